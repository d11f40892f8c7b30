"""Clips of a teacher that are stored in its folder, and used where all that defines them is the same."""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from distill.config import Config
from distill.data.base import ClipDataset
from distill.methods.common.few_step import FewStepSettings
from models.files.shipped import find_shipped

log = logging.getLogger(__name__)


def stored_file(config: Config, steps: int) -> Path | None:
    """Return the path for the teacher's clips of ``steps`` steps, or ``None`` if it has no checkpoint."""
    checkpoint = config.teacher.checkpoint
    return find_shipped(checkpoint) / f"clips_{steps}steps.safetensors" if checkpoint else None


def read_clips(
    config: Config, data: ClipDataset, *, steps: int, captions: Sequence[str], seed: int
) -> tuple[np.ndarray, str] | None:
    """Return the stored clips of ``captions``, one each, uint8 ``(n, T, H, W, 3)``, and a phrase that describes them;
    ``None`` without any, or with a line if anything that defines them differs. ``captions`` must be the first of the
    stored ones."""
    file = stored_file(config, steps)
    if file is None or not file.is_file():
        return None
    try:
        with safe_open(file, framework="numpy") as stored:
            about, clips = stored.metadata(), stored.get_tensor("clips")[: len(captions)]
    except SafetensorError as error:
        log.warning("%s cannot be read (%s); sampling the teacher", file, error)
        return None
    captions = [*captions, *json.loads(about["captions"])[len(captions) :]]
    wanted = definition(config, data, steps=steps, captions=captions, seed=seed)
    if differing := [name for name, value in wanted.items() if about.get(name) != value]:
        log.info("%s was made with other %s; sampling the teacher", file, ", ".join(differing))
        return None
    phrase = f"stored in {file.parent.name}/{file.name}, sampled with {about['made with']}; same weights and settings"
    return clips, phrase


def definition(config: Config, data: ClipDataset, *, steps: int, captions: Sequence[str], seed: int) -> dict[str, str]:
    """Return everything that a teacher's clips depend on, as text."""
    method = config.method
    assert isinstance(method, FewStepSettings), "only its methods sample a teacher"
    weights = hashlib.sha256()
    folder = find_shipped(config.teacher.checkpoint) / "transformer"
    for path in sorted(folder.iterdir()):
        weights.update(path.name.encode())
        weights.update(path.read_bytes())
    condition = data.condition(list(captions))
    embeddings = hashlib.sha256()
    for tensors in (condition.tensors, condition.null.tensors):
        for name in sorted(tensors):
            embeddings.update(tensors[name].contiguous().numpy().tobytes())
    values = {
        "weights": weights.hexdigest(),
        "captions": list(captions),
        "embeddings": embeddings.hexdigest(),
        "latent_shape": data.latent_shapes["video"],
        "steps": steps,
        "guidance_scale": method.guidance,
        "shift": method.sampling_shift,
        "teacher_sampler": method.teacher_sampler,
        "architecture": config.teacher.architecture,
        "precision": config.teacher.precision,
        "fp8": config.teacher.fp8,
        "seed": seed,
    }
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
