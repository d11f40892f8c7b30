"""Handling of SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: end at once, or in the training loop after the step's checkpoint."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
STOPPED = 75
"""Exit code after a handled signal (``EX_TEMPFAIL`` of sysexits.h): the same command resumes the run."""
_SAME = 2.0
"""Seconds in which repeated signals count as one: Ctrl-C reaches a worker both from the terminal and from torchrun."""
_PR_SET_PDEATHSIG = 1
try:
    _LIBC: Any = ctypes.CDLL(None)  # load it now: nothing may be loaded after a fork
except OSError:
    _LIBC = None


class Stopped(BaseException):
    """Request to end the process. It is not an ``Exception``, so that error handlers do not catch it."""


class StopSignal:
    """Context for the main thread in which the first signal raises :class:`Stopped`, or is stored if deferred.

    A second signal, more than two seconds later, ends the process immediately with exit code 128 + its number. This
    works while the main thread waits in a collective, when Python would call its handlers only afterwards.
    """

    def __init__(self, arrived: Callable[[], object] = bool) -> None:
        """``arrived`` is called by a thread at the first signal, even while the main thread waits in a collective."""
        self._arrived = arrived
        self.received: signal.Signals | None = None
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            # Under nohup SIGHUP is ignored, and stays so. torchrun takes it again and hands it on.
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
            self._before = {number: signal.signal(number, self._handle) for number in {*SIGNALS} - ignored}
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._descriptor = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            self._watcher = threading.Thread(
                target=_watch, args=(reading, self._arrived), name="second signal", daemon=True
            )
            self._watcher.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._descriptor)
        os.close(self._writing)  # ends the watcher
        self._watcher.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context, store a signal in ``received`` for a check between steps. Raise it on exit if stored."""
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


def _watch(reading: int, arrived: Callable[[], object]) -> None:
    """Call ``arrived`` at the first signal, and end the process at the second. Python's C handler writes one byte per
    signal as soon as it arrives."""
    first = math.inf
    while number := os.read(reading, 1):
        now = time.monotonic()
        if number[0] in SIGNALS and now - first > _SAME:
            # Do not use sys.exit: it would wait for a checkpoint's thread, or for collectives that no other rank joins.
            os.write(2, f"second signal ({signal.Signals(number[0]).name}): ending without a checkpoint\n".encode())
            os._exit(128 + number[0])
        if number[0] in SIGNALS and first == math.inf:
            first = now
            arrived()
    os.close(reading)


def end_with_torchrun() -> None:
    """Call :func:`end_with_parent` in a worker of torchrun, which would keep the run's folder if torchrun were
    killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Make Linux send SIGTERM to this process when its parent dies. Can be called between fork and exec."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
