"""Ulysses all-to-all: exchange a split of the tokens for a split of the heads, and back.

The source is DeepSpeed-Ulysses (Jacobs et al. 2023, section 3). One exchange carries several tensors, packed along
their features. Starting and waiting are separate calls, so that the exchange of one group of heads overlaps with the
attention of another. In backward, autograd turns each start into a wait and each wait into a start.

Shapes: B batch, s tokens of a rank, P ranks of the Ulysses group, h heads of a tensor, D head size, and
F = sum over the tensors of h D / P.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor


def _begin(x: Tensor, group: str) -> Tensor:
    """Start to send chunk i of the first dimension to rank i. Read the result only after :func:`_finish`.

    It is a functional collective (``torch.ops._c10d_functional``, private, torch 2.11 to 2.13), which Dynamo can trace.
    """
    sizes = [1] * x.shape[0]
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), sizes, sizes, group)


def _finish(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


class _Start(torch.autograd.Function):
    """Start of an exchange. It has no ``jvp``, so forward-mode AD raises here: attention unpacks tangents earlier."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        return _begin(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _finish(grad), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _finish(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        coming = _begin(grad, ctx.group)
        # Anomaly mode reads this gradient before the next node waits for it: without a wait, uninitialized memory.
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            _finish(coming)
        return coming, None


def start_exchange(x: Tensor, group: str) -> Tensor:
    """Start to send ``x[i]`` to rank i of the group. Pass the result to :func:`finish_exchange`."""
    # torch.func transforms (such as torch.func.jvp) refuse an autograd.Function without jvp even without gradients.
    return _Start.apply(x, group) if torch.is_grad_enabled() else _begin(x, group)


def finish_exchange(x: Tensor, group: str) -> Tensor:
    """Wait for an exchange; ``x[i]`` of the result comes from rank i."""
    return _Wait.apply(x, group) if torch.is_grad_enabled() else _finish(x)


def pack_tokens(tensors: Sequence[Tensor], ranks: int, part: int = 0, parts: int = 1) -> Tensor:
    """Pack ``(B, s, h, D)`` tensors for :func:`start_exchange`: ``(P, B, s, F)``.

    Rank p gets the ``part``-th of ``parts`` equal pieces of the p-th of P equal shares of the heads.
    """
    pieces = [rearrange(x, "b s (p g h) d -> g p b s h d", p=ranks, g=parts)[part].flatten(-2) for x in tensors]
    return torch.cat(pieces, dim=-1)


def unpack_heads(x: Tensor, heads: Sequence[int], head_dim: int) -> list[Tensor]:
    """Unpack the exchange of :func:`pack_tokens`: tensors ``(B, P s, heads[i], D)``, all tokens and a share of heads.

    On CUDA they are views of one buffer; for B = 1 it is the received buffer. On the CPU they are copies in which the
    rows of a head are contiguous: flash attention in fp32 is up to 9 % slower on strided rows.
    """
    sizes = [h * head_dim for h in heads]
    if x.device.type == "cpu":
        parts = (rearrange(part, "p b s (h d) -> b h (p s) d", d=head_dim) for part in x.split(sizes, dim=-1))
        return [part.contiguous().transpose(1, 2) for part in parts]
    return [part.unflatten(-1, (-1, head_dim)) for part in rearrange(x, "p b s f -> b (p s) f").split(sizes, dim=-1)]


def pack_heads(tensors: Sequence[Tensor], ranks: int) -> Tensor:
    """Pack ``(B, P s, h, D)`` tensors for the exchange back: ``(P, B, s, F)``."""
    pieces = [rearrange(x, "b (p s) h d -> p b s (h d)", p=ranks) for x in tensors]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def unpack_tokens(parts: Sequence[Tensor], count: int, head_dim: int) -> list[Tensor]:
    """Unpack the exchanges of :func:`pack_heads`, one per part of the heads, to ``count`` tensors ``(B, s, h, D)``."""
    x = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))
    x = x.unflatten(-1, (count, -1, head_dim))
    return [rearrange(x[..., i, :, :], "g p b s h d -> b s (p g h) d") for i in range(count)]
