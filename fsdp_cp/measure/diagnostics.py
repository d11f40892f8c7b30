"""Norms of weights and gradients of a sharded network, and the first gradient that is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_cp.reduce import all_reduce_scalars, local_shard, local_shards, squared_norms


@torch.no_grad()  # with gradients enabled, every shard would cost an autograd call
def parameter_norms(named: Mapping[str, nn.Parameter]) -> dict[str, tuple[float, float | None]]:
    """Return the Euclidean norm of each parameter and of its gradient, by name; the same on every rank.

    All ranks call it between backward and the optimizer's step. Each rank sums the squares of its shards in fp64, and
    one all-reduce adds all of them (the norm of a DTensor would be one collective per tensor). Replicas count once.

    Args:
        named: sharded parameters of one mesh, by name. Reshard a gathered network first: its ``named_parameters`` are
            full copies without the reduced gradients.

    Returns:
        ``(norm of the weight, norm of the gradient)`` by name; the second is ``None`` without a gradient.
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
    # Offloaded shards are on the CPU, but their mesh may have only NCCL.
    sums = torch.stack([weights, gradients, has_grad.to(weights)], dim=1).to(mesh.device_type)
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(sums, group=mesh.get_group(mesh.ndim - 1))
    return {
        name: (weight**0.5, gradient**0.5 if known else None)
        for name, (weight, gradient, known) in zip(named, sums.tolist(), strict=True)
    }


def first_non_finite(named: Mapping[str, nn.Parameter], world: DeviceMesh) -> str:
    """Return the name of the first parameter whose gradient is not finite on some rank. Called by all ranks.

    Args:
        named: parameters by name, sharded or not. Each rank checks its shards.
        world: mesh of all ranks, with one axis.

    Returns:
        The name; ``no parameter`` if all gradients are finite.
    """
    broken = (
        index
        for index, parameter in enumerate(named.values())
        if parameter.grad is not None and not local_shard(parameter.grad).isfinite().all()
    )
    first = all_reduce_scalars([float(next(broken, math.inf))], world, dist.ReduceOp.MIN)[0]
    return "no parameter" if first == math.inf else list(named)[int(first)]
