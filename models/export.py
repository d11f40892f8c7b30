"""A role's weights in a training checkpoint as a diffusers folder, or its adapters as a file that others read.

``python -m models.export RUN OUT``, in one process. OUT is a new or empty folder, or an earlier export, which is
replaced when the new one is whole; any other folder is refused and left as it is.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_cp.checkpoint import find_checkpoint, read_state, readable, reader
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import exit_code
from fsdp_cp.paths import user_path
from fsdp_cp.sharding.initialise import initialise
from fsdp_cp.sharding.shard import materialise
from models.checkpoint_files import EXPERT_FOLDERS, fingerprint, inspect_checkpoint, tensor_reader
from models.export_folder import write_folder
from models.families.base import Family
from models.families.registry import family_of
from models.load import seed_of_expert
from models.lora.files import FORMATS, file_tensors, refuse_whole, write_file
from models.lora.merge import Merged
from models.published import refuse_input, refuse_occupied
from models.role import EXPERTS

_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """A role's weights in a checkpoint."""

    checkpoint: Path
    role: str
    part: str
    """What the checkpoint calls it: the role, or one of its experts (:meth:`models.role.Role.trained_apart`)."""
    weights: str
    state: Mapping[str, Any]
    config: dict[str, Any]
    tensors: Mapping[str, TensorStorageMetadata]
    """By name."""
    reader: FileSystemReader
    """Of the checkpoint; one, since it reads the list of its tensors once."""

    def read(self, name: str) -> Tensor:
        """One of them, whole."""
        key = f"{self.part}.{_KINDS[self.weights]}.{name}"
        value = torch.empty(self.tensors[name].size, dtype=self.tensors[name].properties.dtype)
        with readable(self.checkpoint), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is wanted
            dcp.load({key: value}, storage_reader=self.reader, no_dist=True)
        return value

    @property
    def adapters(self) -> dict[str, Any] | None:
        """What the role's adapters are, where it has any; see ``RolePlan.adapters``."""
        return self.state.get("adapters", {}).get(self.role)

    @property
    def family(self) -> Family:
        """Of the network."""
        return family_of(self.state["settings"][self.role]["family"], self.role)


_KINDS = {"raw": "weights", "ema": "ema"}


def _find(checkpoint: Path, role: str, weights: str) -> list[_Saved]:
    """A role's networks, of experts both.

    Raises:
        UserError: a role or average that the checkpoint has not, a damaged checkpoint.
    """
    state = read_state(checkpoint)
    files = reader(checkpoint)
    metadata = files.read_metadata().state_dict_metadata
    parts, boundaries, updates = [role], state.get("boundaries", {}), state.get("updates", {})
    if not isinstance(boundaries, dict) or not isinstance(updates, dict):
        raise UserError(f"{checkpoint / 'state.json'} is damaged: its boundaries or updates are none; use another one")
    if boundaries.get(role):
        parts = [f"{role}.{expert}" for expert in EXPERTS if f"{role}.{expert}" in updates] or parts
    named = {
        part: {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        for part, prefix in ((part, f"{part}.{_KINDS[weights]}.") for part in parts)
    }
    if not all(named.values()):
        kinds = {kind: name for name, kind in _KINDS.items()}
        held = sorted(
            {(name, kinds[kind]) for name in ("student", "fake") for kind in kinds for key in metadata
             if key.startswith((f"{name}.{kind}.", *(f"{name}.{expert}.{kind}." for expert in EXPERTS)))}
        )  # fmt: skip
        known = ", ".join(f"--role {name} --weights {kind}" for name, kind in held)
        raise UserError(f"{checkpoint} holds no {weights} weights of a role {role!r}; use {known}")
    configs = state.get("configs")
    if not isinstance(configs, dict) or not isinstance(configs.get(role), dict):
        raise UserError(f"{checkpoint / 'state.json'} is damaged: it has no configuration of {role}; use another one")
    return [
        _Saved(
            checkpoint=checkpoint,
            role=role,
            part=part,
            weights=weights,
            state=state,
            config=configs[role],
            tensors=cast("dict[str, TensorStorageMetadata]", tensors),  # weights are nothing else
            reader=files,
        )
        for part, tensors in named.items()
    ]


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    role: str,
    weights: str,
    dtype: torch.dtype,
    kind: str | None,
    base: str | None,
    expert: str | None = None,
) -> str:
    """Export a role of a training checkpoint; needs no process group and never holds more than one file.

    Args:
        checkpoint: a ``step_*`` folder.
        out: the folder to write; see :func:`models.published.refuse_occupied`.
        role: ``student`` or ``fake``.
        weights: ``raw`` or ``ema``.
        dtype: of the files.
        kind: ``merged``, or one of :data:`models.lora.files.FORMATS`; ``None`` for the whole network, which is
            ``merged`` where the role has adapters.
        base: the folder of the adapters' base, where it has moved.
        expert: ``high`` or ``low``, for one of a role's two experts as a network of its own.

    Returns:
        What was written, in words.

    Raises:
        UserError: a role or average that the checkpoint has not, a damaged checkpoint, a folder that is not to be
            written, a base that is not the adapters' own.
    """
    refuse_occupied(out, "OUT")
    networks = _find(checkpoint, role, weights)
    saved = networks[0]
    boundaries = saved.state.get("boundaries", {}).get(role, [])
    if expert is not None and not boundaries:
        raise UserError(f"--expert {expert}: the {role} in {checkpoint} is one network; leave it out")
    held = [each.part.rpartition(".")[2] for each in networks] if boundaries else []
    if boundaries and len(held) < len(EXPERTS) and expert != held[0]:
        raise UserError(
            f"{checkpoint} holds the {role}'s expert for {held[0]} noise alone, which the run trained; add --expert"
            f" {held[0]}, or take both from the run's export/student"
        )
    adapters = saved.adapters
    if adapters is None and kind is not None:
        raise UserError(
            f"--format {kind} is for adapters, and the {role} in {checkpoint} trained its whole network; leave it out"
        )
    if kind in FORMATS and boundaries and expert is None:
        raise UserError(
            f"--format {kind}: the {role} in {checkpoint} is two experts, and a file is of one; add"
            " --expert high or low"
        )
    if base is not None and (adapters is None or kind in FORMATS):
        raise UserError("--base is for adapters that are merged into it (--format merged); leave it out")
    if adapters is not None and (read_from := base or adapters["base"]["path"]):
        # Of a pipeline the networks are in its folders: one of them that an earlier export put there would be replaced.
        for place in (".", *EXPERT_FOLDERS):
            refuse_input(out, "OUT", {"the adapters' base": Path(read_from) / place})
    about = {
        "checkpoint": str(checkpoint.resolve()),
        "step": saved.state["step"],
        "role": role,
        "weights": weights,
        "dtype": str(dtype),
    }
    chosen = list(range(len(networks)))
    if expert is not None:
        chosen, boundaries = [held.index(expert)], []
        about["expert"] = expert
    of = f"the {role}" if expert is None else f"the {role}'s expert for {expert} noise"
    scale = adapters["scale"] if adapters else 1.0
    if kind in FORMATS:
        (saved,) = (networks[i] for i in chosen)
        refuse_whole(saved.tensors, f"{of} in {checkpoint}")
        tensors = file_tensors(kind, saved.tensors, saved.read, family=saved.family, scale=scale, dtype=dtype)
        write_file(out, tensors, about | {"format": kind})
        return f"the {weights} adapters of {of}"
    bases = _bases(saved, base) if adapters is not None else []
    if bases and held:
        bases = [bases[EXPERTS.index(name)] for name in held]
    sources = [_source(networks[i], bases[i] if bases else None, scale, dtype) for i in chosen]
    write_folder(out, sources, saved.config, _FILE_BYTES, boundaries, about=about)
    return f"the {weights} weights of {of}{', merged into their base,' if adapters else ''}"


