"""What a sharded network looks like from outside: its norms, its units, and the CUDA setting that its overlap needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_cp.reduce import all_reduce_scalars, local_shard
from fsdp_cp.sharding.state import fsdp_modules, unit_layout
from fsdp_cp.tensor_lists import local_shards, squared_norms

BLACKWELL = (10, 0)
"""Compute capability from which the kernels of a process start in order without CUDA_DEVICE_MAX_CONNECTIONS=1."""


@torch.no_grad()  # with gradients on, every shard would be a call of autograd
def parameter_norms(named: Mapping[str, nn.Parameter]) -> dict[str, tuple[float, float | None]]:
    """Euclidean norm of each parameter and of its gradient, by name; the same on every rank.

    Call it between backward and the optimizer's step, on all ranks. Shards are squared and summed in fp64 where they
    lie, and one all-reduce adds up all of them (the norm of a DTensor is a collective each). Replicas count once.

    Args:
        named: sharded parameters of one mesh, by name. (Of a gathered network ``named_parameters`` gives full copies,
            without the reduced gradients: reshard it before.)

    Returns:
        ``(norm of the weight, norm of the gradient)``; ``None`` for a parameter without a gradient.
    """
    if not named:
        return {}
    first = next(iter(named.values()))
    assert isinstance(first, DTensor), "a root of shard_module"
    mesh, grads = first.device_mesh, [parameter.grad for parameter in named.values()]
    for name, parameter in named.items():
        assert isinstance(parameter, DTensor) and parameter.device_mesh == mesh, f"{name} lies on another mesh"
    weights = squared_norms(local_shards(named.values()))
    gradients, found = torch.zeros_like(weights), torch.tensor([grad is not None for grad in grads])
    given = local_shards(grad for grad in grads if grad is not None)
    if given:
        gradients[found.to(gradients.device)] = squared_norms(given)
    # Offloaded shards lie on the CPU, but their ranks talk over NCCL.
    sums = torch.stack([weights, gradients, found.to(weights)], dim=1).to(mesh.device_type)
    if mesh.size(mesh.ndim - 1) > 1:
        dist.all_reduce(sums, group=mesh.get_group(mesh.ndim - 1))
    return {
        name: (weight**0.5, gradient**0.5 if known else None)
        for name, (weight, gradient, known) in zip(named, sums.tolist(), strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """One FSDP unit: what is gathered and reduced together."""

    name: str
    """Of its module; ``(root)`` for what no other unit holds."""
    parameters: int
    """Elements, of the full tensors."""
    compute_dtype: str
    """Of the gathered parameters."""
    reduce_dtype: str
    """In which gradients are summed; ``-`` for a frozen unit."""
    master_dtype: str
    """Of the shards."""
    gathered_bytes: int
    """Of the gathered parameters, with the rows that pad uneven ones."""
    shard_bytes: int
    """Of this rank's shards, with the rows that pad them: what they take."""
    true_shard_bytes: int
    """Of this rank's shards, without them."""
    empty_ranks: int
    """Ranks on which at least one of its parameters has no row."""


def group_report(model: nn.Module) -> list[UnitReport]:
    """A row for each unit of ``model``, the root first. Communicates nothing, and needs no forward before it.

    Args:
        model: a root that :func:`fsdp_cp.shard_module` made.
    """
    names = {module: name for name, module in model.named_modules()}
    return [
        _unit_report(names[module] or "(root)", policy, shards)
        for module in fsdp_modules(model)
        for policy, shards in unit_layout(module)
    ]


