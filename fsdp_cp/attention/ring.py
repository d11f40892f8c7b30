"""Ring attention: K and V travel around the ring while each rank attends to the chunk that it holds.

The algorithm is Ring Attention (Liu et al. 2023). Partial results merge by their log-sum-exps, in fp32. In backward the
gradients of a chunk travel with it, and each rank processes its own chunk last, so gradients reach their rank one hop
before a full turn. The next chunk is sent and received while the current one is processed.

A ring of one computes plain attention without communication. Shapes: B batch, S tokens of the chunk with pads, H query
heads, Hk key/value heads, D head size. All tensors of ring rank r belong to its chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_cp.attention.kernels.kernel import Dual, Kernel, accumulation_dtype
from fsdp_cp.attention.layout import Chunk, Layout, Rectangle
from fsdp_cp.attention.pieces import Choice
from fsdp_cp.mesh import group_by_name

Mask = Tensor | Choice
"""Keys that queries see, in addition to the mask of the layout."""
Attend = Callable[..., tuple[Any, ...]]
"""Attention of one rectangle: ``forward`` of a :class:`Kernel`, or with tangents a function like
:func:`fsdp_cp.attention.kernels.kernel.attention_dual`."""
Grads = list[tuple[int, Tensor, Tensor]]
"""First key, dK and dV of each rectangle of a chunk of keys."""
_KEYS_TAG, _GRADS_TAG = 1, 2  # distinct, since backward sends both between the same two ranks at once


@dataclass(frozen=True)
class Ring:
    """Place of one rank in a ring, and the layout of the ring's tokens."""

    layout: Layout
    rank: int
    group: dist.ProcessGroup | None
    """Process group of the ring; ``None`` for a ring of one."""

    @property
    def size(self) -> int:
        return self.layout.ring

    @property
    def processes(self) -> dist.ProcessGroup:
        """Process group of a ring of several."""
        assert self.group is not None, "a ring of one has no group"
        return self.group

    def start_hop(self, send: Tensor | None, receive: Tensor | None, tag: int) -> list[dist.Work]:
        """Start to send to the next rank and to receive from the previous one. ``None`` skips that side."""
        sides = ((dist.isend, send, 1), (dist.irecv, receive, -1))
        peers = {step: dist.get_global_rank(self.processes, (self.rank + step) % self.size) for step in (1, -1)}
        ops = [dist.P2POp(op, x, peers[step], self.processes, tag) for op, x, step in sides if x is not None]
        return dist.batch_isend_irecv(ops) if ops else []


def make_ring(layout: Layout, rank: int, group: str) -> Ring:
    """Return the place of a rank in the ring of the named ``group``. A ring of one ignores the name."""
    return Ring(layout, rank, group_by_name(group) if layout.ring > 1 else None)


class _Travelling:
    """Buffer that travels around the ring. Each hop sends the current buffer and receives the next one.

    Its context waits on exit, also after an exception, for messages in flight. The process group can then be used
    again, and no message writes into freed memory.
    """

    def __init__(self, ring: Ring, tag: int, travels: Callable[[int, int], bool], empty: Callable[[], Tensor]):
        self.ring, self.tag, self.travels, self.empty = ring, tag, travels, empty
        self.works: list[dist.Work] = []
        self.sent: Tensor | None = None
        self.received: Tensor | None = None

    def __enter__(self) -> _Travelling:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def start(self, x: Tensor | None, chunk: int, hop: int) -> None:
        """Start the ``hop``-th hop: send ``x``, which belongs to ``chunk``, and receive from the chunk before it."""
        before = (chunk - 1) % self.ring.size
        self.sent = x if self.travels(chunk, hop) else None  # keep the buffer alive until it is sent
        self.received = self.empty() if self.travels(before, hop) else None
        self.works = self.ring.start_hop(self.sent, self.received, self.tag)

    def wait(self) -> Tensor | None:
        """Wait for the hop; return the received buffer, or ``None`` if nothing was sent to this rank."""
        works, self.works = self.works, []
        for work in works:
            work.wait()
        received, self.sent, self.received = self.received, None, None
        return received


