"""Process group set-up for torchrun, and for plain ``python`` as a world of one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_cp.errors import UserError

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
