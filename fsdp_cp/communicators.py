"""The process groups of a mesh: which axes have one of their own, and what makes NCCL build them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def of_their_own(axes: Mapping[str, int]) -> dict[int | str, Any] | None:
    """``backend_override`` of ``init_device_mesh``: groups of their own for those of ``axes`` that span the world.

    The others have their own as it is, or one rank and no use for a group.

    Args:
        axes: names and sizes of axes of the mesh.
    """
    world = dist.get_world_size()
    backend = str(dist.get_backend_config())  # of every device that the default group serves
    return {axis: backend for axis, size in axes.items() if size == world > 1} or None


def groups_of(*meshes: DeviceMesh) -> list[dist.ProcessGroup]:
    """The groups of all axes of ``meshes`` that have more than one rank, each once, in the same order on all ranks."""
    groups = (group for mesh in meshes for group in mesh.get_all_groups())
    return [group for group in dict.fromkeys(groups) if group.size() > 1]


def connect(*meshes: DeviceMesh) -> None:
    """One small collective on every group of :func:`groups_of`, for meshes on CUDA. Called by all ranks.

    NCCL makes a communicator, with its buffers, at the group's first collective: in mid-step else, at the peak of
    memory, and too late for buffers that are registered with it (``communication_buffers``). gloo connects as groups
    are made: nothing is done on the CPU.
    """
    if meshes[0].device_type == "cuda":
        first_collectives(groups_of(*meshes), torch.device("cuda", torch.cuda.current_device()))


@lru_cache(maxsize=64)
def connect_once(mesh: DeviceMesh) -> None:
    """:func:`connect`, at the first call for ``mesh``."""
    connect(mesh)


def first_collectives(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """A sum of one number over each of ``groups``.

    Of all its ranks at once: NCCL's first ``batch_isend_irecv`` on a group needs all of them, and a step of the ring
    may leave some out. Each is waited for, so that a communicator that cannot be made fails here and not in a step.

    Raises:
        RuntimeError: a group whose ranks do not all answer.
    """
    for group in groups:
        count = torch.ones(1, device=device)
        dist.all_reduce(count, group=group)
        if count.item() != group.size():
            raise RuntimeError(f"{group.group_desc}: {count.item():g} of {group.size()} ranks answered")
