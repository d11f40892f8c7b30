"""Write a role's weights as a diffusers transformer folder, one file at a time, or its adapters as a file.

``python -m models.export RUN OUT`` (models/export.py) does it for a training checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
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
from models.checkpoint_files import ADDITIONS
from models.families.base import Family
from models.lora.files import file_tensors, write_file
from models.lora.merge import Merged
from models.published import published, withdraw

NAME = "diffusion_pytorch_model"
_NOTE = (
    "This network was trained with additions ({names}), which are in {file}. diffusers does not know them: a plain"
    " pipeline loads the network without them, which is not what was trained. python -m distill.sample has them."
)
log = logging.getLogger(__name__)


def export_weights(
    folder: Path,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    max_bytes: int = 5 * 10**9,
    about: Mapping[str, Any] | None = None,
    base: Mapping[str, Tensor] | None = None,
    scale: float = 1.0,
) -> None:
    """Write a sharded state dict as a folder that ``from_pretrained`` loads. Called by all ranks; rank 0 writes.

    Args:
        folder: a run's own. An earlier export in it is replaced when the new one is whole; anything else is kept
            under another name.
        weights: DTensors by diffusers name.
        config: the network's configuration.
        dtype: of the files.
        max_bytes: size of a file; rank 0 holds one file's tensors at a time.
        about: what the weights are, for the folder's manifest.
        base: of ``weights`` that are adapters, which are merged into it.
        scale: of their products.

    Raises:
        UserError: a folder that cannot be written; on every rank.
    """

    def own(name: str) -> Tensor:
        return full_tensor(weights[name])

    read: Callable[[str], Tensor] = own
    counts = {name: w.numel() for name, w in weights.items()}
    if base is not None:
        read = merged = Merged(lambda name: full_tensor(base[name]), own, base, weights, scale)
        counts = {name: (base[name] if name in base else weights[name]).numel() for name in merged.names}

    def gather(name: str) -> Tensor:
        full = read(name)
        return full.to(device="cpu", dtype=dtype) if rank() == 0 else full

    sizes = {name: count * dtype.itemsize for name, count in counts.items()}
    about = {"dtype": str(dtype), **(about or {})}
    on_all_ranks(
        lambda: write_folder(folder, sizes, gather, config, max_bytes, writes=rank() == 0, about=about, move_aside=True)
    )


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
    sizes: dict[str, int],
    gather: Callable[[str], Tensor],
    config: dict[str, Any],
    max_bytes: int,
    writes: bool,
    about: Mapping[str, Any] | None = None,
    move_aside: bool = False,
) -> None:
    """Write a diffusers transformer folder, holding one file's tensors at a time; additions in a file of their own.

    Args:
        folder: see :func:`models.published.published`.
        sizes: bytes of each tensor, by diffusers name.
        gather: a tensor by its name; called once for each, in order.
        config: the network's configuration.
        max_bytes: size of a file.
        writes: does this rank write? The others only take part in ``gather``.
        about, move_aside: of :func:`models.published.published`.

    Raises:
        UserError: a folder that cannot be written; on the rank that writes, after the last ``gather``.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in own(sizes).items():
        if filled and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    contents = {
        f"{NAME}.safetensors" if len(files) == 1 else f"{NAME}-{i + 1:05d}-of-{len(files):05d}.safetensors": names
        for i, names in enumerate(files)
    }
    weight_map = {name: file for file, names in contents.items() for name in names}
    if added(sizes):
        contents[ADDITIONS] = list(added(sizes))
    gathered = _gathered(contents, gather, keep=writes)
    try:
        with published(folder, about or {}, move_aside=move_aside) if writes else nullcontext() as unfinished:
            for file, tensors in gathered:
                if unfinished is not None:
                    save_file(tensors, unfinished / file, metadata={"format": "pt"})
            if unfinished is not None:
                index = {"metadata": {"total_size": sum(own(sizes).values())}, "weight_map": weight_map}
                _write_texts(unfinished, config, index if len(files) > 1 else None, own_name=folder, sizes=sizes)
    except SafetensorError as error:  # a full disk, too
        raise UserError(f"{folder} cannot be written ({error}); nothing in it has changed") from error
    finally:
        for _ in gathered:  # a rank that left the collectives would leave the others waiting in them
            pass


def _gathered(
    contents: Mapping[str, list[str]], gather: Callable[[str], Tensor], *, keep: bool
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each file's name and tensors, none of them where ``keep`` is not set; every rank must come to its end."""
    for file, names in contents.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            full = gather(name)
            if keep:
                tensors[name] = full.contiguous()
        yield file, tensors


def _write_texts(
    unfinished: Path, config: dict[str, Any], index: dict[str, Any] | None, *, own_name: Path, sizes: dict[str, int]
) -> None:
    """``config.json``, the index of several files, and a note on additions."""
    if added(sizes):
        note = _NOTE.format(names=", ".join(sorted(named_additions(sizes))), file=ADDITIONS)
        (unfinished / "README.md").write_text(note + "\n")
        log.warning("%s: %s", own_name, note)
    if index is not None:
        (unfinished / f"{NAME}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    header = {
        "_class_name": config.get("_class_name", "WanTransformer3DModel"),  # a checkpoint from before other families
        "_diffusers_version": diffusers_version,
    }
    (unfinished / "config.json").write_text(json.dumps(header | public, indent=2) + "\n")
