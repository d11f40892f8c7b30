"""The process groups of a mesh: which axes have one of their own, of what priority, and what makes NCCL build them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def context_overrides(*, ring: int, ulysses: int, own_groups: bool) -> dict[int | str, Any] | None:
    """``backend_override`` of ``init_device_mesh`` for the axes that split a sample's tokens; ``None`` for none.

    With ``own_groups`` an axis that spans the world gets a group of its own. The others have their own as it is, or
    one rank and no use for a group.

    A ring's own group, of more than one rank, sends on a stream of high priority where its backend is NCCL: its hops
    are to run beside an attention kernel, whose blocks are in line for every SM before them. Without ``own_groups`` a
    ring that spans the world has the default group, which is what its caller made it: FSDP's gathers go over it too,
    and nothing is said about its stream here.

    Args:
        ring, ulysses: sizes of these axes.
        own_groups: as in :func:`fsdp_cp.mesh.resolve_mesh`.
    """
    world = dist.get_world_size()
    backend = str(dist.get_backend_config())  # of every device that the default group serves
    sizes = {"ring": ring, "ulysses": ulysses}
    found: dict[int | str, Any] = {axis: backend for axis, size in sizes.items() if own_groups and size == world > 1}
    if 1 < ring < world or "ring" in found:
        options = high_priority(backend)
        if options is not None:
            found["ring"] = (backend, options)
    return found or None


def high_priority(backend: str) -> Any:
    """Options that give a group's NCCL communicator a CUDA stream of high priority; ``None`` for another backend.

    ``ProcessGroupNCCL`` is public, though a torch without CUDA has none (2.13).

    Args:
        backend: ``"cuda:nccl"``, ``"cpu:gloo,cuda:nccl"`` and so on.
    """
    if "nccl" not in backend:
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


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