class Merged:
    """Attention of the rank's queries to the keys so far, in fp32 (fp64 for fp64).

    ``queries`` are q, and its tangent if results have tangents.
    """

    def __init__(self, queries: Sequence[Any]):
        self.queries, self.q, self.moves = queries, queries[0], len(queries) > 1
        self.sum: Dual | None = None

    def attend(self, attend: Attend, rows: slice, keys: Sequence[Any], mask: Any, scale: float) -> None:
        """Merge the attention of some ``rows`` to ``keys``: K, V, and their tangents if results have tangents."""
        queries = [None if x is None else x[:, rows] for x in self.queries]
        found = Dual(*attend(*queries[:1], *keys[:2], *queries[1:], *keys[2:], mask, scale))
        if isinstance(mask, Tensor) and not self.moves:
            # Kernels return different values for rows without any key (LSE 0 on the CPU, +inf from FlashAttention 2).
            empty = ~mask.any(1)[:, None, None]
            lse, out = found.lse.masked_fill(empty, -torch.inf), found.out.masked_fill(empty[..., None], 0)
            found = Dual(out, lse)
        self.add(rows, found)

    def add(self, rows: slice, other: Dual) -> None:
        """Merge the attention of some ``rows`` of the queries to further keys."""
        if self.sum is None and other.out.shape[1] == self.q.shape[1]:
            # Cast to fp32 only at a merge: a ring of one never needs it.
            self.sum = other
            return
        out, lse, t_out, t_lse = self._widened()
        o, s = out[:, rows], lse[:, :, rows]
        w = _weight(s, other.lse)
        # Merge the tangents first: they need the outputs from before.
        # Use out=: lerp_ of fake tensors prints its arguments, which fails inside a level of forward-mode AD.
        if t_out is not None and t_lse is not None:
            assert other.t_out is not None and other.t_lse is not None
            t_o, t_s = t_out[:, rows], t_lse[:, :, rows]
            shift = w * (1 - w) * (other.t_lse - t_s).transpose(1, 2).unsqueeze(-1)
            torch.lerp(t_o, other.t_out.to(t_o.dtype), w, out=t_o).add_(shift * (other.out - o))
            torch.lerp(t_s, other.t_lse, w.squeeze(-1).transpose(1, 2), out=t_s)
        torch.lerp(o, other.out.to(o.dtype), w, out=o)
        torch.logaddexp(s, other.lse, out=s)

    def _widened(self) -> Dual:
        dtype = accumulation_dtype(self.q.dtype)
        if self.sum is None:
            out = torch.zeros_like(self.q, dtype=dtype, memory_format=torch.contiguous_format)
            lse = out.new_full((out.shape[0], out.shape[2], out.shape[1]), -torch.inf)
            tangents = (out.clone(), torch.zeros_like(lse)) if self.moves else (None, None)
            self.sum = Dual(out, lse, *tangents)
        elif self.sum.out.dtype != dtype:
            t_out = None if self.sum.t_out is None else self.sum.t_out.to(dtype)
            self.sum = self.sum._replace(out=self.sum.out.to(dtype), t_out=t_out)
        return self.sum

    def result(self) -> Dual:
        """Return the merged attention, the output and its tangent in the dtype of the queries."""
        merged = self._widened() if self.sum is None else self.sum
        t_out = None if merged.t_out is None else merged.t_out.to(self.q.dtype)
        return merged._replace(out=merged.out.to(self.q.dtype), t_out=t_out)


def _weight(lse: Tensor, other: Tensor) -> Tensor:
    """Return the share of ``other`` in the merged rows, ``(B, H, S)`` to ``(B, S, H, 1)``."""
    # Rows without a key in both give NaN (-inf - -inf).
    return torch.sigmoid(other - lse).nan_to_num_(nan=0.0).transpose(1, 2).unsqueeze(-1)


