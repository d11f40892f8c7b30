"""Process groups of a mesh: separate groups for ring and Ulysses, and the collectives that connect NCCL."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def context_overrides(*, ring: int, ulysses: int) -> dict[int | str, Any]:
    """Return ``backend_override`` of ``init_device_mesh`` for the axes that split a sample's tokens.

    An axis that spans the world would get the default group, which FSDP also uses: its collectives would queue after
    FSDP's gathers. An override, even with the same backend, gives the axis a separate group. An axis of fewer ranks
    gets a separate group anyway.

    A ring's NCCL group sends on a high-priority stream: its hops must overlap with an attention kernel, whose blocks
    are already queued for every SM.
    """
    world, backend = dist.get_world_size(), str(dist.get_backend_config())  # backends of all devices
    overrides: dict[int | str, Any] = {
        axis: backend for axis, size in (("ring", ring), ("ulysses", ulysses)) if size == world > 1
    }
    options = high_priority(backend) if ring > 1 else None
    if options is not None:
        overrides["ring"] = (backend, options)
    return overrides


def high_priority(backend: str) -> Any:
    """Return options that give an NCCL communicator a high-priority CUDA stream; ``None`` for another backend.

    ``ProcessGroupNCCL`` is public, but torch 2.13 without CUDA does not have it.

    Args:
        backend: backend string such as ``"cuda:nccl"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    if "nccl" not in backend:
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def groups_of(*meshes: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of all axes of ``meshes`` with several ranks, each once, in the same order on all ranks."""
    groups = (group for mesh in meshes for group in mesh.get_all_groups())
    return [group for group in dict.fromkeys(groups) if group.size() > 1]


def connect(*meshes: DeviceMesh) -> None:
    """Run one small collective on every group of :func:`groups_of`, for meshes on CUDA. Called by all ranks.

    NCCL makes a communicator and its buffers at the group's first collective. Without this call that happens in
    mid-step, at peak memory, and too late to register buffers with the communicator (``communication_buffers``).
    On the CPU this does nothing: gloo connects when groups are made.
    """
    if meshes[0].device_type == "cuda":
        first_collectives(groups_of(*meshes), torch.device("cuda", torch.cuda.current_device()))


@lru_cache(maxsize=64)
def connect_once(mesh: DeviceMesh) -> None:
    connect(mesh)


def first_collectives(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Sum one number over each of ``groups``. Called by all their ranks.

    NCCL's first ``batch_isend_irecv`` on a group needs all ranks, but a ring step may leave some out. Waiting for each
    sum makes a communicator that cannot be created fail here and not in a step.

    Raises:
        RuntimeError: not all ranks of a group answer.
    """
    for group in groups:
        count = torch.ones(1, device=device)
        dist.all_reduce(count, group=group)
        if count.item() != group.size():
            raise RuntimeError(f"{group.group_desc}: {count.item():g} of {group.size()} ranks answered")
