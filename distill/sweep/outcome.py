"""What became of a point: how its torchrun job ended, and what the steps took, from the files that it left."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from distill.json_lines import finite_number, read_objects
from distill.report.charts import read_metrics
from distill.run_folder import STARTS

DONE, OUT_OF_MEMORY, FAILED, REFUSED = "done", "out_of_memory", "failed", "refused"
PLANNED, INTERRUPTED, RUNNING = "planned", "interrupted", "running"
_TAIL = 2**20
"""Bytes of a job's output that are looked through."""
_LONGEST = 300
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure 2 'out of memory'"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|\bMemoryError\b|_ArrayMemoryError"
    r"|std::bad_alloc|Cannot allocate memory"
)
_ERROR = re.compile(r"^(\[rank\d+\]: ?)?(error: |[\w.]*(Error|Exception|Interrupt)\b(: |$))")
_NOT_OURS = re.compile(r"ChildFailedError|SignalException|ProcessRaisedException")
_PREFIX = re.compile(r"^(\[(rank|default)\d+\]: ?)+")
_ROOT = re.compile(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", re.S)


def classify(exit_code: int, output: str) -> tuple[str, str | None]:
    """``status`` and ``reason`` of a job that has ended, from its exit code and the end of what it printed.

    Args:
        exit_code: of torchrun, negative for a signal.
        output: of all its processes.
    """
    if exit_code == 0:
        return DONE, None
    lines = [_PREFIX.sub("", line.rstrip()) for line in output.splitlines()]
    no_memory = next((line for line in lines if _NO_MEMORY.search(line)), None)
    if no_memory is not None:
        return OUT_OF_MEMORY, _shortened(no_memory)
    root = _ROOT.search(output)
    if exit_code == -9 or (root is not None and int(root[1]) == -9):
        who = "torchrun" if exit_code == -9 else "a worker"
        return OUT_OF_MEMORY, (
            f"{who} was killed by SIGKILL: by the kernel, for want of memory on the host, if nobody else did"
        )
    errors = [line for line in lines if _ERROR.match(line) and not _NOT_OURS.search(line)]
    if errors and errors[0].startswith("error: "):
        return (REFUSED if root is None or int(root[1]) == 2 else FAILED), _shortened(errors[0].removeprefix("error: "))
    if errors:
        return FAILED, _shortened(errors[-1])
    if root is not None:
        code = int(root[1])
        return FAILED, f"a worker ended by signal {-code}" if code < 0 else f"a worker ended with exit code {code}"
    last = next((line for line in reversed(lines) if line.strip()), "")
    return FAILED, _shortened(f"exit code {exit_code}" + (f": {last}" if last else ""))


def read_tail(file: Path) -> str:
    """The end of a job's output, without the progress bars that a later one has overwritten."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))


def measurements(run_dir: Path, *, warm_up: int, measured: int) -> dict[str, Any]:
    """Of the ``measured`` steps behind the first ``warm_up``: tokens and operations over the sum of their seconds.

    Roles' steps count as often as they come. ``allocated_gib`` is the peak over the whole run, of the rank with the
    largest: what torch allocated on CUDA; on the CPU what was resident at most, less what was before networks and data.

    Returns:
        ``measured_steps``, ``seconds_per_step``, ``tokens_per_second``, ``mfu`` and ``allocated_gib``; ``None`` for
        what the files do not say.
    """
    records = read_metrics(run_dir / "metrics.jsonl").records
    chosen = [record for record in records if warm_up < record["step"] <= warm_up + measured]
    seconds = [finite_number(record.get("perf/seconds_per_step")) for record in chosen]
    total = sum(seconds)
    found: dict[str, Any] = {
        "measured_steps": len(chosen),
        "seconds_per_step": total / len(chosen) if chosen and math.isfinite(total) else None,
    }
    for name, key in (("tokens_per_second", "perf/tokens_per_second"), ("mfu", "perf/mfu")):
        rates = [finite_number(record.get(key)) for record in chosen]
        weighted = sum(rate * each for rate, each in zip(rates, seconds, strict=True))
        found[name] = weighted / total if total > 0 and math.isfinite(weighted) else None
    peaks = [finite_number(record.get("memory/peak_gib")) for record in records]
    peak = max((each for each in peaks if math.isfinite(each)), default=None)
    starts = read_objects(run_dir / STARTS).records
    before = finite_number(starts[-1].get("resident_gib_before")) if starts else math.nan
    if peak is not None and math.isfinite(before):  # which a run on CUDA has not
        peak -= before
    return found | {"allocated_gib": peak}


def _shortened(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
