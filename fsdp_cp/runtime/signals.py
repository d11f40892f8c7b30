"""SIGTERM, SIGUSR1 and Ctrl-C: end at once, or, within the training loop, after the step and its checkpoint."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOPPED = 75
"""Exit code after a signal that was heeded; ``EX_TEMPFAIL`` of sysexits.h: the same command goes on."""
_SAME = 2.0
"""Seconds within which a signal is the first one again: Ctrl-C reaches a worker from the terminal and from torchrun."""
_PR_SET_PDEATHSIG = 1
try:
    _LIBC: Any = ctypes.CDLL(None)  # before any fork, behind which nothing may be loaded
except OSError:
    _LIBC = None


class Stopped(BaseException):
    """The process was told to end. No ``Exception``: what handles errors must not take it for one."""


class StopSignal:
    """As a context in the main thread: the first signal raises :class:`Stopped`, or is kept where it is deferred.

    A second one, more than two seconds later, ends the process at once, with 128 + its number: also where the main
    thread waits in a collective, and Python's own handlers would be called when that returns.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no handlers
            self._before = {each: signal.signal(each, self._handle) for each in SIGNALS}
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._descriptor = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=_watch, args=(reading,), name="second signal", daemon=True)
            self._watcher.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._descriptor)
        os.close(self._writing)  # by which the watcher ends
        self._watcher.join()
        for each, handler in self._before.items():
            signal.signal(each, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A signal within is kept in ``received``, to be looked at between steps; one that is left is raised behind."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.received is not None:
            raise Stopped(f"stopped by {self.received.name}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if not self._deferred:
            raise Stopped(f"stopped by {self.received.name}")


def _watch(reading: int) -> None:
    """End the process at the second signal; a byte comes for each, from C, when it arrives."""
    first = math.inf
    while number := os.read(reading, 1):
        now = time.monotonic()
        if number[0] in SIGNALS and now - first > _SAME:
            # Not sys.exit, which would wait for a checkpoint's thread, or for collectives that nobody joins.
            os.write(2, f"a second signal ({signal.Signals(number[0]).name}): ended at once\n".encode())
            os._exit(128 + number[0])
        first = min(first, now) if number[0] in SIGNALS else first
    os.close(reading)


def end_with_torchrun() -> None:
    """:func:`end_with_parent` for a worker of torchrun: killed, or ended by a signal that it does not know.

    Left alone, the workers would go on without it, in a folder that the next start wants.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies. Linux alone; elsewhere nothing is done.

    May be called between fork and exec.
    """
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