def _rectangles(
    ring: Ring, chunk: int, tensors: Sequence[Any], mask: Mask | None
) -> Iterator[tuple[Rectangle, list[Any], Any]]:
    """Yield each rectangle of the rank's queries and ``chunk``, its part of the padded ``tensors`` and of the mask."""
    keys = ring.layout.key_chunk(chunk)
    taken = [None if x is None else keys.take(x) for x in tensors]
    for rectangle in ring.layout.rectangles(ring.rank, chunk):
        columns = slice(*rectangle.keys)
        seen = _seen(ring, chunk, mask)
        if isinstance(seen, Tensor):
            seen = seen[:, columns]
        yield rectangle, [None if x is None else x[:, columns] for x in taken], seen


def _seen(ring: Ring, chunk: int, mask: Mask | None) -> Any:
    """Return the mask of a kernel call for the keys of ``chunk``; that of a sparse kernel is a ``Chosen``."""
    if isinstance(mask, Choice):
        return mask.among(chunk)
    return None if mask is None else ring.layout.key_chunk(chunk).select(mask)


def _visited(tensors: tuple[Any, ...], ring: Ring, own_last: bool = False) -> Generator[tuple[int, Sequence[Any]]]:
    """Yield the number and the padded ``tensors`` of each chunk: the rank's own chunk first, or last for a backward.

    A chunk that this rank does not attend to has no tensors. In a ring of one, tensors may be ``None``. The next chunk
    is in flight while the caller works on this one.
    """
    layout, me = ring.layout, ring.rank
    if ring.size == 1:
        yield me, list(tensors)
        return
    held: Tensor | None
    held = torch.stack(tensors)
    empty = partial(torch.empty, held.shape, dtype=held.dtype, device=held.device)
    with _Travelling(ring, _KEYS_TAG, layout.keys_travel, empty) as travelling:
        for hop in range(ring.size):
            chunk = (me - hop) % ring.size
            if hop > 0:
                held = travelling.wait()  # overwrite the sent chunk, or a third one would stay in memory
            if hop < ring.size - 1:
                travelling.start(held, chunk, hop)
            if hop > 0 or not own_last:
                yield chunk, [] if held is None or not layout.rectangles(me, chunk) else list(held)
    if own_last:
        held = None
        yield me, list(tensors)


