"""Phases of a step: named for profilers, timed, and with nothing left gathered behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.profiler import record_function

from fsdp_cp.sharding.state import reshard


@contextmanager
def phase(name: str, networks: Iterable[nn.Module] = ()) -> Iterator[None]:
    """A ``record_function`` range, on CUDA an NVTX range too; on leaving it every one of ``networks`` is resharded.

    Strategies that keep parameters gathered for a whole step (``optim``, ``optim_grads``) would hold an idle network's
    full weights until its next use, and updates to its shards would be ignored until then.

    Args:
        name: of the range, e.g. ``"student/backward"``.
        networks: roots of :func:`fsdp_cp.shard_module`.
    """
    with _named(name):
        try:
            yield
        except BaseException:
            for network in networks:
                with suppress(Exception):  # of a network in disarray: what failed first is what the user must see
                    reshard(network)
            raise
        for network in networks:
            reshard(network)


@dataclass
class _Now:
    """Where this process is."""

    open: list[str] = field(default_factory=list)
    """From the outermost phase to the innermost."""
    latest: str = ""
    """The phase that was left last."""
    since: float = field(default_factory=time.monotonic)
    """When a phase was entered or left last."""


_now = _Now()


class PhaseTimes:
    """How long each phase took inside the context, without the phases that ran inside of it.

    The clock is read at the phases' borders and nowhere else, so the parts add up to the whole. On CUDA it is the
    device's, by events on the current stream: the host runs ahead of the kernels that it launches, and its own clock
    would count them where something next waits for the device. Nothing waits for the device before :meth:`seconds`.

    Args:
        device: whose clock it is.

    >>> with PhaseTimes(torch.device("cpu")) as times:
    ...     with phase("a"):
    ...         work()
    >>> times.seconds()  # the empty name: outside of every phase
    {"": 0.001, "a": 0.2}
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._borders: list[tuple[str, float | torch.cuda.Event]] = []
        """The innermost phase from there on, and when."""

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
        """By the phase's name, in the order in which they came; on CUDA the device is waited for."""
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
"""Called wherever a phase has been entered or left."""


@contextmanager
def at_borders(call: Callable[[], None]) -> Iterator[None]:
    """Inside, ``call`` runs wherever a phase has been entered or left; :func:`phase_now` says into which."""
    _at_borders.append(call)
    try:
        yield
    finally:
        _at_borders.remove(call)


def where(error: BaseException | None = None) -> str:
    """The innermost phase of now, or that was open when ``error`` was raised, as words of a sentence.

    Where none is open, the phase before.
    """
    name = _now.open[-1] if error is None and _now.open else getattr(error, "innermost_phase", None)
    if name is not None:
        return f"in phase {name}"
    return f"after phase {_now.latest}" if _now.latest else "before the first phase"


def phase_now() -> str:
    """The innermost phase that is open; empty where none is."""
    return _now.open[-1] if _now.open else ""


def seconds_in_place() -> float:
    """How long ago a phase was entered or left last."""
    return time.monotonic() - _now.since


@contextmanager
def _named(name: str) -> Iterator[None]:
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
    except BaseException as error:
        if not hasattr(error, "innermost_phase"):  # it passes through the outer ones too
            vars(error)["innermost_phase"] = name
        raise
    finally:
        _now.open.pop()
        _now.latest, _now.since = name, time.monotonic()
        if nvtx:
            torch.cuda.nvtx.range_pop()
    for mark in _at_borders:  # not after an error: of a GPU that has failed, it would fail again and hide the first
        mark()
