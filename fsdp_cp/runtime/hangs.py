"""Timeouts of collectives: one timeout for all process groups of this process, and a report when a rank timed out.

In torch each group has a separate timeout, and groups of a ``DeviceMesh`` get the backend's default (30 minutes for
gloo, 10 for NCCL), whatever the timeout of the group of all ranks.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from fsdp_cp.measure.phases import seconds_in_place, where
from fsdp_cp.runtime.timeouts import world_timeout

log = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds that a failed process has to exit by itself; torchrun grants the same time to processes that it ends."""

_TIMED_OUT = re.compile(
    r"Timed out waiting|Application timeout caused pair closure|wait timeout after|operation timeout"
)
_LOST = re.compile(r"Connection (closed|reset) by (remote )?peer|Broken pipe|Connection refused")
"""Error texts of gloo and of torch's store (torch 2.11 to 2.13), all raised as RuntimeError."""


# ---------------------------------------------------------------- timeouts of groups


def process_groups() -> list[dist.ProcessGroup]:
    """Return every process group of this rank. ``_world.pg_map`` is private (torch 2.11 to 2.13)."""
    return list(dist.distributed_c10d._world.pg_map)


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group``; all four names are private (torch 2.11 to 2.13).

    ``torch.distributed.distributed_c10d._set_pg_timeout`` does the same, but leaves out the backends that
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps.
    """
    backends = [group._get_backend(torch.device(kind)) for kind in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def set_timeout(timeout: timedelta, groups: list[dist.ProcessGroup] | None = None) -> None:
    """Set the timeout of ``groups`` for collectives that start after this call.

    The default is all groups except those of :func:`keep_timeout`. ``Backend._set_default_timeout`` is private (torch
    2.11 to 2.13).
    """
    for group in [group for group in process_groups() if group not in _state.kept] if groups is None else groups:
        for backend in _backends(group):
            with suppress(RuntimeError):  # a backend without timeouts, such as that of tests
                backend._set_default_timeout(timeout)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return a group's timeout; ``None`` for a backend without one. ``options._timeout`` is private."""
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(group)]
    return next((timeout for timeout in timeouts if timeout is not None), None)


def _world_timeout() -> timedelta | None:
    world = dist.group.WORLD
    assert world is not None, "no process group"
    return timeout_of(world)


@contextmanager
def inherited_timeout() -> Iterator[None]:
    """Set the timeout of groups that are made within this context to that of the group of all ranks."""
    before = process_groups()
    yield
    timeout = _world_timeout()
    if timeout is not None:
        set_timeout(timeout, [group for group in process_groups() if group not in before])


@dataclass
class _Shortened:
    """The two timeouts that :func:`long_timeout` switches; ``short`` is ``None`` while the long timeout is set."""

    long: timedelta | None = None
    short: timedelta | None = None
    kept: list[dist.ProcessGroup] = field(default_factory=list)


_state = _Shortened()


def keep_timeout(group: dist.ProcessGroup) -> None:
    """Exempt ``group`` from :func:`shorten`: its ranks do not run in step with training."""
    _state.kept.append(group)


def shorten(timeout: timedelta) -> None:
    """Set ``timeout`` for every group, except inside :func:`long_timeout`. A second call changes nothing.

    All ranks call it at the same place, after a collective that all of them have finished.
    """
    if _state.short == timeout:
        return
    if _state.long is None:
        _state.long = _world_timeout()
    _state.short = timeout
    set_timeout(timeout)


@contextmanager
def long_timeout() -> Iterator[None]:
    """Restore the timeout from before :func:`shorten`, for work of one rank that the others wait for.

    All ranks enter the context. It ends with a barrier: without it, a rank that leaves early would wait with the short
    timeout for a rank that still works. After an exception the long timeout stays.
    """
    short, long = _state.short, _state.long
    if short is None or long is None:  # not shortened, or nested
        yield
        return
    _state.short = None
    set_timeout(long)
    yield
    if dist.get_world_size() > 1:
        dist.barrier()
    set_timeout(short)
    _state.short = short


