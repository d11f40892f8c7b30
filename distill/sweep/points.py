"""The words of a sweep in Hydra's grammar, and the points that they stand for, each with a name for its folder."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from distill.config.errors import group_files
from fsdp_cp.errors import UserError

MOST = 1000
"""Points of a sweep; a range that was meant otherwise has more."""
_LONGEST_VALUE = 40
_LONGEST_NAME = 180


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is swept, and what is not."""

    fixed: tuple[str, ...]
    """Words as they were typed."""
    values: Mapping[str, tuple[str, ...]]
    """Of each swept key, as Hydra writes them (strings with their quotes), in the order given."""

    @property
    def keys(self) -> tuple[str, ...]:
        """What is swept, in the order typed."""
        return tuple(self.values)

    def points(self) -> list[Point]:
        """The Cartesian product, the last key fastest.

        Raises:
            UserError: more than :data:`MOST`.
        """
        count = 1
        for values in self.values.values():
            count *= len(values)
        if count > MOST:
            raise UserError(f"the sweep has {count} points; use {MOST} or less")
        product = itertools.product(*self.values.values())
        return [Point(tuple(zip(self.keys, values, strict=True))) for values in product]


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of values."""

    overrides: tuple[tuple[str, str], ...]
    """(key, value), as in :class:`Sweep`."""

    @property
    def words(self) -> list[str]:
        """For the command line of ``train.py``."""
        return [f"{key}={value}" for key, value in self.overrides]

    @property
    def name(self) -> str:
        """``num_frames=21,cp=2``: fit for a folder, and the same whatever the sweep's other points are.

        A value that a file's name cannot show in full has a few digits of its hash behind it, so that no two points
        share a name.
        """
        short = short_keys(key for key, _ in self.overrides)
        name = ",".join(f"{short[key]}={_in_a_name(value)}" for key, value in self.overrides)
        return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{_hash(name)}"


def parse_words(words: Sequence[str], swept_before: Iterable[str] = ()) -> Sweep:
    """Tell what is swept (``a=1,2``, ``choice``, ``range``, ``glob``) from what is not.

    A word that Hydra's grammar does not read is not swept: a path or a prompt needs no quotes, as in a run. A comma
    outside of quotes and brackets is a sweep's, in a path too.

    Args:
        words: ``key=value``.
        swept_before: keys of the sweep that goes on; one of their values alone stands for a sweep of one.

    Raises:
        UserError: an interval, which has no values to list; a sweep without a value; a setting that is swept and also
            given otherwise; nothing swept.
    """
    parser = OverridesParser.create(config_loader=_Groups())  # type: ignore[arg-type]
    before = set(swept_before)
    fixed: list[str] = []
    values: dict[str, tuple[str, ...]] = {}
    keys: list[str] = []
    for word in words:
        typed = word.partition("=")[0]
        override = _parsed(parser, word)
        keys.append(typed.lstrip("+"))
        if override is not None and (override.is_sweep_override() or typed in before):
            values[typed] = _values(word, override)
        elif typed in before:
            values[typed] = (word.partition("=")[2],)
        else:
            fixed.append(word)
    for typed in values:
        if keys.count(typed.lstrip("+")) > 1:
            raise UserError(f"{typed} is swept and given a second time; give it once")
    if not values:
        raise UserError("nothing is swept; give a setting several values, as in 'data.num_frames=21,41,81'")
    return Sweep(tuple(fixed), values)


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key; more of it where two keys end alike."""
    keys = list(keys)
    short = {}
    for key in keys:
        parts = re.split(r"[./]", key.lstrip("+"))
        for length in range(1, len(parts) + 1):
            short[key] = ".".join(parts[-length:])
            same = [other for other in keys if re.split(r"[./]", other.lstrip("+"))[-length:] == parts[-length:]]
            if len(same) == 1:
                break
    return short


def plain(value: str) -> str:
    """A value without Hydra's quotes."""
    return value[1:-1] if re.fullmatch(r"'.*'|\".*\"", value, re.S) else value


def _parsed(parser: OverridesParser, word: str) -> Override | None:
    try:
        return parser.parse_overrides([word])[0]  # parse_override leaves glob without its names
    except HydraException:
        return None


def _values(word: str, override: Override) -> tuple[str, ...]:
    if not override.is_sweep_override():
        return (override.get_value_element_as_str(),)
    if not override.is_discrete_sweep():
        raise UserError(f"{word}: an interval has no values to list; use range(START, STOP, STEP) or a list")
    try:
        values = tuple(dict.fromkeys(itertools.islice(override.sweep_string_iterator(), MOST + 1)))
    except (HydraException, ValueError, ArithmeticError) as error:
        raise UserError(f"{word}: {' '.join(str(error).split())}") from error
    if not values:
        raise UserError(f"{word} has no value")
    return values


class _Groups:
    """The names that ``glob`` chooses from: our files, without the schemas that Hydra's own loader lists too."""

    def get_group_options(self, group_name: str, results_filter: Any = None) -> list[str]:
        return [path.stem for path in group_files(group_name)]


def _in_a_name(value: str) -> str:
    shown = re.sub(r"[^\w.+-]+", "_", plain(value), flags=re.ASCII)
    return shown if shown == value and len(value) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}-{_hash(value)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
