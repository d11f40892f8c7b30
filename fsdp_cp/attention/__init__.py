"""Context-parallel attention: each rank holds some tokens of every head and attends to all tokens.

Ulysses all-to-all, ring attention, or both at once, with any token count, forward, backward and forward-mode
derivative; docs/attention.md is the guide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from fsdp_cp.attention.arguments import check_arguments, check_split_arguments, check_total_keys
from fsdp_cp.attention.derivative import choose_dual
from fsdp_cp.attention.failures import Failure, StopRecomputation, raise_in_backward
from fsdp_cp.attention.kernels import choose_kernel
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.operators import attend_in_ring, keep_failure_of_backward, make_ring
from fsdp_cp.attention.ring import ring_dual
from fsdp_cp.attention.ulysses import (
    finish_exchange,
    pack_heads,
    pack_tokens,
    start_exchange,
    unpack_heads,
    unpack_tokens,
)
from fsdp_cp.duals import may_be_dual, unpack_duals
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import ContextGroups, Mesh, check_mesh, context_groups
from fsdp_cp.sequence import gather_tokens, local_token_count, split_own
from fsdp_cp.sequence_lengths import keep_with, known_total, refuse_split_keys, running, segments_of, total_of

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
    """Self-attention over tokens that are split over the ``cp`` axis, by Ulysses all-to-all x ring attention.

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
            ``("encoder_hidden_states", "hidden_states")`` are as many as were split under these names. By default it
            comes from the splits of the forward that runs, of a network of
            :func:`fsdp_cp.context_parallel.parallelize_context`, as the one count that makes ``S_local`` per rank;
            so a shape alone decides, in a block that runs again in backward too
            (:mod:`fsdp_cp.sequence_lengths`). Where none of these forwards runs, there are no pads.
        scale: factor on the logits, ``D ** -0.5`` by default.
        backend: the local kernel: ``"auto"`` (the log says once which and why), ``"cpu_flash"``, ``"flash"``,
            ``"cudnn"``, ``"efficient"``, ``"flash_attn_2"``, ``"flash_attn_3"``, ``"transformer_engine"``,
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
        ValueError: shapes, dtypes, devices, degrees or a backend that do not fit; before anything is sent. A number of
            tokens that is neither given nor to be told: splits with pads, of which none, or more than one, fits.
        RuntimeError: forward-mode AD with gradients enabled, or in a compiled graph.
        What a kernel raises, once the others have what they wait for in this call (:mod:`fsdp_cp.attention.failures`).
    """
    groups = context_groups(mesh)
    check_arguments(q, k, v, key_mask, scale, backend)
    check_split_arguments(total_tokens, causal_block, head_groups, joint)
    q, k, v = _autocast((q, k, v))
    if joint is not None:
        if not isinstance(mesh, Mesh):
            raise ValueError("joint text needs a mesh of fsdp_cp.build_mesh, not a DeviceMesh")
        q, k, v, total_tokens = _with_text((q, k, v), _autocast(joint), mesh, total_tokens, causal_block)
    segments = segments_of(total_tokens, q.shape[1], groups)
    _check(q, k, v, key_mask, sum(segments), backend)
    _check_split(q, k, segments, causal_block, groups, head_groups)
    layout = Layout(segments, segments, ulysses=groups.ulysses_size, ring=groups.ring_size, causal_block=causal_block)
    attend = partial(_attend, q, k, v, key_mask, scale, backend, layout, groups, head_groups)
    out: Tensor | tuple[Tensor, Tensor]
    if joint is None:
        out = attend()
    else:
        assert isinstance(mesh, Mesh)
        out = _text_apart(attend, (q, k, v), segments[0], mesh)
    if (record := running(groups)) is not None:
        keep_with(out, record)
    return out


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
    """Attention of the rank's own tokens to keys and values of another sequence (text).

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
        total_keys: ``L``, or a name of the plan; by default as ``total_tokens`` there. Without ``mesh`` it says that
            every rank does hold all ``L`` keys, where they are as many as its share of a sequence that the plan splits.

    Returns:
        ``(B, S_local, H, D)``.

    Raises:
        ValueError, RuntimeError: as :func:`context_parallel_attention`.
    """
    check_arguments(q, k, v, key_mask, scale, backend)
    check_total_keys(total_keys)
    q, k, v = _autocast((q, k, v))
    if mesh is not None:
        check_mesh(mesh)
        total = known_total(k.shape[1], mesh.context, "k", "total_keys") if total_keys is None else total_keys
        total = total_of(total, mesh.context, "total_keys") if isinstance(total, str) else total
        if local_token_count(total, mesh.context.cp_size) != k.shape[1]:
            raise UserError(
                f"k has {k.shape[1]} local tokens, but total_keys={total} over cp={mesh.context.cp_size} makes"
                f" {local_token_count(total, mesh.context.cp_size)}; use fsdp_cp.sequence.split_tokens"
            )
        _check(q, k, v, key_mask, total, backend)  # before anything is sent
        k, v = gather_tokens(torch.stack((k, v)), mesh, total, 2, partial_grad=True).unbind()
    elif total_keys is None:
        refuse_split_keys(q.shape[1], k.shape[1])
    elif total_keys != k.shape[1]:
        raise UserError(f"k has {k.shape[1]} tokens, but total_keys={total_keys!r}; give mesh=mesh where k is split")
    _check(q, k, v, key_mask, None, backend)
    layout = Layout((q.shape[1],), (k.shape[1],), ulysses=1, ring=1)
    return _attend(q, k, v, key_mask, scale, backend, layout, _ONE_RANK, 1)


def _with_text(
    tensors, joint, mesh: Mesh, total_tokens, causal_block
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """q, k and v with the rank's share of the text in front, and the tokens of text and video."""
    if causal_block is not None:
        raise ValueError("causal_block counts video tokens; it cannot be combined with joint text")
    if isinstance(total_tokens, Sequence) and not isinstance(total_tokens, str):
        raise ValueError(f"with joint text total_tokens is the number of video tokens, not {tuple(total_tokens)}")
    for name, x, video in zip("qkv", joint, tensors, strict=True):
        if x.ndim != 4 or x.shape[0] != video.shape[0] or x.shape[2:] != video.shape[2:]:
            raise ValueError(f"joint {name} {tuple(x.shape)} does not fit {name} {tuple(video.shape)} but for tokens")
        if x.dtype != video.dtype or x.device != video.device:
            raise ValueError(f"joint {name} is {x.dtype} on {x.device}, but {name} is {video.dtype} on {video.device}")
        if x.shape[1] != joint[0].shape[1]:
            raise ValueError(f"joint {name} has {x.shape[1]} tokens, joint q {joint[0].shape[1]}")
    (total,) = segments_of(total_tokens, tensors[0].shape[1], mesh.context)
    q, k, v = (torch.cat([split_own(text, mesh), x], dim=1) for text, x in zip(joint, tensors, strict=True))
    return q, k, v, (joint[0].shape[1], total)


