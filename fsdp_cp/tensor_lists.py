"""Operations on many tensors at a time, for lists of a thousand small ones; the one place that calls torch's own.

``torch._foreach_*`` are private but for what ``torch.optim`` documents of them (torch 2.11 to 2.13). On CUDA each is a
few kernels for all tensors, on the CPU a loop in C++: the same operation on each as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Square of the Euclidean norm of each tensor, computed in fp64: ``(n,)``, on the device of the first.

    Args:
        tensors: plain ones on one device, at least one; of any dtypes, empty ones included.

    Raises:
        ValueError: an empty list, whose device nobody knows.
    """
    if not tensors:
        raise ValueError("squared_norms of no tensors has no device; leave the call out")
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square()


def multiply_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each by ``factor``, in place; an empty list is left as it is.

    On the CPU torch rounds ``factor`` to bf16 for tensors in bf16, which it would not do for one alone.
    """
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def lerp_(tensors: Sequence[Tensor], towards: Sequence[Tensor], weight: float) -> None:
    """Move each towards its like by the share ``weight`` of the way, in place; empty lists are left as they are."""
    if tensors:
        torch._foreach_lerp_(list(tensors), list(towards), weight)
