"""Forward-mode tangents at the entry of an operator that communicates.

Collectives and opaque operators drop tangents silently. So an operator takes its arguments apart here, sends primals
and tangents in one exchange, and puts the results together with ``torch.autograd.forward_ad.make_dual``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def may_be_dual() -> bool:
    """Are we inside ``forward_ad.dual_level()`` (or ``torch.func.jvp``)?

    ``forward_ad._current_level`` is private (torch 2.11 to 2.13); Dynamo guards on it, so that a graph compiled without
    tangents is not used again where there may be some.
    """
    return forward_ad._current_level >= 0


# A compiled graph would lose the tangent between an operator's parts without a word: functions that take duals apart
# carry this, so that Dynamo leaves them alone, or refuses with fullgraph=True.
eager_only = torch.compiler.disable(reason="forward-mode AD through context parallelism runs in eager")


def unpack_duals(tensors: Sequence[Tensor], operator: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Primals and tangents of an operator's arguments; zeros for a tangent that is missing, ``None`` if all are.

    Raises:
        RuntimeError: with gradients enabled (forward over reverse is not supported).
    """
    duals = [forward_ad.unpack_dual(x) for x in tensors]
    if all(dual.tangent is None for dual in duals):
        return tuple(tensors), None
    if torch.is_grad_enabled():
        raise RuntimeError(f"forward-mode AD through {operator} has no backward; compute it under torch.no_grad()")
    tangents = [torch.zeros_like(d.primal) if d.tangent is None else d.tangent for d in duals]
    return tuple(dual.primal for dual in duals), tuple(tangents)
