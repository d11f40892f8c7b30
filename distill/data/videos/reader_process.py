"""Processes for files that can end or hold up what reads them, by a defect of a C library: each costs itself alone.

A process is started once and reads many files. It is replaced when it ends.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from distill.data.videos.container import ClipError

_TRIES = 2
"""Calls of a file that ends its process: an earlier file can have damaged the first one, and anyone can kill it."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ReaderProcesses:
    """Processes that call one function, as many as there are threads that call at the same time."""

    def __init__(self, function: str, *, seconds: int) -> None:
        """Set ``function``, as ``module:name``, and the seconds that a call may take from frame to frame. It takes
        what can be pickled, and returns bytes and what JSON can say."""
        self.function, self.seconds = function, seconds
        self._idle: list[_Process] = []
        self._lock = threading.Lock()

    def call(self, *arguments: Any) -> tuple[bytes, Any]:
        """Return what the function returns. Raise ``ClipError``, also if it ends its process or takes too long."""
        for _ in range(_TRIES):
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or _Process(self.function, self.seconds)
            try:
                payload, answer = process.call(arguments)
            except (EOFError, OSError):
                signal_number = -process.end()
                continue
            with self._lock:
                self._idle.append(process)
            if "problem" in answer:
                raise ClipError(answer["problem"])
            if "defect" in answer:
                raise RuntimeError(answer["defect"])
            return payload, answer["value"]
        if signal_number == signal.SIGALRM:
            raise ClipError(f"cannot be read in {self.seconds} s")
        how = signal.strsignal(signal_number) if signal_number > 0 else f"exit code {-signal_number}"
        raise ClipError(f"ends its reader ({how})")

    def close(self) -> None:
        """End the processes. A later call starts others."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()


class _Process:
    def __init__(self, function: str, seconds: int) -> None:
        self._pipe, theirs = Pipe()
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {function!r}, {seconds})"
        environment = os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        try:
            self._pipe.recv_bytes()
        except EOFError:
            raise RuntimeError(f"the process that calls {function} ended with {self.end()} at its start") from None

    def call(self, arguments: tuple[Any, ...]) -> tuple[bytes, Any]:
        self._pipe.send_bytes(pickle.dumps(arguments))
        answer = json.loads(self._pipe.recv_bytes())
        return self._pipe.recv_bytes(), answer

    def end(self) -> int:
        """End the process, and return its exit code: minus the signal that ended it."""
        self._pipe.close()
        return self._process.wait()


def serve(descriptor: int, function: str, seconds: int) -> None:
    """Answer calls until the other side closes the pipe."""
    for ours in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(ours, signal.SIG_IGN)  # sent to a whole group of processes, they are for the one that asks
    module, _, name = function.partition(":")
    work = getattr(import_module(module), name)
    with Connection(descriptor) as pipe:
        pipe.send_bytes(b"")
        while True:
            try:
                # Unpickling is safe: the bytes come from the process that started this one.
                arguments = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            # The timer ends this process, in a library's endless loop too. `extend_limit` starts its interval again.
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
            payload, answer = _answer(work, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send_bytes(json.dumps(answer).encode())
            pipe.send_bytes(payload)


def _answer(work: Any, arguments: tuple[Any, ...]) -> tuple[bytes, dict[str, Any]]:
    try:
        payload, value = work(*arguments)
        return payload, {"value": value}
    except ClipError as error:
        return b"", {"problem": str(error)}
    except Exception:
        return b"", {"defect": traceback.format_exc()}
