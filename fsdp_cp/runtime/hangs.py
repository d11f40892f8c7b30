"""Reports of a rank that waited in vain for the others: rank, phase and last collective."""

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
"""Seconds in which a failed process must have ended by itself; torchrun gives the processes that it ends as many."""

_TIMED_OUT = re.compile(
    r"Timed out waiting|Application timeout caused pair closure|wait timeout after|operation timeout"
)
_LOST = re.compile(r"Connection (closed|reset) by (remote )?peer|Broken pipe|Connection refused")
"""Words of gloo and of torch's store (torch 2.11 to 2.13); all of them come as a RuntimeError."""


def report_hang(error: BaseException, *, step: str = "", advice: str = "") -> None:
    """Log one line if ``error`` is a collective that timed out or lost another rank; otherwise do nothing.

    The line is a note of the error too, since torchrun's summary ends with the error. An error is reported once.

    Args:
        error: exception that ended this rank's work.
        step: place in its work, e.g. ``"in step 7 of 100"``.
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
    """Log one line when no phase was entered or left for nine tenths of the timeout; once for each such place.

    For NCCL, whose watchdog ends the process from outside of Python, so that no exception can be reported. A thread
    logs, since the main one waits for the GPU. Tested with gloo only.
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
    """Return the oldest unfinished collective, else the newest, from torch's flight recorders; ``None`` without one.

    E.g. ``all_gather 57 of group mesh_fsdp``: the 57th of its group, counted alike on all its ranks. A collective that
    has just failed counts as done. The recorders are on unless ``TORCH_FR_BUFFER_SIZE=0``. gloo's leaves out ``send``
    and ``recv`` (ring attention). ``_dump_fr_trace_json`` (gloo) and ``_dump_nccl_trace_json`` are private (torch 2.11
    to 2.13).
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
    """End this process after :data:`GRACE` with exit code 1, and its stack, if it has not ended by then.

    Without this an interpreter that ends waits for collectives that are still on their way, each until its timeout:
    gloo's threads are joined. faulthandler's thread needs no interpreter.
    """
    with suppress(RuntimeError, OSError):  # stderr may be closed: the first error is what the user must see
        faulthandler.dump_traceback_later(GRACE, exit=True)
