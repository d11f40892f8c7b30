"""Attention to cached keys and values over a ring: K and V stay on their rank, queries and results travel.

Each rank holds some tokens of every cached chunk and of the new chunk. It gathers the new chunk's queries, attends to
its own keys, and returns the results, which merge by their log-sum-exps. In backward the queries are gathered again,
with what the gradients need, and dQ returns; dK and dV of the new chunk end where they belong. Only the number of new
tokens determines the traffic.

Shapes as in :mod:`fsdp_cp.attention.ring`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_cp.attention.kernels.kernel import Kernel, accumulation_dtype
from fsdp_cp.attention.kernels.reference import Dual
from fsdp_cp.attention.ring import Merged, Ring, attend_tile, put_rows
from fsdp_cp.runtime.torch_versions import all_gather_single

Past = Sequence[tuple[Tensor, Tensor]]
"""Keys and values ``(B, tokens without pads, Hk, D)`` of each cached chunk."""


def cached_forward(
    q: Tensor, k: Tensor, v: Tensor, past: Past, scale: float, ring: Ring, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Compute attention of the new chunk's queries to its own keys and to the keys of ``past``, on all ranks.

    Returns:
        ``(B, S, H, D)`` in the dtype of ``q`` and the log-sum-exp ``(B, H, S)`` in fp32 (fp64 for fp64), as
        :func:`fsdp_cp.attention.ring.ring_forward`.
    """
    chunk = ring.layout.chunk(ring.rank)
    (queries,) = _from_all(ring, q)
    merged = Merged(queries)
    for keys, values in _held(ring, k, v, past):
        merged.add(slice(0, queries.shape[1]), attend_tile(kernel, queries, keys, values, None, scale))
    out, lse, *_ = merged.result()
    if ring.size > 1:
        out, lse = _merge_returned(ring, chunk.take(q), out, lse)
    return chunk.put(out), put_rows(chunk, lse)


def cached_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    past: Past,
    scale: float,
    ring: Ring,
    kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the new chunk's queries, keys and values. ``past`` is constant.

    ``out`` and ``lse`` come from :func:`cached_forward`. Sums over chunks and ranks are in fp32 (fp64 for fp64).
    """
    chunk = ring.layout.chunk(ring.rank)
    sums = accumulation_dtype(q.dtype)
    grads, queries, outputs, rows = _from_all(ring, grad_out, q, out, _as_features(lse, q.dtype))
    lse = _as_rows(rows, sums)
    dq: Tensor | None = None
    for keys, values in _held(ring, k, v, past):  # the new chunk comes last
        dq_part, dk, dv = kernel.backward(grads, queries, keys, values, outputs, lse, None, scale)
        dq = dq_part if dq is None else dq.to(sums).add_(dq_part)
    if not chunk.size:
        dk, dv = k[:, :0], v[:, :0]
    dq = torch.zeros_like(queries) if dq is None else dq
    dq = chunk.put(dq) if ring.size == 1 else _sum_returned(ring, dq.to(sums))
    return dq.to(q.dtype), chunk.put(dk), chunk.put(dv)


def _held(ring: Ring, k: Tensor, v: Tensor, past: Past) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values that this rank holds, without pads: ``past``, then the new chunk."""
    chunk = ring.layout.chunk(ring.rank)
    return [pair for pair in (*past, (chunk.take(k), chunk.take(v))) if pair[0].shape[1]]


def _as_features(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``(B, H, S)`` as ``(B, S, H, F)`` of another dtype, bit by bit, so that it travels in one buffer."""
    return lse.transpose(1, 2).unsqueeze(-1).contiguous().view(dtype)


def _as_rows(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert :func:`_as_features`."""
    return features.contiguous().view(dtype).squeeze(-1).transpose(1, 2).contiguous()


def _from_all(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """Gather tensors ``(B, S, H, F)`` of all ring ranks: ``(B, new tokens without pads, H, F)``. One call."""
    chunks = [ring.layout.chunk(i) for i in range(ring.size)]
    if ring.size == 1:
        return [chunks[0].take(x) for x in tensors]
    packed = torch.cat(tensors, dim=-1).contiguous()
    received = packed.new_empty((ring.size, *packed.shape))
    all_gather_single(received.view(-1), packed.view(-1), _group(ring))
    widths = [x.shape[-1] for x in tensors]
    return [
        torch.cat([chunk.take(x) for chunk, x in zip(chunks, piece, strict=True)], dim=1)
        for piece in received.split(widths, dim=-1)
    ]


def _for_all(ring: Ring, x: Tensor) -> Tensor:
    """Return ``(B, new tokens without pads, H, F)`` as ``(R, B, S, H, F)``: a padded part for each ring rank."""
    chunks = [ring.layout.chunk(i) for i in range(ring.size)]
    pieces = x.split([chunk.size for chunk in chunks], dim=1)
    return torch.stack([chunk.put(piece) for chunk, piece in zip(chunks, pieces, strict=True)])


def _merge_returned(ring: Ring, queries: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Send each rank the results of its queries; merge the received results of the rank's own ``queries``."""
    chunk, width = ring.layout.chunk(ring.rank), out.shape[-1]
    sent = _for_all(ring, torch.cat((out, _as_features(lse, out.dtype)), dim=-1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_group(ring))
    merged = Merged(queries)
    for x in received:
        returned, features = chunk.take(x).split((width, x.shape[-1] - width), dim=-1)
        merged.add(slice(0, chunk.size), Dual(returned, _as_rows(features, lse.dtype), None, None))
    out, lse, *_ = merged.result()
    return out, lse


def _sum_returned(ring: Ring, x: Tensor) -> Tensor:
    """Return the sum over ring ranks of the gradients of this rank's queries, ``(B, S, H, D)``."""
    sent = _for_all(ring, x)
    received = torch.empty_like(sent[0])
    # torch 2.13 renamed the call and warns about the old name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(received.view(-1), sent.view(-1), group=_group(ring))
    return received


def _group(ring: Ring) -> dist.ProcessGroup:
    assert ring.group is not None, "a ring of one has no group"
    return ring.group