def _text_apart(
    attend: Callable[[], Tensor], tensors: tuple[Tensor, Tensor, Tensor], length: int, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """The video's output, and the text's gathered, of which a rank that fails brings NaN."""
    with Failure() as failure:
        out = failure.attempt(attend)
        if out is None:
            out = torch.full_like(tensors[0], torch.nan)
            if may_be_dual(out) and unpack_duals(tensors, "context-parallel attention")[1] is not None:
                out = forward_ad.make_dual(out, out.clone())
        own = local_token_count(length, mesh.cp_size)
        text, video = out.split([own, out.shape[1] - own], dim=1)
        text = gather_tokens(text, mesh, total=length, partial_grad=True)
    return video, text


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
    failure, reports = Failure(), torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if reports:
        tensors = raise_in_backward(tuple(tensors), failure)

    def attend_packed(received: list[Tensor]) -> Tensor:
        done = attend(unpack_heads(received.pop(), heads, head_dim))
        if reports:
            keep_failure_of_backward(done[0], failure)
        return pack_heads(done, ranks)

    # All exchanges are begun at once and wait their turn; each one back begins as soon as its heads are done.
    coming = [start_exchange(pack_tokens(tensors, ranks, i, head_groups), group) for i in range(head_groups)]
    coming.reverse()
    going: list[Tensor] = []
    with failure:
        try:
            while coming:  # popped, so that a group's buffer goes when its heads are done
                received = [finish_exchange(coming.pop(), group)]
                shape = received[0].shape[:-1]
                done = failure.attempt(attend_packed, received)  # which takes it out: it goes when it is unpacked
                if done is None:
                    done = tensors[0].new_full((*shape, outputs * heads[0] * head_dim), torch.nan)
                going.append(start_exchange(done, group))
                del done
        except StopRecomputation:
            # Exchanges that nobody waits for would keep their buffers for ever.
            for x in (*coming, *going):
                finish_exchange(x.detach(), group)
            raise
        back = [finish_exchange(x, group) for x in going]
    return unpack_tokens(back, outputs, head_dim)


def _autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What autocast does to scaled_dot_product_attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keys: int | None, backend: str) -> None:
    """Before anything is sent; ``keys`` is the number of all keys, ``None`` for those of ``k``."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; no size may be 0")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but q is {q.dtype} on {q.device}; they must agree")
    if k.shape != v.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same shape")
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        raise ValueError(f"k {tuple(k.shape)} and q {tuple(q.shape)} must agree in batch and head_dim")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"the {k.shape[2]} heads of k and v must divide the {q.shape[2]} heads of q")
    if mask is not None:
        if mask.dtype != torch.bool or mask.device != q.device:
            raise ValueError(f"key_mask is {mask.dtype} on {mask.device}; it must be bool on {q.device}")
        wanted = (q.shape[0], k.shape[1] if keys is None else keys)
        if mask.shape != wanted:
            raise ValueError(f"key_mask has shape {tuple(mask.shape)}; it must be (batch, keys) = {wanted}")
    _check_kernel(q, mask, backend)


def _check_kernel(q: Tensor, mask: Tensor | None, backend: str) -> None:
    """Refuse before anything is sent. A compiled graph finds out when it runs."""
    if not torch.compiler.is_compiling():
        choose_kernel(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=mask is not None)


def _check_split(
    q: Tensor, k: Tensor, segments: tuple[int, ...], causal_block: int | None, groups: ContextGroups, head_groups: int
) -> None:
    if not segments or min(segments) < 1:
        raise ValueError(f"total_tokens={segments} must be at least 1")
    local = sum(local_token_count(total, groups.cp_size) for total in segments)
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != local:
            total = segments[0] if len(segments) == 1 else segments
            raise ValueError(
                f"{name} has {x.shape[1]} local tokens, but total_tokens={total} over cp={groups.cp_size} makes"
                f" {local}; use fsdp_cp.sequence.split_tokens"
            )
    if causal_block is not None and (causal_block < 1 or len(segments) > 1):
        raise ValueError(f"causal_block={causal_block} must be at least 1, over one segment (it has {len(segments)})")
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % groups.ulysses_size:
            common = math.gcd(q.shape[2], k.shape[2], groups.cp_size)
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise ValueError(
                f"mesh.ulysses={groups.ulysses_size} does not divide the {x.shape[2]} heads of {name};"
                f" use mesh.ulysses={' or '.join(map(str, fitting))}"
            )
        share = x.shape[2] // groups.ulysses_size
        if head_groups < 1 or share % head_groups:
            raise ValueError(f"head_groups={head_groups} does not divide the {share} heads of {name} that a rank gets")
