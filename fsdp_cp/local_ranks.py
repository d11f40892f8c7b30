"""Run a function on several local gloo processes, for tests and benchmarks: real processes, no torchrun.

The processes are forked from a server that has imported torch already, so a test at 4 ranks does not pay 4 imports.
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


@lru_cache(maxsize=1)
def _context(preload: tuple[str, ...]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 180.0,
    preload: Sequence[str] = ("torch", "fsdp_cp", "models.load"),
) -> list[Any]:
    """``function(*args)`` on each of ``world_size`` ranks of a gloo process group.

    Args:
        world_size: number of processes.
        function: importable (not a lambda or a closure); its result must pickle.
        args: must pickle.
        timeout: seconds for all ranks together; ranks that hang are killed.
        preload: modules that the server of forks imports once.

    Returns:
        The results in rank order.

    Raises:
        RuntimeError: with the traceback of the first rank that failed, or on a time-out.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited: ranks that share cores must not oversubscribe them
    context = _context(tuple(preload))
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, f"{folder}/store", sender, function, args, timeout),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, deadline, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Any], deadline: float, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        ready = wait(list(open_pipes.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(open_pipes)} did not finish in {timeout:.0f} s")
        for rank in [r for r, pipe in open_pipes.items() if pipe in ready]:
            try:
                # Unpickled: it comes through a pipe from a process that this one started.
                ok, payload = pickle.loads(open_pipes.pop(rank).recv_bytes())
            except EOFError:
                ok, payload = False, "the process died"
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{payload}")
            results[rank] = payload
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    sender: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = (True, function(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(result))
    sender.close()
