"""Part of a video in time, which a row of a table names: ``start`` and ``end`` in seconds, or ``cut`` in frames."""

import json
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

from fsdp_cp.errors import UserError

F = TypeVar("F")

SPAN_COLUMNS = ("start", "end", "cut")
_ROUNDING = Fraction(1, 1000)
"""Seconds by which a table may round the time of a frame, up or down, and still mean this frame."""


class Span(NamedTuple):
    """Frames from ``first`` up to, without, ``last``; both count from the first frame of the video."""

    first: float
    last: float
    unit: Literal["s", "frames"]

    def __str__(self) -> str:
        return f"{self.first:g} to {self.last:g} {self.unit}"

    def frames(self, timed: Iterable[tuple[F, Fraction]]) -> Iterator[tuple[F, Fraction]]:
        """Yield those of a video's frames, each with its time, that are in this part."""
        begin: Fraction | None = None
        for index, (frame, time) in enumerate(timed):
            begin = time if begin is None else begin
            at = index if self.unit == "frames" else time - begin + _ROUNDING
            if at >= self.last:
                return
            if at >= self.first:
                yield frame, time


def read_span(start: Any, end: Any, cut: Any, where: str) -> Span | None:
    """Return the part that a row names by its values of :data:`SPAN_COLUMNS`, numbers or texts; ``None`` for the whole
    video. ``where`` is the file and the line."""
    start, end, cut = (None if _is_blank(value) else value for value in (start, end, cut))
    if start is None and end is None and cut is None:
        return None
    if cut is None:
        unit = "s"
        first, last = (_number(value, default) for value, default in ((start, 0.0), (end, math.inf)))
    elif start is None and end is None:
        unit = "frames"
        first, last = _pair(cut)
    else:
        raise UserError(f"{where} has start or end, and cut; keep one of both kinds")
    if not 0 <= first < last or (unit == "frames" and (first % 1 or last % 1)):
        found = f"start={start!r}, end={end!r}" if cut is None else f"cut={cut!r}"
        kinds = "start and end must be seconds with 0 <= start < end, and cut two frame numbers, as [30, 60]"
        raise UserError(
            f"{where} has {found}; {kinds}. Set data.columns={{start: '', end: '', cut: ''}} to ignore them"
        )
    return Span(first, last, unit)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(value: Any, default: float) -> float:
    """Return a number; NaN, which fits no bound, where ``value`` is not one."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _pair(cut: Any) -> tuple[float, float]:
    if isinstance(cut, str):
        try:
            cut = json.loads(cut)
        except (ValueError, RecursionError):
            cut = None
    if not isinstance(cut, list) or len(cut) != 2:
        return math.nan, math.nan
    return _number(cut[0], math.nan), _number(cut[1], math.nan)
