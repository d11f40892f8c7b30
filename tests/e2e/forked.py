"""``train.py`` on ranks that are forked from a process which has imported torch and the trainer already.

What torchrun's workers see of it is in their environment; torchrun itself is not there. A start takes a few hundredths
of a second, where an interpreter's takes six of a core's.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from fsdp_cp import local_ranks


def run_forked(
    ranks: int, module: str, words: list[str], *, cwd: Path, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """``module.main(words)`` on each rank, to the end; when one fails the others are killed, as by torchrun.

    Args:
        ranks: as of ``torchrun --nproc-per-node``; 0 is plain ``python``.
        module: of a command, importable.
        words: of its command line.
        cwd: where it is typed.
        environment: all of it; torchrun's own variables are added.
        timeout: seconds for all ranks.

    Returns:
        The output of the ranks, one after the other, and the exit code of the first that failed, or 0.

    Raises:
        TimeoutError: with the output so far.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(list(local_ranks.PRELOAD))
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        processes = []
        for rank in range(max(ranks, 1)):
            given = dict(environment)
            if ranks:
                given |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port.getsockname()[1]),
                }  # fmt: skip
            process = context.Process(target=_rank, args=(module, words, str(cwd), given, f"{folder}/{rank}"))
            process.start()
            processes.append(process)
        failed, late = _wait(processes, time.monotonic() + timeout)
        printed = [
            "".join(Path(f"{folder}/{rank}.{end}").read_text(errors="replace") for rank in range(len(processes)))
            for end in ("out", "err")
        ]
    if late:
        raise TimeoutError(f"{module} {' '.join(words)} takes longer than {timeout:.0f} s:\n{''.join(printed)}")
    return subprocess.CompletedProcess([module, *words], failed, *printed)


def _wait(processes: list, deadline: float) -> tuple[int, bool]:
    """Exit code of the first that failed, or 0; and whether the deadline passed."""
    left = {process.sentinel: process for process in processes}
    while left:
        ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        codes = [left.pop(sentinel).exitcode for sentinel in ready]
        if not ready or any(codes):
            for process in left.values():
                process.kill()
            for process in processes:
                process.join()
            return next((code for code in codes if code), 0), not ready
    return 0, False


def _rank(module: str, words: list[str], cwd: str, environment: dict[str, str], output: str) -> None:
    """The life of a rank."""
    for number, end in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.argv = [f"{module}.py", *words]
    main = importlib.import_module(module).main
    from fsdp_cp.launch import end_process

    end_process(main(words))