_Base = tuple[Callable[[str], Tensor], dict[str, torch.Size]]
"""How to read a weight of the adapters' base by name, and all their shapes."""


def _source(
    saved: _Saved, base: _Base | None, scale: float, dtype: torch.dtype
) -> tuple[dict[str, int], Callable[[str], Tensor]]:
    """Bytes by name, and what gives a tensor, for :func:`models.export_folder.write_folder`."""
    read: Callable[[str], Tensor] = saved.read
    counts = {name: value.size.numel() for name, value in saved.tensors.items()}
    if base is not None:
        of_base, shapes = base
        read = merged = Merged(of_base, saved.read, shapes, saved.tensors, scale)
        counts = {name: shapes[name].numel() if name in shapes else counts[name] for name in merged.names}
    return {name: count * dtype.itemsize for name, count in counts.items()}, lambda name: read(name).to(dtype)


def _bases(saved: _Saved, given: str | None) -> list[_Base]:
    """Of each network of the role.

    Raises:
        UserError: a base that is not there, or another one.
    """
    assert saved.adapters is not None
    of = saved.adapters["base"]
    if of["path"] is None:
        if given is not None:
            raise UserError("--base: these adapters are on random weights, which the run's seed gives; leave it out")
        return [_random_base(saved, i) for i in range(len(saved.state.get("boundaries", {}).get(saved.role, [])) + 1)]
    found = inspect_checkpoint(given or of["path"], "--base")
    if " ".join(map(fingerprint, found.folders)) != of["fingerprint"]:
        raise UserError(
            f"--base {given or of['path']} has other weights than the base that the {saved.role} was trained on"
            f" ({of['path']}); give that one"
        )
    return [
        (tensor_reader(folder), {name: torch.Size(shape) for name, shape in folder.shapes.items()})
        for folder in found.folders
    ]


def _random_base(saved: _Saved, expert: int) -> _Base:
    with torch.device("meta"):
        network = saved.family.build(saved.config, "state.json")
    materialise(network, "cpu")
    initialise(network, seed=seed_of_expert(saved.state["seed"], expert), special=saved.family.fill_special)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    return weights.__getitem__, {name: weight.shape for name, weight in weights.items()}


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
    parser.add_argument(
        "--format",
        choices=("merged", *FORMATS),
        help="of a role with adapters: merged into its base, as a diffusers folder (the default), as a file for"
        " diffusers' load_lora_weights, or one with the keys of Wan's own code, as ComfyUI and LightX2V read it",
    )
    parser.add_argument(
        "--expert", choices=EXPERTS, help="of a role of two experts one alone, as a network of its own; both by default"
    )
    parser.add_argument("--base", help="with --format merged: the folder of the base, where it has moved")
    args = parser.parse_args(argv)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    logging.basicConfig(format="%(message)s")

    @paths_of_the_user()
    def work() -> None:
        if not args.out:
            raise UserError("OUT is empty; give a folder")
        out = user_path(args.out, "OUT")
        checkpoint = find_checkpoint(user_path(args.run, "RUN") if args.run else "", "RUN")
        base = str(user_path(args.base, "--base")) if args.base is not None else None
        written = export_checkpoint(
            checkpoint,
            out,
            role=args.role,
            weights=args.weights,
            dtype=dtype,
            kind=args.format,
            base=base,
            expert=args.expert,
        )
        print(f"{out}: {written} in {checkpoint}")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
