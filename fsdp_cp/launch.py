"""Process group set-up for torchrun, and for plain ``python`` as a world of one."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_cp import timeouts
from fsdp_cp.agent_store import own_part
from fsdp_cp.error_file import write_error
from fsdp_cp.errors import NO_ROOM, UserError
from fsdp_cp.measure.memory import mark_start
from fsdp_cp.signals import STOPPED, Stopped

log = logging.getLogger(__name__)

_OF_WORKERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
               "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")  # fmt: skip
# Sizes of a parallel launch. Not SLURM_NTASKS: sbatch sets it for its script, where one process runs.
_TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "PMI_SIZE": "mpiexec", "OMPI_COMM_WORLD_SIZE": "mpirun"}
_GPU_FILES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"))
"""Present if NVIDIA's driver is loaded, also in a container that was given a GPU."""


def rank() -> int:
    """Rank in the process group; before there is one, as torchrun gave it (0 under plain ``python``)."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank on this node as torchrun gave it; 0 under plain ``python``."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Size of the process group; before there is one, as torchrun gave it (1 under plain ``python``)."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_separate_worlds() -> None:
    """Refuse several tasks of srun or MPI without torchrun: each would be rank 0 of a world of one.

    Raises:
        UserError: more than one task, and the environment has no ``RANK`` and ``WORLD_SIZE``.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    for name, launcher in _TASKS.items():
        tasks = os.environ.get(name, "")
        if tasks.isdecimal() and int(tasks) > 1:
            command = f"torchrun --standalone --nproc-per-node {tasks} train.py ..."
            raise UserError(
                f"{name}={tasks}: {launcher} started {tasks} tasks without torchrun, and each would train alone; use"
                f" `{'srun --ntasks=1 ' * (launcher == 'srun')}{command}` on one node, docs/running.md on several, or"
                " export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each task"
            )


def outside_of_torchrun() -> dict[str, str]:
    """The environment without what torchrun gives its workers, for a process that is to be none of them."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_WORKERS and not name.startswith("TORCHELASTIC_")
    }


def report_error(error: UserError) -> int:
    """Print a user's mistake as one line, once on each node; the exit code for it, 2.

    Under torchrun the line goes into the worker's error file too, from which torchrun repeats it at the end of its own
    summary ("Root Cause"): the line itself is some forty lines further up by then.

    Args:
        error: raised by one rank, or by all of them.
    """
    line = "error: " + " ".join(str(error).splitlines())
    logging.getLogger(__name__).debug(line)
    if local_rank() != 0:
        time.sleep(3)  # what all ranks refuse is said once: torchrun ends this one when the first has exited
    write_error(line)  # without a traceback: torchrun would show that instead
    print(line, file=sys.stderr)
    return 2


def exit_code(work: Callable[[], None]) -> int:
    """What a command ends with: 0, or 2 with one line where ``work`` met a user's mistake or a full disk.

    Told to end by a signal it says so in a line too: 75 where it heeds signals itself, 130 after Ctrl-C elsewhere.
    Anything else that it raises is ours, and comes with its traceback.
    """
    try:
        work()
    except UserError as error:
        return report_error(error)
    except Stopped as stopped:
        if rank() == 0:
            print(stopped, file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return report_error(UserError(f"{error.filename or 'a file'} cannot be written ({error.strerror}); make room"))
    return 0


def end_process(code: int) -> NoReturn:
    """End a command's process with an exit code, as Python does but for the interpreter's finalization.

    A thread of gloo lets go of a collective's tensors after those who waited for it were told, for which it may need
    the interpreter. Where that is being finalized, the process aborts ("terminate called without an active exception",
    exit code -6) although all its work is done, and torchrun counts the run as failed. Destroying the process groups
    does not end those threads while anything refers to a group, as DTensor's caches do (torch 2.13).

    ``multiprocessing`` ends its children in the same way (``BaseProcess._bootstrap``, Python 3.11 to 3.14).
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a pipe that nobody reads any more, a closed stream
                code = code or 1
        os._exit(code)


