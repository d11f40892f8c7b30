"""Write a role's weights as a diffusers transformer folder, one file at a time.

``python -m models.export RUN OUT`` does it for a training checkpoint, in one process. OUT is a new or empty folder, or
an earlier export, which is replaced when the new one is whole; any other folder is refused and left as it is.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from diffusers import SchedulerMixin
from diffusers import __version__ as diffusers_version
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_cp.checkpoint import find_checkpoint, read_state, readable, reader
from fsdp_cp.errors import UserError
from fsdp_cp.launch import exit_code, rank
from fsdp_cp.paths import user_path
from fsdp_cp.reduce import full_tensor, on_all_ranks
from models.additions.base import added, named_additions, own
from models.checkpoint_files import ADDITIONS
from models.published import published, refuse_occupied, withdraw

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

    Raises:
        UserError: a folder that cannot be written; on every rank.
    """

    def gather(name: str) -> Tensor:
        full = full_tensor(weights[name])
        return full.to(device="cpu", dtype=dtype) if rank() == 0 else full

    sizes = {name: w.numel() * dtype.itemsize for name, w in weights.items()}
    about = {"dtype": str(dtype), **(about or {})}
    on_all_ranks(
        lambda: write_folder(folder, sizes, gather, config, max_bytes, writes=rank() == 0, about=about, move_aside=True)
    )


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


def export_checkpoint(checkpoint: Path, out: Path, *, role: str, weights: str, dtype: torch.dtype) -> None:
    """Export a role of a training checkpoint; needs no process group and never holds more than one file.

    Args:
        checkpoint: a ``step_*`` folder.
        out: the folder to write; see :func:`models.published.refuse_occupied`.
        role: ``student`` or ``fake``.
        weights: ``raw`` or ``ema``.
        dtype: of the files.

    Raises:
        UserError: a role or average that the checkpoint has not, a damaged checkpoint, a folder that is not to be
            written.
    """
    refuse_occupied(out, "OUT")
    state = read_state(checkpoint)
    configs = state.get("configs")
    storage = reader(checkpoint)
    prefix = f"{role}.{'ema' if weights == 'ema' else 'weights'}."
    metadata = storage.read_metadata().state_dict_metadata
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    saved = cast("dict[str, TensorStorageMetadata]", named)  # weights are nothing else
    if not saved:
        held = sorted({(key.split(".")[0], key.split(".")[1]) for key in metadata} - {("student", "adamw")})
        known = ", ".join(
            f"--role {name} --weights {'ema' if kind == 'ema' else 'raw'}" for name, kind in held if kind != "adamw"
        )
        raise UserError(f"{checkpoint} holds no {weights} weights of a role {role!r}; use {known}")

    if not isinstance(configs, dict) or not isinstance(configs.get(role), dict):
        raise UserError(f"{checkpoint / 'state.json'} is damaged: it has no configuration of {role}; use another one")

    def read(name: str) -> Tensor:
        value = torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
        with readable(checkpoint), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is wanted
            dcp.load({prefix + name: value}, storage_reader=reader(checkpoint), no_dist=True)
        return value.to(dtype)

    sizes = {name: value.size.numel() * dtype.itemsize for name, value in saved.items()}
    about = {
        "checkpoint": str(checkpoint.resolve()),
        "step": state["step"],
        "role": role,
        "weights": weights,
        "dtype": str(dtype),
    }
    write_folder(out, sizes, read, configs[role], 5 * 10**9, writes=True, about=about)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m models.export", description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="a run folder (its newest checkpoint is taken) or a step_* folder")
    parser.add_argument(
        "out",
        metavar="OUT",
        help="the diffusers transformer folder to write: new, empty, or an earlier export, which is replaced",
    )
    parser.add_argument("--role", default="student", choices=("student", "fake"))
    parser.add_argument("--weights", default="raw", choices=("raw", "ema"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    args = parser.parse_args(argv)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    logging.basicConfig(format="%(message)s")

    def work() -> None:
        if not args.out:
            raise UserError("OUT is empty; give a folder")
        out = user_path(args.out, "OUT")
        checkpoint = find_checkpoint(user_path(args.run, "RUN") if args.run else "", "RUN")
        export_checkpoint(checkpoint, out, role=args.role, weights=args.weights, dtype=dtype)
        print(f"{out}: the {args.weights} weights of the {args.role} in {checkpoint}")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
