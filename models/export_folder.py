"""Write a role's weights as a diffusers transformer folder, one file at a time, or its adapters as a file.

``python -m models.export RUN OUT`` (models/export.py) does it for a training checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

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
from models.checkpoint_files import ADDITIONS, EXPERT_FOLDERS
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


class _Source(NamedTuple):
    """A network that is written."""

    sizes: dict[str, int]
    """Bytes of each tensor, by diffusers name."""
    gather: Callable[[str], Tensor]
    """A tensor by its name; called once for each, in order."""


def export_weights(
    folder: Path,
    networks: Sequence[Mapping[str, Tensor]],
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    boundaries: Sequence[float] = (),
    max_bytes: int = 5 * 10**9,
    about: Mapping[str, Any] | None = None,
    bases: Sequence[Mapping[str, Tensor] | None] | None = None,
    scale: float = 1.0,
) -> None:
    """Write sharded networks as a folder that ``from_pretrained`` loads. Called by all ranks; rank 0 writes.

    One network is a transformer folder. Two experts are ``transformer/`` and ``transformer_2/`` of one that has their
    boundary in ``model_index.json``, as pipelines have it.

    Args:
        folder: a run's own. An earlier export in it is replaced when the new one is whole; anything else is kept
            under another name.
        networks: DTensors by diffusers name, of each.
        config: theirs.
        dtype: of the files.
        boundaries: of experts (:class:`models.role.Role`).
        max_bytes: size of a file; rank 0 holds one file's tensors at a time.
        about: what the weights are, for the folder's manifest.
        bases: of each of ``networks`` that is adapters, which are merged into it.
        scale: of their products.

    Raises:
        UserError: a folder that cannot be written; on every rank.
    """
    sources = [
        _source(weights, None if bases is None else bases[i], scale=scale, dtype=dtype)
        for i, weights in enumerate(networks)
    ]
    about = {"dtype": str(dtype), **(about or {})}
    on_all_ranks(
        lambda: _write(folder, sources, config, boundaries, max_bytes, writes=rank() == 0, about=about, move_aside=True)
    )


def _source(
    weights: Mapping[str, Tensor], base: Mapping[str, Tensor] | None, *, scale: float, dtype: torch.dtype
) -> _Source:
    """One of :func:`export_weights`'s networks."""

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

    return _Source({name: count * dtype.itemsize for name, count in counts.items()}, gather)


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
    networks: Sequence[tuple[dict[str, int], Callable[[str], Tensor]]],
    config: dict[str, Any],
    max_bytes: int,
    boundaries: Sequence[float] = (),
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a diffusers folder as :func:`export_weights`, in one process; additions in a file of their own.

    Args:
        folder: see :func:`models.published.published`.
        networks: of each the bytes of its tensors, by diffusers name, and what gives a tensor by its name: called once
            for each, in order.
        config: theirs.
        max_bytes: size of a file, of whose tensors so many are held at a time.
        boundaries: of experts.
        about: of :func:`models.published.published`.

    Raises:
        UserError: a folder that cannot be written.
    """
    _write(folder, [_Source(*each) for each in networks], config, boundaries, max_bytes, writes=True, about=about or {})


def _write(
    folder: Path,
    sources: Sequence[_Source],
    config: dict[str, Any],
    boundaries: Sequence[float],
    max_bytes: int,
    *,
    writes: bool,
    about: Mapping[str, Any],
    move_aside: bool = False,
) -> None:
    """Where it does not write, this rank only takes part in each ``gather``.

    Raises:
        UserError: a folder that cannot be written; on the rank that writes, after the last ``gather``.
    """
    assert len(sources) == len(boundaries) + 1
    places = EXPERT_FOLDERS if boundaries else ("",)
    contents = [_contents(source.sizes, max_bytes) for source in sources]
    gathered = _gathered(places, contents, sources, keep=writes)
    try:
        with published(folder, about, move_aside=move_aside) if writes else nullcontext() as unfinished:
            for file, tensors in gathered:
                if unfinished is not None:
                    (unfinished / file).parent.mkdir(exist_ok=True)
                    save_file(tensors, unfinished / file, metadata={"format": "pt"})
            if unfinished is not None:
                for place, files, source in zip(places, contents, sources, strict=True):
                    _write_texts(unfinished / place, config, files, own_name=folder / place, sizes=source.sizes)
                if boundaries:
                    index: dict[str, Any] = {"boundary_ratio": boundaries[0]}
                    index |= {name: ["diffusers", config["_class_name"]] for name in EXPERT_FOLDERS}
                    (unfinished / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    except SafetensorError as error:  # a full disk, too
        raise UserError(f"{folder} cannot be written ({error}); nothing in it has changed") from error
    finally:
        for _ in gathered:  # a rank that left the collectives would leave the others waiting in them
            pass


def _contents(sizes: dict[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each file of a network."""
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
    if added(sizes):
        contents[ADDITIONS] = list(added(sizes))
    return contents


def _gathered(
    places: Sequence[str], contents: Sequence[Mapping[str, list[str]]], sources: Sequence[_Source], *, keep: bool
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Each file and its tensors, none of them where ``keep`` is not set; every rank must come to its end."""
    for place, files, source in zip(places, contents, sources, strict=True):
        for file, names in files.items():
            tensors: dict[str, Tensor] = {}
            for name in names:
                full = source.gather(name)
                if keep:
                    tensors[name] = full.contiguous()
            yield Path(place, file), tensors


def _write_texts(
    unfinished: Path,
    config: dict[str, Any],
    contents: Mapping[str, list[str]],
    *,
    own_name: Path,
    sizes: dict[str, int],
) -> None:
    """``config.json``, the index of several files, and a note on additions."""
    if added(sizes):
        note = _NOTE.format(names=", ".join(sorted(named_additions(sizes))), file=ADDITIONS)
        (unfinished / "README.md").write_text(note + "\n")
        log.warning("%s: %s", own_name, note)
    weight_map = {name: file for file, names in contents.items() if file != ADDITIONS for name in names}
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": sum(own(sizes).values())}, "weight_map": weight_map}
        (unfinished / f"{NAME}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    header = {
        "_class_name": config.get("_class_name", "WanTransformer3DModel"),  # a checkpoint from before other families
        "_diffusers_version": diffusers_version,
    }
    (unfinished / "config.json").write_text(json.dumps(header | public, indent=2) + "\n")