def ring_attention(
    tensors: Sequence[Any], masks: Sequence[Mask], scale: float, ring: Ring, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Compute attention of the rank's chunk of queries to all keys, in one turn of the ring.

    Args:
        tensors: q ``(B, S, H, D)``, k and v ``(B, S, Hk, D)``, and for the derivative their tangents; in a ring of one,
            ``None`` stands for a tangent of 0. Pads of all tensors are ignored and give 0.
        masks: none, or one: ``(B, all tokens)`` bool, True where a key may be attended to, the same on all ranks; or
            the rank's choice of tiles.

    Returns:
        Results of :func:`padded`.
    """
    q, k, v, *tangents = tensors
    local, mask = ring.layout.chunk(ring.rank), next(iter(masks), None)
    merged = Merged([None if x is None else local.take(x) for x in (q, *tangents[:1])])
    with closing(_visited((k, v, *tangents[1:]), ring)) as visited:
        for chunk, keys in visited:
            for rectangle, seen_keys, seen in _rectangles(ring, chunk, keys, mask):
                merged.attend(attend, slice(*rectangle.queries), seen_keys, seen, scale)
                del seen_keys
            del keys  # otherwise three chunks are in memory while the next one arrives
    return padded(local, merged.result())


def padded(chunk: Chunk, merged: Dual) -> tuple[Tensor, Tensor]:
    """Return the output of a chunk's tokens with pads, ``(B, S, H, D)`` in the dtype of ``q``, and its tangent; without
    one, the log-sum-exp ``(B, H, S)`` in fp32 or fp64, -inf for a row without a key."""
    out = chunk.put(merged.out)
    if merged.t_out is not None:
        return out, chunk.put(merged.t_out)
    return out.contiguous(), chunk.put(merged.lse.transpose(1, 2)).transpose(1, 2).contiguous()


def ring_backward(
    grad_out, q, k, v, out, lse, masks: Sequence[Mask], scale: float, ring: Ring, kernel: Kernel
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the rank's queries, and of its keys and values summed over the queries of all ranks.

    ``grad_out`` and ``out`` are ``(B, S, H, D)``; ``out`` and ``lse`` come from :func:`ring_attention`. Chunks are
    summed in fp32 (fp64 for fp64).
    """
    layout, me, mask = ring.layout, ring.rank, next(iter(masks), None)
    local = layout.chunk(me)
    g_own, q_own, out_own = (local.take(x) for x in (grad_out, q, out))
    lse_own = local.take(lse.transpose(1, 2)).transpose(1, 2)
    if mask is not None:  # exp(logit - inf) = 0: rows without a key have no gradient
        lse_own = lse_own.masked_fill(lse_own == -torch.inf, torch.inf)
    if layout.alone(me):
        # One kernel call covers everything: return its gradients without a sum in fp32.
        keys_own = layout.key_chunk(me)
        seen_by_all = _seen(ring, me, mask)
        dq_own, dk_own, dv_own = kernel.backward(
            g_own, q_own, keys_own.take(k), keys_own.take(v), out_own, lse_own, seen_by_all, scale
        )
        return local.put(dq_own), keys_own.put(dk_own), keys_own.put(dv_own)
    dq = torch.zeros_like(q_own, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)

    def chunk_grads(chunk: int, tensors: Sequence[Tensor]) -> Grads:
        """Add the gradients of the rank's queries to ``dq``; return those of a chunk's padded keys and values."""
        grads = []
        for rectangle, (keys, values), seen in _rectangles(ring, chunk, tensors, mask):
            rows = slice(*rectangle.queries)
            g, queries, o = (x[:, rows] for x in (g_own, q_own, out_own))
            dq_part, dk, dv = kernel.backward(g, queries, keys, values, o, lse_own[:, :, rows], seen, scale)
            dq[:, rows] += dq_part
            grads.append((rectangle.keys[0], dk, dv))
            del dq_part, dk, dv
        return grads

    dk, dv = _key_grads(ring, k, v, chunk_grads)
    return local.put(dq.to(q.dtype)), dk.to(k.dtype), dv.to(v.dtype)


def _add_grads(total: Tensor, chunk: Chunk, chunk_grads: Grads) -> None:
    for start, dk, dv in chunk_grads:
        chunk.add_into(total[0], dk, start)
        chunk.add_into(total[1], dv, start)
    chunk_grads.clear()  # frees them before the next chunk arrives


def _key_grads(ring: Ring, k: Tensor, v: Tensor, grads_of: Callable[[int, Sequence[Tensor]], Grads]) -> Tensor:
    """Return dK and dV of the rank's own chunk over all ranks, ``(2, B, S, Hk, D)`` in fp32 (fp64 for fp64)."""
    layout, shape, sums = ring.layout, (2, *k.shape), accumulation_dtype(k.dtype)
    empty = partial(torch.empty, shape, dtype=sums, device=k.device)
    with (
        closing(_visited((k, v), ring, own_last=True)) as visited,  # the gradients of the own chunk end here
        _Travelling(ring, _GRADS_TAG, layout.grads_travel, empty) as grads,
    ):
        step = 0
        for chunk, tensors in visited:  # enumerate would hold a chunk until the next one is there
            is_last = step == ring.size - 1
            chunk_grads = grads_of(chunk, tensors)
            del tensors
            total = grads.wait() if step > 0 else None
            if total is None and (chunk_grads or is_last):
                total = torch.zeros(shape, dtype=sums, device=k.device)
            if total is not None:
                _add_grads(total, layout.key_chunk(chunk), chunk_grads)
            if not is_last:
                grads.start(total, chunk, step)
            step += 1
    assert total is not None
    return total
