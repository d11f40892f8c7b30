"""Ulysses all-to-all: exchange a split of the tokens for a split of the heads, and back.

The source is DeepSpeed-Ulysses (Jacobs et al. 2023, section 3). One exchange carries several tensors, packed along
their features. Starting and waiting are separate calls, so that the exchange of one group of heads overlaps with the
attention of another. In backward, autograd turns each start into a wait and each wait into a start.

Shapes: B batch, s tokens of a rank, P ranks of the Ulysses group, h heads of a tensor, D head size, and
F = sum over the tensors of h D / P.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import forward_ad

from fsdp_cp.attention.kernels.kernel import contiguous_rows
from fsdp_cp.duals import may_be_dual, unpack_duals
from fsdp_cp.mesh import ContextGroups


def _begin(x: Tensor, group: str) -> Tensor:
    """Start to send chunk i to rank i, by a functional collective (private, torch 2.11 to 2.13) that Dynamo traces."""
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


def pack_tokens(tensors: Sequence[Tensor], ranks: int, head_group: int = 0, head_groups: int = 1) -> Tensor:
    """Pack ``(B, s, h, D)`` tensors for :func:`start_exchange`: ``(P, B, s, F)``.

    Rank p gets the ``head_group``-th of ``head_groups`` equal pieces of the p-th of P equal shares of the heads.
    """
    pieces = [
        rearrange(x, "b s (p g h) d -> g p b s h d", p=ranks, g=head_groups)[head_group].flatten(-2) for x in tensors
    ]
    return torch.cat(pieces, dim=-1)


def unpack_heads(x: Tensor, heads: Sequence[int], head_dim: int) -> list[Tensor]:
    """Unpack the exchange of :func:`pack_tokens`: tensors ``(B, P s, heads[i], D)``, all tokens and a share of heads.

    They are views of one buffer; for B = 1 it is the received buffer.
    """
    sizes = [h * head_dim for h in heads]
    return [piece.unflatten(-1, (-1, head_dim)) for piece in rearrange(x, "p b s f -> b (p s) f").split(sizes, dim=-1)]


def pack_heads(tensors: Sequence[Tensor], ranks: int) -> Tensor:
    """Pack ``(B, P s, h, D)`` tensors for the exchange back: ``(P, B, s, F)``."""
    pieces = [rearrange(x, "b (p s) h d -> p b s (h d)", p=ranks) for x in tensors]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def unpack_tokens(received: Sequence[Tensor], count: int, head_dim: int) -> list[Tensor]:
    """Unpack the exchanges of :func:`pack_heads`, one per group of heads, to ``count`` tensors ``(B, s, h, D)``."""
    x = received[0].unsqueeze(0) if len(received) == 1 else torch.stack(list(received))
    x = x.unflatten(-1, (count, -1, head_dim))
    return [rearrange(x[..., i, :, :], "g p b s h d -> b s (p g h) d") for i in range(count)]


def with_all_tokens(
    qkv: Sequence[Tensor],
    attend: Callable[[Sequence[Any], int], Sequence[Tensor]],
    groups: ContextGroups,
    head_groups: int,
) -> Tensor:
    """Exchange tokens for heads, call ``attend`` on all tokens of the rank's heads, and exchange its output back.

    Queries may have another number of tokens than keys and values. ``attend`` gets q, k and v, all with contiguous rows
    of a head, and the number of the head group, from 0 to ``head_groups - 1`` in order; it returns the output. If one
    of q, k and v has a tangent, ``attend`` also gets the three tangents, returns that of the output too, and the result
    is dual. On one rank ``None`` stands for a tangent of 0.
    """
    primals, tangents = unpack_duals(qkv, "attention") if may_be_dual(qkv[0]) else (qkv, None)
    if tangents is None:
        return _exchanged(contiguous_rows(*primals), attend, 1, groups, head_groups)[0]
    if groups.cp_size > 1:  # one buffer travels
        tangents = tuple(torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True))
    return forward_ad.make_dual(*_exchanged(contiguous_rows(*primals, *tangents), attend, 2, groups, head_groups))


def _exchanged(
    tensors: Sequence[Any],
    attend: Callable[[Sequence[Any], int], Sequence[Tensor]],
    outputs: int,
    groups: ContextGroups,
    head_groups: int,
) -> Sequence[Tensor]:
    """Exchange ``tensors``, call ``attend``, and exchange its ``outputs`` back."""
    ranks, group, head_dim = groups.ulysses_size, groups.ulysses_group, tensors[0].shape[-1]
    if ranks == 1:
        return attend(tensors, 0)
    # One exchange carries all tensors of a token count: queries of another sequence than the keys travel apart.
    parts: dict[int, list[int]] = {}
    for index, x in enumerate(tensors):
        parts.setdefault(x.shape[1], []).append(index)
    heads = [x.shape[2] // (ranks * head_groups) for x in tensors]

    def start(head_group: int) -> list[Tensor]:
        packs = ([tensors[i] for i in part] for part in parts.values())
        return [start_exchange(pack_tokens(pack, ranks, head_group, head_groups), group) for pack in packs]

    def finish(exchanges: Sequence[Tensor]) -> list[Tensor]:
        received: dict[int, Tensor] = {}
        for part, x in zip(parts.values(), exchanges, strict=True):
            unpacked = unpack_heads(finish_exchange(x, group), [heads[i] for i in part], head_dim)
            received |= zip(part, unpacked, strict=True)
        return [received[i] for i in range(len(tensors))]

    # Start all exchanges at once. Start each exchange back as soon as its heads are done.
    coming = [start(i) for i in range(head_groups)]
    coming.reverse()
    going: list[Tensor] = []
    try:
        while coming:  # pop, so that a group's buffer is freed when its heads are done
            done = attend(finish(coming.pop()), len(going))
            going.append(start_exchange(pack_heads(done, ranks), group))
            del done
    except BaseException:
        # Exchanges that nobody waits for would keep their buffers forever. The exception may be no error: activation
        # checkpointing stops a recomputation early by raising, on all ranks at the same place.
        for x in (*chain.from_iterable(coming), *going):
            finish_exchange(x.detach(), group)
        raise
    return unpack_tokens([finish_exchange(x, group) for x in going], outputs, head_dim)
