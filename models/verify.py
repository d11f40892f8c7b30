"""Check that a network computes the same on every mesh: ``python -m models.verify FOLDER_OR_FAMILY``.

For a FAMILY it uses small example networks with random weights. For a FOLDER (a diffusers transformer or pipeline
folder) it uses the network in it, or both experts. It builds each network as a role, then splits and shards it on each
mesh that ``--ranks`` local processes allow. It compares outputs, gradients and derivatives in float64 with those of the
unmodified network in one process. It runs a network with optional inputs, such as a first frame, with and without them.
A network that can be causal is also compared as a causal role with that role on one rank: with a noisy and a clean
history, and chunk by chunk.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import math
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import exit_code
from models.export_folder import write_folder
from models.families.base import config_of
from models.families.registry import family_names, family_of
from models.files.checkpoint_files import EXPERT_FOLDERS, defining, inspect_checkpoint
from models.files.hub import network_files, resolve_path
from models.lora.merge import Weights
from models.sample import VIDEO
from models.verification import BATCH, BOUND, GRIDS, planned, sample_shapes, verify

COLUMNS = ("output", "each gradient", "norm", "derivative", "weights changed")


def report(title: str, folder: Path, family: str, ranks: int) -> bool:
    """Print one table per network and one with its optional inputs; return whether all errors are within the bound."""
    experts = len(inspect_checkpoint(str(folder), "FOLDER").folders)
    plan = planned(folder, family)
    parts, needed = sample_shapes(plan, GRIDS[0])
    optional = sorted(plan.family.optional_shapes(plan.config, parts[VIDEO]).keys() - needed.keys())
    good = True
    for expert in range(experts):
        name = f"{title}, {EXPERT_FOLDERS[expert]}" if experts > 1 else title
        good &= _table(name, folder, family, ranks, expert)
        if optional:
            good &= _table(f"{name}, {' and '.join(optional)} given", folder, family, ranks, expert, optional=True)
    if experts > 1:
        return good
    try:
        plan.family.check_causal(plan.config, "FOLDER")
    except UserError:
        return good
    return good & _table(f"{title}, causal", folder, family, ranks, optional=bool(optional), causal=True)


def _table(
    title: str, folder: Path, family: str, ranks: int, expert: int = 0, *, optional: bool = False, causal: bool = False
) -> bool:
    columns = ("chunk by chunk", *COLUMNS) if causal else COLUMNS
    names = ["dp_shard x cp", "tokens", "checkpointing", *(["history"] if causal else []), *columns]
    print(f"\n**{title}**\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|")
    good = True
    for case, errors, worst in verify(folder, family, ranks, expert, optional, causal=causal):
        fits = max(errors.values()) <= BOUND
        good &= fits
        cells = [f"{case.dp_shard} x {case.cp}", str(math.prod(case.grid)), "on" if case.checkpointing else "off"]
        cells += [case.history] if case.history else []
        for column in columns:
            digits = ".0f" if column == "weights changed" else ".1e"
            cells.append(format(errors[column], digits) if column in errors else "-")
        print(f"| {' | '.join(cells)} |" + ("" if fits else f" **above {BOUND:g}**, first in {worst}"), flush=True)
    return good


def write_example(folder: Path, family: str, config: Mapping[str, Any]) -> None:
    """Write a network of ``config`` with random weights to a diffusers folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = family_of(family, "student").build(config, "models.verify")
        for parameter in network.parameters():  # constructors set biases to 0, which would hide errors
            parameter.data += 0.05 * torch.randn_like(parameter)
    tensors = network.state_dict()
    weights = Weights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)
    named = {"_class_name": family_of(family, "student").class_name} | defining(config_of(network))
    write_folder(folder, [weights], named, dtype=torch.float32)


def run(target: str, family: str | None, ranks: int) -> bool:
    """Print the tables of a folder, or of a family's examples; return whether all errors are within the bound."""
    folder = resolve_path(str(user_path(target, "FOLDER_OR_FAMILY")), "FOLDER_OR_FAMILY", network_files)
    for name in (family, None if folder.is_dir() else target):
        if name is not None and name not in family_names():
            raise UserError(f"{name} is neither a folder nor a family; use a folder, or {' or '.join(family_names())}")
    if folder.is_dir():
        family = family or _family_of(folder)
        planned(folder, family)  # raises before anything is printed
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "diffusers"))
    print(f"python -m models.verify {target}: largest relative differences from the plain network in one process,")
    print(f"float64, {packages}, at most {ranks} ranks; {BATCH} samples")
    if folder.is_dir():
        assert family is not None
        return report(target, folder, family, ranks)
    good = True
    for name, config in family_of(target, "student").examples().items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "network"
            write_example(folder, target, config)
            good &= report(f"{target} {name}", folder, target, ranks)
    return good


def _family_of(folder: Path) -> str:
    """Return the family of the folder's network class. If none matches, return the first family, whose check then
    reports the mismatch."""
    class_name = inspect_checkpoint(str(folder), "FOLDER").folders[0].config.get("_class_name")
    names = family_names()
    for name in names:
        with suppress(UserError):  # skip a family of another package that cannot be imported
            if family_of(name, "FOLDER").class_name == class_name:
                return name
    return names[0]


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, 1 if an error is too large, or 2 after a one-line message for a user error."""
    parser = argparse.ArgumentParser(prog="python -m models.verify", description=__doc__.splitlines()[0])
    parser.add_argument(
        "target", metavar="FOLDER_OR_FAMILY", help=f"a diffusers folder, or {', '.join(family_names())}"
    )
    parser.add_argument("--family", help="of a folder's network; by its class by default")
    parser.add_argument(
        "--ranks", type=int, default=4, help="local processes at most; meshes that need more are left out"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    good = False

    @paths_of_the_user()
    def work() -> None:
        nonlocal good
        if args.ranks < 1:
            raise UserError(f"--ranks {args.ranks} must be at least 1")
        good = run(args.target, args.family, args.ranks)
        print(f"\nall within {BOUND:g}" if good else f"\nNOT exact: errors above {BOUND:g}")

    code = exit_code(work)
    return code or int(not good)


if __name__ == "__main__":
    sys.exit(main())
