"""Start and end of a process: rank, device and process group, under torchrun or as a world of one; exit codes.

It also holds what torchrun shares with its workers: the error file, and the store through which ranks meet.
"""

import atexit
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from fsdp_cp.errors import NO_ROOM, UserError
from fsdp_cp.files.atomic_file import write_text
from fsdp_cp.measure.memory import mark_start
from fsdp_cp.runtime import timeouts
from fsdp_cp.runtime.signals import STOPPED, Stopped

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds in which a failed process must have ended by itself; torchrun gives the processes that it ends as many."""
_OF_WORKERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
               "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")  # fmt: skip
# Number of tasks that a launcher started. Do not use SLURM_NTASKS: sbatch sets it for its script, which is one process.
_TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "PMI_SIZE": "mpiexec", "OMPI_COMM_WORLD_SIZE": "mpirun"}
_GPU_FILES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"))
"""Files that exist if NVIDIA's driver is loaded, also in a container with a GPU."""


def rank() -> int:
    """Return the rank in the process group, or before it exists torchrun's rank (0 under plain ``python``)."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return torchrun's rank on this node; 0 under plain ``python``."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the size of the process group, or before it exists torchrun's world size (1 under plain ``python``)."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def refuse_separate_worlds() -> None:
    """Refuse several tasks of srun or MPI without torchrun: each would be rank 0 of a world of one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    for name, launcher in _TASKS.items():
        tasks = os.environ.get(name, "")
        if tasks.isdecimal() and int(tasks) > 1:
            command = f"torchrun --standalone --nproc-per-node {tasks} train.py ..."
            raise UserError(
                f"{name}={tasks}: each of {launcher}'s {tasks} tasks without torchrun would train alone; use"
                f" `{'srun --ntasks=1 ' * (launcher == 'srun')}{command}` on one node, or as docs/running.md says"
            )


def outside_of_torchrun() -> dict[str, str]:
    """Return the environment without torchrun's variables, for a process that is not a worker of torchrun."""
    ours = {name for name in os.environ if name not in _OF_WORKERS and not name.startswith("TORCHELASTIC_")}
    return {name: os.environ[name] for name in ours}


def report_error(error: UserError) -> int:
    """Print a user's mistake as one line, once on each node; return its exit code, 2.

    Under torchrun also write the line to the worker's error file: torchrun repeats it at the end of its summary.
    """
    line = "error: " + " ".join(str(error).splitlines())
    logging.getLogger(__name__).debug(line)
    if local_rank() != 0:
        time.sleep(3)  # torchrun ends this rank once local rank 0 has exited, so the line appears once
    write_error(line)  # no traceback: torchrun would show it instead of the line
    print(line, file=sys.stderr)
    return 2


def exit_code(work: Callable[[], None]) -> int:
    """Run a command and return its exit code: 0, or 2 with one line after a user's mistake or a full disk.

    A signal also ends it with one line: code 75 if the command handles signals itself, else 130 after Ctrl-C. Any other
    exception is a defect and propagates with its traceback.
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
    """End the process with an exit code, as Python does, but without finalizing the interpreter.

    A gloo thread frees a collective's tensors after it has reported the collective done, and may need the interpreter
    to do so. During finalization the process then aborts ("terminate called without an active exception", exit code -6)
    although all work is done, and torchrun counts the run as failed. Destroying the process groups does not end those
    threads while an object refers to a group, as DTensor's caches do (torch 2.13).

    ``multiprocessing`` ends its children in the same way (``BaseProcess._bootstrap``, Python 3.11 to 3.14).
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a pipe without a reader, a closed stream
                code = code or 1
        os._exit(code)


