"""Write a role's weights as a diffusers transformer folder, one file at a time, or its adapters as a file.

``python -m models.export RUN OUT`` (models/export.py) does it for a training checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import SchedulerMixin
from diffusers import __version__ as diffusers_version
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import full_tensor, on_all_ranks
from models.additions.base import added, named_additions, own
from models.families.base import Family
from models.files.checkpoint_files import ADDITIONS, EXPERT_FOLDERS
from models.files.published import published, withdraw
from models.lora.files import file_tensors, write_file
from models.lora.merge import Weights, merged

NAME = "diffusion_pytorch_model"
MAX_BYTES = 5 * 10**9
"""Size of a file; so much of a network is in memory at a time."""
_NOTE = (
    "This network was trained with additions ({names}), which are in {file}. diffusers does not know them: a plain"
    " pipeline loads the network without them, which is not what was trained. python -m distill.sample has them."
)
log = logging.getLogger(__name__)


def export_weights(
    folder: Path,
    networks: Sequence[Mapping[str, Tensor]],
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    boundaries: Sequence[float] = (),
    max_bytes: int = MAX_BYTES,
    about: Mapping[str, Any] | None = None,
    bases: Sequence[Mapping[str, Tensor] | None] | None = None,
    scale: float = 1.0,
) -> None:
    """Write sharded networks as a folder that ``from_pretrained`` loads. Called by all ranks; rank 0 writes.

    Args:
        folder: in a run directory. It replaces an earlier export when it is whole; anything else in its place is kept
            under another name.
        networks: DTensors by diffusers name, of each network.
        config, dtype, boundaries, max_bytes: of :func:`write_folder`.
        about: what the weights are, for the folder's manifest.
        bases: for each of ``networks`` that is adapters, the base that they are merged into.
        scale: of their products.

    Raises:
        UserError: a folder that cannot be written; on every rank.
    """
    weights = [_sharded(network) for network in networks]
    for i, base in enumerate(bases or ()):
        if base is not None:
            weights[i] = merged(_sharded(base), weights[i], scale)
    about = {"dtype": str(dtype), **(about or {})}
    on_all_ranks(
        lambda: write_folder(
            folder, weights, config, dtype=dtype, boundaries=boundaries, max_bytes=max_bytes, about=about,
            writes=rank() == 0, move_aside=True,
        )
    )  # fmt: skip


def _sharded(tensors: Mapping[str, Tensor]) -> Weights:
    return Weights({name: tuple(w.shape) for name, w in tensors.items()}, lambda name: full_tensor(tensors[name]))


def export_adapters(
    folder: Path,
    weights: Mapping[str, Tensor],
    family: Family,
    *,
    scale: float,
    dtype: torch.dtype,
    about: Mapping[str, Any],
) -> None:
    """Write a role's adapters as diffusers reads them, into a run's own folder. Called by all ranks; rank 0 writes.

    Args:
        folder, dtype, about: of :func:`export_weights`.
        weights: adapters alone, DTensors by public name.
        family: of the base.
        scale: ``alpha / rank``.

    Raises:
        UserError: a folder that cannot be written; on every rank.
    """
    tensors = file_tensors(
        "diffusers-lora", weights, lambda name: full_tensor(weights[name]), family=family, scale=scale, dtype=dtype
    )
    about = {"dtype": str(dtype), "format": "diffusers-lora", **about}
    on_all_ranks(lambda: write_file(folder, tensors, about, move_aside=True) if rank() == 0 else None)


def export_scheduler(folder: Path, scheduler: SchedulerMixin | None) -> None:
    """Write what ``from_pretrained`` reads; ``None`` removes what an earlier export left. One rank calls it."""
    if scheduler is None:
        withdraw(folder)
        return
    with published(folder, {"scheduler": type(scheduler).__name__}, move_aside=True) as unfinished:
        scheduler.save_pretrained(unfinished)


def write_folder(
    folder: Path,
    networks: Sequence[Weights],
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    boundaries: Sequence[float] = (),
    max_bytes: int = MAX_BYTES,
    about: Mapping[str, Any] | None = None,
    writes: bool = True,
    move_aside: bool = False,
) -> None:
    """Write a diffusers folder; additions in a file of their own.

    One network is a transformer folder. Two experts are ``transformer/`` and ``transformer_2/`` of a folder that has
    their boundary in ``model_index.json``, as pipelines have it.

    Args:
        folder, about, move_aside: of :func:`models.files.published.published`.
        networks: the weights of each network; a tensor is read once.
        config: their ``config.json``.
        dtype: of the files.
        boundaries: of experts (:class:`models.roles.role.Role`).
        max_bytes: size of a file.
        writes: whether this rank writes; others only take part in reading.

    Raises:
        UserError: a folder that cannot be written; on the rank that writes, after the last tensor is read.
    """
    assert len(networks) == len(boundaries) + 1
    places = EXPERT_FOLDERS if boundaries else ("",)
    contents = [_contents(weights.shapes, max_bytes // dtype.itemsize) for weights in networks]
    files = _read_files(places, contents, networks, dtype if writes else None)
    try:
        with published(folder, about or {}, move_aside=move_aside) if writes else nullcontext() as unfinished:
            for file, tensors in files:
                if unfinished is not None:
                    (unfinished / file).parent.mkdir(exist_ok=True)
                    save_file(tensors, unfinished / file, metadata={"format": "pt"})
            if unfinished is not None:
                for place, content, weights in zip(places, contents, networks, strict=True):
                    _write_texts(unfinished / place, folder / place, config, content, weights.shapes, dtype)
                if boundaries:
                    index: dict[str, Any] = {"boundary_ratio": boundaries[0]}
                    index |= {name: ["diffusers", config["_class_name"]] for name in EXPERT_FOLDERS}
                    (unfinished / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    except SafetensorError as error:  # a full disk, too
        raise UserError(f"{folder} cannot be written ({error}); nothing in it has changed") from error
    finally:
        for _ in files:  # a rank that left the collectives would leave the others waiting in them
            pass


def _contents(shapes: Mapping[str, tuple[int, ...]], most: int) -> dict[str, list[str]]:
    """Return the names of the tensors of each file of a network; a file has at most ``most`` values."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, shape in own(shapes).items():
        if filled and filled + math.prod(shape) > most:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += math.prod(shape)
    contents = {
        f"{NAME}.safetensors" if len(files) == 1 else f"{NAME}-{i + 1:05d}-of-{len(files):05d}.safetensors": names
        for i, names in enumerate(files)
    }
    if added(shapes):
        contents[ADDITIONS] = list(added(shapes))
    return contents


