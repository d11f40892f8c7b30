"""Write a role's weights as a diffusers transformer folder, one file at a time.

``python -m models.export CHECKPOINT OUT`` does it for a training checkpoint, in one process.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from diffusers import SchedulerMixin
from diffusers import __version__ as diffusers_version
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from fsdp_cp.checkpoint import find_resume, read_numbers
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import barrier, full_tensor
from models.additions import added, named_additions, own
from models.checkpoint_files import ADDITIONS

NAME = "diffusion_pytorch_model"
_NOTE = (
    "This network was trained with additions ({names}), which are in {file}. diffusers does not know them: a plain"
    " pipeline loads the network without them, which is not what was trained. python -m distill.sample has them."
)
log = logging.getLogger(__name__)


def export_weights(
    folder: Path, weights: dict[str, Tensor], config: dict[str, Any], *, dtype: torch.dtype, max_bytes: int = 5 * 10**9
) -> None:
    """Write a sharded state dict as a folder that ``from_pretrained`` loads. Called by all ranks; rank 0 writes.

    Args:
        folder: replaced when complete.
        weights: DTensors by diffusers name.
        config: the network's configuration.
        dtype: of the files.
        max_bytes: size of a file; rank 0 holds one file's tensors at a time.
    """

    def gather(name: str) -> Tensor:
        full = full_tensor(weights[name])
        return full.to(device="cpu", dtype=dtype) if rank() == 0 else full

    sizes = {name: w.numel() * dtype.itemsize for name, w in weights.items()}
    write_folder(folder, sizes, gather, config, max_bytes, writes=rank() == 0)
    barrier()


def export_scheduler(folder: Path, scheduler: SchedulerMixin | None) -> None:
    """Write what ``from_pretrained`` reads; ``None`` removes what an earlier export left. One rank calls it."""
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    if scheduler is not None:
        scheduler.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    if scheduler is not None:
        unfinished.rename(folder)


def write_folder(
    folder: Path,
    sizes: dict[str, int],
    gather: Callable[[str], Tensor],
    config: dict[str, Any],
    max_bytes: int,
    writes: bool,
) -> None:
    """Write a diffusers transformer folder, holding one file's tensors at a time; additions in a file of their own.

    Args:
        folder: replaced when complete.
        sizes: bytes of each tensor, by diffusers name.
        gather: a tensor by its name; called once for each, in order.
        config: the network's configuration.
        max_bytes: size of a file.
        writes: does this rank write? The others only take part in ``gather``.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in own(sizes).items():
        if filled and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    unfinished = folder.with_name(folder.name + ".tmp")
    if writes:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    contents = {
        f"{NAME}.safetensors" if len(files) == 1 else f"{NAME}-{i + 1:05d}-of-{len(files):05d}.safetensors": names
        for i, names in enumerate(files)
    }
    weight_map = {name: file for file, names in contents.items() for name in names}
    if added(sizes):
        contents[ADDITIONS] = list(added(sizes))
    for file, names in contents.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            full = gather(name)  # a collective: every rank takes part, rank 0 alone keeps the result
            if writes:
                tensors[name] = full.contiguous()
        if writes:
            save_file(tensors, unfinished / file, metadata={"format": "pt"})
    if writes:
        if ADDITIONS in contents:
            note = _NOTE.format(names=", ".join(sorted(named_additions(sizes))), file=ADDITIONS)
            (unfinished / "README.md").write_text(note + "\n")
            log.warning("%s: %s", folder, note)
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(own(sizes).values())}, "weight_map": weight_map}
            (unfinished / f"{NAME}.safetensors.index.json").write_text(json.dumps(index, indent=2))
        public = {key: value for key, value in config.items() if not key.startswith("_")}
        header = {
            "_class_name": config.get("_class_name", "WanTransformer3DModel"),
            "_diffusers_version": diffusers_version,
        }
        (unfinished / "config.json").write_text(json.dumps(header | public, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def export_checkpoint(checkpoint: Path, out: Path, *, role: str, weights: str, dtype: torch.dtype) -> None:
    """Export a role of a training checkpoint; needs no process group and never holds more than one file.

    Args:
        checkpoint: a ``step_*`` folder.
        out: the folder to write.
        role: ``student`` or ``fake``.
        weights: ``raw`` or ``ema``.
        dtype: of the files.

    Raises:
        UserError: a role or average that the checkpoint has not.
    """
    numbers = read_numbers(checkpoint)
    prefix = f"{role}.{'ema' if weights == 'ema' else 'weights'}."
    metadata = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    saved = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if not saved:
        raise UserError(f"{checkpoint} holds no {weights} weights of a role {role!r}")

    def read(name: str) -> Tensor:
        value = torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
        dcp.load({prefix + name: value}, checkpoint_id=str(checkpoint), no_dist=True)
        return value.to(dtype)

    sizes = {name: value.size.numel() * dtype.itemsize for name, value in saved.items()}
    write_folder(out, sizes, read, numbers["configs"][role], 5 * 10**9, writes=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a run folder (its newest checkpoint is taken) or a step_* folder")
    parser.add_argument("out", type=Path, help="the diffusers transformer folder to write")
    parser.add_argument("--role", default="student", choices=("student", "fake"))
    parser.add_argument("--weights", default="raw", choices=("raw", "ema"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    args = parser.parse_args(argv)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    try:
        checkpoint = find_resume(args.checkpoint, Path(args.checkpoint))
        if checkpoint is None:
            raise UserError("give a run folder or a step_* folder")
        export_checkpoint(checkpoint, args.out, role=args.role, weights=args.weights, dtype=dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
