"""Processes of one point: start the planner and the torchrun job, classify how they end, read the measurements."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distill.config.errors import CONFIGS
from distill.planning.command import FILE as PLAN_FILE
from distill.run.folder import STARTS
from distill.sweep.points import Point
from fsdp_cp.errors import UserError
from fsdp_cp.files.json_lines import finite_number, read_objects
from fsdp_cp.launch import outside_of_torchrun
from fsdp_cp.runtime.signals import end_with_parent

TRAIN = CONFIGS.parent / "train.py"
OUTPUT, PLAN_OUTPUT = "output.txt", "plan.txt"
"""Files with the output of the job's and the planner's processes; the run itself writes ``log.txt``."""
DONE, OUT_OF_MEMORY, FAILED, REFUSED = "done", "out_of_memory", "failed", "refused"
_TAIL = 2**20
"""Number of bytes at the end of a job's output that :func:`classify` reads."""
_LONGEST = 300
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUDNN_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure 2 'out of memory'"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|\bMemoryError\b|_ArrayMemoryError"
    r"|std::bad_alloc|Cannot allocate memory"
)
_OF_RANK = re.compile(r"^(\[(rank|default)\d+\]: ?)+")
_ERROR = re.compile(r"error: |(?!.*(ChildFailed|Signal|ProcessRaised))[\w.]*(Error|Exception|Interrupt)\b(: |$)")
_ROOT_CAUSE = re.compile(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", re.S)


def plan_point(point: Point, run_dir: Path, *, world: int) -> dict[str, Any]:
    """Plan one point in a separate process; return the ``predicted_*`` part of its row, or ``plan_reason``."""
    command = [sys.executable, str(TRAIN), *point.words, f"run_dir={run_dir}", "plan=true", f"world={world}"]
    code, _ = _run(command, run_dir / PLAN_OUTPUT)
    if code != 0:
        return {"plan_reason": classify(code, _tail(run_dir / PLAN_OUTPUT))[1]}
    plan = json.loads((run_dir / PLAN_FILE).read_text())
    seconds = plan["seconds_per_step"]
    return {
        "predicted_allocated_gib": plan["allocated_gib"],
        "predicted_tokens_per_second": seconds and plan["tokens"] * point.batch_size / seconds,
        "predicted_mfu": plan["mfu"],
        "plan_reason": None,
    }


def train_point(point: Point, run_dir: Path, *, launcher: Sequence[str]) -> dict[str, Any]:
    """Run one point's job by ``launcher``, torchrun with its options and any prefix; return its part of the row."""
    code, seconds = _run([*launcher, str(TRAIN), *point.words, f"run_dir={run_dir}"], run_dir / OUTPUT)
    status, reason = classify(code, _tail(run_dir / OUTPUT))
    row = {"status": status, "reason": reason, "seconds": round(seconds, 1)}
    return row | (measurements(run_dir, point.warm_up, point.measured) if status == DONE else {})


def classify(exit_code: int, output: str) -> tuple[str, str | None]:
    """Return ``status`` and ``reason`` of a job from its exit code (negative: a signal) and the end of its output."""
    if exit_code == 0:
        return DONE, None
    lines = [line for line in (_OF_RANK.sub("", line).strip() for line in output.splitlines()) if line]
    if root := _ROOT_CAUSE.search(output):
        exit_code = int(root[1])
    status, reason = _cause(exit_code, lines)
    reason = " ".join(reason.split())
    return status, reason if len(reason) <= _LONGEST else f"{reason[: _LONGEST - 3]}..."


def _cause(exit_code: int, lines: Sequence[str]) -> tuple[str, str]:
    """Return the status of a job that failed, and the line that says why."""
    if no_memory := [line for line in lines if _NO_MEMORY.search(line)]:
        return OUT_OF_MEMORY, no_memory[0]
    if exit_code == -signal.SIGKILL:
        return OUT_OF_MEMORY, "a process was killed by SIGKILL, probably by the kernel for lack of host memory"
    errors = [line for line in lines if _ERROR.match(line)]
    if errors and errors[0].startswith("error: "):
        return REFUSED if exit_code == 2 else FAILED, errors[0].removeprefix("error: ")
    last = lines[-1] if lines else ""
    return FAILED, errors[-1] if errors else f"exit code {exit_code}: {last}"


def measurements(run_dir: Path, warm_up: int, measured: int) -> dict[str, Any]:
    """Return the measured columns of a finished run, ``None`` where missing: rates over ``measured`` steps after
    ``warm_up``, weighted by their seconds. ``allocated_gib`` is the largest peak of any rank in the whole run:
    allocated memory on CUDA, growth of resident memory on a CPU."""
    records = read_objects(run_dir / "metrics.jsonl")
    chosen = [record for record in records if warm_up < record["step"] <= warm_up + measured]
    seconds = [finite_number(record.get("perf/seconds_per_step")) for record in chosen]
    total = sum(seconds)

    def mean(key: str) -> float | None:
        value = sum(finite_number(record.get(key)) * s for record, s in zip(chosen, seconds, strict=True))
        return value / total if total > 0 and math.isfinite(value) else None

    peaks = [finite_number(record.get("memory/peak_gib")) for record in records]
    peak = max(filter(math.isfinite, peaks), default=None)
    starts = read_objects(run_dir / STARTS)
    resident = finite_number(starts[-1].get("resident_gib_before")) if starts else math.nan
    if peak is not None and math.isfinite(resident):  # on the CPU
        peak -= resident
    return {
        "measured_steps": len(chosen),
        "seconds_per_step": total / len(chosen) if chosen and math.isfinite(total) else None,
        "tokens_per_second": mean("perf/tokens_per_second"),
        "mfu": mean("perf/mfu"),
        "allocated_gib": peak,
    }


def _tail(file: Path) -> str:
    return file.read_bytes()[-_TAIL:].decode(errors="replace").replace("\r", "\n")


def _run(command: Sequence[str], output: Path) -> tuple[int, float]:
    """Run a process; return its exit code and seconds. An exception here (a signal) ends the process first."""
    started = time.monotonic()
    try:
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=outside_of_torchrun() | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C reaches only the sweep, which ends its job in order
                preexec_fn=end_with_parent,  # a killed sweep must not leave torchrun in a directory that the next needs
            )
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started with its output in {output} ({error.strerror})") from error
    try:
        return process.wait(), time.monotonic() - started
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen) -> None:
    """End a job: kill its workers, and let torchrun clean up. After SIGTERM they would first save a checkpoint that
    nothing resumes, and each has its own session, which no signal to the process group reaches."""
    workers = _descendants(process.pid)
    process.terminate()
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += map(int, file.read_text().split())
    return [*children, *(below for child in children for below in _descendants(child))]
