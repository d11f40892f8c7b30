"""Reductions, object exchange over process groups, norms of sharded networks, and operations on lists of tensors.

The object functions also work without a process group. Only this module calls ``torch._foreach_*`` (private, torch
2.11 to 2.13) on weights and gradients. On CUDA each of these runs a few kernels for all tensors, on the CPU a loop in
C++. Each tensor's result is the same as if it were processed alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.runtime.torch_versions import all_gather_single

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

    If ``work`` raises on one rank, all ranks raise, instead of waiting in the next collective: that rank its exception,
    the others a ``UserError`` of the same type or, for any other exception, a ``RuntimeError``.
    """
    failure, note, result = None, None, None
    try:
        result = work()
    except Exception as error:  # raised again below, on every rank
        failure = error
        kind = type(error) if isinstance(error, UserError) else None
        note = (kind, f"{type(error).__name__}: {error}", str(error))
    answers = all_gather_objects((note, result))
    if failure is not None:
        raise failure
    for number, (note, _) in enumerate(answers):
        if note is not None:
            raise note[0](note[2]) if note[0] else RuntimeError(f"rank {number} failed: {note[1]}")
    return [result for _, result in answers]


def on_first_rank(work: Callable[[], T]) -> T:
    """Call ``work`` on rank 0; return its result on every rank, or raise on all ranks if it raises. A collective."""
    return cast(T, on_all_ranks(lambda: work() if rank() == 0 else None)[0])


def gathered(work: Callable[[], T]) -> list[T] | None:
    """Run ``work`` as :func:`on_all_ranks` does; return large results on rank 0 alone, ``None`` elsewhere."""
    made: list[T] = []
    on_all_ranks(lambda: made.append(work()))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return made
    results: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(made[0], results)
    return results


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
    counts as zero, so ranks may lack different gradients. Replicas (hybrid sharding) count once. The parameters are
    DTensors of one mesh, sharded over its last axis.
    """
    mesh: DeviceMesh | None = None
    grads: list[Tensor] = []
    for parameter in parameters:
        assert isinstance(parameter, DTensor), "shard_module has made them"
        mesh = parameter.device_mesh if mesh is None else mesh
        assert parameter.device_mesh is mesh or parameter.device_mesh == mesh, "one mesh per gradient norm"
        assert isinstance(parameter.placements[-1], Shard)
        if parameter.grad is not None:
            grads.append(parameter.grad)
    assert mesh is not None, "no parameters"
    # cumsum() adds in the order of a loop; sum() would change the last digits of norms.
    square = squared_norms(local_shards(grads)).cumsum(0)[-1] if grads else torch.zeros((), dtype=torch.float64)
    return _sum_over_shards(square, mesh)


def _sum_over_shards(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over the last axis of ``mesh``. Offloaded gradients are on the CPU, but the mesh may have only NCCL."""
    x = x.to(mesh.device_type)
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(x, group=mesh.get_group(mesh.ndim - 1))
    return x


def full_tensor(x: Tensor) -> Tensor:
    """Gather a DTensor in full on every rank, on its mesh's device; return another tensor unchanged. A collective."""
    if not isinstance(x, DTensor):
        return x
    moved = cast(DTensor, x.to(x.device_mesh.device_type))  # offloaded shards: the mesh may have only NCCL
    # On one rank clone, since a gather copies too: the caller must not be able to change the weights.
    return moved.to_local().clone() if x.device_mesh.size() == 1 else moved.full_tensor()


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; return another tensor unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


_CAST_AT_A_TIME = 1 << 15
"""Number of elements that are cast to fp64 together; they fit the second-level cache."""


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of DTensors, which share their memory, and other tensors unchanged, without autograd.

    The function reads ``DTensor._local_tensor``. ``to_local`` returns a view of it but takes a hundred times the host
    time, which for weights, gradients and averages of a thousand parameters is as long as their update.

    FSDP2 replaces a parameter's local tensor (in ``to_empty``, in loading, and in the first forward if it must pad).
    Call this for each use and do not keep the result.
    """
    return [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the squared norms of at least one plain tensor of one device, in fp64: ``(n,)``. Some may be empty."""
    # Do not split fake tensors: each piece is one call, and the planner of a 14B network would make half a million.
    if tensors[0].device.type != "cpu" or isinstance(tensors[0], FakeTensor):
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()
    # On the CPU torch first casts each whole tensor into new memory, which takes three times as long as the rest.
    pieces = [x.reshape(-1).split(_CAST_AT_A_TIME) if x.numel() > _CAST_AT_A_TIME else (x,) for x in tensors]
    squares = torch.stack(torch._foreach_norm([piece for split in pieces for piece in split], 2, dtype=torch.float64))
    return torch.stack([x.sum() for x in squares.square().split([len(split) for split in pieces])])


def lerp_(tensors: Sequence[Tensor], towards: Sequence[Tensor], weight: float) -> None:
    """Interpolate each tensor in place towards its partner by ``weight``. The lists may be empty."""
    if tensors:
        torch._foreach_lerp_(list(tensors), list(towards), weight)


@torch.no_grad()  # with gradients enabled, every shard would cost an autograd call
def parameter_norms(named: Mapping[str, nn.Parameter]) -> dict[str, tuple[float, float | None]]:
    """Return the Euclidean norm of each parameter and of its gradient, by name; the same on every rank.

    All ranks call it between backward and the optimizer's step, on a resharded network: parameters of a gathered one
    are full copies without the reduced gradients. Each rank sums the squares of its shards in fp64, and one all-reduce
    adds all of them. Replicas count once. A missing gradient has norm ``None``.
    """
    if not named:
        return {}
    first = next(iter(named.values()))
    assert isinstance(first, DTensor), "a root of shard_module"
    mesh, grads = first.device_mesh, [parameter.grad for parameter in named.values()]
    for name, parameter in named.items():
        assert isinstance(parameter, DTensor) and parameter.device_mesh == mesh, f"{name} lies on another mesh"
    weights = squared_norms(local_shards(named.values()))
    gradients, has_grad = torch.zeros_like(weights), torch.tensor([grad is not None for grad in grads])
    shards = local_shards(grad for grad in grads if grad is not None)
    if shards:
        gradients[has_grad.to(gradients.device)] = squared_norms(shards)
    sums = _sum_over_shards(torch.stack([weights, gradients, has_grad.to(weights)], dim=1), mesh)
    return {
        name: (weight**0.5, gradient**0.5 if known else None)
        for name, (weight, gradient, known) in zip(named, sums.tolist(), strict=True)
    }


def first_non_finite(named: Mapping[str, nn.Parameter], world: DeviceMesh) -> str:
    """Return the first parameter with a gradient that is not finite on some rank, or ``no parameter``. A collective."""
    grads = ((index, parameter.grad) for index, parameter in enumerate(named.values()))
    broken = (index for index, grad in grads if grad is not None and not local_shard(grad).isfinite().all())
    first = all_reduce_scalars([float(next(broken, math.inf))], world, dist.ReduceOp.MIN)[0]
    return "no parameter" if first == math.inf else list(named)[int(first)]
