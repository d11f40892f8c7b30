"""Local gloo processes that run a function, for tests and benchmarks without torchrun.

The processes are forked from a server that has already imported torch, so a test at 4 ranks does not import it 4 times.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

PRELOAD: tuple[str, ...] = ("torch", "fsdp_cp.sharding.shard")
"""Modules that the fork server imports by default. A program that needs others assigns this."""


@lru_cache(maxsize=1)
def _context(preload: tuple[str, ...]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


class RankPool:
    """Ranks of a gloo process group that wait for work, so that many small tests share one start.

    Use it as a context manager, or call :meth:`close`. A failure ends all ranks, since a collective cannot continue
    without one of them; the next :meth:`run` starts new ones.
    """

    def __init__(self, world_size: int, *, timeout: float = 180.0, preload: Sequence[str] | None = None):
        """Set the seconds for one :meth:`run`, and the modules that the fork server imports (default ``PRELOAD``)."""
        self.world_size, self.timeout = world_size, timeout
        self.preload = tuple(PRELOAD if preload is None else preload)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(*args)`` on each rank and return the results in rank order.

        The function is importable (not a lambda or a closure). Arguments and results can be pickled.

        Raises:
            RuntimeError: a rank failed (the message has the traceback of the first one), or the timeout expired.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send_bytes(pickle.dumps((function, args)))
            return _collect(self._pipes, time.monotonic() + self.timeout, self.timeout)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(5)
        self._kill()

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks inherit it, and must not oversubscribe shared cores
        context = _context(self.preload)
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, f"{self._folder.name}/store", theirs, self.timeout)
            process = context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _collect(pipes: list[Any], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        ready = wait(list(open_pipes.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(open_pipes)} did not finish in {timeout:.0f} s")
        for rank in [r for r, pipe in open_pipes.items() if pipe in ready]:
            try:
                # Unpickling is safe: the bytes come from a process that this one started.
                ok, payload = pickle.loads(open_pipes.pop(rank).recv_bytes())
            except EOFError:
                ok, payload = False, "the process died"
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(rank: int, world_size: int, store: str, pipe: Any, timeout: float) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        place: dict[str, Any] = {"store": dist.FileStore(store, world_size), "rank": rank, "world_size": world_size}
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **place)
        # Unpickling is safe: the bytes come from the process that started this one.
        while (work := pickle.loads(pipe.recv_bytes())) is not None:
            function, args = work
            result = function(*args)
            dist.barrier()
            pipe.send_bytes(pickle.dumps((True, result)))
        dist.destroy_process_group()
    except EOFError:  # the parent is gone
        pass
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    pipe.close()
