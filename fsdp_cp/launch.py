"""Process group set-up for torchrun, and for plain ``python`` as a world of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_cp.errors import UserError


def rank() -> int:
    """Global rank as torchrun gave it; 0 under plain ``python``."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank on this node as torchrun gave it; 0 under plain ``python``."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """World size as torchrun gave it; 1 under plain ``python``."""
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
    if local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"{local_rank() + 1} or more processes on this node, but torch sees {torch.cuda.device_count()} GPUs;"
            f" use torchrun --nproc-per-node {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank())


@contextmanager
def process_group(device: torch.device, *, startup_timeout: timedelta = timedelta(minutes=60)) -> Iterator[None]:
    """The default process group (gloo, and NCCL for CUDA) for the length of the context.

    The time-out is long, for encoding data and loading checkpoints.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=startup_timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=startup_timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
