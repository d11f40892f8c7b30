"""Context-parallel attention: each rank holds some tokens of every head and attends to all tokens.

Ulysses all-to-all, ring attention, or both at once, with any token count, forward, backward and forward-mode
derivative; docs/attention.md is the guide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_cp.attention.arguments import check_arguments, check_split_arguments
from fsdp_cp.attention.kernels import choose_kernel
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.operators import make_ring, ring_attention
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
from fsdp_cp.mesh import ContextGroups, Mesh, context_groups
from fsdp_cp.sequence import gather_tokens, local_token_count, split_tokens

__all__ = ["context_parallel_attention", "cross_attention", "keep_attention_output"]

_ONE_RANK = ContextGroups("", 0, 1, "", 0, 1)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh | DeviceMesh,
    total_tokens: int | Sequence[int] | None = None,
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
            sequence is the concatenation of segments that were split each by itself. By default there are no pads.
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
        ValueError: shapes, dtypes, devices, degrees or a backend that do not fit; before anything is sent.
        RuntimeError: forward-mode AD with gradients enabled, or in a compiled graph.
    """
    groups = context_groups(mesh)
    check_arguments(q, k, v, key_mask, scale, backend)
    check_split_arguments(total_tokens, causal_block, head_groups, joint)
    q, k, v = _autocast((q, k, v))
    if joint is not None:
        if not isinstance(mesh, Mesh):
            raise ValueError("joint text needs a mesh of fsdp_cp.build_mesh, not a DeviceMesh")
        return _with_text(
            q, k, v, _autocast(joint), mesh, total_tokens, scale, backend, key_mask, causal_block, head_groups
        )
    segments = _segments(total_tokens, q, groups)
    _check(q, k, v, key_mask, sum(segments), backend)
    _check_split(q, k, segments, causal_block, groups, head_groups)
    layout = Layout(segments, segments, ulysses=groups.ulysses_size, ring=groups.ring_size, causal_block=causal_block)
    return _attend(q, k, v, key_mask, scale, backend, layout, groups, head_groups)


def cross_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of the rank's own tokens to keys and values that every rank holds in full (text). No communication.

    The gradients of ``k`` and ``v`` are partial sums over the rank's own queries, as every gradient upstream of a
    split is (docs/gradients.md). Forward-mode AD as in :func:`context_parallel_attention`.

    Args:
        q: ``(B, S_local, H, D)``.
        k, v: ``(B, L, Hk, D)``; ``Hk`` divides ``H``.
        key_mask: ``(B, L)`` bool, True where a key may be attended to. A row that may attend to nothing gives 0.
        scale: factor on the logits, ``D ** -0.5`` by default.
        backend: as in :func:`context_parallel_attention`.

    Returns:
        ``(B, S_local, H, D)``.

    Raises:
        ValueError, RuntimeError: as :func:`context_parallel_attention`.
    """
    check_arguments(q, k, v, key_mask, scale, backend)
    q, k, v = _autocast((q, k, v))
    _check(q, k, v, key_mask, None, backend)
    layout = Layout((q.shape[1],), (k.shape[1],), ulysses=1, ring=1)
    return _attend(q, k, v, key_mask, scale, backend, layout, _ONE_RANK, 1)


def keep_attention_output(_ctx, op, *_args, **_kwargs) -> CheckpointPolicy:
    """Selective activation checkpointing: keep the attention's output, recompute everything else.

    For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. Backward then runs the projections and the
    all-to-all again, but not the ring; the output of cross-attention, the same operator, is kept too.
    """
    keep = op == torch.ops.fsdp_cp.ring_attention.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _with_text(q, k, v, joint, mesh, total_tokens, scale, backend, key_mask, causal_block, head_groups):
    """Each rank brings its share of the text into the exchange; the text's output is gathered again."""
    if causal_block is not None:
        raise ValueError("causal_block counts video tokens; it cannot be combined with joint text")
    if isinstance(total_tokens, Sequence):
        raise ValueError(f"with joint text total_tokens is the number of video tokens, not {tuple(total_tokens)}")
    for name, x, video in zip("qkv", joint, (q, k, v), strict=True):
        if x.ndim != 4 or x.shape[0] != video.shape[0] or x.shape[2:] != video.shape[2:]:
            raise ValueError(f"joint {name} {tuple(x.shape)} does not fit {name} {tuple(video.shape)} but for tokens")
        if x.dtype != video.dtype or x.device != video.device:
            raise ValueError(f"joint {name} is {x.dtype} on {x.device}, but {name} is {video.dtype} on {video.device}")
        if x.shape[1] != joint[0].shape[1]:
            raise ValueError(f"joint {name} has {x.shape[1]} tokens, joint q {joint[0].shape[1]}")
    length = joint[0].shape[1]
    total = q.shape[1] * mesh.cp_size if total_tokens is None else total_tokens
    own = [torch.cat([split_tokens(text, mesh), video], dim=1) for text, video in zip(joint, (q, k, v), strict=True)]
    out = context_parallel_attention(
        *own,
        mesh=mesh,
        total_tokens=(length, total),
        scale=scale,
        backend=backend,
        key_mask=key_mask,
        head_groups=head_groups,
    )
    text, video = out.split([local_token_count(length, mesh.cp_size), q.shape[1]], dim=1)
    return video, gather_tokens(text, mesh, total=length, partial_grad=True)


def _attend(q, k, v, mask, scale, backend, layout: Layout, groups: ContextGroups, head_groups: int) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if may_be_dual(q):
        primals, tangents = unpack_duals((q, k, v), "context-parallel attention")
        if tangents is not None:
            _check_kernel(q, mask, backend, jvp=True)
            if groups.cp_size > 1:  # what travels is one buffer
                tangents = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
            ring, inputs = make_ring(layout, groups.ring_rank, groups.ring_group), (*primals, *tangents)
            out, t_out = _exchanged(inputs, lambda x: ring_dual(*x, mask, scale, ring), 2, groups, head_groups)
            return forward_ad.make_dual(out, t_out)
    # Kernels read a head's row as contiguous, and would read the wrong memory otherwise.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))

    def attend(x: Sequence[Tensor]) -> tuple[Tensor]:
        block = layout.causal_block or 0
        sizes = (list(layout.segments), list(layout.keys), block, layout.ulysses, layout.ring)
        return (ring_attention(*x, mask, scale, *sizes, groups.ring_rank, groups.ring_group, backend)[0],)

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
        # Checkpointing stops a recomputation by an exception once it has what backward needs: exchanges that nobody
        # waits for would keep their buffers for ever.
        for x in (*coming, *going):
            finish_exchange(x.detach(), group)
        raise
    return unpack_tokens([finish_exchange(x, group) for x in going], outputs, head_dim)


def _autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What autocast does to scaled_dot_product_attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _segments(total_tokens: int | Sequence[int] | None, q: Tensor, groups: ContextGroups) -> tuple[int, ...]:
    if total_tokens is None:
        return (q.shape[1] * groups.cp_size,)
    return tuple(total_tokens) if isinstance(total_tokens, Sequence) else (int(total_tokens),)


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


def _check_kernel(q: Tensor, mask: Tensor | None, backend: str, jvp: bool = False) -> None:
    """Refuse before anything is sent. A compiled graph finds out when it runs."""
    if not torch.compiler.is_compiling():
        masked = mask is not None
        choose_kernel(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=masked, jvp=jvp)


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
