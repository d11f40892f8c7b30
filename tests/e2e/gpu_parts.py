"""Parts for the tests of ``benchmarks.gpu``, which end in all possible ways. Nothing here imports torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.child import Context


def good(context: Context) -> None:
    context.row("a row", ms=1.25, share=0.5)
    assert context.attempt("another", lambda: {"ms": 2}) and len(context.written()) == 2
    assert not context.attempt("too long", lambda: {}, needs=1e6, tokens=3)


def raising(context: Context) -> None:
    context.row("before", ms=1)
    assert not context.attempt("a kernel that fails", lambda: {"ms": 1 / 0}, tokens=8)
    raise ModuleNotFoundError("No module named 'hydra'")


def crashing(context: Context) -> None:
    context.row("before", ms=3)
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hanging(context: Context) -> None:
    """Hang, with a child process that would outlive this one. Both ignore requests to end."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-c", code])
    context.row("before", process=left.pid, group=os.getpgrp())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def empty(context: Context) -> None:
    context.row("refused", error="no such kernel")


def isolating(context: Context) -> None:
    """Start processes that crash, hang, raise and write."""
    for name, seconds in (("crashing", 60.0), ("hanging", 1.0), ("raising", 60.0), ("good", 60.0)):
        context.isolated(name, f"tests.e2e.gpu_parts:{name}_with_words", name, seconds=seconds)
    context.row("after them", ms=4)


def telling(context: Context) -> None:
    """Hang in a child process. Both processes write their ids into the folder named by ``TELL``."""
    Path(os.environ["TELL"], str(os.getpid())).touch()
    context.isolated("inside", "tests.e2e.gpu_parts:telling_inside")


def telling_inside(context: Context) -> None:
    Path(os.environ["TELL"], str(os.getpid())).touch()
    time.sleep(600)


def crashing_with_words(context: Context, word: str) -> None:
    os.abort()


def hanging_with_words(context: Context, word: str) -> None:
    time.sleep(600)


def raising_with_words(context: Context, word: str) -> None:
    raise ValueError("wrong\nin more lines")


def good_with_words(context: Context, word: str) -> None:
    context.row(word, ms=5)
