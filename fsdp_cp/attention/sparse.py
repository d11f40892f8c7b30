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

from collections.abc import Callable, Sequence
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
from fsdp_cp.attention.pieces import Choice, TilePieces, counts, cut, pack_bits
from fsdp_cp.attention.ring import Attend, Ring, make_ring, ring_attention, ring_backward
from fsdp_cp.attention.ulysses import with_all_tokens
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
    numbers = layout.as_numbers()
    names = (groups.ring_group, groups.ring_rank, groups.ring_size)
    place = (numbers[0], numbers[3], *names, groups.ulysses_group, groups.ulysses_rank, groups.ulysses_size)
    coarse: list[Tensor] = []  # of each head group, (B, P, H, D); tangents follow along the batch

    def attend(tensors: Sequence[Any], _part: int) -> Sequence[Tensor]:
        if len(tensors) > 3:
            return attend_dual(tensors[:3], tensors[3:])
        means = tile_means(*tensors, q.dtype, *place)
        if gate is not None:
            rounded = [x.to(accumulation_dtype(q.dtype)) for x in means]
            coarse.extend(attend_in_ring([], (scale, *_of_means(means).as_numbers(), 0, "", backend), rounded))
        further = [means[0].detach(), means[1].detach(), sparse.kept]
        return attend_to_chosen(further, (scale, *numbers, groups.ring_rank, groups.ring_group, backend), tensors)

    def attend_dual(primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        moved = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
        both = (torch.cat(pair) for pair in zip(primals, moved, strict=True))  # means are linear
        means, t_means = zip(*(x.chunk(2) for x in tile_means(*both, q.dtype, *place)), strict=True)
        if gate is not None:
            rounded = [x.to(accumulation_dtype(q.dtype)) for x in (*means, *t_means)]
            alone = make_ring(_of_means(means), 0, "")
            coarse.append(torch.cat(ring_attention(rounded, [], scale, alone, attention_dual)))
        ring = make_ring(layout, groups.ring_rank, groups.ring_group)
        kernels = choose_sparse(backend, primals[0], sparse.tiles.width)
        return _forward((*primals, *moved), [means[0], means[1], sparse.kept], scale, ring, kernels.dual)[:2]

    out = with_all_tokens((q, k, v), attend, groups, head_groups)
    if gate is None:
        return out
    rows = tile_rows(torch.cat(coarse, dim=2), q.dtype, *place)
    if len(rows) > len(q):
        rows = forward_ad.make_dual(*(x.clone() for x in rows.chunk(2)))
    return out + gate * rows


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


def _forward(qkv: Sequence[Tensor], further: Sequence[Tensor], scale: float, ring: Ring, attend: Attend):
    means_of_q, means_of_k, kept = further
    choice = choose_tiles(means_of_q, means_of_k, kept, scale, ring)
    return *ring_attention(qkv, [choice], scale, ring, attend), choice.bits


def _backward(grad_out, q, k, v, out, lse, further: Sequence[Tensor], scale: float, ring: Ring, kernel: Kernel):
    bits, kept = further
    choice = Choice(bits, _number(kept), cut(ring.layout, q.device), ring.rank)
    return ring_backward(grad_out, q, k, v, out, lse, [choice], scale, ring, kernel)


def _bits_shape(q: Tensor, further: Sequence[Tensor]) -> tuple[int, ...]:
    means_of_q, means_of_k, _ = further
    return q.shape[0], q.shape[2], means_of_q.shape[1], -(-means_of_k.shape[1] // 8)


attend_to_chosen = AttentionOperator(
    "sparse_attention",
    _forward,
    _backward,
    choice=lambda q, further: q.new_empty(_bits_shape(q, further), dtype=torch.uint8),
)
"""Operator of this module. Its further tensors are the means of :func:`choose_tiles`, without gradients, and the kept
count. It returns the choice too, which backward gets instead of the means: a recomputed forward never chooses again."""


# --- means over tiles, and back: linear operators, whose backward is their transpose ---


class _Place(NamedTuple):
    """Place of a rank on the mesh."""

    layout: Layout
    groups: ContextGroups

    def own_slots(self, pieces: TilePieces) -> Tensor:
        """Return the piece of each of the rank's own positions, ``(S_local,)``; P for a pad."""
        groups = self.groups
        return pieces.of_rank[groups.ring_rank].slots.view(groups.ulysses_size, -1)[groups.ulysses_rank]


_PLACE = (
    "ScalarType dtype, SymInt[] segments, SymInt[] tiles, str ring_group, SymInt ring_rank, SymInt ring_size, "
    "str ulysses_group, SymInt ulysses_rank, SymInt ulysses_size"
)
Tensors = tuple[Tensor, ...]


def _linear(name: str, inputs: str, forward: Callable, shapes: Callable, transpose: Any = None) -> Any:
    """Return an operator of tensors, the dtype of tokens, the segments, the tiles and :class:`ContextGroups`.

    ``shapes`` makes empty results of ``forward``. The operator ``transpose`` is the backward.
    """
    count = inputs.count("Tensor")
    schema = f"({inputs}, {_PLACE}) -> {'(' + ', '.join(['Tensor'] * count) + ')' if count > 1 else 'Tensor'}"

    def on_place(function: Callable, *arguments: Any) -> Any:
        segments, tiles, *names = arguments[count + 1 :]
        sizes, groups = tuple(map(int, segments)), ContextGroups(*names)
        layout = make_layout(sizes, sizes, (), tuple(map(int, tiles)), int(groups.ulysses_size), int(groups.ring_size))
        results = function(*arguments[: count + 1], _Place(layout, groups))
        return results if count > 1 else results[0]

    def keep(ctx: Any, inputs: Tensors, output: Any) -> None:
        ctx.settings = inputs[count:]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        results = transpose(*grads, *ctx.settings)
        none: list[Any] = [[] if setting == [] else None for setting in ctx.settings]
        return *(results if count > 1 else (results,)), *none

    operator = torch.library.custom_op(f"fsdp_cp::{name}", partial(on_place, forward), mutates_args=(), schema=schema)
    operator.register_fake(partial(on_place, shapes))
    if transpose is not None:
        operator.register_autograd(backward, setup_context=keep)
    return operator


def _means(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    pieces = cut(place.layout, q.device)
    own = pieces.of_rank[place.groups.ring_rank]
    sums = torch.cat([_sums(x, own.slots, pieces.slots, torch.float64) for x in (q, k, v)], dim=-1)
    total = sums.new_zeros((len(sums), len(pieces.sizes), *sums.shape[2:]))
    for of_rank, x in zip(
        pieces.of_rank, _gathered(sums, place.groups.ring_size, place.groups.ring_group), strict=True
    ):
        total.index_add_(1, of_rank.tiles, x)  # unused slots add 0 to tile 0
    means = (total / pieces.sizes[:, None, None]).chunk(3, dim=-1)
    # Copies: of one tile, sample and head each chunk is contiguous, and an operator's results may not share memory.
    return means[0][:, own.tiles], *(x.clone(memory_format=torch.contiguous_format) for x in means[1:])


def _of_means_to_tokens(dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    pieces = cut(place.layout, dq.device)
    own = pieces.of_rank[place.groups.ring_rank]
    of_queries = torch.zeros_like(dk).index_add_(1, own.tiles, dq)
    grads = (torch.cat([of_queries, dk, dv], dim=-1) / pieces.sizes[:, None, None]).to(accumulation_dtype(dtype))
    of_ranks = torch.stack([grads[:, of_rank.tiles] for of_rank in pieces.of_rank])
    mine = _scattered(of_ranks, place.groups.ring_size, place.groups.ring_group)
    return tuple(_rows(x, own.slots, dtype) for x in mine.chunk(3, dim=-1))


def _to_own_tokens(x: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    slots = place.own_slots(cut(place.layout, x.device))
    return (
        _rows(torch.cat([*_gathered(x, place.groups.ulysses_size, place.groups.ulysses_group)], dim=2), slots, dtype),
    )


def _of_own_tokens(grad: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    pieces = cut(place.layout, grad.device)
    sums = _sums(grad, place.own_slots(pieces), pieces.slots, accumulation_dtype(dtype))
    of_ranks = torch.stack(sums.chunk(place.groups.ulysses_size, dim=2))
    return (_scattered(of_ranks, place.groups.ulysses_size, place.groups.ulysses_group).contiguous(),)


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


def _empty(x: Tensor, rows: int, heads: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], rows, heads, x.shape[3]), dtype=dtype)


def _empty_means(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    slots, tiles = counts(place.layout)
    return tuple(_empty(x, n, x.shape[2], torch.float64) for x, n in ((q, slots), (k, tiles), (v, tiles)))


def _empty_tokens(dq: Tensor, dk: Tensor, dv: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    padded = place.layout.chunk(0).padded
    return tuple(_empty(x, padded, x.shape[2], dtype) for x in (dq, dk, dv))


def _empty_own_tokens(x: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    ranks = place.groups.ulysses_size
    return (_empty(x, place.layout.chunk(0).padded // ranks, x.shape[2] * ranks, dtype),)


def _empty_tiles(grad: Tensor, dtype: torch.dtype, place: _Place) -> Tensors:
    return (
        _empty(grad, counts(place.layout)[0], grad.shape[2] // place.groups.ulysses_size, accumulation_dtype(dtype)),
    )


_QKV, _X = "Tensor q, Tensor k, Tensor v", "Tensor x"
_means_backward = _linear("tile_means_backward", _QKV, _of_means_to_tokens, _empty_tokens)
tile_means = _linear("tile_means", _QKV, _means, _empty_means, _means_backward)
"""Operator that returns means over tiles in fp64: of ``q`` for the rank's pieces ``(B, P, H, D)``, of ``k`` and ``v``
for all tiles ``(B, T, H, D)``.

The mean of a piece is that of its whole tile. Sums of 16-bit numbers are exact in fp64, so means do not depend on the
mesh. Inputs are ``(B, S, H, D)`` with pads, their dtype, and the arguments of :class:`_Place`.
"""
_rows_backward = _linear("tile_rows_backward", _X, _of_own_tokens, _empty_tiles)
tile_rows = _linear("tile_rows", _X, _to_own_tokens, _empty_own_tokens, _rows_backward)
"""Operator that gives each of the rank's own tokens the row of its piece: ``(B, P, H / ulysses, D)``, in the dtype of
sums, to ``(B, S_local, H, D)`` in the given dtype. Heads are gathered over the Ulysses group. Pads get 0."""
