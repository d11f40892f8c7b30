"""The process that measures one part of ``benchmarks.gpu``, and what a part is given.

A part is a function of one :class:`Context` (and of words, where another part calls it). It writes a row as soon as it
has one, so that a crash or a hang behind it loses nothing. torch is imported by parts alone: this module stays quick to
start, and a machine that lacks a package gives a row that says so.
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
"""The exit code of a process whose part raised, and which has said so in a row."""
GRACE = 30
"""Seconds after its limit at which a process ends itself, should nobody have ended it."""


class DeviceLost(RuntimeError):
    """The GPU answers this process no more, after an illegal access, say: whatever it measured next would fail too."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a part is told, and where its rows go."""

    device_type: str
    """``cuda`` or ``cpu``."""
    tiny: bool
    """Test sizes?"""
    rows: Path
    """A file of one JSON object a line."""
    deadline: float
    """The time (``time.time``) at which the part is ended."""

    @property
    def device(self) -> Any:
        """The ``torch.device``: the first GPU, or the CPU."""
        import torch

        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    def left(self) -> float:
        """Seconds until the part is ended."""
        return self.deadline - time.time()

    def row(self, what: str, **cells: Any) -> None:
        """Write a row at once; cells are numbers, texts or ``None``, by the column's title with its unit."""
        line = json.dumps({"what": what, **{name: _plain(value) for name, value in cells.items()}})
        with self.rows.open("a") as file:
            file.write(line + "\n")

    def written(self) -> list[dict[str, Any]]:
        """The rows of the part so far, those of its other processes among them."""
        return read_rows(self.rows)

    def attempt(self, what: str, measure: Callable[[], Mapping[str, Any]], *, needs: float = 0.0, **cells: Any) -> bool:
        """Write what ``measure`` finds as a row, or what it raises; is it there?

        Args:
            what: the row's name.
            measure: its cells.
            needs: seconds that it takes at least; with fewer left it is not begun, and the row says so.
            cells: what is known before.

        Raises:
            DeviceLost: what failed has taken the GPU with it.
        """
        if self.left() < needs:
            self.row(what, **cells, error=f"left out: {max(0.0, self.left()):.0f} s were left of the part's time")
            return False
        try:
            found = measure()
        except Exception as error:
            failure = said(error)
        else:
            self.row(what, **cells, **found)
            return True
        self.row(what, **cells, error=failure)
        # Only here: inside the clause the traceback holds the frames, and they hold the tensors of what failed.
        self.let_go()
        return False

    def let_go(self) -> None:
        """Give back memory that nobody refers to any more.

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
            raise DeviceLost(said(error)) from error

    def isolated(self, what: str, target: str, *words: str, seconds: float = math.inf, **environment: str) -> bool:
        """Call ``target`` in a process of its own, with the ``words``, for so long at most; did it end well?

        Its rows are this part's. One that fails or hangs is a row called ``what``, and its GPU memory is free again.
        """
        limit = min(seconds, self.left() - 5)
        if limit <= 0:
            self.row(what, error="left out: the part's time was over")
            return False
        command = command_of(target, what, self.rows, self.device_type, self.tiny, limit, *words)
        try:
            # In this process's group, which is ended as a whole where the part is.
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
    """Call those of each in turn, the two beside each other: one has the GPU, the other plans on the CPU.

    Raises:
        Exception: what one of them raised, when the other lane is through.
    """

    def through(calls: Sequence[Callable[[], object]]) -> None:
        for call in calls:
            call()

    with ThreadPoolExecutor(2) as pool:
        for lane in [pool.submit(through, calls) for calls in (first, second)]:
            lane.result()


def _plain(value: Any) -> Any:
    """As JSON has it: a number that is not finite has no place there, and would make the file unreadable elsewhere."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def said(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")[:300]


def ended(code: int) -> str:
    """How a process came to an exit code that is no success."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def read_rows(file: Path) -> list[dict[str, Any]]:
    """What is in a file of rows; a last line that was torn by the end of its process is left out."""
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
    """The command line that calls ``target`` (``module:function``); a row called ``what`` says what it raised."""
    settings = [what, str(rows), device_type, "tiny" if tiny else "whole", f"{seconds:.3f}"]
    return [sys.executable, "-u", "-m", "benchmarks.gpu.child", target, *settings, *words]


def main(arguments: list[str]) -> int:
    """Exit code 0; 1 where the part raised, which is its last row."""
    target, what, rows, device_type, size, seconds, *words = arguments
    # If whoever started this process is gone, nobody else ends it; the default action of SIGALRM does, in a hang too.
    signal.alarm(math.ceil(float(seconds)) + GRACE)
    if os.getpgrp() == os.getpid():  # the part's own process: when it is told to end, its other ones end too
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    context = Context(
        device_type=device_type, tiny=size == "tiny", rows=Path(rows), deadline=time.time() + float(seconds)
    )
    module, _, function = target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(context, *words)
    except Exception as error:
        traceback.print_exc()
        context.row(what, error=said(error))
        return RAISED
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # gloo's threads abort a process that is being finalised; a part that has no process group has no such module.
    launch = sys.modules.get("fsdp_cp.launch")
    sys.exit(code) if launch is None else launch.end_process(code)