def choose_device(device: str) -> torch.device:
    """``auto`` (CUDA if there is one), ``cpu`` or ``cuda`` to this rank's device.

    Raises:
        UserError: CUDA asked for where there is none, or ``auto`` where there is a GPU that torch does not see, which
            would otherwise be days on the CPU without a word; more ranks on a node than it has GPUs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={device} is unknown; use auto, cpu or cuda")
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        file = next((file for file in _GPU_FILES if file.exists()), None) if visible not in ("", "-1") else None
        if device == "auto" and file is None:
            return torch.device("cpu")
        hint = file and (
            f" although {file} exists; check its permissions, CUDA_VISIBLE_DEVICES={visible or 'unset'}, and"
            f" whether nvidia-smi shows a driver for CUDA {torch.version.cuda}, the one of torch {torch.__version__}"
        )
        raise UserError(f"device={device}, but torch sees no GPU{hint or ''}; or use device=cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes > gpus:  # asked alike on all ranks, so that all of them refuse
        raise UserError(
            f"{processes} processes on this node, but torch sees {gpus} GPUs;"
            f" use torchrun --nproc-per-node {gpus}, or device=cpu"
        )
    return torch.device("cuda", local_rank())


def choose_allocator(device: torch.device, settings: str | None) -> None:
    """Configure torch's CUDA allocator, which reads this once when CUDA starts; what the environment says stays.

    Args:
        device: nothing is done on the CPU.
        settings: as torch documents for ``PYTORCH_CUDA_ALLOC_CONF``, e.g. ``expandable_segments:True``; ``None`` for
            torch's own.
    """
    if device.type != "cuda" or settings is None:
        return
    assert not torch.cuda.is_initialized(), "too late: CUDA's allocator has read its settings"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in os.environ:
            log.warning("%s=%s is set; cuda_allocator=%s is not used", name, os.environ[name], settings)
            return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings


def choose_threads(device: torch.device, *, host_optimizer: bool) -> None:
    """Give a rank on a GPU, whose optimizer steps on the host, its share of this process's cores.

    torchrun gives every rank ``OMP_NUM_THREADS=1`` where nothing is set, and so does the Dockerfile: AdamW over a
    network's shards then takes one core, for seconds, while the others idle. A 1 of the user's cannot be told from
    those; another number stays. Nothing changes on the CPU, where the number of threads changes the last digits.

    Args:
        device: this rank's.
        host_optimizer: does a trained role have ``offload=cpu``?
    """
    if device.type != "cuda" or not host_optimizer or os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return
    threads = share_of_cores()
    torch.set_num_threads(threads)
    if rank() == 0:
        log.info("offload=cpu: %d threads a rank (%d cores, %d ranks on this node)", threads, *_cores_and_ranks())


def share_of_cores() -> int:
    """Cores of this node for each of its ranks, at least 1."""
    cores, ranks = _cores_and_ranks()
    return max(1, cores // ranks)


def _cores_and_ranks() -> tuple[int, int]:
    # Those that this process may use: a container or SLURM may have fewer than the machine.
    return len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta = timedelta(minutes=60)) -> Iterator[None]:
    """The default process group (gloo, and NCCL for CUDA) for the length of the context.

    After an exception a process that is not the only one must end: what it had begun is not waited for.

    Args:
        device: this rank's device.
        timeout: of a collective; long, since rank 0 alone writes samples and the report while the others wait.
    """
    from fsdp_cp import hangs  # and with it FSDP, which takes half a second

    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if "RANK" in os.environ:
        store = own_part(timeout)
        place: dict[str, Any] = {} if store is None else {"store": store, "rank": rank(), "world_size": world_size()}
        dist.init_process_group(backend, timeout=timeout, **place)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    mark_start(device)
    failed = True
    try:
        yield
        failed = False
    except BaseException as error:
        hangs.report(error)
        raise
    finally:
        timeouts.forget()
        # After an exception on one rank the others may wait in a collective, and destroying the group would wait for
        # them, with the traceback unprinted. The process ends instead, and torchrun ends the rest.
        if not failed or dist.get_world_size() == 1:
            dist.destroy_process_group()
        else:
            hangs.end_soon()
