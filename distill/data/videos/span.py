"""Part of a video in time, which a row of a table names: ``start`` and ``end`` in seconds, or ``cut`` in frames."""

import json
import math
import operator
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


def read_span(*values: Any, where: str) -> Span | None:
    """Return the part that a row names by its values of :data:`SPAN_COLUMNS`, numbers or texts; ``None`` for the whole
    video. ``where`` is the file and the line."""
    start, end, cut = (None if isinstance(value, str) and not value.strip() else value for value in values)
    if start is None and end is None and cut is None:
        return None
    if cut is not None and (start, end) != (None, None):
        raise UserError(f"{where} has start or end, and cut; keep one of both kinds")
    try:
        if cut is None:
            first, last = float(start or 0), math.inf if end is None else float(end)
        else:
            first, last = map(operator.index, json.loads(cut) if isinstance(cut, str) else cut)
    except (TypeError, ValueError, OverflowError, RecursionError):
        first = last = math.nan
    if not 0 <= first < last:
        found = f"start={start!r}, end={end!r}" if cut is None else f"cut={cut!r}"
        kinds = "start and end must be seconds with 0 <= start < end, and cut two frame numbers, as [30, 60]"
        raise UserError(
            f"{where} has {found}; {kinds}. Set data.columns={{start: '', end: '', cut: ''}} to ignore them"
        )
    return Span(first, last, "s" if cut is None else "frames")
