"""The Ulysses all-to-all: exchange a split of the tokens for a split of the heads, and back.

Shapes: B batch, S tokens of the full sequence, H heads, D head size, P ranks of the Ulysses group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    """Chunk i of the first dimension goes to rank i. Its own inverse, hence its own backward.

    It has no ``jvp``, so that forward-mode AD raises here instead of losing the tangent.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllToAll.apply(grad, ctx.group), None


def tokens_to_heads(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Each ``(B, S/P, H, D)`` to ``(B, S, H/P, D)``, all in one all-to-all."""
    size = dist.get_world_size(group)
    x = rearrange(torch.stack(tensors), "n b s (p h) d -> p n b s h d", p=size)
    return rearrange(_AllToAll.apply(x, group), "p n b s h d -> n b (p s) h d").unbind(0)


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``(B, S, H/P, D)`` to ``(B, S/P, H, D)``."""
    size = dist.get_world_size(group)
    x = rearrange(x, "b (p s) h d -> p b s h d", p=size)
    return rearrange(_AllToAll.apply(x, group), "p b s h d -> b s (p h) d")
