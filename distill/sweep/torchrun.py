"""The options of a sweep's command line: its own, and those that each point's torchrun is handed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from fsdp_cp.errors import UserError

_MULTIRUN = ("-m", "--multirun")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A sweep's command line, taken apart."""

    torchrun: tuple[str, ...]
    """Options for ``torchrun``, its number of processes and ``--standalone`` filled in."""
    world: int
    """Ranks of a point's job."""
    words: tuple[str, ...]
    """``key=value``."""
    hydra: tuple[str, ...]
    """The words that choose a launcher of Hydra's and set it up."""
    sweep_dir: str | None
    plan: bool
    """``--plan``: the planner alone."""
    predict: bool
    """Not with ``--no-plan``."""
    prefix: tuple[str, ...]
    """``--prefix``: words in front of ``torchrun``, such as srun's."""


def wants_sweep(arguments: Sequence[str]) -> bool:
    """Whether ``train.py`` is asked for a sweep (``--multirun``), and for nothing that only shows something."""
    shows = {"-h", "--help", "-c", "--cfg"} & {word.partition("=")[0] for word in arguments}
    return any(word in _MULTIRUN for word in arguments) and not shows


def parse_arguments(arguments: Sequence[str]) -> Arguments:
    """Take a sweep's command line apart.

    Raises:
        UserError: an option that neither torchrun nor the sweep has, options behind the first setting, a number of
            nodes or processes that is no number; torchrun around it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ:
        raise UserError(
            "a sweep starts torchrun itself, once for each point; start it without, by python -m distill.sweep"
            " --nproc-per-node N experiment=NAME KEY=A,B"
        )
    rest, plan, no_plan, prefix = [], False, False, ()
    words = iter(arguments)
    for word in words:
        if word in _MULTIRUN:
            continue
        if word == "--plan":
            plan = True
        elif word == "--no-plan":
            no_plan = True
        elif word == "--prefix" or word.startswith("--prefix="):
            prefix = tuple(_split(word.partition("=")[2] if "=" in word else next(words, "")))
        else:
            rest.append(word)
    if plan and no_plan:
        raise UserError("--plan is the planner alone, and --no-plan is without it; give one of them")
    options, settings = _split_off(rest)
    sweep_dir, own, hydra = None, [], []
    for word in settings:
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            raise UserError(
                f"{word} stands behind a setting; torchrun's options come first, and settings are key=value"
            )
        if key == "sweep_dir":
            if not value:
                raise UserError("sweep_dir= is empty (a shell variable that is not set?); give a folder")
            sweep_dir = value
        elif key.lstrip("+") == "hydra/launcher" or key.lstrip("+").startswith("hydra.launcher."):
            hydra.append(word)
        else:
            own.append(word)
    torchrun, world = _complete(options)
    return Arguments(
        torchrun=torchrun,
        world=world,
        words=tuple(own),
        hydra=tuple(hydra),
        sweep_dir=sweep_dir,
        plan=plan,
        predict=not no_plan,
        prefix=prefix,
    )


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--prefix {text!r}: {error}; give the words as a shell would read them") from error
    if not words:
        raise UserError("--prefix is empty; give what stands in front of torchrun, as in --prefix 'srun -n 2'")
    return words


def _split_off(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """torchrun's options and the settings behind them; its own parser knows which option takes a value."""
    from torch.distributed.run import get_args_parser

    class Refused(Exception):
        pass

    def error(message: str) -> NoReturn:
        raise Refused(message)

    parser = get_args_parser()
    parser.error = error  # type: ignore[method-assign]  # which would print torchrun's usage and exit
    try:
        # The second is for a command line without any setting, where the first would miss its program.
        parsed = parser.parse_args([*words, "-"])
    except Refused as refused:
        raise UserError(f"{refused}; options are torchrun's, --plan, --no-plan and --prefix") from refused
    settings = [parsed.training_script, *parsed.training_script_args][:-1]
    options = list(words[: len(words) - len(settings)])
    if parsed.module or parsed.no_python:
        raise UserError(
            "--module and --no-python say what torchrun starts, which is train.py in a sweep; leave them out"
        )
    return options, settings


def _complete(options: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The options with ``--nproc-per-node`` and ``--standalone`` where they are missing, and the number of ranks."""
    from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

    words = list(options)
    names = {word.partition("=")[0].replace("_", "-") for word in options if word.startswith("-")}
    if "--nproc-per-node" not in names:
        words += ["--nproc-per-node", str(max(1, torch.cuda.device_count()))]
    parsed = get_args_parser().parse_args([*words, "-"])
    try:
        least, most = parse_min_max_nnodes(parsed.nnodes)
        if least != most:
            raise UserError(f"--nnodes {parsed.nnodes}: a point's number of ranks must be known; give one number")
        processes = determine_local_world_size(parsed.nproc_per_node)
    except UserError:
        raise
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--nnodes and --nproc-per-node: {error}; give numbers") from error
    if least < 1 or processes < 1:
        raise UserError("--nnodes and --nproc-per-node must be 1 or more")
    if most == 1 and not names & {
        "--standalone",
        "--rdzv-endpoint",
        "--rdzv-backend",
        "--master-port",
        "--master-addr",
    }:
        words.insert(0, "--standalone")
    return tuple(words), most * processes
