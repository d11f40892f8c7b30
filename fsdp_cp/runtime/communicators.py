"""Process groups of a mesh: those of ring and Ulysses apart from FSDP's, and the collectives that connect NCCL."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def context_overrides(*, ring: int, ulysses: int) -> dict[int | str, Any]:
    """Return ``backend_override`` of ``init_device_mesh`` for the axes that split a sample's tokens.

    An axis that spans the world would get the default group, which FSDP uses too: its collectives would queue after
    FSDP's gathers. An override, even of the same backend, gives the axis a group of its own. An axis of fewer ranks
    has its own group without one.

    A ring's NCCL group sends on a stream of high priority: its hops are to overlap with an attention kernel, whose
    blocks are in line for every SM before them.

    Args:
        ring, ulysses: sizes of these axes.
    """
    world, backend = dist.get_world_size(), str(dist.get_backend_config())  # of every device of the default group
    overrides: dict[int | str, Any] = {
        axis: backend for axis, size in (("ring", ring), ("ulysses", ulysses)) if size == world > 1
    }
    options = high_priority(backend) if ring > 1 else None
    if options is not None:
        overrides["ring"] = (backend, options)
    return overrides


def high_priority(backend: str) -> Any:
    """Return options that give an NCCL communicator a CUDA stream of high priority; ``None`` for another backend.

    ``ProcessGroupNCCL`` is public, though a torch without CUDA has none (2.13).

    Args:
        backend: ``"cuda:nccl"``, ``"cpu:gloo,cuda:nccl"`` and so on.
    """
    if "nccl" not in backend:
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def groups_of(*meshes: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups of more than one rank of all axes of ``meshes``, each once, in the same order on all ranks."""
    groups = (group for mesh in meshes for group in mesh.get_all_groups())
    return [group for group in dict.fromkeys(groups) if group.size() > 1]


def connect(*meshes: DeviceMesh) -> None:
    """Run one small collective on every group of :func:`groups_of`, for meshes on CUDA. Called by all ranks.

    NCCL makes a communicator, with its buffers, at the group's first collective. Without this call that is in
    mid-step, at the peak of memory, and too late for buffers that are registered with it (``communication_buffers``).
    gloo connects when groups are made: nothing is done on the CPU.
    """
    if meshes[0].device_type == "cuda":
        first_collectives(groups_of(*meshes), torch.device("cuda", torch.cuda.current_device()))


@lru_cache(maxsize=64)
def connect_once(mesh: DeviceMesh) -> None:
    """Call :func:`connect` once for each ``mesh``."""
    connect(mesh)


def first_collectives(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Sum one number over each of ``groups``, on all its ranks.

    NCCL's first ``batch_isend_irecv`` on a group needs all ranks, and a step of the ring may leave some out. Waiting
    for each sum lets a communicator that cannot be made fail here and not in a step.

    Raises:
        RuntimeError: not all ranks of a group answer.
    """
    for group in groups:
        count = torch.ones(1, device=device)
        dist.all_reduce(count, group=group)
        if count.item() != group.size():
            raise RuntimeError(f"{group.group_desc}: {count.item():g} of {group.size()} ranks answered")
