"""Report of a rank that waits too long for the others: steps done, phase and last collective."""

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_cp.measure.phases import seconds_in_place, where
from fsdp_cp.runtime.timeouts import world_timeout

log = logging.getLogger(__name__)


@contextmanager
def watch_for_hangs(progress: Callable[[], str] = str) -> Iterator[None]:
    """Log one line when no phase was entered or left for nine tenths of the timeout; once for each such place.

    The timeout then ends the process: NCCL's watchdog from outside of Python, gloo by an exception that does not name
    the phase. A thread logs, since the main one waits. ``progress`` returns what is done so far, in words.
    """
    ended = threading.Event()

    def watch() -> None:
        reported = False
        while True:
            timeout = world_timeout()
            total = timeout.total_seconds() if timeout is not None else math.inf
            # Wake often, also during a long timeout: a short one may follow it.
            if ended.wait(min(0.4, 0.045 * total)):
                return
            seconds = seconds_in_place()
            if seconds < 0.9 * total:
                reported = False
            elif not reported:
                reported = True
                place, last = ", ".join(filter(None, (progress(), where()))), last_collective() or "unknown"
                spent = f"rank {dist.get_rank()} has spent {seconds:.0f} s {place}; last collective: {last}"
                log.error("%s; if it waits for another rank, the timeout of %.0f s ends it", spent, total)

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
    has just failed counts as done. The recorders (private, torch 2.11 to 2.13) are on unless
    ``TORCH_FR_BUFFER_SIZE=0``. gloo's leaves out ``send`` and ``recv`` (ring attention).
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
