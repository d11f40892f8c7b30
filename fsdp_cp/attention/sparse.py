"""Video sparse attention (VSA, Zhang et al. 2025) on any mesh: each tile of queries attends to a few tiles of keys.

A tile is a box of neighboring tokens. From means over tiles, a coarse attention scores all tiles for each query tile
and head. The fine attention goes to the tokens of the tiles with the highest scores. The result is ``fine + gate *
coarse``, where the coarse output is the same for all tokens of a query tile. The choice is a constant in backward.

On a mesh, no rank holds whole tiles (:mod:`fsdp_cp.attention.pieces`):

1. Ulysses' all-to-all gives a rank all tokens of its ring rank and a share of the heads, as in dense attention.
2. Each ring rank sums q, k and v over its pieces. One all-gather over the ring gives every rank the means of all tiles;
   its backward is a reduce-scatter. Each rank scores the tiles for its own query pieces.
3. K and V travel around the ring as in dense attention. A rank attends to the chosen pieces of each chunk, and merges.
4. The coarse output goes back as tiles, by an all-gather of the heads. The gate never travels.

Sent per rank, in addition to dense attention, with P slots for pieces (about tokens / 64 / ring), B samples, H heads,
head size D: forward ``24 (ring - 1) B P H / ulysses D`` bytes of sums in fp64 and ``4 (ulysses - 1) B P H / ulysses D``
of coarse output; backward ``12 (ring - 1) B P H / ulysses D`` and again the latter. The derivative sends twice the
forward. For fp64 inputs, 4 and 12 are 8 and 24.

Shapes: B batch, S positions of the rank's chunk with pads, H heads, D head size, P slots for pieces, T tiles.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from fsdp_cp.attention.kernels.choose import choose_sparse
from fsdp_cp.attention.kernels.kernel import Kernel, accumulation_dtype, attention_dual, product
from fsdp_cp.attention.layout import Layout, make_layout
from fsdp_cp.attention.operators import AttentionOperator, attend_in_ring
from fsdp_cp.attention.pieces import Choice, counts, cut, pack_bits
from fsdp_cp.attention.ring import Ring, make_ring, ring_backward, ring_dual, ring_forward
from fsdp_cp.attention.ulysses import with_all_tokens
from fsdp_cp.duals import may_be_dual, unpack_duals
from fsdp_cp.measure.fake_world import device_type, real_tensors
from fsdp_cp.mesh import ContextGroups, group_by_name
from fsdp_cp.runtime.torch_versions import all_gather_single, reduce_scatter_single
from fsdp_cp.tiles import Sparse

MAX_HEAD_DIM = 256
"""Largest head size for which :func:`exact_scores` is exact."""
_SLICES = 4
"""Number of slices of 8 bits, into which :func:`exact_scores` cuts a number."""
_ROWS = 256
"""Number of query pieces that are scored at a time."""


class _Call(NamedTuple):
    """One call of :func:`attend_to_tiles`."""

    layout: Layout
    groups: ContextGroups
    scale: float
    backend: str
    kept: Tensor
    coarse: list[Tensor] | None
    """Coarse output of each head group, ``(B, P, H, D)``; in a dual attention, tangents follow along the batch."""

    @property
    def place(self) -> tuple[Any, ...]:
        """Arguments of the operators on means: the layout's numbers and the rank in the ring."""
        segments, _, _, tiles, ulysses, ring = self.layout.as_numbers()
        return segments, tiles, ulysses, ring, self.groups.ring_rank


