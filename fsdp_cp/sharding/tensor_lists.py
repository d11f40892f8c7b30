"""Operations on many tensors at a time, for lists of a thousand small ones; the one place that calls torch's own.

``torch._foreach_*`` are private (torch 2.11 to 2.13). On CUDA each is a few kernels for all tensors, on the CPU a loop
in C++: the same operation on each as if it were alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_cp.measure.fake_world import is_fake

_CAST_AT_A_TIME = 1 << 15
"""Elements; in fp64 they fit the second level's cache."""


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of DTensors, sharing their memory; other tensors as they are. Autograd does not see it.

    ``DTensor._local_tensor``: ``to_local`` gives a view of it, at a hundred times the host's time, which for weights,
    gradients and averages of a thousand parameters comes to as much as their update.

    FSDP2 replaces a parameter's local tensor (in ``to_empty``, in loading, at the first forward where it has to pad
    it): call this again for each use, and keep none.
    """
    return [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]


def in_pieces(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Yield slices of neighbors whose ``sizes`` come to at most ``most``, or of one that is larger alone."""
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
        tensors: plain ones on one device, at least one; of any dtypes, empty ones included.

    Raises:
        ValueError: an empty list.
    """
    if not tensors:
        raise ValueError("squared_norms() needs at least one tensor")
    # Do not split fake tensors: each piece is one call, and the planner of a 14B network would make half a million.
    if tensors[0].device.type != "cpu" or is_fake(tensors[0]):
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()
    # There torch casts each tensor as a whole first, to new memory, which takes three times as long as the rest.
    pieces = [x.reshape(-1).split(_CAST_AT_A_TIME) if x.numel() > _CAST_AT_A_TIME else (x,) for x in tensors]
    squares = torch.stack(torch._foreach_norm([piece for each in pieces for piece in each], 2, dtype=torch.float64))
    return torch.stack([x.sum() for x in squares.square().split([len(each) for each in pieces])])


def multiply_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each by ``factor``, in place; an empty list is left as it is.

    On the CPU torch rounds ``factor`` to bf16 for tensors in bf16, which it would not do for one alone.
    """
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def lerp_(tensors: Sequence[Tensor], towards: Sequence[Tensor], weight: float) -> None:
    """Move each tensor to its partner by the share ``weight`` of the way, in place; accept empty lists."""
    if tensors:
        torch._foreach_lerp_(list(tensors), list(towards), weight)
