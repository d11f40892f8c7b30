"""Process that measures one part of ``benchmarks.gpu``, and the context of a part.

A part is a function of one :class:`Context` (and of words, if another part calls it). It writes each row at once, so
that a later crash or hang loses nothing. Only parts import torch: this module starts quickly, and a missing package
becomes a row with the error.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RAISED = 1
"""Exit code of a process whose part raised an error, after writing the error to a row."""
TINY_PATIENCE = 5
"""Factor on all time limits at test size: CPUs that also run other tests are slower than a GPU."""
GRACE = 30
"""Seconds after its limit at which a process ends itself, if no other process has ended it."""


class DeviceLost(RuntimeError):
    """Error for a GPU that no longer works in this process, e.g. after an illegal access."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Settings of a part, and its output of rows."""

    device_type: str
    """``cuda`` or ``cpu``."""
    tiny: bool
    """Whether to use test sizes."""
    rows: Path
    """File of rows, one JSON object per line."""
    deadline: float
    """Time (``time.time``) at which the part is ended."""

    @property
    def device(self) -> Any:
        """First GPU, or the CPU, as a ``torch.device``."""
        import torch

        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    def left(self) -> float:
        """Return the seconds until the part is ended."""
        return self.deadline - time.time()

    def row(self, what: str, **cells: Any) -> None:
        """Write a row at once. Cells are numbers, texts or ``None``, by column title, which includes the unit."""
        line = json.dumps({"what": what, **{name: _plain(value) for name, value in cells.items()}})
        with self.rows.open("a") as file:
            file.write(line + "\n")

    def written(self) -> list[dict[str, Any]]:
        """Return the rows of the part so far, including those of its other processes."""
        return read_rows(self.rows)

    def attempt(self, what: str, measure: Callable[[], Mapping[str, Any]], *, needs: float = 0.0, **cells: Any) -> bool:
        """Write the cells of ``measure``, or its error, as a row. Return whether it succeeded.

        Args:
            what: name of the row.
            measure: returns the cells.
            needs: minimum seconds of ``measure``. With less time left, the row says that it was left out.
            cells: cells that are known before.

        Raises:
            DeviceLost: the GPU failed too.
        """
        if self.left() < needs:
            self.row(what, **cells, error=f"left out: {max(0.0, self.left()):.0f} s were left of the part's time")
            return False
        try:
            measured = measure()
        except Exception as error:
            failure = error_line(error)
        else:
            self.row(what, **cells, **measured)
            return True
        self.row(what, **cells, error=failure)
        # Free memory here: within the except clause, the traceback's frames still hold the tensors of the failed call.
        self.let_go()
        return False

    def let_go(self) -> None:
        """Free unreferenced memory.

        Raises:
            DeviceLost: the GPU has failed.
        """
        gc.collect()
        if self.device_type != "cuda" or "torch" not in sys.modules:
            return
        import torch

        if not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            raise DeviceLost(error_line(error)) from error

    def isolated(self, what: str, target: str, *words: str, seconds: float = math.inf, **environment: str) -> bool:
        """Call ``target`` with ``words`` in a new process for at most ``seconds``. Return whether it succeeded.

        Its rows belong to this part. A failure or a hang becomes a row called ``what``. Its GPU memory is then free.
        """
        limit = min(seconds * (TINY_PATIENCE if self.tiny else 1), self.left() - 5)
        if limit <= 0:
            self.row(what, error="left out: the part's time was over")
            return False
        command = command_of(target, what, self.rows, self.device_type, self.tiny, limit, *words)
        try:
            # Keep it in this process's group, which is killed as a whole at the end of the part.
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | environment, stdin=subprocess.DEVNULL, timeout=limit
            )
        except subprocess.TimeoutExpired:
            self.row(what, error=f"over its time: ended after {limit:.0f} s")
            return False
        if done.returncode not in (0, RAISED):
            self.row(what, error=ended(done.returncode))
        return done.returncode == 0


def in_two_lanes(first: Sequence[Callable[[], object]], second: Sequence[Callable[[], object]]) -> None:
    """Call the functions of each lane in order, with both lanes in parallel: one uses the GPU, the other the CPU.

    Raises:
        Exception: an error of a call. Raised after the other lane has ended.
    """

    def through(calls: Sequence[Callable[[], object]]) -> None:
        for call in calls:
            call()

    with ThreadPoolExecutor(2) as pool:
        for lane in [pool.submit(through, calls) for calls in (first, second)]:
            lane.result()


def _plain(value: Any) -> Any:
    """Convert non-finite numbers to strings, since JSON does not have them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def error_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")[:300]


def ended(code: int) -> str:
    """Describe a non-zero exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, without a last line that the end of its process has torn."""
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def command_of(
    target: str, what: str, rows: Path, device_type: str, tiny: bool, seconds: float, *words: str
) -> list[str]:
    """Return the command line that calls ``target`` (``module:function``). Its errors go to a row called ``what``."""
    settings = [what, str(rows), device_type, "tiny" if tiny else "whole", f"{seconds:.3f}"]
    return [sys.executable, "-u", "-m", "benchmarks.gpu.child", target, *settings, *words]


def main(arguments: list[str]) -> int:
    """Run the part. Return exit code 0, or 1 if the part raised an error, which is then its last row."""
    target, what, rows, device_type, size, seconds, *words = arguments
    # If the parent process is gone, the default action of SIGALRM ends this process, even in a hang.
    signal.alarm(math.ceil(float(seconds)) + GRACE)
    if os.getpgrp() == os.getpid():  # the part's main process: on SIGTERM its other processes end too
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    context = Context(
        device_type=device_type, tiny=size == "tiny", rows=Path(rows), deadline=time.time() + float(seconds)
    )
    module, _, function = target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(context, *words)
    except Exception as error:
        traceback.print_exc()
        context.row(what, error=error_line(error))
        return RAISED
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # gloo's threads abort a process during its finalization. A part without a process group has not loaded this module.
    launch = sys.modules.get("fsdp_cp.launch")
    sys.exit(code) if launch is None else launch.end_process(code)
