"""Context-parallel attention: each rank holds some tokens of every head and attends to all tokens.

Ulysses all-to-all, ring attention, or both at once, with any token count, forward, backward and forward-mode
derivative; docs/library.md is the guide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from fsdp_cp.attention.arguments import check_cross_attention, check_self_attention
from fsdp_cp.attention.duals import may_be_dual, unpack_duals
from fsdp_cp.attention.kernels.derivative import choose_dual
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.operators import attend_in_ring, make_ring
from fsdp_cp.attention.ring import ring_dual
from fsdp_cp.attention.ulysses import (
    finish_exchange,
    pack_heads,
    pack_tokens,
    start_exchange,
    unpack_heads,
    unpack_tokens,
)
from fsdp_cp.mesh import ContextGroups, Mesh, context_groups
from fsdp_cp.sequence import gather_tokens, local_token_count, split_tokens

__all__ = ["context_parallel_attention", "cross_attention"]

_ONE_RANK = ContextGroups("", 0, 1, "", 0, 1)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh | DeviceMesh,
    total_tokens: int | str | Sequence[int | str] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    key_mask: Tensor | None = None,
    causal_block: int | None = None,
    joint: tuple[Tensor, Tensor, Tensor] | None = None,
    head_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute self-attention over tokens split over the ``cp`` axis, by Ulysses all-to-all x ring attention.

    Among the ``ulysses`` ranks one all-to-all gives each all their tokens and a share of the heads (DeepSpeed-Ulysses,
    Jacobs et al. 2023); around the ``ring`` K and V travel (Ring Attention, Liu et al. 2023); a second all-to-all
    brings the output back. Differentiable in reverse mode; in forward mode (``torch.autograd.forward_ad``) under
    ``torch.no_grad()``, with the same number of exchanges.

    Args:
        q: ``(B, S_local, H, D)``, the rank's own tokens as :func:`fsdp_cp.sequence.split_tokens` makes them:
            ``S_local = ceil(S / cp)`` positions, of which the last ranks' last ones may be pads.
        k, v: ``(B, S_local, Hk, D)``; ``Hk`` divides ``H`` (grouped-query attention).
        mesh: the mesh, or a ``DeviceMesh`` with axes out of ``("ring", "ulysses")``. ``ulysses`` must divide ``Hk``.
        total_tokens: ``S``, which says how many pads there are. Several numbers, e.g. ``(text, video)``: the local
            sequence is the concatenation of segments that were split each by itself. A string is a name of the plan:
            ``("encoder_hidden_states", "hidden_states")`` are as many as were split under these names. Inside a
            network of :func:`fsdp_cp.context_parallel.parallelize_context` the default is the one count of its splits
            that makes ``S_local`` per rank (:mod:`fsdp_cp.context.sequence_lengths`); elsewhere it is required with
            ``cp > 1``.
        scale: factor on the logits, ``D ** -0.5`` by default.
        backend: the local kernel: ``"auto"`` (the log says once which and why), ``"cpu_flash"``, ``"flash"``,
            ``"cudnn"``, ``"efficient"``, ``"flash_attn_3"``, ``"flash_attn_4"``, ``"transformer_engine"``,
            ``"reference"``.
        key_mask: ``(B, all tokens)`` bool, True where a key may be attended to; over the text (with ``joint``) or the
            segments in their order, then the video; the same on all ranks. A row that may attend to nothing gives 0.
        causal_block: tokens of a block (frames x tokens per frame); a query attends to its own block and to earlier
            ones (block-causal, as causal video students need). Keys that a rank may not see are not visited.
        joint: q, k, v of text ``(B, L, H or Hk, D)`` that every rank holds in full; text and video attend to each
            other, and each text token takes part once.
        head_groups: exchange and attend to the heads in this many groups, so that the all-to-all of one runs
            during the attention of another. Divides the heads that a rank gets; without an all-to-all it does nothing.

    Returns:
        ``(B, S_local, H, D)``, pads 0; with ``joint`` also the text's output ``(B, L, H, D)``, the same on all ranks.
        Its gradient is a partial sum on each rank (docs/gradients.md), so backward sums it over them.

    Raises:
        ValueError: shapes, dtypes, devices, degrees or a backend that do not fit, or ``total_tokens`` that is missing;
            before anything is sent.
        RuntimeError: forward-mode AD with gradients enabled, or in a compiled graph.
        What a kernel raises, once this rank's messages in flight have arrived. The other ranks wait for this rank until
            it ends (docs/library.md, "Failures").
    """
    groups = context_groups(mesh)
    (q, k, v), text, segments = check_self_attention(
        q, k, v, mesh=mesh, groups=groups, total_tokens=total_tokens, scale=scale, backend=backend, key_mask=key_mask,
        causal_block=causal_block, joint=joint, head_groups=head_groups,
    )  # fmt: skip
    if text is not None:
        assert isinstance(mesh, Mesh)
        q, k, v = (torch.cat([split_tokens(x, mesh), video], dim=1) for x, video in zip(text, (q, k, v), strict=True))
    layout = Layout(segments, segments, ulysses=groups.ulysses_size, ring=groups.ring_size, causal_block=causal_block)
    out = _attend(q, k, v, key_mask, scale, backend, layout, groups, head_groups)
    if text is None:
        return out
    assert isinstance(mesh, Mesh)
    local_text = local_token_count(segments[0], mesh.cp_size)
    out_text, out = out.split([local_text, out.shape[1] - local_text], dim=1)
    return out, gather_tokens(out_text, mesh, total=segments[0], partial_grad=True)


def cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    mesh: Mesh | None = None,
    total_keys: int | str | None = None,
) -> Tensor:
    """Compute attention of the rank's own tokens to keys and values of another sequence (text).

    By default every rank holds these in full, and there is no communication. With ``mesh`` they are split over ``cp``
    like the queries, though with a number of tokens of their own: one all-gather of both, and one reduce-scatter in
    backward. That suits text; to a long sequence attend with :func:`context_parallel_attention`.

    The gradients of ``k`` and ``v`` are partial sums over the rank's own queries, as every gradient upstream of a
    split is (docs/gradients.md); of split keys they are complete, for the rank's own. Forward-mode AD as in
    :func:`context_parallel_attention`.

    Args:
        q: ``(B, S_local, H, D)``.
        k, v: ``(B, L, Hk, D)``; ``Hk`` divides ``H``. With ``mesh`` ``(B, ceil(L / cp), Hk, D)``.
        key_mask: ``(B, L)`` bool, True where a key may be attended to. A row that may attend to nothing gives 0.
        scale: factor on the logits, ``D ** -0.5`` by default.
        backend: as in :func:`context_parallel_attention`.
        mesh: the mesh whose ``cp`` axis the keys are split over.
        total_keys: ``L``, or a name of the plan; by default as ``total_tokens`` there. Without ``mesh`` it confirms
            that every rank holds all ``L`` keys, where these are as many as its share of a sequence of the plan.

    Returns:
        ``(B, S_local, H, D)``.

    Raises:
        ValueError, RuntimeError: as :func:`context_parallel_attention`.
    """
    (q, k, v), keys = check_cross_attention(
        q, k, v, mesh=mesh, total_keys=total_keys, scale=scale, backend=backend, key_mask=key_mask
    )
    if mesh is not None:
        k, v = gather_tokens(torch.stack((k, v)), mesh, keys, 2, partial_grad=True).unbind()
    layout = Layout((q.shape[1],), (keys,), ulysses=1, ring=1)
    return _attend(q, k, v, key_mask, scale, backend, layout, _ONE_RANK, 1)


def _attend(q, k, v, mask, scale, backend, layout: Layout, groups: ContextGroups, head_groups: int) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if may_be_dual(q):
        primals, tangents = unpack_duals((q, k, v), "context-parallel attention")
        if tangents is not None:
            attention_dual = choose_dual(backend, primals[0], groups)
            if groups.cp_size > 1:  # what travels is one buffer
                pairs = zip(primals, tangents, strict=True)
                tangents = tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)
            ring = make_ring(layout, groups.ring_rank, groups.ring_group)

            def attend_dual(x: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
                q, k, v, t_q, t_k, t_v = x
                return ring_dual(q, k, v, t_q, t_k, t_v, mask, scale, ring, attention_dual)

            # None among them on one rank alone, where they are handed on as they are.
            inputs = cast("tuple[Tensor, ...]", (*primals, *tangents))
            out, t_out = _exchanged(inputs, attend_dual, 2, groups, head_groups)
            return forward_ad.make_dual(out, t_out)
    # Kernels read a head's row as contiguous, and would read the wrong memory otherwise.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))

    def attend(x: Sequence[Tensor]) -> tuple[Tensor]:
        block = layout.causal_block or 0
        sizes = (list(layout.segments), list(layout.keys), block, layout.ulysses, layout.ring)
        return (attend_in_ring(*x, mask, scale, *sizes, groups.ring_rank, groups.ring_group, backend),)

    return _exchanged((q, k, v), attend, 1, groups, head_groups)[0]


def _exchanged(
    tensors: Sequence[Tensor],
    attend: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    outputs: int,
    groups: ContextGroups,
    head_groups: int,
) -> Sequence[Tensor]:
    """Give every rank all tokens of its share of the heads, call ``attend`` on them, and bring its outputs back."""
    ranks, group, head_dim = groups.ulysses_size, groups.ulysses_group, tensors[0].shape[-1]
    if ranks == 1:
        return attend(tensors)
    heads = [x.shape[2] // (ranks * head_groups) for x in tensors]
    # All exchanges are begun at once and wait their turn; each one back begins as soon as its heads are done.
    coming = [start_exchange(pack_tokens(tensors, ranks, i, head_groups), group) for i in range(head_groups)]
    coming.reverse()
    going: list[Tensor] = []
    try:
        while coming:  # popped, so that a group's buffer goes when its heads are done
            done = attend(unpack_heads(finish_exchange(coming.pop(), group), heads, head_dim))
            going.append(start_exchange(pack_heads(done, ranks), group))
            del done
    except BaseException:
        # Exchanges that nobody waits for would keep their buffers for ever. An exception here may also be how
        # checkpointing ends a recomputation, on all ranks at the same place.
        for x in (*coming, *going):
            finish_exchange(x.detach(), group)
        raise
    return unpack_tokens([finish_exchange(x, group) for x in going], outputs, head_dim)
