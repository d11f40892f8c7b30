"""Ring attention: K and V travel around the ring while each rank attends to the chunk that it holds.

After Ring Attention (Liu et al. 2023): partial results merge by their log-sum-exps, kept in fp32. In backward the
gradients of a chunk travel with it and the rank's own chunk comes last, so that they are home after one hop less than
a full turn. Sends and receives of the next chunk are in flight while the current one is worked on.

With a ring of one there is no communication, and this is plain attention on one rank. Shapes: B batch, S tokens of the
chunk with pads, H query heads, Hk key/value heads, D head size; all tensors of ring rank r belong to its chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_cp.attention.kernels import Kernel, accumulation_dtype
from fsdp_cp.attention.layout import Layout, Tile
from fsdp_cp.attention.reference import Dual, attention_dual

_KEYS_TAG, _GRADS_TAG = 1, 2  # both are in flight between the same two ranks in backward


@dataclass(frozen=True)
class Ring:
    """One rank's place in a ring, and what it works on."""

    layout: Layout
    rank: int
    group: dist.ProcessGroup | None
    """``None`` for a ring of one."""

    @property
    def size(self) -> int:
        return self.layout.ring

    def start_hop(self, send: Tensor | None, receive: Tensor | None, tag: int) -> list[dist.Work]:
        """Begin to send to the next rank and to receive from the one before; ``None`` leaves that side out."""
        ahead, behind = (dist.get_global_rank(self.group, (self.rank + i) % self.size) for i in (1, -1))
        ops = []
        if send is not None:
            ops.append(dist.P2POp(dist.isend, send, ahead, self.group, tag))
        if receive is not None:
            ops.append(dist.P2POp(dist.irecv, receive, behind, self.group, tag))
        return dist.batch_isend_irecv(ops) if ops else []