def _unit_report(name: str, policy: MixedPrecisionPolicy, shards: Sequence[tuple[DTensor, int]]) -> UnitReport:
    gathered = padded = true = empty = 0
    compute: set[torch.dtype] = set()
    for shard, elements in shards:
        ranks = shard.device_mesh.size(shard.device_mesh.ndim - 1)
        dtype = policy.param_dtype or shard.dtype
        compute.add(dtype)
        gathered += ranks * elements * dtype.itemsize
        padded += elements * shard.element_size()
        true += shard.to_local().numel() * shard.element_size()
        rows = shard.shape[cast(Shard, shard.placements[-1]).dim]
        chunk = max(1, -(-rows // ranks))  # rows of every rank but the last ones
        empty = max(empty, ranks - -(-rows // chunk))
    trained = any(shard.requires_grad for shard, _ in shards)
    masters = {shard.dtype for shard, _ in shards}
    return UnitReport(
        name=name,
        parameters=sum(shard.numel() for shard, _ in shards),
        compute_dtype=_names(compute),
        reduce_dtype=_names({policy.reduce_dtype} if policy.reduce_dtype else compute) if trained else "-",
        master_dtype=_names(masters),
        gathered_bytes=gathered,
        shard_bytes=padded,
        true_shard_bytes=true,
        empty_ranks=empty,
    )


def _names(dtypes: set[torch.dtype]) -> str:
    return " + ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def report_table(rows: Sequence[UnitReport]) -> str:
    """:func:`group_report` as lines of text, with a line of sums; sizes in MiB."""
    header = ("unit", "parameters", "compute", "reduce", "masters", "gathered", "shard", "unpadded", "empty on")
    lines = [
        (
            row.name,
            f"{row.parameters:,}",
            row.compute_dtype,
            row.reduce_dtype,
            row.master_dtype,
            *(f"{size / 2**20:.2f} MiB" for size in (row.gathered_bytes, row.shard_bytes, row.true_shard_bytes)),
            f"{row.empty_ranks} ranks",
        )
        for row in rows
    ]
    sums = [sum(getattr(row, key) for row in rows) for key in ("gathered_bytes", "shard_bytes", "true_shard_bytes")]
    total = f"{sum(row.parameters for row in rows):,}"
    lines.append(("all", total, "", "", "", *(f"{size / 2**20:.2f} MiB" for size in sums), ""))
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(_table_line(line, widths) for line in (header, *lines))


def _table_line(line: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    words = [
        text.ljust(w) if i in (0, 2, 3, 4) else text.rjust(w)
        for i, (text, w) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(words).rstrip()


def first_non_finite(named: Mapping[str, nn.Parameter], world: DeviceMesh) -> str:
    """The first parameter, in their order, whose gradient is not finite on some rank. Called by all ranks.

    Args:
        named: by name, sharded or not; each rank looks at what it holds.
        world: all ranks, as one axis.

    Returns:
        Its name; ``no parameter`` where all gradients are finite.
    """
    names, found = [], math.inf
    for index, (name, parameter) in enumerate(named.items()):
        names.append(name)
        if found == math.inf and parameter.grad is not None and not local_shard(parameter.grad).isfinite().all():
            found = index
    first = all_reduce_scalars([float(found)], world, dist.ReduceOp.MIN)[0]
    return "no parameter" if first == math.inf else names[int(first)]


def connection_advice(
    device_type: str, capability: tuple[int, int] | None, cp: int, env: Mapping[str, str]
) -> str | None:
    """What to change about ``CUDA_DEVICE_MAX_CONNECTIONS``, in one line; ``None`` where it is well.

    FSDP's gathers and reductions run beside compute only if their streams have hardware queues of their own, which 1
    takes away. Context parallelism before Blackwell would rather have 1: kernels of one queue start in the order of
    their launch, an exchange before the attention that follows it. Megatron-LM demands the one for FSDP, the other for
    TP and CP; where both are in use FSDP's wish counts, since it has more to hide.

    Args:
        device_type: ``cpu`` or ``cuda``.
        capability: of the GPU, ``(9, 0)`` for Hopper; ``None`` on CPU.
        cp: ranks that share a sample's tokens.
        env: environment variables.
    """
    if device_type != "cuda" or capability is None:
        return None
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = env.get(name, "").strip()
    if value and not (value.isdecimal() and 1 <= int(value) <= 32):
        return f"{name}={value} is no number from 1 to 32; unset it (8 is CUDA's default)"
    torn = cp > 1 and tuple(capability) < BLACKWELL
    if value and int(value) == 1:
        note = f"; mesh.cp={cp} alone would want 1 on this GPU, measure both" if torn else ""
        return f"{name}=1 keeps FSDP's communication from running beside compute; unset it (8 is CUDA's default){note}"
    if torn:
        return (
            f"{name} is {value or 'not set'}, which FSDP needs; on this GPU (before Blackwell) the exchanges of"
            f" mesh.cp={cp} may then start behind compute; if a profile shows that, try {name}=1"
        )
    return None
