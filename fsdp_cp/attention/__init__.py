"""Context-parallel attention: each rank holds some tokens of every head and attends to all tokens.

It combines Ulysses all-to-all and ring attention, works with any token count, and has reverse-mode and forward-mode
derivatives. See docs/library.md.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_cp.attention.kernels.choose import check_sparse_backend, choose_dual, choose_kernel
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.mask import BlockMask
from fsdp_cp.attention.operators import attend_in_ring
from fsdp_cp.attention.pass_q import attend_by_passing_queries
from fsdp_cp.attention.ring import make_ring
from fsdp_cp.attention.sparse import MAX_HEAD_DIM, attend_to_tiles
from fsdp_cp.attention.ulysses import with_all_tokens
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import ContextGroups, Mesh, OneRank, check_mesh, context_groups
from fsdp_cp.sequence import gather_tokens, is_count, local_token_count, split_tokens
from fsdp_cp.sequence_lengths import check_order, refuse_split_keys, segments_of
from fsdp_cp.tiles import Sparse

QKV = tuple[Tensor, Tensor, Tensor]


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
    mask: BlockMask | None = None,
    joint: tuple[Tensor, Tensor, Tensor] | None = None,
    sparse: Sparse | None = None,
    gate: Tensor | None = None,
    head_groups: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute self-attention over tokens split over the ``cp`` axis, by Ulysses all-to-all x ring attention.

    One all-to-all among the ``ulysses`` ranks gives each rank all their tokens and a share of the heads
    (DeepSpeed-Ulysses, Jacobs et al. 2023). K and V travel around the ``ring`` (Ring Attention, Liu et al. 2023). A
    second all-to-all brings the output back. The result is differentiable in reverse mode. Forward mode
    (``torch.autograd.forward_ad``) needs ``torch.no_grad()`` and uses the same number of exchanges.

    Args:
        q: ``(B, S_local, H, D)``, the rank's own tokens as :func:`fsdp_cp.sequence.split_tokens` returns them:
            ``S_local = ceil(S / cp)`` positions. The last ranks may have pads at the end.
        k, v: ``(B, S_local, Hk, D)``; ``Hk`` divides ``H`` (grouped-query attention).
        mesh: the mesh, or a ``DeviceMesh`` with axes out of ``("ring", "ulysses")``. ``ulysses`` must divide ``Hk``.
        total_tokens: ``S``, which determines the number of pads. Several numbers, for example ``(text, video)``, mean
            that the local sequence concatenates segments that were split separately. A string is a name from the plan
            and stands for the number of tokens split under that name. The default, in a network of
            :func:`fsdp_cp.context_parallel.parallelize_context`, is the only token count that the plan split into
            ``S_local`` per rank (:mod:`fsdp_cp.sequence_lengths`); elsewhere it is required with ``cp > 1``.
        scale: factor on the logits, ``D ** -0.5`` by default.
        backend: the local kernel: ``"auto"`` (logs its choice and the reason once), ``"cpu_flash"``, ``"flash"``,
            ``"cudnn"``, ``"efficient"``, ``"flash_attn_4"``, ``"reference"``.
        key_mask: ``(B, all tokens)`` bool, True where a key may be attended to; the same on all ranks. It covers the
            segments in order; with ``joint``, first the text, then the video. A row with no allowed key gives 0.
        mask: keys that each query sees (:func:`fsdp_cp.attention.mask.block_causal`, :func:`teacher_forcing
            <fsdp_cp.attention.mask.teacher_forcing>`), counted like ``key_mask``; a query sees a key if both masks
            allow it. Ranks skip keys that none of their queries sees.
        joint: q, k, v of text ``(B, L, H or Hk, D)`` that every rank holds in full. Text and video attend to each
            other, and each text token counts once.
        sparse: tiles of the video, the last segment, and how many of them a tile of queries attends to
            (:mod:`fsdp_cp.attention.sparse`); made by :func:`fsdp_cp.tiles.sparse_tiles`. Earlier segments are dense:
            their queries see all keys, and all queries see their keys. Takes ``k`` with the heads of ``q``, head sizes
            up to 256, ``backend`` ``"auto"`` or ``"reference"``, and no masks or ``joint`` text.
        gate: ``(B, S_local, H, D)``, factor on the coarse attention of ``sparse``; without it that part is left out.
        head_groups: number of groups of heads that are exchanged and attended to one after another, so that one
            group's all-to-all overlaps with another's attention. Must divide the number of heads that a rank gets; has
            no effect without an all-to-all.

    Returns:
        ``(B, S_local, H, D)``, pads 0; with ``joint`` also the text's output ``(B, L, H, D)``, the same on all ranks.
        Backward sums the gradient of the text's output over ranks (docs/gradients.md).

    Raises:
        ValueError: invalid shapes, dtypes, devices, degrees or backend, or missing ``total_tokens``, before any send.
        RuntimeError: forward-mode AD with gradients enabled, or in a compiled graph.
        Exception: a kernel fails. It is raised once this rank's messages in flight have arrived; the other ranks wait
            for this rank until it exits (docs/library.md, "Attention").
    """
    groups = context_groups(mesh)
    q, k, v = check_tensors(q, k, v)
    segments = segments_of(total_tokens, q.shape[1], groups)
    check_split(q, k, segments, head_groups, groups)
    if joint is not None and sparse is not None:
        raise UserError("sparse attention takes no joint text; split the text too, as the first of the total_tokens")
    if joint is not None:
        text = check_joint(joint, (q, k, v), segments, mesh)
        segments = (text[0].shape[1], *segments)
        mesh = cast(Mesh, mesh)
        q, k, v = (torch.cat([split_tokens(x, mesh), video], dim=1) for x, video in zip(text, (q, k, v), strict=True))
    scale = check_options(q, scale, backend, sum(segments), key_mask, mask)
    if sparse is not None or gate is not None:
        masked = key_mask is not None or mask is not None
        gate = _checked_sparse(sparse, gate, q, k, segments, backend, groups, masked)
        assert sparse is not None and joint is None
        return attend_to_tiles(q, k, v, gate, sparse, segments, scale, backend, groups, head_groups)
    layout = Layout(segments, segments, ulysses=groups.ulysses_size, ring=groups.ring_size, mask=mask)
    out = _attend(q, k, v, key_mask, scale, backend, layout, groups, head_groups)
    if joint is None:
        return out
    local_text = local_token_count(segments[0], groups.cp_size)
    out_text, out = out.split([local_text, out.shape[1] - local_text], dim=1)
    return out, gather_tokens(out_text, cast(Mesh, mesh), total=segments[0], partial_grad=True)


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
    total_tokens: int | str | None = None,
    head_groups: int = 1,
) -> Tensor:
    """Compute attention of the rank's own tokens to keys and values of another sequence: text, or audio and video.

    By default every rank holds all keys and values, and nothing is communicated. With ``mesh`` they are split over
    ``cp`` like the queries. Then, with ``total_tokens``, the cheapest way of :func:`cross_way` connects the two
    sequences: the keys are gathered, the queries are gathered and the results merge by their log-sum-exps, or both
    sides go through Ulysses and the ring. A long side is never gathered next to a short one. Without ``total_tokens``
    the keys are gathered, which suits text.

    Without ``mesh``, the gradients of ``k`` and ``v`` are partial sums over the rank's own queries, like every
    gradient upstream of a split (docs/gradients.md). With ``mesh``, the gradients of the rank's own keys are complete.
    Forward-mode AD works as in :func:`context_parallel_attention`.

    Args:
        q: ``(B, S_local, H, D)``.
        k, v: ``(B, L, Hk, D)``; ``Hk`` divides ``H``. With ``mesh`` ``(B, ceil(L / cp), Hk, D)``.
        key_mask: ``(B, L)`` bool, True where a key may be attended to. A row with no allowed key gives 0.
        scale: factor on the logits, ``D ** -0.5`` by default.
        backend, head_groups: as in :func:`context_parallel_attention`.
        mesh: the mesh whose ``cp`` axis the keys are split over.
        total_keys: ``L``, or a name from the plan; the default is that of ``total_tokens``. Without ``mesh``, set it
            to confirm that every rank holds all ``L`` keys, if ``L`` also equals a rank's share of a split sequence.
        total_tokens: number of queries on all ranks, or a name from the plan; only with ``mesh``.

    Returns:
        ``(B, S_local, H, D)``. Raises as :func:`context_parallel_attention` does.
    """
    q, k, v = check_tensors(q, k, v)
    queries, keys, way, groups = q.shape[1], k.shape[1], "keys", OneRank.context
    if mesh is not None:
        check_mesh(mesh)
        (keys,) = segments_of(total_keys, k.shape[1], mesh.context, "k", "total_keys")
        if (local := local_token_count(keys, mesh.cp_size)) != k.shape[1]:
            raise UserError(f"k has {k.shape[1]} local tokens, but total_keys={keys} makes {local}; use split_tokens")
        if total_tokens is not None:
            (queries,) = segments_of(total_tokens, q.shape[1], mesh.context)
            check_split(q, q, (queries,), head_groups, mesh.context)
            check_split(k, k, (keys,), head_groups, mesh.context)
            sizes = (queries * q.shape[2], keys * k.shape[2])
            way = cross_way(*sizes, mesh.context, head_dim=q.shape[3], masked=key_mask is not None)
    elif total_tokens is not None:
        raise UserError(f"total_tokens={total_tokens!r} needs mesh=mesh, over which q and k are split")
    elif total_keys is None:
        refuse_split_keys(q.shape[1], keys)
    elif total_keys != keys:
        raise UserError(f"k has {keys} tokens, but total_keys={total_keys!r}; give mesh=mesh where k is split")
    scale = check_options(q, scale, backend, keys, key_mask)
    if mesh is None or way == "keys":
        queries = q.shape[1]
        if mesh is not None:
            k, v = gather_tokens(torch.stack((k, v)), mesh, keys, 2, partial_grad=True).unbind()
    elif way == "queries":  # to this way the mesh is a ring of all cp ranks
        name = mesh.cp.get_group().group_name
        groups = ContextGroups(name, mesh.context.cp_rank, mesh.cp_size, "", 0, 1)
    else:
        groups = mesh.context
    layout = Layout((queries,), (keys,), ulysses=groups.ulysses_size, ring=groups.ring_size)
    return _attend(q, k, v, key_mask, scale, backend, layout, groups, head_groups, pass_q=way == "queries")


