"""How much of a profiled stretch of time went into collectives, and how much of that no computation hid."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Span = tuple[float, float]
"""From and to, in any one unit."""

_STEP = re.compile(r"ProfilerStep#(\d+)")
_COMMUNICATION = ("c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
"""Namespaces of operators that begin a collective or wait for one."""


class Interval(NamedTuple):
    """Something that happened on a rank."""

    start: float
    end: float
    kind: Literal["collective", "compute", "waiting"]
    """``waiting`` for a collective is no computation, though an operator that computes may contain it."""
    stream: int = 0
    """CUDA stream, or thread of the CPU, on which one thing happens at a time."""
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Of the windows' time, from 0 to 1."""

    collectives: float
    """At least one collective was at work."""
    exposed: float
    """At least one collective was, and no computation on any stream."""
    compute: float
    """A computation was at work on some stream."""


def shares(intervals: Iterable[Interval], windows: Iterable[Span]) -> Shares:
    """What of the time in ``windows`` went into collectives and into computation.

    Args:
        intervals: in any order; those of one stream may contain one another.
        windows: the stretches of time that count; what lies outside of them is left out.

    Raises:
        ValueError: windows without any length.
    """
    counted = union(windows)
    total = _length(counted)
    if not total:
        raise ValueError("the windows have no length")
    computing: dict[int, list[Span]] = defaultdict(list)
    waiting: dict[int, list[Span]] = defaultdict(list)
    communicating: list[Span] = []
    for start, end, kind, stream, _ in intervals:
        if kind == "collective":
            communicating.append((start, end))
        else:
            (computing if kind == "compute" else waiting)[stream].append((start, end))
    at_work = [span for stream, spans in computing.items() for span in without(union(spans), union(waiting[stream]))]
    idle = without(counted, union(at_work))
    quiet = without(counted, union(communicating))
    return Shares(
        collectives=_length(without(counted, quiet)) / total,
        exposed=_length(without(idle, quiet)) / total,
        compute=_length(without(counted, idle)) / total,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """The time that any of ``spans`` covers, as spans that neither meet nor overlap, in their order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """What of ``spans`` none of ``holes`` covers; both as :func:`union` returns them, and so the result."""
    left: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        hole = first
        while hole < len(holes) and holes[hole][0] < end:
            if start < holes[hole][0]:
                left.append((start, holes[hole][0]))
            start = max(start, holes[hole][1])
            hole += 1
        if start < end:
            left.append((start, end))
    return left


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


def trace_windows(trace: Mapping[str, Any]) -> dict[int, Span]:
    """The steps of a chrome trace of ``torch.profiler``, by the number in ``ProfilerStep#N``; microseconds."""
    return {
        int(found[1]): (event["ts"], event["ts"] + event["dur"])
        for event in _complete(trace)
        if event.get("cat") == "user_annotation" and (found := _STEP.fullmatch(event["name"]))
    }


def trace_intervals(trace: Mapping[str, Any], device_type: str) -> list[Interval]:
    """What a chrome trace of ``torch.profiler`` says of collectives and computation; microseconds.

    On CUDA the kernels: those of NCCL are collectives, from their start on this GPU, so that what they wait for other
    ranks counts; all others compute, and copies do neither. On the CPU gloo's own ranges are collectives (from when its
    thread takes them up), and the operators of aten on other threads compute, but for what waits inside of them.
    Names, categories and arguments are those that torch 2.11 to 2.13 write.

    Args:
        trace: as JSON is read.
        device_type: of the rank.
    """
    if device_type == "cuda":
        return [
            _interval(
                event,
                "collective" if event["name"].startswith("nccl") else "compute",
                event["args"].get("stream", event["tid"]),
            )
            for event in _complete(trace)
            if event.get("cat") == "kernel"
        ]
    events = list(_complete(trace))
    collectives = [event for event in events if event["name"].startswith("gloo:")]
    # gloo's threads copy with aten what they send and receive; that is the collective, not the model.
    theirs = {event["tid"] for event in collectives}
    found = [_interval(event, "collective", event["tid"]) for event in collectives]
    for event in events:
        if event.get("cat") == "cpu_op" and event["tid"] not in theirs:
            if event["name"].startswith("aten::"):
                found.append(_interval(event, "compute", event["tid"]))
            elif event["name"].startswith(_COMMUNICATION):
                found.append(_interval(event, "waiting", event["tid"]))
    return found


def _complete(trace: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """The events that have a duration."""
    return (event for event in trace["traceEvents"] if event.get("ph") == "X")


def _interval(event: Mapping[str, Any], kind: Literal["collective", "compute", "waiting"], stream: int) -> Interval:
    return Interval(event["ts"], event["ts"] + event["dur"], kind, stream, event["name"])


def by_name(intervals: Iterable[Interval], windows: Iterable[Span]) -> dict[str, dict[str, float]]:
    """``calls`` and ``seconds`` of each collective that began in ``windows``, of intervals in microseconds.

    Those of one name may run at the same time: the seconds are the sum over all, and may exceed the windows'.
    """
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    spans = list(windows)
    for start, end, kind, _, name in intervals:
        if kind == "collective" and any(first <= start < last for first, last in spans):
            short = name.partition("(")[0]  # of a kernel: without its C++ arguments
            calls[short] += 1
            seconds[short] += (end - start) / 1e6
    return {name: {"calls": calls[name], "seconds": seconds[name]} for name in sorted(calls)}
