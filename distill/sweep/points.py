"""Points of a sweep, from Hydra's grammar of several values: the command line of each point's run, or its refusal."""

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from distill.config import Config, compose_config
from distill.methods import METHODS
from distill.planning.command import plan_without_gpus
from distill.run.setup import plan_run
from fsdp_cp.errors import UserError

MOST = 1000
"""Limit on the points of a sweep; catches a mistyped range."""
WARM_UP = 2
"""Minimal number of steps before the measured ones, in which allocators, kernels and graphs settle."""
MEASURED = 8
"""Minimal number of measured steps, if the sweep chooses ``steps``."""
_PERIODS = 1000
"""Number of steps in which :func:`role_turns` looks for a period."""
_LONGEST_NAME = 150
_DEFAULTS = {
    "checkpoint.every": "0",
    "checkpoint.at_end": "false",
    "checkpoint.resume": "never",
    "export.at_end": "false",
    "sample.every": "0",
    "guard.every": "0",
    "guard.action": "warn",
    "sample.at_end": "false",
    "log.every": "1",
}
"""Settings of a point, unless the user's words set them."""
_RESERVED = ("run_dir", "log.every", "world", "plan", "dry_run")
"""Settings that only the sweep sets."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of the swept values."""

    name: str
    """Directory name, for example ``num_frames=21,cp=2``."""
    overrides: dict[str, str]
    """Swept keys and values as Hydra writes them: strings keep their quotes."""
    refusal: str | None = None
    """Reason in one line why this point cannot run. The fields below are then unset."""
    words: tuple[str, ...] = ()
    """Command line of the run, without ``run_dir``."""
    tokens: int | None = None
    batch_size: int | None = None
    warm_up: int = 0
    """Number of steps before the measured ones."""
    measured: int = 0
    """Number of measured steps, in whole periods of the roles' turns."""


def parse_words(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split settings into fixed words and swept keys with their values (``a=1,2``, ``choice(...)``, ``range(...)``). A
    word that Hydra's grammar cannot parse, as a path or prompt, is fixed."""
    parser = OverridesParser.create()
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for key, word in zip(keys, words, strict=True):
        if key in _RESERVED:
            raise UserError(f"{word}: a sweep sets {key} itself; use sweep_dir=FOLDER, --plan or --nproc-per-node")
        try:
            override = parser.parse_override(word)
        except HydraException:
            override = None
        if override is None or not override.is_sweep_override():
            fixed.append(word)
            continue
        if keys.count(key) > 1:
            raise UserError(f"{key} is swept and given a second time; give it once")
        try:
            values = list(dict.fromkeys(itertools.islice(override.sweep_string_iterator(), MOST + 1)))
        except (HydraException, ValueError, ArithmeticError):
            values = []
        if not values:
            raise UserError(f"{word} must list values; use KEY=A,B or KEY=range(START,STOP,STEP)")
        swept[word.partition("=")[0]] = values
    if not swept:
        raise UserError("a sweep needs a setting with several values, as 'data.num_frames=21,41,81'")
    if (count := math.prod(map(len, swept.values()))) > MOST:
        raise UserError(f"the sweep has at least {count} points; use {MOST} or less")
    return fixed, swept


def check_points(fixed: Sequence[str], swept: Mapping[str, Sequence[str]], *, world: int, planned: bool) -> list[Point]:
    """Compose and check the run of every combination of ``swept``, the last key fastest."""
    combinations = itertools.product(*swept.values())
    return [_check(fixed, dict(zip(swept, values, strict=True)), world, planned) for values in combinations]


def _check(fixed: Sequence[str], overrides: dict[str, str], world: int, planned: bool) -> Point:
    words = [*fixed, *(f"{key}={value}" for key, value in overrides.items())]
    name = point_name(overrides)
    try:
        keys = {word.partition("=")[0].lstrip("+") for word in words}
        words += [f"{key}={value}" for key, value in _DEFAULTS.items() if key not in keys]
        first, period = role_turns(compose_config(words))
        warm_up = first + -(-WARM_UP // period) * period
        if "steps" not in keys:
            words.append(f"steps={warm_up + -(-MEASURED // period) * period}")
        config = compose_config(words)
        if config.steps < warm_up + period:
            least = f"steps={warm_up + period} or more, or leave it out"
            raise UserError(f"steps={config.steps} leaves no step to measure after {warm_up} of warm-up; use {least}")
        config.world = world
        plan = plan_without_gpus(config)[1] if planned else plan_run(config)
    except UserError as error:
        return Point(name=name, overrides=overrides, refusal=" ".join(str(error).split()))
    return Point(
        name=name,
        overrides=overrides,
        words=tuple(words),
        tokens=plan.tokens,
        batch_size=config.batch_size,
        warm_up=warm_up,
        measured=(config.steps - warm_up) // period * period,
    )


def role_turns(config: Config) -> tuple[int, int]:
    """Return the step from which the order of the trained roles is periodic, and the period in steps; (0, 1) without
    one within 1000 steps, as with a method that starts with 1000 steps of the student."""
    method = METHODS[config.method.name][0](config.method, {})
    turns = [method.trained_role(step) for step in range(_PERIODS)]
    tail = turns[_PERIODS // 2 :]
    for period in range(1, len(tail) // 2):
        if tail[period:] == tail[:-period]:
            irregular = [i for i in range(_PERIODS - period) if turns[i] != turns[i + period]]
            return (irregular[-1] + 1 if irregular else 0), period
    return 0, 1


def point_name(overrides: Mapping[str, str]) -> str:
    """Return a directory name such as ``num_frames=21,cp=2``; a name that is cut ends with a hash."""
    short = short_keys(overrides)
    text = ",".join(f"{short[key]}={value}" for key, value in overrides.items())
    name = re.sub(r"[^\w.+=,-]+", "_", text, flags=re.ASCII)
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole key if two keys end alike."""
    last = {key: key.lstrip("+").rpartition(".")[2] for key in keys}
    return {key: name if [*last.values()].count(name) == 1 else key.lstrip("+") for key, name in last.items()}
