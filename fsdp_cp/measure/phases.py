"""Phases of a step: named for profilers, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.profiler import record_function


@dataclass
class _Now:
    """Phases that this process is in."""

    open: list[str] = field(default_factory=list)
    """Open phases, outermost first."""
    latest: str = ""
    """Phase that ended last."""
    since: float = field(default_factory=time.monotonic)
    """Time at which a phase last began or ended."""


_now = _Now()


class PhaseTimes:
    """Duration of each phase inside the context, without the phases nested in it.

    The clock is read only at the borders of phases, so the parts add up to the whole. On CUDA events on the current
    stream measure device time: the host runs ahead of its kernels, and its clock would count them in the phase that
    next waits for the device. Nothing waits for the device before :meth:`seconds`.

    >>> with PhaseTimes(torch.device("cpu")) as times:
    ...     with phase("a"):
    ...         work()
    >>> times.seconds()  # the empty name is time outside of every phase
    {"": 0.001, "a": 0.2}
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._borders: list[tuple[str, float | torch.cuda.Event]] = []
        """Innermost phase after each border, and the time of the border."""

    def __enter__(self) -> PhaseTimes:
        self._borders = []
        self._mark()
        _at_borders.append(self._mark)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        _at_borders.remove(self._mark)
        if kind is None:
            self._mark()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._borders.append((phase_now(), event))
        else:
            self._borders.append((phase_now(), time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase by name, in order of first occurrence. On CUDA, wait for the device."""
        taken: dict[str, float] = {}
        if self._borders and isinstance(last := self._borders[-1][1], torch.cuda.Event):
            last.synchronize()
        for (name, start), (_, end) in pairwise(self._borders):
            if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                span = start.elapsed_time(end) / 1000
            else:
                assert isinstance(start, float) and isinstance(end, float), "one clock"
                span = end - start
            taken[name] = taken.get(name, 0.0) + span
        return taken


_at_borders: list[Callable[[], None]] = []
"""Functions to call after a phase begins or ends. :func:`phase_now` then returns the new phase."""


def where() -> str:
    """Return words that name the innermost open phase, ``in phase student/backward``, or else the previous one."""
    if _now.open:
        return f"in phase {_now.open[-1]}"
    return f"after phase {_now.latest}" if _now.latest else "before the first phase"


def phase_now() -> str:
    """Return the innermost open phase, or an empty string."""
    return _now.open[-1] if _now.open else ""


def seconds_in_place() -> float:
    """Return the seconds since a phase last began or ended."""
    return time.monotonic() - _now.since


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Open a ``record_function`` range, on CUDA also an NVTX range, for example ``"student/backward"``."""
    _now.open.append(name)
    _now.since = time.monotonic()
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        for mark in _at_borders:
            mark()
        with record_function(name):
            yield
    finally:
        _now.open.pop()
        _now.latest, _now.since = name, time.monotonic()
        if nvtx:
            torch.cuda.nvtx.range_pop()
    for mark in _at_borders:  # skipped after an error: on a failed GPU a mark would raise and hide the first error
        mark()