def attend_to_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    sparse: Sparse,
    segments: tuple[int, ...],
    scale: float,
    backend: str,
    groups: ContextGroups,
    head_groups: int,
) -> Tensor:
    """Compute sparse attention of the rank's own tokens, all tensors ``(B, S_local, H, D)`` and checked.

    It is the part of :func:`fsdp_cp.attention.context_parallel_attention` for ``sparse``.
    """
    layout = Layout(segments, segments, ulysses=groups.ulysses_size, ring=groups.ring_size, tiles=sparse.tiles)
    call = _Call(layout, groups, scale, backend, sparse.kept, None if gate is None else [])
    primals, tangents = unpack_duals((q, k, v), "sparse attention") if may_be_dual(q) else ((q, k, v), None)
    if tangents is None:
        (out,) = with_all_tokens(primals, partial(_attend, call), 1, groups, head_groups)
    else:
        moved = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
        out = forward_ad.make_dual(
            *with_all_tokens((*primals, *moved), partial(_attend_dual, call), 2, groups, head_groups)
        )
    if call.coarse is None:
        return out
    rows = tile_rows(torch.cat(call.coarse, dim=2), q.dtype, *call.place, groups.ulysses_rank, groups.ulysses_group)
    if tangents is not None:
        rows = forward_ad.make_dual(*(x.clone() for x in rows.chunk(2)))
    return out + gate * rows


def _attend(call: _Call, qkv: Sequence[Tensor], _part: int) -> list[Tensor]:
    """Attend from all tokens of the ring rank with a share of the heads."""
    means = tile_means(*qkv, *call.place, call.groups.ring_group)
    if call.coarse is not None:
        rounded = [x.to(accumulation_dtype(qkv[0].dtype)) for x in means]
        settings = (call.scale, *_of_means(means).as_numbers(), 0, "", call.backend)
        call.coarse.extend(attend_in_ring(None, settings, rounded))
    further = [means[0].detach(), means[1].detach(), call.kept]
    settings = (call.scale, *call.layout.as_numbers(), call.groups.ring_rank, call.groups.ring_group, call.backend)
    return attend_to_chosen(further, settings, qkv)


def _attend_dual(call: _Call, duals: Sequence[Tensor], _part: int) -> tuple[Tensor, Tensor]:
    """Attend with tangents; ``duals`` are q, k, v and their tangents."""
    both = (torch.cat(pair) for pair in zip(duals[:3], duals[3:], strict=True))  # means are linear
    found = tile_means(*both, *call.place, call.groups.ring_group)
    means, t_means = zip(*(x.chunk(2) for x in found), strict=True)
    if call.coarse is not None:
        rounded = [x.to(accumulation_dtype(duals[0].dtype)) for x in (*means, *t_means)]
        alone = make_ring(_of_means(means), 0, "")
        call.coarse.append(torch.cat(ring_dual(rounded, None, call.scale, alone, attention_dual)))
    ring = make_ring(call.layout, call.groups.ring_rank, call.groups.ring_group)
    choice = choose_tiles(means[0], means[1], call.kept, call.scale, ring)
    assert call.layout.tiles is not None
    kernels = choose_sparse(call.backend, duals[0], call.layout.tiles.width)
    return ring_dual(duals, choice, call.scale, ring, kernels.dual)


def _of_means(means: Sequence[Tensor]) -> Layout:
    """Return the layout of attention of query means to all means, on one rank."""
    return Layout((means[0].shape[1],), (means[1].shape[1],), ulysses=1, ring=1)


# --- the choice ---


