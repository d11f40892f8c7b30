"""Commands on ranks that are forked from a process that has already imported torch and the trainer.

The ranks have torchrun's environment variables, but torchrun itself does not run. A start takes a few hundredths of a
second; starting an interpreter takes six seconds of a core.
"""

from __future__ import annotations

import os
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from fsdp_cp.runtime import local_ranks


class Forked:
    """Running command ``python -m module words`` on each rank.

    Args:
        ranks: as in ``torchrun --nproc-per-node``; 0 is plain ``python``.
        module: an importable module of a command.
        words: the command's arguments.
        cwd: the working directory.
        environment: all environment variables but torchrun's own.
        file_bytes: the largest file that the command may write, in bytes; it stands for a full disk.
    """

    def __init__(
        self,
        ranks: int,
        module: str,
        words: list[str],
        *,
        cwd: Path,
        environment: dict[str, str],
        file_bytes: int | None = None,
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(list(local_ranks.PRELOAD))
        self.words = [module, *words]
        self._folder = tempfile.TemporaryDirectory()
        self.processes = []
        with socket.socket() as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", 0))
            for rank in range(max(ranks, 1)):
                variables = dict(environment)
                if ranks:
                    variables |= {
                        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port.getsockname()[1]),
                    }  # fmt: skip
                arguments = (module, words, str(cwd), variables, f"{self._folder.name}/{rank}", file_bytes)
                self.processes.append(context.Process(target=_rank, args=arguments))
                self.processes[-1].start()

    def send(self, number: int) -> None:
        """Send a signal to every rank."""
        for process in self.processes:
            os.kill(process.pid, number)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # a stopped one too
            process.join()

    def lives(self) -> bool:
        """Assert that every rank runs; on failure the output is in the assertion."""
        assert all(process.is_alive() for process in self.processes), self.output("out") + self.output("err")
        return True

    def output(self, end: str) -> str:
        """Return what all ranks wrote to ``out`` or ``err``."""
        files = (Path(f"{self._folder.name}/{rank}.{end}") for rank in range(len(self.processes)))
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def wait(self, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Wait for the ranks; when one fails, kill the others, as torchrun does.

        Returns:
            The output of the ranks, one after the other, and the exit code of the first that failed, or 0.
        """
        left = {process.sentinel: process for process in self.processes}
        code, deadline = 0, time.monotonic() + timeout
        while left and not code:
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            codes = [left.pop(sentinel).exitcode for sentinel in ready]
            code = next((each for each in codes if each), 0)
            if not ready:
                break
        for process in left.values():
            process.kill()
        for process in self.processes:
            process.join()
        done = subprocess.CompletedProcess(self.words, code, self.output("out"), self.output("err"))
        self._folder.cleanup()
        if left and not code:
            raise TimeoutError(f"{' '.join(self.words)} takes longer than {timeout} s:\n{done.stdout}{done.stderr}")
        return done


def _rank(
    module: str, words: list[str], cwd: str, environment: dict[str, str], output: str, file_bytes: int | None
) -> None:
    """Run the command in a forked process."""
    for number, end in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    sys.argv = [f"{module}.py", *words]
    runpy.run_module(module, run_name="__main__")
