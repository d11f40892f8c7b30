"""Every point composed and checked before the first of them starts: what it would train, and what refuses it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from distill.config import Config, compose_config
from distill.methods import METHODS
from distill.planning.command import as_planned, planned_shapes
from distill.setup import plan_run
from distill.sweep.points import Point
from fsdp_cp.errors import UserError

WARM_UP = 2
"""Least steps before those that are measured: allocators, kernels and graphs settle."""
MEASURED = 8
"""Least steps that are measured, where the sweep chooses ``steps``."""
_LOOKED_AT = 1000
_QUIET = {
    "checkpoint.every": "0",
    "checkpoint.at_end": "false",
    "checkpoint.resume": "never",
    "export.at_end": "false",
    "sample.every": "0",
    "sample.at_end": "false",
    "log.every": "1",
    "planning.before_run": "false",
}
"""What a point is given unless its words say otherwise."""
_OURS = {
    "run_dir": "each point has a folder of its own in the sweep's; use sweep_dir=FOLDER",
    "log.every": "a sweep measures every step; leave it out",
    "world": "a sweep's ranks are torchrun's; use --nproc-per-node and --nnodes",
    "plan": "use --plan, which plans every point",
    "dry_run": "use --plan, which starts no run",
}
"""Settings that a sweep sets itself, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A point with what its run is given, or why there will be none."""

    point: Point
    refusal: str | None
    """The one line; ``None`` for a point that may run."""
    words: tuple[str, ...] = ()
    """All of its run's words but ``run_dir``."""
    tokens: int | None = None
    """Of a sample."""
    batch_size: int | None = None
    warm_up: int = 0
    """Steps before those that are measured."""
    measured: int = 0
    """Steps that are measured, in which each role has its turn as often as in a long run."""


def refuse_ours(words: Sequence[str]) -> None:
    """Refuse settings that a sweep sets itself.

    Raises:
        UserError: naming what to use instead.
    """
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        if key in _OURS:
            raise UserError(f"{word}: {_OURS[key]}")


def check_points(
    fixed: Sequence[str], points: Sequence[Point], *, world: int, planned: bool, elsewhere: bool = False
) -> list[Checked]:
    """Compose and check all ``points``.

    Args:
        fixed: the words that all share.
        points: of the sweep.
        world: ranks of a point's job.
        planned: as the planner checks: no checkpoint, data or GPU need be there.
        elsewhere: a launcher starts the jobs on other machines, which have the GPUs.
    """
    logger = logging.getLogger("distill.setup")
    before, logger.disabled = logger.disabled, True  # the same warnings for every point, which its own run says too
    try:
        return [_check(fixed, point, world, planned, elsewhere) for point in points]
    finally:
        logger.disabled = before


def _check(fixed: Sequence[str], point: Point, world: int, planned: bool, elsewhere: bool) -> Checked:
    words = [*fixed, *point.words]
    try:
        given = {word.partition("=")[0].lstrip("+") for word in words}
        config = compose_config(words)
        words += [f"{key}={value}" for key, value in _QUIET.items() if key not in given]
        first, period = role_turns(config)
        warm_up = first + -(-WARM_UP // period) * period
        if "steps" not in given:
            words.append(f"steps={warm_up + -(-MEASURED // period) * period}")
        config = compose_config(words)
        if config.steps < warm_up + period:
            raise UserError(
                f"steps={config.steps} leaves nothing to measure: {warm_up} steps of warm-up and {period} in which each"
                f" role has its turn; use steps={warm_up + period} or more, or leave it out"
            )
        config.world, config.dry_run = world, elsewhere
        shapes = None
        if planned:
            config = as_planned(config)
            shapes = planned_shapes(config)
        plan = plan_run(config, shapes=shapes)
        tokens = plan.roles[0].tokens(*(shapes or config.data.sample_shapes()))
    except UserError as error:
        return Checked(point=point, refusal=" ".join(str(error).split()))
    return Checked(
        point=point,
        refusal=None,
        words=tuple(words),
        tokens=tokens,
        batch_size=config.batch_size,
        warm_up=warm_up,
        measured=(config.steps - warm_up) // period * period,
    )


def role_turns(config: Config) -> tuple[int, int]:
    """From which step on the roles' turns to train repeat, and after how many steps.

    (0, 1) where one role trains for as long as a sweep could go: a method that begins with the student alone for 1000
    steps is measured in that part.
    """
    method = METHODS[config.method.name][0](config.method, {})
    turns = [method.trained_role(step) for step in range(_LOOKED_AT)]
    tail = turns[_LOOKED_AT // 2 :]
    for period in range(1, len(tail) // 2):
        if tail[period:] == tail[:-period]:
            odd = [i for i in range(_LOOKED_AT - period) if turns[i] != turns[i + period]]
            return (odd[-1] + 1 if odd else 0), period
    return 0, 1