CrossWay = Literal["keys", "queries", "both"]
"""Part of a cross-attention between two split sequences that travels."""


def cross_way(queries: int, keys: int, groups: ContextGroups, *, head_dim: int, masked: bool = False) -> CrossWay:
    """Return the way of :func:`cross_attention` between two split sequences that sends the fewest bytes.

    Counted are forward and backward of a rank, for 16-bit tensors, with n tokens times heads of a side on P = cp ranks,
    U = ulysses and R = ring, in units of ``head_dim`` elements of 16 bits:

    - ``keys``: gather k and v, reduce their gradients: 4 (P - 1) n_k / P.
    - ``queries``: gather q and return the results; in backward gather q, out and its gradient, and reduce dQ in fp32:
      7 (P - 1) n_q / P, and two log-sum-exps.
    - ``both``: Ulysses' exchanges of q, k, v and out, 4 (U - 1) / U (n_q + n_k) / P, and the ring's of K, V and, in
      fp32, of their gradients, 8 (R - 1) n_k / P.

    ``queries`` and ``keys`` are n_q and n_k on all ranks. With ``masked`` keys, queries do not travel.
    """
    p, u, r = groups.cp_size, groups.ulysses_size, groups.ring_size
    costs: dict[CrossWay, float] = {
        "keys": 4 * (p - 1) * keys,
        "both": 4 * (u - 1) / u * (queries + keys) + 8 * (r - 1) * keys,
        "queries": (7 + 4 / head_dim) * (p - 1) * queries,
    }
    if masked:
        del costs["queries"]
    return min(costs, key=lambda way: costs[way])


