"""Run one part in a new process group, and end the whole group at the time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import RAISED, ROOT, command_of, ended, read_rows
from benchmarks.gpu.parts import Part
from fsdp_cp.launch import outside_of_torchrun
from fsdp_cp.runtime.signals import end_with_parent

FINISHED, FAILED, LATE = "finished", "failed", "over its time"
PRINTED = 40
"""Number of lines of a part's output to keep."""


@dataclass(kw_only=True)
class Outcome:
    """Result of a part."""

    status: str
    """``finished``; ``failed`` (a bad exit code, or no rows); or ``over its time`` (ended at the time limit)."""
    seconds: float
    error: str | None = None
    """Reason if the part is not finished."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    """Last lines of its output if the part is not finished."""


def run_part(part: Part, *, device_type: str, tiny: bool, seconds: float) -> Outcome:
    """Measure ``part`` in another process for at most ``seconds``. All its processes and files are removed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_") as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        command = command_of(part.target, part.name, rows, device_type, tiny, seconds, *part.words)
        code = _run(command, log, seconds, outside_of_torchrun() | _environment(device_type))
        measured = read_rows(rows)
        printed = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-PRINTED:]
    taken = time.monotonic() - began
    if code is None:
        late = f"ended after {seconds:.0f} s"
        return Outcome(status=LATE, seconds=taken, error=_with_last_word(late, printed), rows=measured, printed=printed)
    if code != 0:
        raised = code == RAISED and bool(measured) and "error" in measured[-1]
        reason = measured[-1]["error"] if raised else _with_last_word(ended(code), printed)
        return Outcome(status=FAILED, seconds=taken, error=reason, rows=measured, printed=printed)
    if all("error" in row for row in measured):
        return Outcome(status=FAILED, seconds=taken, error="nothing could be measured", rows=measured, printed=printed)
    return Outcome(status=FINISHED, seconds=taken, rows=measured)


def _environment(device_type: str) -> dict[str, str]:
    """Return the part's environment variables. On the CPU it gets one thread, and never sees a GPU."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    chosen = {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    return chosen | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if device_type == "cpu" else {})


def _run(command: list[str], log: Path, seconds: float, environment: dict[str, str]) -> int | None:
    """Run ``command`` and return its exit code; ``None`` at the time limit."""
    with log.open("wb") as stream:
        # If this process is killed, the part ends too; otherwise it would run until its time limit.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip
    deadline = time.monotonic() + seconds
    try:
        # Do not reap the process here, as process.wait would: a zombie keeps its id, so that the group below is ours.
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
    finally:  # also after Ctrl-C, which does not reach another session
        # Kill its remaining processes too: a child or a compiler would keep GPU memory.
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return code


def _with_last_word(reason: str, printed: list[str]) -> str:
    return f"{reason}; its last line was: {printed[-1].strip()[:200]}" if printed else reason
