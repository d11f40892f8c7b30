"""Process group set-up for torchrun, and for plain ``python`` as a world of one."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_cp.errors import NO_ROOM, UserError

log = logging.getLogger(__name__)


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
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        # As torch.distributed.elastic's own handler writes it, but without a traceback: it would be shown instead.
        about = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        try:
            with open(file, "w") as stream:
                json.dump(about, stream)
        except OSError as failure:
            print(f"torchrun's error file {file} cannot be written ({failure.strerror})", file=sys.stderr)
    print(line, file=sys.stderr)
    return 2


def exit_code(work: Callable[[], None]) -> int:
    """What a command ends with: 0, or 2 with one line where ``work`` met a user's mistake or a full disk.

    Anything else that it raises is ours, and comes with its traceback.
    """
    try:
        work()
    except UserError as error:
        return report_error(error)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return report_error(UserError(f"{error.filename or 'a file'} cannot be written ({error.strerror}); make room"))
    return 0


def choose_device(device: str) -> torch.device:
    """``auto`` (CUDA if there is one), ``cpu`` or ``cuda`` to this rank's device.

    Raises:
        UserError: CUDA asked for where there is none, or more ranks on a node than it has GPUs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={device} is unknown; use auto, cpu or cuda")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no GPU; use device=cpu")
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


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta = timedelta(minutes=60)) -> Iterator[None]:
    """The default process group (gloo, and NCCL for CUDA) for the length of the context.

    Args:
        device: this rank's device.
        timeout: of a collective; long, since rank 0 alone decodes samples while the others wait.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    failed = True
    try:
        yield
        failed = False
    finally:
        # After an exception on one rank the others may wait in a collective, and destroying the group would wait for
        # them, with the traceback unprinted. The process ends instead, and torchrun ends the rest.
        if not failed or dist.get_world_size() == 1:
            dist.destroy_process_group()