def _attend(q, k, v, key_mask, scale, backend, layout: Layout, groups: ContextGroups, head_groups, pass_q=False):
    settings = (scale, *layout.as_numbers(), groups.ring_rank, groups.ring_group, backend)
    masks = [] if key_mask is None else [key_mask]
    operator = attend_by_passing_queries if pass_q else attend_in_ring

    def attend(tensors: Sequence[Any], _part: int) -> Sequence[Tensor]:
        if len(tensors) == 3:
            return operator(masks, settings, tensors)
        ring = make_ring(layout, groups.ring_rank, groups.ring_group)
        return operator.forward(tensors, masks, scale, ring, choose_dual(backend, tensors[0]))

    return with_all_tokens((q, k, v), attend, groups, head_groups)


def check_tensors(q: Any, k: Any, v: Any, where: str = "") -> QKV:
    """Check that q, k and v (with ``where`` as a prefix in messages) fit; return them in the dtype of autocast."""
    for name, x in zip("qkv", (q, k, v), strict=True):
        if not isinstance(x, Tensor) or x.ndim != 4 or 0 in x.shape:
            raise UserError(f"{where}{name} must be (batch, tokens, heads, head_dim) with no size 0, got {summary(x)}")
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise UserError(f"{where}{name} must be {q.dtype} on {q.device}, as {where}q is, got {summary(x)}")
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]) or q.shape[2] % k.shape[2]:
        shapes = f"{where}q {tuple(q.shape)}, {where}k {tuple(k.shape)} and {where}v {tuple(v.shape)}"
        raise UserError(f"{shapes} must agree in batch and head_dim, k and v in all, and k's heads must divide q's")
    return q, k, v