def choose_tiles(q: Tensor, k: Tensor, kept: Tensor, scale: float, ring: Ring) -> Choice:
    """Choose the tiles of each query piece: those of dense segments, and ``kept`` of the video.

    The video tiles with the highest scores are chosen; of equal scores, the first. Pieces of dense segments choose all
    tiles. A score that is NaN chooses nothing, and shows in the coarse output.

    Args:
        q: means of the rank's query pieces, ``(B, P, H, D)``, fp64.
        k: means of all tiles, ``(B, T, H, D)``, fp64.
    """
    pieces = cut(ring.layout, q.device)
    own, dense, video = pieces.of_rank[ring.rank], pieces.dense, k.shape[1] - pieces.dense
    count = min(max(_number(kept), 1), video)
    bits = q.new_empty((q.shape[0], q.shape[2], q.shape[1], -(-k.shape[1] // 8)), dtype=torch.uint8)
    q, k = q.transpose(1, 2), k[:, dense:].transpose(1, 2)
    starts = range(0, q.shape[2], _ROWS)
    for start in starts[:2] if isinstance(q, FakeTensor) else starts:
        rows = slice(start, start + _ROWS)
        scores = exact_scores(q[:, :, rows], k).mul_(scale).float()
        least = scores.topk(count, dim=-1).values[..., -1:]  # its indices leave open which of equal scores they are
        above, tied = scores > least, scores == least
        chosen = above | (tied & (tied.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
        chosen = torch.nn.functional.pad(chosen, (dense, 0), value=True) | (own.tiles[rows] < dense)[:, None]
        bits[:, :, rows] = pack_bits(chosen & (own.sizes[rows] > 0)[:, None])
    return Choice(bits, count, pieces, ring.rank)


def _number(kept: Tensor) -> int:
    with real_tensors():  # a real count, and a fake one that was made from a number, are known inside a fake mode
        return int(kept)


def exact_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return ``q k'`` in fp64, ``(B, H, M, N)``, the same bits on every device and for every part of the rows.

    The result does not depend on the order of sums, so ranks that share a tile choose alike. Each row, relative to its
    largest number, is cut into slices of 8 bits (Ozaki et al. 2012). Products of slices are small integers, and their
    sums are exact in fp32. On CUDA they run in bf16 on tensor cores, far faster than fp64.

    Args:
        q, k: ``(B, H, M, D)`` and ``(B, H, N, D)``, fp64; ``D`` is at most :data:`MAX_HEAD_DIM`.
    """
    (q_slices, q_unit), (k_slices, k_unit) = _sliced(q), _sliced(k)
    total: Tensor | float = 0.0
    for n in range(1, _SLICES + 1):
        pairs = product(torch.cat(q_slices[:n], -1), torch.cat(k_slices[:n][::-1], -1).mT)
        total = total * 256 + pairs.double()
    return total * q_unit * k_unit.mT * 256.0 ** (1 - _SLICES)


def _sliced(x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return integers of at most 8 bits, the highest first, and the unit of the first: ``(..., 1)``, powers of two."""
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent.long().clamp(-900, 900)
    unit = ((exponent - 7 + 1023) << 52).view(torch.float64)  # 2 ** (exponent - 7), exact on every device
    rest, slices = x / unit, []
    for _ in range(_SLICES):
        slices.append(rest.round())
        rest = (rest - slices[-1]) * 256
    kind = torch.bfloat16 if device_type(x) == "cuda" else torch.float32
    return [piece.to(kind) for piece in slices], unit


# --- the operator ---


def _forward(q, k, v, further: Sequence[Tensor], scale: float, ring: Ring, kernel: Kernel):
    means_of_q, means_of_k, kept = further
    choice = choose_tiles(means_of_q, means_of_k, kept, scale, ring)
    return *ring_forward(q, k, v, choice, scale, ring, kernel), choice.bits


def _backward(grad_out, q, k, v, out, lse, further: Sequence[Tensor], scale: float, ring: Ring, kernel: Kernel):
    bits, kept = further
    choice = Choice(bits, _number(kept), cut(ring.layout, q.device), ring.rank)
    return ring_backward(grad_out, q, k, v, out, lse, choice, scale, ring, kernel)


def _bits_shape(q: Tensor, further: Sequence[Tensor]) -> tuple[int, ...]:
    means_of_q, means_of_k, _ = further
    return q.shape[0], q.shape[2], means_of_q.shape[1], -(-means_of_k.shape[1] // 8)


attend_to_chosen = AttentionOperator(
    "sparse_attention",
    "Tensor[] further",
    _forward,
    _backward,
    choice=lambda q, further: q.new_empty(_bits_shape(q, further), dtype=torch.uint8),
)
"""Operator of this module. Its further argument is the means of :func:`choose_tiles`, without gradients, and the kept
count. It returns the choice too, which backward gets instead of the means: a recomputed forward never chooses again."""


# --- means over tiles, and back ---


def _layout(segments: Sequence[int], tiles: Sequence[int], ulysses: int, ring: int) -> Layout:
    sizes = tuple(map(int, segments))
    return make_layout(sizes, sizes, (), tuple(map(int, tiles)), int(ulysses), int(ring))


def _sums(x: Tensor, slots: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Sum ``(B, n, H, D)`` over its slots: ``(B, count, H, D)``. Slot ``count`` is for pads."""
    total = x.new_zeros((x.shape[0], count + 1, *x.shape[2:]), dtype=dtype)
    for index, part in zip(slots.split(4096), x.split(4096, dim=1), strict=True):  # a part at a time in fp64
        total.index_add_(1, index, part.to(dtype))
    return total[:, :count]


def _rows(x: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Give each position the row of its slot, 0 to a pad: ``(B, count, H, D)`` to ``(B, n, H, D)``."""
    return torch.cat([x.to(dtype), x.new_zeros((x.shape[0], 1, *x.shape[2:]), dtype=dtype)], dim=1)[:, slots]


def _gathered(x: Tensor, ranks: int, group: str) -> Tensor:
    """Gather ``x`` of every rank: ``(ranks, *x.shape)``."""
    if ranks == 1:
        return x[None]
    out = x.new_empty((ranks, *x.shape))
    all_gather_single(out.view(-1), x.contiguous().view(-1), group_by_name(group))
    return out


def _scattered(x: Tensor, ranks: int, group: str) -> Tensor:
    """Sum ``(ranks, ...)`` over ranks and return the own part, the transpose of :func:`_gathered`."""
    if ranks == 1:
        return x[0]
    out = torch.empty_like(x[0], memory_format=torch.contiguous_format)
    reduce_scatter_single(out.view(-1), x.contiguous().view(-1), group_by_name(group))
    return out


@torch.library.custom_op("fsdp_cp::tile_means", mutates_args=())
def tile_means(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[int],
    tiles: Sequence[int],
    ulysses: int,
    ring: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means over tiles in fp64: of ``q`` for the rank's pieces ``(B, P, H, D)``, of k, v for all tiles.

    The mean of a piece is that of its whole tile. Sums of 16-bit numbers are exact in fp64, so means do not depend on
    the mesh. ``q``, ``k`` and ``v`` are ``(B, S, H, D)``, with pads.
    """
    pieces = cut(_layout(segments, tiles, ulysses, ring), q.device)
    slots = pieces.of_rank[rank].slots
    sums = torch.cat([_sums(x, slots, pieces.slots, torch.float64) for x in (q, k, v)], dim=-1)
    everyone = _gathered(sums, ring, group)
    total = sums.new_zeros((len(sums), len(pieces.sizes), *sums.shape[2:]))
    for of_rank, x in zip(pieces.of_rank, everyone, strict=True):
        total.index_add_(1, of_rank.tiles, x)  # unused slots add 0 to tile 0
    means = (total / pieces.sizes[:, None, None]).chunk(3, dim=-1)
    return means[0][:, pieces.of_rank[rank].tiles], means[1].contiguous(), means[2].contiguous()


@torch.library.custom_op("fsdp_cp::tile_means_backward", mutates_args=())
def _tile_means_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dtype: torch.dtype,
    segments: Sequence[int],
    tiles: Sequence[int],
    ulysses: int,
    ring: int,
    rank: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    pieces = cut(_layout(segments, tiles, ulysses, ring), dq.device)
    own = pieces.of_rank[rank]
    of_queries = torch.zeros_like(dk).index_add_(1, own.tiles, dq)
    grads = torch.cat([of_queries, dk, dv], dim=-1) / pieces.sizes[:, None, None]
    grads = grads.to(accumulation_dtype(dtype))
    mine = _scattered(torch.stack([grads[:, of_rank.tiles] for of_rank in pieces.of_rank]), ring, group)
    dq, dk, dv = (_rows(x, own.slots, dtype) for x in mine.chunk(3, dim=-1))
    return dq, dk, dv


@torch.library.custom_op("fsdp_cp::tile_rows", mutates_args=())
def tile_rows(
    x: Tensor,
    dtype: torch.dtype,
    segments: Sequence[int],
    tiles: Sequence[int],
    ulysses: int,
    ring: int,
    rank: int,
    ulysses_rank: int,
    group: str,
) -> Tensor:
    """Give each of the rank's own tokens the row of its piece: ``(B, P, H / ulysses, D)`` to ``(B, S_local, H, D)``.

    The heads are gathered over the Ulysses ``group``. Pads get 0.
    """
    slots = _own_slots(segments, tiles, ulysses, ring, rank, ulysses_rank, x.device)
    return _rows(torch.cat([*_gathered(x, ulysses, group)], dim=2), slots, dtype)


@torch.library.custom_op("fsdp_cp::tile_rows_backward", mutates_args=())
def _tile_rows_backward(
    grad: Tensor,
    count: int,
    dtype: torch.dtype,
    segments: Sequence[int],
    tiles: Sequence[int],
    ulysses: int,
    ring: int,
    rank: int,
    ulysses_rank: int,
    group: str,
) -> Tensor:
    slots = _own_slots(segments, tiles, ulysses, ring, rank, ulysses_rank, grad.device)
    heads = torch.stack(_sums(grad, slots, count, dtype).chunk(ulysses, dim=2))
    return _scattered(heads, ulysses, group).contiguous()


def _own_slots(segments, tiles, ulysses, ring, rank, ulysses_rank, device: torch.device) -> Tensor:
    """Return the piece of each of the rank's own positions, ``(S_local,)``; P for a pad."""
    slots = cut(_layout(segments, tiles, ulysses, ring), device).of_rank[rank].slots
    return slots.view(ulysses, -1)[ulysses_rank]


@tile_means.register_fake
def _(q, k, v, segments, tiles, ulysses, ring, rank, group):
    slots, count = counts(_layout(segments, tiles, ulysses, ring))
    shapes = (slots, count, count)
    return tuple(
        x.new_empty((x.shape[0], n, *x.shape[2:]), dtype=torch.float64) for x, n in zip((q, k, v), shapes, strict=True)
    )


@_tile_means_backward.register_fake
def _(dq, dk, dv, dtype, segments, tiles, ulysses, ring, rank, group):
    padded = _layout(segments, tiles, ulysses, ring).chunk(0).padded
    return tuple(x.new_empty((x.shape[0], padded, *x.shape[2:]), dtype=dtype) for x in (dq, dk, dv))


@tile_rows.register_fake
def _(x, dtype, segments, tiles, ulysses, ring, rank, ulysses_rank, group):
    local = _layout(segments, tiles, ulysses, ring).chunk(0).padded // ulysses
    return x.new_empty((x.shape[0], local, x.shape[2] * ulysses, x.shape[3]), dtype=dtype)


@_tile_rows_backward.register_fake
def _(grad, count, dtype, segments, tiles, ulysses, ring, rank, ulysses_rank, group):
    return grad.new_empty((grad.shape[0], count, grad.shape[2] // ulysses, grad.shape[3]), dtype=dtype)


def _keep_place_of_means(ctx, inputs, output) -> None:
    q, _k, _v, *ctx.place = inputs
    ctx.dtype = q.dtype


def _means_backward(ctx, dq, dk, dv):
    return *_tile_means_backward(dq, dk, dv, ctx.dtype, *ctx.place), *[None] * len(ctx.place)


def _keep_place_of_rows(ctx, inputs, output) -> None:
    x, _dtype, *ctx.place = inputs
    ctx.count, ctx.dtype = x.shape[1], x.dtype


def _rows_backward(ctx, grad):
    return _tile_rows_backward(grad, ctx.count, ctx.dtype, *ctx.place), None, *[None] * len(ctx.place)


tile_means.register_autograd(_means_backward, setup_context=_keep_place_of_means)
tile_rows.register_autograd(_rows_backward, setup_context=_keep_place_of_rows)