def _read_files(
    places: Sequence[str],
    contents: Sequence[Mapping[str, list[str]]],
    networks: Sequence[Weights],
    dtype: torch.dtype | None,
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Yield each file and its tensors, without tensors where ``dtype`` is ``None``. Every rank must exhaust it."""
    for place, files, weights in zip(places, contents, networks, strict=True):
        for file, names in files.items():
            tensors: dict[str, Tensor] = {}
            for name in names:
                full = weights.read(name)
                if dtype is not None:
                    tensors[name] = full.to(device="cpu", dtype=dtype).contiguous()
            yield Path(place, file), tensors


def _write_texts(
    unfinished: Path,
    folder: Path,
    config: dict[str, Any],
    contents: Mapping[str, list[str]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    """Write ``config.json``, the index of several files, and a note on additions."""
    if added(shapes):
        note = _NOTE.format(names=", ".join(sorted(named_additions(shapes))), file=ADDITIONS)
        (unfinished / "README.md").write_text(note + "\n")
        log.warning("%s: %s", folder, note)
    weight_map = {name: file for file, names in contents.items() if file != ADDITIONS for name in names}
    if len(set(weight_map.values())) > 1:
        total = sum(map(math.prod, own(shapes).values())) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (unfinished / f"{NAME}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    header = {
        "_class_name": config.get("_class_name", "WanTransformer3DModel"),  # a checkpoint from before other families
        "_diffusers_version": diffusers_version,
    }
    (unfinished / "config.json").write_text(json.dumps(header | public, indent=2) + "\n")
