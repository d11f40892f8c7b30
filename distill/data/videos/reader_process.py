"""A process for each call that a defect of a C library can end or hold up: a file costs itself alone."""

import json
import os
import pickle
import signal
import subprocess
import sys
from importlib import import_module
from typing import Any

from distill.data.videos.container import ClipError

_TRIES = 2
"""Calls of a file that ends its process: anyone can kill the first one."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def call_apart(function: str, *arguments: Any, seconds: int) -> tuple[bytes, Any]:
    """Call ``function``, as ``module:name``, in a process of its own, which takes 0.2 s of a core to start. The
    function takes what can be pickled, and returns bytes and what JSON can say. Raise ``ClipError``, also if it ends
    its process or takes more than so many ``seconds``."""
    command = [sys.executable, "-c", f"from {__name__} import answer; answer({function!r})"]
    environment = os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(sys.path)}
    options = {"input": pickle.dumps(arguments), "stdout": subprocess.PIPE, "env": environment, "timeout": seconds}
    for _ in range(_TRIES):
        try:
            ended = subprocess.run(command, **options)
        except subprocess.TimeoutExpired as error:
            raise ClipError(f"cannot be read in {seconds} s") from error
        if ended.returncode > 0:
            raise RuntimeError(f"the process that calls {function} ended with {ended.returncode}; see its traceback")
        if ended.returncode == 0:
            head, _, payload = ended.stdout.partition(b"\n")
            answered = json.loads(head)
            if "problem" in answered:
                raise ClipError(answered["problem"])
            return payload, answered["value"]
    raise ClipError(f"ends its reader ({signal.strsignal(-ended.returncode)})")


def answer(function: str) -> None:
    """Answer the call of this process."""
    for others in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(others, signal.SIG_IGN)  # sent to a whole group of processes, they are for the one that asks
    module, _, name = function.partition(":")
    payload, answered = b"", {}
    try:
        # Unpickling is safe: the bytes come from the process that started this one.
        payload, answered["value"] = getattr(import_module(module), name)(*pickle.load(sys.stdin.buffer))
    except ClipError as error:
        answered["problem"] = str(error)
    sys.stdout.buffer.write(json.dumps(answered).encode() + b"\n" + payload)