def check_options(q: Tensor, scale: Any, backend: Any, keys: int, key_mask: Any = None, mask: Any = None) -> float:
    """Check options of attention to ``keys`` keys; return the scale.

    A compiled graph checks ``backend`` when it runs.
    """
    wanted = (torch.bool, q.device, (q.shape[0], keys))
    is_tensor = isinstance(key_mask, Tensor)
    if key_mask is not None and not (is_tensor and (key_mask.dtype, key_mask.device, key_mask.shape) == wanted):
        raise UserError(f"key_mask must be bool, (batch, keys) = {wanted[2]} on {q.device}, got {summary(key_mask)}")
    if mask is not None and (not isinstance(mask, BlockMask) or mask.tokens != keys):
        described = f"one of {mask.tokens} tokens" if isinstance(mask, BlockMask) else summary(mask)
        raise UserError(f"mask must be a BlockMask of all {keys} tokens, got {described}")
    if scale is not None and (not isinstance(scale, (int, float)) or not math.isfinite(scale)):
        raise UserError(f"scale must be a finite number, or None for head_dim ** -0.5, got {scale!r}")
    if not torch.compiler.is_compiling():
        masked = key_mask is not None
        choose_kernel(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=masked)
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _checked_sparse(
    sparse: Any,
    gate: Any,
    q: Tensor,
    k: Tensor,
    segments: tuple[int, ...],
    backend: str,
    groups: ContextGroups,
    masked: bool,
) -> Tensor | None:
    """Check the arguments of sparse attention; return the gate in the dtype of ``q``."""
    if not isinstance(sparse, Sparse):
        raise UserError(f"sparse must be from sparse_tiles(...), and gate needs it, got a {type(sparse).__name__}")
    if masked:
        raise UserError("sparse attention takes no key_mask and no mask; cut padded text instead")
    if k.shape[2] != q.shape[2] or q.shape[3] > MAX_HEAD_DIM:
        heads = f"{q.shape[2]} and {k.shape[2]} heads of size {q.shape[3]}"
        raise UserError(
            f"sparse attention needs as many heads of k as of q, of size {MAX_HEAD_DIM} at most, got {heads}"
        )
    if sparse.tiles.tokens != segments[-1]:
        grid = f"{sparse.tiles.tokens} tokens of sparse's grid {sparse.tiles.grid}"
        raise UserError(f"the {grid} must be the last of total_tokens={segments}")
    check_sparse_backend(backend)
    check_order(sparse.tiles, groups)
    if gate is None:
        return None
    if not isinstance(gate, Tensor) or (gate.shape, gate.device) != (q.shape, q.device):
        raise UserError(f"gate must be {tuple(q.shape)} on {q.device}, as q is, got {summary(gate)}")
    return gate.to(q.dtype)


def check_split(q: Tensor, k: Tensor, segments: tuple[int, ...], head_groups: Any, groups: ContextGroups) -> None:
    """Check that the rank's token counts match ``segments`` and that the mesh divides the heads."""
    ranks, cp = groups.ulysses_size, groups.cp_size
    local = sum(local_token_count(total, cp) for total in segments)
    for name, x in (("q", q), ("k", k)):
        tokens, heads = x.shape[1:3]
        if tokens != local:
            raise UserError(f"total_tokens={segments} over cp={cp} makes {local} tokens of {name}, got {tokens}")
        if heads % ranks:
            largest = math.gcd(q.shape[2], k.shape[2], cp)
            raise UserError(f"mesh.ulysses={ranks} must divide the {heads} heads of {name}; use a divisor of {largest}")
        if not is_count(head_groups) or heads // ranks % head_groups:
            raise UserError(f"head_groups={head_groups!r} must divide the {heads // ranks} heads of {name} on a rank")


def check_joint(joint: Any, tensors: QKV, segments: tuple[int, ...], mesh: Mesh | DeviceMesh) -> QKV:
    """Check the text that every rank holds in full; return its q, k and v."""
    if not isinstance(joint, (tuple, list)) or len(joint) != 3 or isinstance(mesh, DeviceMesh):
        raise UserError("joint must be q, k and v of the text, (batch, L, heads, head_dim), on a mesh of build_mesh")
    if len(segments) > 1:
        raise UserError("joint text takes no total_tokens of several segments")
    text = check_tensors(joint[0], joint[1], joint[2], where="joint ")
    for name, x, video in zip("qkv", text, tensors, strict=True):
        wanted = (video.shape[0], text[0].shape[1], *video.shape[2:])
        if (x.shape, x.dtype, x.device) != (wanted, video.dtype, video.device):
            raise UserError(f"joint {name} must be {video.dtype} {wanted} on {video.device}, got {summary(x)}")
    return text


def summary(x: Any) -> str:
    """Describe an argument that must be a tensor: its dtype, shape and device, or its type."""
    return f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
