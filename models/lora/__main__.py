"""Make adapters: of a fully trained network by SVD, or of two adapters of one base by addition.

``python -m models.lora extract FULL BASE OUT --rank 64``, ``python -m models.lora stack STUDENT ADAPTER BASE OUT``.
"""

import argparse
import logging
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.files.atomic_folder import description, refuse_input, refuse_occupied
from fsdp_cp.launch import exit_code
from models.causal import read_causal
from models.export import DTYPES, RoleExport
from models.families.base import Family
from models.families.registry import family_names, family_of
from models.files.checkpoint_files import TransformerFolder, fingerprint, inspect_transformer
from models.lora import videox
from models.lora.contract import BASE, METHOD, SAMPLING, SHOWN, in_words, read_contract
from models.lora.extract import extract
from models.lora.files import FASTVIDEO, FORMATS
from models.lora.merge import Weights
from models.lora.settings import LoraSettings
from models.lora.stack import inspect_for_base, stack
from models.owner import is_gate
from models.sparse import read_sparse

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Return exit code 0, or 2 after a one-line message for a user error."""
    parser = argparse.ArgumentParser(prog="python -m models.lora", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("extract", help="adapters that make FULL of BASE, as nearly as their rank can")
    command.add_argument("full", metavar="FULL", help="diffusers folder of the trained network")
    command.add_argument("base", metavar="BASE", help="diffusers folder of the network that it began as")
    _add_output(command)
    command.add_argument("--rank", type=int, default=64)
    command.add_argument(
        "--targets", nargs="+", default=[], help="patterns of layer names; those of the blocks by default"
    )
    command.set_defaults(work=_extract)
    what = "one adapter that adds STUDENT and ADAPTER, of one base; ranks add up"
    more = "Gates of sparse attention are no adapters: they belong to STUDENT, stay as they are, and take no weight."
    command = commands.add_parser("stack", help=what, description=f"Write {what}. {more}")
    command.add_argument("student", metavar="STUDENT", help="file or folder of adapters, which tells how to sample")
    command.add_argument("adapter", metavar="ADAPTER", help="file or folder of adapters that were trained on BASE")
    command.add_argument("base", metavar="BASE", help="diffusers folder of the base of both")
    _add_output(command)
    command.add_argument(
        "--weights", nargs=2, type=float, default=[1.0, 1.0], metavar=("W", "V"), help="1 1 by default"
    )
    command.set_defaults(work=_stack)
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")

    @paths_of_the_user()
    def work() -> None:
        out = user_path(args.out, "OUT")
        refuse_occupied(out, "OUT")
        args.work(args, out)

    return exit_code(work)


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("out", metavar="OUT", help="folder to write: new, empty, or an earlier export")
    command.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="as of python -m models.export")
    command.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    command.add_argument("--family", choices=family_names(), default="wan")


def _network_of(args: argparse.Namespace, base: TransformerFolder) -> tuple[nn.Module, Family]:
    family = family_of(args.family, "--family")
    with torch.device("meta"):
        return family.build(base.config, "BASE"), family


def _check_gates(args: argparse.Namespace, where: Path, names: Iterable[str]) -> None:
    if any(map(is_gate, names)) and args.format != FASTVIDEO:
        raise UserError(f"{where} has gates of sparse attention; use --format {FASTVIDEO}, which has them")


def _write(
    args: argparse.Namespace,
    out: Path,
    base: TransformerFolder,
    parts: dict[str, Tensor],
    sparse: Path,
    causal: dict[str, Any] | None = None,
    **more: Any,
) -> None:
    """Write adapters and gates, the ``parts``, of the folder ``base``; ``more`` is the rest of the description.
    ``sparse`` is the folder of a network with gates."""
    settings, sampled = read_sparse(sparse, str(sparse)), more.get(SAMPLING)
    exported = RoleExport(
        family=family_of(args.family, "--family"),
        config=base.config,
        causal=causal,
        sparse=None if settings is None else asdict(settings),
        scale=1.0,
        trained={0: Weights({name: tuple(tensor.shape) for name, tensor in parts.items()}, parts.__getitem__)},
        bases=tuple,
        few_steps={"times": sampled["times"], "stochastic": sampled["sampler"] == "renoise"} if sampled else None,
        settings={"method": more.get(METHOD), "teacher": {"checkpoint": str(base.path.resolve())}},
    )
    maker = f"models.lora {args.command}"
    about = {"made by": maker, "base": str(base.path), BASE: fingerprint(base), **more}
    exported.write(out, args.format, dtype=DTYPES[args.dtype], about=about)


def _extract(args: argparse.Namespace, out: Path) -> None:
    if args.rank < 1:
        raise UserError(f"--rank {args.rank} must be at least 1")
    given = (("FULL", args.full), ("BASE", args.base))
    full, base = (inspect_transformer(str(user_path(folder, name)), name) for name, folder in given)
    refuse_input(out, "OUT", {"FULL": full.path, "BASE": base.path})
    network, family = _network_of(args, base)
    _check_gates(args, full.path, full.shapes.keys() - base.shapes.keys())
    extracted = extract(full, base, network, family, LoraSettings(rank=args.rank, targets=args.targets))
    own = description(full.path)
    more = {key: own[key] for key in (METHOD, SAMPLING) if own.get(key)}
    parts = extracted.adapters | extracted.gates
    _write(args, out, base, parts, full=str(full.path), rank=args.rank, sparse=full.path, **more)
    print(f"{out}: adapters of rank {args.rank} for {len(extracted.adapters) // 2} layers, which hold"
          f" {extracted.kept:.2%} of the squared difference there")  # fmt: skip
    if extracted.left_out:
        most = max(extracted.left_out, key=extracted.left_out.__getitem__)
        print(f"left out: {len(extracted.left_out)} other tensors that differ, the most {most} (by"
              f" {extracted.left_out[most]:.2g} of its norm)")  # fmt: skip


def _stack(args: argparse.Namespace, out: Path) -> None:
    """Stack two adapters. The first one's description and ``causal.json`` tell how the sum is sampled.

    Gates of sparse attention belong to the first one. They are not adapters, so its weight does not scale them.
    """
    if args.format == videox.KIND:
        raise UserError(f"--format {videox.KIND} holds last layers, which adapters lack; leave it out")
    if not all(map(math.isfinite, args.weights)):
        raise UserError(f"--weights {args.weights} must be two finite numbers")
    base = inspect_transformer(str(user_path(args.base, "BASE")), "BASE")
    network, family = _network_of(args, base)
    places = {name: str(user_path(getattr(args, name.lower()), name)) for name in ("STUDENT", "ADAPTER")}
    adapters = [inspect_for_base(place, base, network, family, name) for name, place in places.items()]
    refuse_input(out, "OUT", {name: Path(place) for name, place in places.items()} | {"BASE": base.path})
    student = adapters[0].file.parent
    _check_gates(args, student, adapters[0].added)
    about: dict[str, Any] = {"stacked": places, "weights": args.weights}
    contract, other = (read_contract(one.file) for one in adapters)
    if (method := contract.get(METHOD) or description(student).get(METHOD)) is not None:
        about[METHOD] = method
    if sampled := {key: contract[key] for key in SHOWN if key in contract}:
        about[SAMPLING] = sampled
    if "times" in other and other["times"] != contract.get("times"):
        log.warning("ADAPTER was trained for %s; the sum is sampled as STUDENT says", in_words(other))
    if (causal := read_causal(student, "STUDENT")) is not None:
        about["causal"] = {**asdict(causal[0]), "frames": causal[1]}
    if adapters[1].added:
        raise UserError(f"ADAPTER {places['ADAPTER']} has gates of sparse attention, which cannot be added; drop them")
    parts = stack(adapters, args.weights) | adapters[0].read_added()
    _write(args, out, base, parts, sparse=student, **about)
    print(f"{out}: adapters of rank {adapters[0].rank} + {adapters[1].rank}, times {args.weights[0]:g} and"
          f" {args.weights[1]:g}")  # fmt: skip
    if adapters[0].added:
        print(f"{out}: {len(adapters[0].added)} tensors of STUDENT's gates of sparse attention, without a weight")


if __name__ == "__main__":
    sys.exit(main())