def choose_device(device: str) -> torch.device:
    """Return this rank's device for ``auto`` (CUDA if available), ``cpu`` or ``cuda``.

    Raises:
        UserError: ``cuda`` without a GPU; ``auto`` with a GPU that torch does not see (the run would silently take days
            on the CPU); or more ranks on a node than GPUs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda, got {device}")
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
    if processes > gpus:  # both numbers are equal on all ranks of the node, so all of them refuse
        advice = f"use torchrun --nproc-per-node {gpus}, or device=cpu"
        raise UserError(f"{processes} processes on this node, but torch sees {gpus} GPUs; {advice}")
    return torch.device("cuda", local_rank())


def choose_allocator(device: torch.device, settings: str | None) -> None:
    """Set ``PYTORCH_CUDA_ALLOC_CONF`` unless the environment does. Call it before CUDA starts, which reads it once."""
    if device.type != "cuda" or settings is None:
        return
    assert not torch.cuda.is_initialized(), "too late: CUDA's allocator has read its settings"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in os.environ:
            log.warning("ignored cuda_allocator=%s: %s=%s is set", settings, name, os.environ[name])
            return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings


def choose_threads(device: torch.device, *, host_optimizer: bool) -> None:
    """Give a GPU rank its share of the host's cores if its optimizer steps on the host (``offload=cpu``).

    torchrun and the Dockerfile default to ``OMP_NUM_THREADS=1``: AdamW then runs for seconds on one core while the
    others idle. A value of 1 that the user set looks the same and is replaced; any other value stays. On the CPU
    nothing changes, since there the number of threads changes the last digits of results.
    """
    if device.type != "cuda" or not host_optimizer or os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return
    threads = share_of_cores()
    torch.set_num_threads(threads)
    if rank() == 0:
        log.info("offload=cpu: the optimizer uses %d threads per rank", threads)


def share_of_cores() -> int:
    """Return the number of cores for each rank of this node, at least 1, of those that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta = timedelta(minutes=60)) -> Iterator[None]:
    """Open the default process group (gloo, and NCCL for CUDA) within this context.

    After an exception, a process of several must exit without waiting for its collectives. The ``timeout`` of
    collectives is long, since rank 0 writes samples and the report while the others wait.
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
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
    finally:
        timeouts.forget()
        # After an exception on one rank the others may wait in a collective. Destroying the group would wait for them
        # before the traceback is printed. Exit instead; torchrun then ends the other ranks.
        if not failed or dist.get_world_size() == 1:
            dist.destroy_process_group()
        else:
            # The end of the interpreter waits for gloo's threads: after a while print the stack and exit with code 1.
            with suppress(RuntimeError, OSError):  # stderr may be closed: the first error is what the user must see
                faulthandler.dump_traceback_later(GRACE, exit=True)


def recorded(main: Callable[P, T]) -> Callable[P, T | None]:
    """Wrap ``main`` in torch's ``record``, so that torchrun's summary ends with the exception that ``main`` raises.

    The wrapper returns ``None`` after ``sys.exit(0)``. torch's own handler writes the file piece by piece. If torchrun
    sends SIGTERM in between, it reads an incomplete file and fails with JSONDecodeError instead of restarting.
    """
    return record(main, _AtomicHandler())


def write_error(message: str, callstack: str | None = None) -> None:
    """Write torchrun's error file if it requests one; it shows ``callstack`` instead of the ``message`` of one line."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"timestamp": str(int(time.time()))} | ({} if callstack is None else {"py_callstack": callstack})
    about = {"message": {"message": message, "extraInfo": extra}}
    try:
        write_text(Path(file), json.dumps(about))
    except OSError as failure:
        print(f"torchrun's error file {file} cannot be written ({failure.strerror})", file=sys.stderr)


class _AtomicHandler(ErrorHandler):
    def record_exception(self, e: BaseException) -> None:
        write_error(f"{type(e).__name__}: {e}", traceback.format_exc())


def own_part(timeout: timedelta) -> dist.Store | None:
    """Return a part of the agent's store to which no earlier group of these ranks has written. Called by all ranks.

    With ``--max-restarts`` torchrun restarts the ranks after one has died, and torch 2.13 gives them the store of the
    previous ranks. There they would find the addresses of dead processes (gloo: ``Connection refused``), as in the
    second of two groups of one start. The restart count cannot name the parts, since the torchruns of several nodes
    count differently. Return ``None`` if ranks do not use the agent's store: ``init_process_group`` then makes one.
    """
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout)
    return dist.PrefixStore(agree(store, int(env["RANK"]), int(env["WORLD_SIZE"]), timeout), store)


def agree(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """Return a name that only these ``ranks`` processes share, whatever earlier processes wrote into ``store``.

    Rank 0 makes the name and sends it to each rank that wrote a hello. It also answers the hello of an earlier process,
    but nobody waits for that answer. The ranks have agreed when all have confirmed the name.
    """
    if rank != 0:
        hello = uuid.uuid4().hex
        store.set(f"fsdp_cp/hello/{rank}", hello)
        store.wait([f"fsdp_cp/welcome/{hello}"], timeout)
        name = store.get(f"fsdp_cp/welcome/{hello}").decode()
        store.set(f"fsdp_cp/{name}/{rank}", "")
        return f"fsdp_cp/{name}"
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    others, welcomed = range(1, ranks), set[str]()
    while not store.check([f"fsdp_cp/{name}/{other}" for other in others]):
        for other in others:
            if store.check([f"fsdp_cp/hello/{other}"]):
                hello = store.get(f"fsdp_cp/hello/{other}").decode()
                if hello not in welcomed:
                    store.set(f"fsdp_cp/welcome/{hello}", name)
                    welcomed.add(hello)
        if time.monotonic() > deadline:
            raise RuntimeError(f"only some of the {ranks} ranks connected within {timeout.total_seconds():g} s")
        time.sleep(0.02)
    return f"fsdp_cp/{name}"
