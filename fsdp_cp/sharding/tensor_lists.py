"""Operations on lists of many tensors, such as a thousand small ones. Only this module calls ``torch._foreach_*``.

These functions are private (torch 2.11 to 2.13). On CUDA each runs a few kernels for all tensors, on the CPU a loop in
C++. Each tensor's result is the same as if it were processed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_cp.measure.fake_world import is_fake

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


def in_pieces(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Yield slices of neighbors whose ``sizes`` sum to at most ``most``. A larger item gets a separate slice."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield slice(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the square of the Euclidean norm of each tensor, computed in fp64: ``(n,)``, on the device of the first.

    Args:
        tensors: at least one plain tensor, all on one device; any dtypes, and tensors may be empty.

    Raises:
        ValueError: an empty list.
    """
    if not tensors:
        raise ValueError("squared_norms() needs at least one tensor")
    # Do not split fake tensors: each piece is one call, and the planner of a 14B network would make half a million.
    if tensors[0].device.type != "cpu" or is_fake(tensors[0]):
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()
    # On the CPU torch first casts each whole tensor into new memory, which takes three times as long as the rest.
    pieces = [x.reshape(-1).split(_CAST_AT_A_TIME) if x.numel() > _CAST_AT_A_TIME else (x,) for x in tensors]
    squares = torch.stack(torch._foreach_norm([piece for each in pieces for piece in each], 2, dtype=torch.float64))
    return torch.stack([x.sum() for x in squares.square().split([len(each) for each in pieces])])


def multiply_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor by ``factor`` in place. The list may be empty.

    On the CPU torch rounds ``factor`` to bf16 for bf16 tensors; it does not when multiplying a single tensor.
    """
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def lerp_(tensors: Sequence[Tensor], towards: Sequence[Tensor], weight: float) -> None:
    """Interpolate each tensor in place towards its partner by ``weight``. The lists may be empty."""
    if tensors:
        torch._foreach_lerp_(list(tensors), list(towards), weight)
