"""Reductions and object exchange over process groups. The object functions also work without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_cp.errors import UserError
from fsdp_cp.runtime.torch_versions import all_gather_single
from fsdp_cp.sharding.tensor_lists import local_shards, multiply_, squared_norms

T = TypeVar("T")


def all_gather_objects(obj: Any) -> list[Any]:
    """Return one object from every rank, in rank order; ``[obj]`` without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [obj]
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, obj)
    return objects


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank; return the results in rank order, on all ranks.

    If ``work`` raises on one rank, all ranks raise: that rank its exception, the others the same ``UserError`` or, for
    any other exception, a ``RuntimeError``. Otherwise they would wait in the next collective until it times out.
    """
    failure, note, result = None, None, None
    try:
        result = work()
    except Exception as error:  # raised again below, on every rank
        failure = error
        note = (isinstance(error, UserError), f"{type(error).__name__}: {error}", str(error))
    answers = all_gather_objects((note, result))
    if failure is not None:
        raise failure
    for number, (note, _) in enumerate(answers):
        if note is not None:
            raise UserError(note[2]) if note[0] else RuntimeError(f"rank {number} failed: {note[1]}")
    return [result for _, result in answers]


def gathered(work: Callable[[], T]) -> list[T] | None:
    """Run ``work`` on every rank; return the results in rank order on rank 0, ``None`` elsewhere.

    Use it for large results: :func:`on_all_ranks` sends all of them to every rank. Raises like :func:`on_all_ranks`.
    """
    made: list[T] = []
    on_all_ranks(lambda: made.append(work()))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return made
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(made[0], parts)
    return parts


def barrier() -> None:
    """Wait for every rank. Does nothing without a process group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def all_reduce_scalars(
    values: list[float], mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> list[float]:
    """Reduce several numbers over a one-dimensional mesh in one fp64 collective; return the same on every rank."""
    if mesh.size() == 1:  # NCCL would make a communicator with additional buffers
        return [float(value) for value in values]
    packed = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(packed, op=op, group=mesh.get_group())
    return packed.tolist()


def gather_samples(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather ``(n, ...)`` from every rank of a one-dimensional mesh to ``(ranks x n, ...)``, in rank order."""
    if mesh.size() == 1:
        return x
    out = x.new_empty((mesh.size() * x.shape[0], *x.shape[1:]))
    all_gather_single(out.view(-1), x.contiguous().view(-1), mesh.get_group())
    return out


def grad_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the Euclidean norm of all gradients together, the same on every rank; see :func:`grad_square`."""
    return grad_square(parameters).sqrt().item()


@torch.no_grad()  # with gradients enabled, every shard of a DTensor would cost an autograd call
def grad_square(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the squared norm of all gradients together, in fp64, the same on every rank.

    One all-reduce serves all parameters (the norm of a DTensor would be one collective per tensor). A missing gradient
    counts as zero, so ranks may lack different gradients. Replicas (hybrid sharding) count once.

    Args:
        parameters: DTensors of one mesh, sharded over its last axis.
    """
    device: torch.device | None = None
    mesh: DeviceMesh | None = None
    grads: list[Tensor] = []
    for parameter in parameters:
        assert isinstance(parameter, DTensor), "shard_module has made them"
        if mesh is None:
            mesh, device = parameter.device_mesh, local_shard(parameter).device
        assert parameter.device_mesh is mesh or parameter.device_mesh == mesh, "one mesh per gradient norm"
        assert isinstance(parameter.placements[-1], Shard)
        if parameter.grad is not None:
            grads.append(parameter.grad)
    assert mesh is not None, "no parameters"
    if grads:
        # cumsum() adds in the order of a loop; sum() would change the last digits of norms.
        square = squared_norms(local_shards(grads)).cumsum(0)[-1]
    else:
        square = torch.zeros((), dtype=torch.float64, device=device)
    square = square.to(mesh.device_type)  # offloaded gradients are on the CPU, but the mesh may have only NCCL
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))
    return square


def full_tensor(x: Tensor) -> Tensor:
    """Gather a DTensor in full on every rank, on its mesh's device; return another tensor unchanged. A collective.

    Shards that are offloaded to the CPU are moved first: the mesh may have only NCCL.
    """
    if not isinstance(x, DTensor):
        return x
    moved = cast(DTensor, x.to(x.device_mesh.device_type))
    # On one rank clone, since a gather copies too: the caller must not be able to change the weights.
    return moved.to_local().clone() if x.device_mesh.size() == 1 else moved.full_tensor()


@torch.no_grad()
def scale_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    multiply_(local_shards(p.grad for p in parameters if p.grad is not None), factor)


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; return another tensor unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x
