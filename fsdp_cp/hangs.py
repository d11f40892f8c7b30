"""What is said when a rank has waited for the others in vain: which rank, in which phase, in which collective."""

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
from fsdp_cp.timeouts import world_timeout

log = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds in which a process that has failed must have ended by itself; torchrun gives those that it ends as many."""

_TIMED_OUT = re.compile(
    r"Timed out waiting|Application timeout caused pair closure|wait timeout after|operation timeout"
)
_LOST = re.compile(r"Connection (closed|reset) by (remote )?peer|Broken pipe|Connection refused")
"""gloo's own words and those of torch's store (torch 2.11 to 2.13); all of them come as a RuntimeError."""


def report(error: BaseException, *, step: str = "", advice: str = "") -> None:
    """Log one line if ``error`` is that of a collective that timed out, or whose other rank is gone; else nothing.

    The line is a note of the error too, since torchrun's summary ends with the error. What was reported is not reported
    again.

    Args:
        error: what ended this rank's work.
        step: where in its work that was, e.g. ``"in step 7 of 100"``.
        advice: how to go on.
    """
    happened = _what_happened(error)
    if happened is None or hasattr(error, "reported_hang"):
        return
    vars(error)["reported_hang"] = True
    place = ", ".join(part for part in (step, where(error)) if part)
    rank = dist.get_rank() if dist.is_initialized() else 0
    line = f"rank {rank} {happened}: {place}; last collective: {last_collective() or 'none is known'}"
    line += f"; {advice}" if advice else ""
    log.error(line)
    error.add_note(line)


@contextmanager
def watched() -> Iterator[None]:
    """Log one line when for nine tenths of the timeout no phase was entered or left; once for each such place.

    For NCCL, whose watchdog ends the process from outside of Python: no exception could be reported then. A thread says
    it, since the main one waits for the GPU; it has been tried with gloo alone.
    """
    ended = threading.Event()

    def watch() -> None:
        said = False
        while True:
            timeout = world_timeout()
            limit = 0.9 * (timeout.total_seconds() if timeout is not None else math.inf)
            if ended.wait(min(10.0, limit / 20)):
                return
            seconds = seconds_in_place()
            if seconds < limit:
                said = False
            elif not said:
                said = True
                assert timeout is not None, "without one the limit is infinite"
                log.error(
                    "rank %d has been %s for %.0f s; last collective: %s; if it waits for another rank, the timeout of"
                    " %.0f s ends it",
                    dist.get_rank(),
                    where(),
                    seconds,
                    last_collective() or "none is known",
                    timeout.total_seconds(),
                )

    thread = threading.Thread(target=watch, name="watch for hangs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _what_happened(error: BaseException) -> str | None:
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    if _TIMED_OUT.search(text):
        after = re.search(r"(\d+) ?ms", text)
        return f"waited {int(after.group(1)) / 1000:g} s in vain for another rank" if after else "waited in vain"
    if "gloo" in text and _LOST.search(text):
        return "lost another rank, which has ended or waited in vain itself (see what it says)"
    return None


def last_collective() -> str | None:
    """The oldest collective that is not done, or else the newest, from torch's flight recorders; ``None`` without one.

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
    open_ones = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    entry = (open_ones or entries[-1:])[0]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name, description = entry["process_group"]
    operator = entry["profiling_name"].rpartition(":")[2]
    return f"{operator} {number} of group {description if description not in ('', 'undefined') else name}"


def end_soon() -> None:
    """End this process after :data:`GRACE` with exit code 1, and its stack, if it has not ended by then.

    Without this an interpreter that ends waits for collectives that are still on their way, each until its timeout:
    gloo's threads are joined. faulthandler's thread needs no interpreter.
    """
    with suppress(RuntimeError, OSError):  # stderr is no file: what failed first is what the user must see
        faulthandler.dump_traceback_later(GRACE, exit=True)