class _Travelling:
    """A buffer that goes around the ring: send the one in hand, receive the next, both at once."""

    def __init__(
        self,
        ring: Ring,
        tag: int,
        travels: Callable[[int, int], bool],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.ring, self.tag, self.travels = ring, tag, travels
        self.empty = partial(torch.empty, shape, dtype=dtype, device=device)
        self.works: list[dist.Work] = []
        self.sent: Tensor | None = None
        self.received: Tensor | None = None

    def start(self, x: Tensor | None, chunk: int, hop: int) -> None:
        """Send ``x``, which is of ``chunk``, on its ``hop``-th hop; what comes in is of the chunk before it."""
        before = (chunk - 1) % self.ring.size
        self.sent = x if self.travels(chunk, hop) else None  # held until it has left
        self.received = self.empty() if self.travels(before, hop) else None
        self.works = self.ring.start_hop(self.sent, self.received, self.tag)

    def wait(self) -> Tensor | None:
        """What came in; ``None`` if nobody sent."""
        for work in self.works:
            work.wait()
        received, self.sent, self.received, self.works = self.received, None, None, []
        return received


class _Merged:
    """Attention of the rank's queries to what it has seen so far, in fp32 (fp64 for fp64)."""

    def __init__(self, q: Tensor):
        self.q = q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """``out`` and ``lse`` of some ``rows`` of the queries over keys that were not seen yet."""
        if self.out is None and out.shape[1] == self.q.shape[1]:
            # As the kernel made it: a ring of one has nothing to merge, so its output is never widened and rounded.
            self.out, self.lse = out, lse
            return
        self._widen()
        o, s = self.out[:, rows], self.lse[:, :, rows]
        o.lerp_(out.to(o.dtype), _weight(s, lse))
        torch.logaddexp(s, lse, out=s)

    def _widen(self) -> None:
        dtype = accumulation_dtype(self.q.dtype)
        if self.out is None:
            self.out = torch.zeros_like(self.q, dtype=dtype, memory_format=torch.contiguous_format)
            b, s, h, _ = self.q.shape
            self.lse = self.out.new_full((b, h, s), -torch.inf)
        elif self.out.dtype != dtype:
            self.out = self.out.to(dtype)

    def result(self) -> tuple[Tensor, Tensor]:
        if self.out is None:
            self._widen()
        return self.out.to(self.q.dtype), self.lse


def _weight(lse: Tensor, other: Tensor) -> Tensor:
    """Share of ``other`` in the merged rows, ``(B, H, S)`` to ``(B, S, H, 1)``."""
    # Rows that neither has seen a key for: -inf - -inf.
    return torch.sigmoid(other - lse).nan_to_num_(nan=0.0).transpose(1, 2).unsqueeze(-1)


def _tile_mask(mask: Tensor | None, layout: Layout, chunk: int, tile: Tile) -> Tensor | None:
    return None if mask is None else layout.key_chunk(chunk).select(mask)[:, slice(*tile.keys)]


def _attend(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float):
    out, lse = kernel.forward(q, k, v, mask, scale)
    if mask is not None:
        # Kernels disagree about rows without any key (LSE 0 on the CPU, +inf from FlashAttention 2).
        empty = ~mask.any(1)[:, None, None]
        lse = lse.masked_fill(empty, -torch.inf)
        out = out.masked_fill(empty[..., None], 0)
    return out, lse


def _packed(tensors: Sequence[Tensor], heads_first: bool) -> Tensor:
    """One buffer to send: ``(n, B, S, H, D)``, or ``(n, B, H, S, D)`` with the rows of a head next to each other."""
    return torch.stack([x.transpose(1, 2) if heads_first else x for x in tensors])


def _unpacked(buffer: Tensor, heads_first: bool) -> list[Tensor]:
    """The ``(B, S, H, D)`` tensors of :func:`_packed`."""
    return [x.transpose(1, 2) if heads_first else x for x in buffer]


def _prefers_heads_first(x: Tensor, backward: bool) -> bool:
    """On the CPU flash attention is 2 to 6 % faster so, except its bf16 forward, which packs its operands itself."""
    return x.device.type == "cpu" and (backward or x.dtype != torch.bfloat16)


def _visited(tensors: tuple[Tensor | None, ...], ring: Ring) -> Iterator[tuple[int, list[Tensor | None]]]:
    """Each chunk that comes by, the rank's own first: its number and the true tokens of its ``tensors``, of which some
    may be ``None`` in a ring of one.

    The next chunk is on its way while the caller works on this one.
    """
    layout, me = ring.layout, ring.rank
    if ring.size == 1:
        yield me, [None if x is None else layout.key_chunk(me).take(x) for x in tensors]
        return
    heads_first = _prefers_heads_first(tensors[0], backward=False)
    held: Tensor | None = _packed(tensors, heads_first)
    travelling = _Travelling(ring, _KEYS_TAG, layout.keys_travel, held.shape, held.dtype, held.device)
    for step in range(ring.size):
        chunk = (me - step) % ring.size
        if step < ring.size - 1:
            travelling.start(held, chunk, step)
        if layout.tiles(me, chunk):
            yield chunk, [layout.key_chunk(chunk).take(x) for x in _unpacked(held, heads_first)]
        if step < ring.size - 1:
            held = travelling.wait()


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, ring: Ring, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Attention of the rank's chunk of queries to all keys.

    Args:
        q: ``(B, S, H, D)``; k, v: ``(B, S, Hk, D)``; pads are ignored and give 0.
        mask: ``(B, all tokens)`` bool, True where a key may be attended to, the same on all ranks.

    Returns:
        ``(B, S, H, D)`` in the dtype of ``q``, and the log-sum-exp ``(B, H, S)`` in fp32 (fp64 for fp64), -inf for
        rows without a key.
    """
    layout, me = ring.layout, ring.rank
    own = layout.chunk(me)
    merged = _Merged(own.take(q))
    for chunk, (keys, values) in _visited((k, v), ring):
        for tile in layout.tiles(me, chunk):
            rows, columns = slice(*tile.queries), slice(*tile.keys)
            seen = _tile_mask(mask, layout, chunk, tile)
            merged.add(rows, *_attend(kernel, merged.q[:, rows], keys[:, columns], values[:, columns], seen, scale))
        del keys, values  # or three chunks are held while the next one comes in
    out, lse = merged.result()
    return own.put(out), own.put(lse.transpose(1, 2)).transpose(1, 2)


def ring_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    ring: Ring,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the rank's chunk: of its queries, and of its keys and values over the queries of all ranks.

    ``grad_out`` and ``out`` are ``(B, S, H, D)``, ``lse`` is what :func:`ring_forward` returned. Sums over chunks are
    kept in fp32 (fp64 for fp64).
    """
    layout, me, size = ring.layout, ring.rank, ring.size
    own = layout.chunk(me)
    rows = [own.take(x) for x in (grad_out, q, out)]
    lse = own.take(lse.transpose(1, 2)).transpose(1, 2)
    if mask is not None:  # exp(logit - inf) = 0: rows without a key have no gradient
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    tiles = layout.tiles(me, me)
    one_tile = size == 1 and len(tiles) == 1 and tiles[0].queries == (0, own.size)
    sums = accumulation_dtype(q.dtype)

    def tile_grads(tile: Tile, kc: Tensor, vc: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        g, qc, o = (x[:, slice(*tile.queries)] for x in rows)
        k_tile, v_tile = kc[:, slice(*tile.keys)], vc[:, slice(*tile.keys)]
        tile_mask = _tile_mask(mask, layout, chunk, tile)
        return kernel.backward(g, qc, k_tile, v_tile, o, lse[:, :, slice(*tile.queries)], tile_mask, scale)

    if one_tile:  # nothing to sum: the kernel's gradients as they are
        keys_own = layout.key_chunk(me)
        dq, dk, dv = tile_grads(tiles[0], keys_own.take(k), keys_own.take(v), me)
        return own.put(dq), keys_own.put(dk), keys_own.put(dv)

    dq = torch.zeros_like(rows[1], dtype=sums, memory_format=torch.contiguous_format)
    if size > 1:
        heads_first = _prefers_heads_first(k, backward=True)
        kv = _packed((k, v), heads_first)
        keys = _Travelling(ring, _KEYS_TAG, layout.keys_travel, kv.shape, k.dtype, k.device)
        grads = _Travelling(ring, _GRADS_TAG, layout.grads_travel, (2, *k.shape), sums, k.device)
        keys.start(kv, me, 0)
    for step in range(size):
        chunk = (me - 1 - step) % size  # the rank's own chunk comes last, so that its gradients end here
        is_last = step == size - 1
        there = layout.key_chunk(chunk)
        kv = None  # sent on; held any longer, it would be a third chunk in memory
        if not is_last:
            kv = keys.wait()
        if step < size - 2:
            keys.start(kv, chunk, step + 1)
        parts = []
        for tile in layout.tiles(me, chunk):
            seen = (there.take(x) for x in ((k, v) if is_last else _unpacked(kv, heads_first)))
            dq_tile, dk, dv = tile_grads(tile, *seen, chunk)
            dq[:, slice(*tile.queries)] += dq_tile
            parts.append((tile.keys[0], dk, dv))
            del dq_tile, dk, dv
        total = grads.wait() if step > 0 else None
        if total is None and (parts or is_last):
            total = torch.zeros((2, *k.shape), dtype=sums, device=k.device)
        for start, dk, dv in parts:
            there.add_into(total[0], dk, start)
            there.add_into(total[1], dv, start)
            del dk, dv
        parts.clear()
        if not is_last:
            grads.start(total, chunk, step)
    return own.put(dq.to(q.dtype)), total[0].to(k.dtype), total[1].to(v.dtype)


def ring_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    mask: Tensor | None,
    scale: float,
    ring: Ring,
) -> tuple[Tensor, Tensor]:
    """Attention of the rank's chunk of queries and its derivative along the tangents, in one turn of the ring.

    Shapes as in :func:`ring_forward`; in a ring of one, a tangent that is 0 may be ``None``. Returns ``out`` and
    ``t_out``, ``(B, S, H, D)`` in the dtype of ``q``.
    """
    layout, me = ring.layout, ring.rank
    own = layout.chunk(me)
    q_own, t_q_own = own.take(q), None if t_q is None else own.take(t_q)
    merged: Dual | None = None
    for chunk, (keys, values, t_keys, t_values) in _visited((k, v, t_k, t_v), ring):
        for tile in layout.tiles(me, chunk):
            rows, columns = slice(*tile.queries), slice(*tile.keys)
            part = attention_dual(
                q_own[:, rows],
                keys[:, columns],
                values[:, columns],
                None if t_q_own is None else t_q_own[:, rows],
                None if t_keys is None else t_keys[:, columns],
                None if t_values is None else t_values[:, columns],
                _tile_mask(mask, layout, chunk, tile),
                scale,
            )
            if merged is None and part.out.shape[1] == q_own.shape[1]:
                merged = part
                continue
            merged = merged or _nothing_seen(q_own)
            o, t_o = merged.out[:, rows], merged.t_out[:, rows]
            s, t_s = merged.lse[:, :, rows], merged.t_lse[:, :, rows]
            w = _weight(s, part.lse)
            w_s = w.squeeze(-1).transpose(1, 2)
            shift = w * (1 - w) * (part.t_lse - t_s).transpose(1, 2).unsqueeze(-1)
            # The tangent first: it needs the outputs, and t_lse, as they are before this chunk.
            t_o.lerp_(part.t_out, w).add_(shift * (part.out - o))
            o.lerp_(part.out, w)
            t_s.lerp_(part.t_lse, w_s)
            torch.logaddexp(s, part.lse, out=s)
    merged = merged or _nothing_seen(q_own)
    return own.put(merged.out.to(q.dtype)), own.put(merged.t_out.to(q.dtype))


def _nothing_seen(q: Tensor) -> Dual:
    zeros = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)
    t_lse = zeros.new_zeros((q.shape[0], q.shape[2], q.shape[1]))
    return Dual(zeros, torch.full_like(t_lse, -torch.inf), zeros.clone(), t_lse)