def forget() -> None:
    """Drop all state, once the process groups whose timeouts :func:`shorten` changed are gone."""
    _state.long = _state.short = None
    _state.kept.clear()


# ---------------------------------------------------------------- reports of hangs


def report_hang(error: BaseException, *, step: str = "", advice: str = "") -> None:
    """Log one line if ``error`` shows that a collective timed out or lost another rank; otherwise do nothing.

    It also adds the line to the error as a note, which torchrun's summary shows. Each error is reported once.

    Args:
        error: exception that ended this rank's work.
        step: current step, for example ``"in step 7 of 100"``.
        advice: how to continue.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or hasattr(error, "reported_hang"):
        return
    if _TIMED_OUT.search(text):
        after = re.search(r"(\d+) ?ms", text)
        happened = f"waited {int(after.group(1)) / 1000:g} s in vain for another rank" if after else "timed out"
    elif "gloo" in text and _LOST.search(text):
        happened = "lost the connection to another rank, which exited or timed out (see that rank's log)"
    else:
        return
    vars(error)["reported_hang"] = True
    place = ", ".join(part for part in (step, where(error)) if part)
    rank = dist.get_rank() if dist.is_initialized() else 0
    line = f"rank {rank} {happened}: {place}; last collective: {last_collective() or 'unknown'}"
    line += f"; {advice}" if advice else ""
    log.error(line)
    error.add_note(line)


@contextmanager
def watch_for_hangs() -> Iterator[None]:
    """Log one line when no phase has begun or ended for nine tenths of the timeout, once per such wait.

    This is for NCCL, whose watchdog ends the process from outside of Python without an exception to report. A thread
    logs, since the main thread waits for the GPU. Tested only with gloo.
    """
    ended = threading.Event()

    def watch() -> None:
        reported = False
        while True:
            timeout = world_timeout()
            total = timeout.total_seconds() if timeout is not None else math.inf
            if ended.wait(min(10.0, 0.045 * total)):
                return
            seconds = seconds_in_place()
            if seconds < 0.9 * total:
                reported = False
            elif not reported:
                reported = True
                log.error(
                    "rank %d has been %s for %.0f s; last collective: %s; if it waits for another rank, the timeout of"
                    " %.0f s ends it",
                    dist.get_rank(),
                    where(),
                    seconds,
                    last_collective() or "unknown",
                    total,
                )

    thread = threading.Thread(target=watch, name="watch for hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def last_collective() -> str | None:
    """Return the oldest unfinished collective in torch's flight recorders, or the newest; ``None`` if they are empty.

    ``all_gather 57 of group mesh_fsdp`` is the 57th collective of its group; all ranks of the group count alike. A
    collective that has just failed counts as finished. The recorders are on unless ``TORCH_FR_BUFFER_SIZE=0``. gloo's
    recorder omits ``send`` and ``recv`` (ring attention). ``_dump_fr_trace_json`` (gloo) and ``_dump_nccl_trace_json``
    are private (torch 2.11 to 2.13).
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    if not entries:
        return None
    entries.sort(key=lambda entry: entry["time_created_ns"])
    unfinished = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    entry = (unfinished or entries[-1:])[0]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name, description = entry["process_group"]
    operator = entry["profiling_name"].rpartition(":")[2]
    return f"{operator} {number} of group {description if description not in ('', 'undefined') else name}"


def end_soon() -> None:
    """Print the stack and end this process with exit code 1 if it still runs after :data:`GRACE` seconds.

    At exit, the interpreter joins gloo's threads and so waits for every unfinished collective until its timeout.
    faulthandler's thread works without the interpreter.
    """
    with suppress(RuntimeError, OSError):  # stderr may be closed: the first error is what the user must see
        faulthandler.dump_traceback_later(GRACE, exit=True)
