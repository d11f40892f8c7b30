"""Writers of diffusers folders: transformers and schedulers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import SchedulerMixin
from diffusers import __version__ as diffusers_version
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from torch import Tensor

from fsdp_cp.files.atomic_folder import atomic_folder, withdraw
from fsdp_cp.launch import rank
from fsdp_cp.reduce import full_tensor
from models.additions.base import addition_tensors, network_tensors
from models.files.checkpoint_files import ADDITIONS_FILE, EXPERT_FOLDERS, HEADS_FILE
from models.files.save import write_export
from models.lora.merge import Weights

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
    about: Mapping[str, Any] | None = None,
    boundaries: Sequence[float] = (),
    max_bytes: int = MAX_BYTES,
    header: Mapping[str, str] | None = None,
    texts: Mapping[str, Mapping[str, Any] | None] | None = None,
    schedulers: Mapping[str, SchedulerMixin] | None = None,
    heads: Weights | None = None,
    in_pipeline: bool = False,
    **options: Any,
) -> None:
    """Write a diffusers folder, with additions in a separate file: :func:`models.files.save.write_export`.

    One network becomes a transformer folder. Two experts become ``transformer/`` and ``transformer_2/``, with their
    boundary in ``model_index.json`` as in pipelines.

    Each tensor is read once, on every rank. ``config`` is the contents of ``config.json``, ``texts`` those of other
    files next to it, and ``heads``, the last layers of each step (:func:`models.export_heads.fused_heads`), go into a
    file of their own. With ``in_pipeline`` one network is in ``transformer/`` too.
    """
    assert len(networks) == len(boundaries) + 1
    is_pipeline = bool(boundaries) or in_pipeline
    places = EXPERT_FOLDERS[: len(networks)] if is_pipeline else ("",)
    splits = [  # without additions, which have a file of their own
        split_state_dict_into_shards_factory(
            network_tensors(weights.shapes),
            get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
            filename_pattern=f"{NAME}{{suffix}}.safetensors",
            max_shard_size=max_bytes,
        )
        for weights in networks
    ]
    files = _read_files(places, splits, networks, heads, dtype if rank() == 0 else None)
    config = _public(config)
    texts = {**(texts or {}), "config.json": config}
    in_places = {str(Path(place, file)): contents for place in places for file, contents in texts.items()}
    for place, split in zip(places, splits, strict=True):
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            in_places[str(Path(place, f"{NAME}.safetensors.index.json"))] = index
    if boundaries:
        experts = {place: ["diffusers", config["_class_name"]] for place in places}
        in_places["model_index.json"] = {"boundary_ratio": boundaries[0], **experts}
    write_export(folder, about or {}, files, in_places, header=header or {}, schedulers=schedulers or {}, **options)


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    name = config.get("_class_name", "WanTransformer3DModel")  # old checkpoints lack it
    header = {"_class_name": name, "_diffusers_version": diffusers_version}
    return header | {key: value for key, value in config.items() if not key.startswith("_")}


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
