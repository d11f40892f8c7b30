"""Writers of diffusers folders: transformers and schedulers."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import SchedulerMixin
from diffusers import __version__ as diffusers_version
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from torch import Tensor

from fsdp_cp.files.atomic_folder import atomic_folder, withdraw
from fsdp_cp.launch import rank
from fsdp_cp.reduce import full_tensor, on_all_ranks
from models.additions.base import addition_tensors, network_tensors
from models.causal import write_causal
from models.files.checkpoint_files import ADDITIONS_FILE, EXPERT_FOLDERS, HEADS_FILE
from models.files.save import refuse_unwritten, save_tensors
from models.lora.merge import Weights
from models.sparse import write_sparse

NAME = "diffusion_pytorch_model"
MAX_BYTES = 5 * 10**9
"""Maximum size of a file in bytes, and thus of the weights in memory."""
SCHEDULERS = ("scheduler", "audio_scheduler")
"""Folders of :meth:`models.families.base.Family.schedulers`."""


def sharded(tensors: Mapping[str, Tensor]) -> Weights:
    """Return the weights of DTensors by public name, each gathered when it is read."""
    return Weights({name: tuple(w.shape) for name, w in tensors.items()}, lambda name: full_tensor(tensors[name]))


def export_schedulers(folder: Path, schedulers: Mapping[str, SchedulerMixin]) -> None:
    """Write scheduler folders into ``folder``, and remove those of an earlier export. One rank calls it."""
    for name in SCHEDULERS:
        if name not in schedulers:
            withdraw(folder / name)
            continue
        about = {"scheduler": type(schedulers[name]).__name__}
        with atomic_folder(folder / name, about, move_aside=True) as unfinished:
            schedulers[name].save_pretrained(unfinished)


def write_folder(
    folder: Path,
    networks: Sequence[Weights],
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    boundaries: Sequence[float] = (),
    max_bytes: int = MAX_BYTES,
    header: Mapping[str, str] | None = None,
    about: Mapping[str, Any] | None = None,
    causal: Mapping[str, Any] | None = None,
    sparse: Mapping[str, Any] | None = None,
    schedulers: Mapping[str, SchedulerMixin] | None = None,
    heads: Weights | None = None,
    in_pipeline: bool = False,
    finish: Callable[[Path], object] = lambda folder: None,
    move_aside: bool = False,
) -> None:
    """Write a diffusers folder, with additions in a separate file. All ranks must call it; rank 0 writes.

    One network becomes a transformer folder. Two experts become ``transformer/`` and ``transformer_2/``, with their
    boundary in ``model_index.json`` as in pipelines.

    Each tensor is read once, on every rank. ``config``, ``causal`` and ``sparse`` are the contents of ``config.json``,
    ``causal.json`` and ``sparse.json``; ``schedulers`` are written by folder, ``header`` into the files of weights, and
    ``heads``, the last layers of each step (:func:`models.export_heads.fused_heads`), into a file of their own. With
    ``in_pipeline`` one network is in ``transformer/`` too. ``finish`` adds files to the unfinished folder, as the card
    does. For ``about`` and ``move_aside`` see
    :func:`fsdp_cp.files.atomic_folder.atomic_folder`.

    Raises:
        UserError: the folder cannot be written; on every rank, after the last tensor is read.
    """
    assert len(networks) == len(boundaries) + 1
    is_pipeline = bool(boundaries) or in_pipeline
    places, writes = EXPERT_FOLDERS[: len(networks)] if is_pipeline else ("",), rank() == 0
    splits = [  # without additions, which have a file of their own
        split_state_dict_into_shards_factory(
            network_tensors(weights.shapes),
            get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
            filename_pattern=f"{NAME}{{suffix}}.safetensors",
            max_shard_size=max_bytes,
        )
        for weights in networks
    ]
    files = _read_files(places, splits, networks, heads, dtype if writes else None)

    def write_parts(unfinished: Path) -> None:
        for file, tensors in files:
            (unfinished / file).parent.mkdir(exist_ok=True)
            save_tensors(tensors, unfinished / file, header or {})
        for place, split in zip(places, splits, strict=True):
            _write_texts(unfinished / place, config, split, causal, sparse)
        if boundaries:
            _write_index(unfinished, config["_class_name"], boundaries[0])
        for name, scheduler in (schedulers or {}).items():
            scheduler.save_pretrained(unfinished / name)
        finish(unfinished)

    def write() -> None:
        try:
            if writes:
                with refuse_unwritten(folder), atomic_folder(folder, about or {}, move_aside=move_aside) as unfinished:
                    write_parts(unfinished)
        finally:
            for _ in files:  # if this rank left the collectives, the others would block in them
                pass

    on_all_ranks(write)


def _read_files(
    places: Sequence[str],
    splits: Sequence[StateDictSplit],
    networks: Sequence[Weights],
    heads: Weights | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Yield each file and its tensors, without tensors where ``dtype`` is ``None``. Every rank must exhaust it."""
    for place, split, weights in zip(places, splits, networks, strict=True):
        additions = {ADDITIONS_FILE: names} if (names := [*addition_tensors(weights.shapes)]) else {}
        for file, names in {**split.filename_to_tensors, **additions}.items():
            tensors: dict[str, Tensor] = {}
            for name in names:
                full = weights.read(name)
                if dtype is not None:
                    tensors[name] = full.to(device="cpu", dtype=dtype).contiguous()
            yield Path(place, file), tensors
    if heads is not None:
        read = {name: heads.read(name) for name in heads.shapes}
        yield Path(HEADS_FILE), {} if dtype is None else {name: full.cpu().contiguous() for name, full in read.items()}


def _write_texts(
    unfinished: Path,
    config: dict[str, Any],
    split: StateDictSplit,
    causal: Mapping[str, Any] | None,
    sparse: Mapping[str, Any] | None,
) -> None:
    """Write ``config.json``, ``causal.json``, ``sparse.json`` and an index of files."""
    if causal is not None:
        write_causal(unfinished, causal)
    if sparse is not None:
        write_sparse(unfinished, sparse)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (unfinished / f"{NAME}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    name = config.get("_class_name", "WanTransformer3DModel")  # old checkpoints lack it
    header = {"_class_name": name, "_diffusers_version": diffusers_version}
    (unfinished / "config.json").write_text(json.dumps(header | public, indent=2) + "\n")


def _write_index(unfinished: Path, network: str, boundary: float) -> None:
    """Write the ``model_index.json`` of two experts of class ``network``."""
    index: dict[str, Any] = {"boundary_ratio": boundary}
    index |= {name: ["diffusers", network] for name in EXPERT_FOLDERS}
    (unfinished / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
