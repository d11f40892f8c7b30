"""Attention in which queries travel and keys and values stay where they are ("pass-Q", Yang et al. 2024).

Each rank holds some queries and some keys. It gathers the queries of all ranks, attends to its own keys, and returns
the results, which merge by their log-sum-exps. In backward the queries are gathered again, with what the gradients
need, and dQ returns; dK and dV end where they belong. Only the number of queries determines the traffic. Keys may
belong to the sequence of the queries or to another one, and each rank may hold further, constant keys (a cache).

Source: Context Parallelism for Scalable Million-Token Inference, arXiv:2411.01783. Shapes as in the module ``ring``.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_cp.attention.kernels.kernel import Dual, Kernel, accumulation_dtype
from fsdp_cp.attention.operators import SETTINGS, AttentionOperator, ring_and_kernel
from fsdp_cp.attention.ring import Attend, Merged, Ring, padded
from fsdp_cp.runtime.torch_versions import all_gather_single, reduce_scatter_single


def pass_q_attention(
    tensors: Sequence[Tensor], past: Sequence[Tensor], scale: float, ring: Ring, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Compute attention of the rank's queries to the keys ``k`` and ``past`` of all ranks.

    ``past`` has the keys and values ``(B, tokens without pads, Hk, D)`` of each cached chunk, in turn; it has no
    tangents. Other arguments and results are those of :func:`fsdp_cp.attention.ring.ring_attention`.
    """
    q, k, v, *tangents = tensors
    held = _held(ring, (k, v, *tangents[1:]), past)
    return _attend([q, *tangents[:1]], held, scale, ring, attend)


def attend_in_buffer(q, k, v, k_slots: Tensor, v_slots: Tensor, place: Tensor, scale: float, *settings: Any) -> Tensor:
    """Write the rank's share of ``k`` and ``v`` into buffers, and compute attention to a range of them, on all ranks.

    The buffers ``k_slots`` and ``v_slots`` ``(B, slots, Hk, D)`` are changed in place, as ``place`` of
    :func:`fsdp_cp.attention.cached.buffered_attention` says.
    """
    ring, kernel = ring_and_kernel(q, k, [], *settings)
    # A plan's fake tensors have no values; it then counts attention to the whole buffer.
    at, start, stop = (0, 0, k_slots.shape[1]) if isinstance(place, FakeTensor) else place.tolist()
    chunk = ring.layout.chunk(ring.rank)
    for buffer, x in ((k_slots, k), (v_slots, v)):
        buffer[:, at : at + chunk.size] = chunk.take(x)
    seen = [(k_slots[:, start:stop], v_slots[:, start:stop])] if stop > start else []
    return _attend([q], seen, scale, ring, kernel.forward)[0]


attend_in_buffer_operator = torch.library.custom_op(
    "fsdp_cp::buffered_attention",
    attend_in_buffer,
    mutates_args=("k_slots", "v_slots"),
    # names differ from those of the settings, or torch.compile takes one for the other
    schema="(Tensor q, Tensor k, Tensor v, Tensor(a!) k_slots, Tensor(b!) v_slots, Tensor place, "
    f"{SETTINGS}) -> Tensor",
)
attend_in_buffer_operator.register_fake(lambda q, *_: torch.empty_like(q, memory_format=torch.contiguous_format))


def _attend(
    queries: Sequence[Tensor], held: Sequence[Sequence[Tensor]], scale: float, ring: Ring, attend: Attend
) -> tuple[Tensor, Tensor]:
    """Compute attention to the keys and values that each rank holds, with one call of ``attend`` for each of them.

    With tangents, ``queries`` are q and its tangent, and each of ``held`` is k, v and theirs.
    """
    merged = Merged(_from_all(ring, *queries))
    for keys in held:
        merged.attend(attend, slice(0, merged.q.shape[1]), keys, None, scale)
    chunk = ring.layout.chunk(ring.rank)
    return padded(chunk, _merge_returned(ring, [chunk.take(x) for x in queries], merged.result()))


def pass_q_backward(
    grad_out, q, k, v, out, lse, past: Sequence[Tensor], scale: float, ring: Ring, kernel: Kernel
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the rank's queries, keys and values. ``past`` is constant.

    ``out`` and ``lse`` come from :func:`pass_q_attention`. Sums over chunks and ranks are in fp32 (fp64 for fp64).
    """
    chunk, key_chunk = ring.layout.chunk(ring.rank), ring.layout.key_chunk(ring.rank)
    sums = accumulation_dtype(q.dtype)
    grads, queries, outputs, rows = _from_all(ring, grad_out, q, out, _as_features(lse, q.dtype))
    lse = _as_rows(rows, sums)
    dq: Tensor | None = None
    for keys, values in _held(ring, (k, v), past):  # k and v come last
        dq_part, dk, dv = kernel.backward(grads, queries, keys, values, outputs, lse, None, scale)
        dq = dq_part if dq is None else dq.to(sums).add_(dq_part)
    if not key_chunk.size:
        dk, dv = k[:, :0], v[:, :0]
    dq = torch.zeros_like(queries) if dq is None else dq
    dq = chunk.put(dq) if ring.size == 1 else _sum_returned(ring, dq.to(sums))
    return dq.to(q.dtype), key_chunk.put(dk), key_chunk.put(dv)


def _held(ring: Ring, new: Sequence[Tensor], past: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Return the keys and values that this rank holds, without pads: ``past``, then its share of the ``new`` ones."""
    chunk = ring.layout.key_chunk(ring.rank)
    held = [*zip(past[::2], past[1::2], strict=True), [chunk.take(x) for x in new]]
    return [tensors for tensors in held if tensors[0].shape[1]]


def _as_features(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``(B, H, S)`` as ``(B, S, H, F)`` of another dtype, bit by bit, so that it travels in one buffer."""
    return lse.transpose(1, 2).unsqueeze(-1).contiguous().view(dtype)


def _as_rows(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Invert :func:`_as_features`."""
    # A copy: the rows of a single token and head are contiguous where they lie, but not aligned for `dtype`.
    rows = features.clone(memory_format=torch.contiguous_format).view(dtype)
    return rows.squeeze(-1).transpose(1, 2).contiguous()


def _from_all(ring: Ring, *tensors: Tensor) -> list[Tensor]:
    """Gather tensors ``(B, S, H, F)`` of all ring ranks: ``(B, new tokens without pads, H, F)``. One call."""
    chunks = [ring.layout.chunk(i) for i in range(ring.size)]
    if ring.size == 1:
        return [chunks[0].take(x) for x in tensors]
    packed = torch.cat(tensors, dim=-1).contiguous()
    received = packed.new_empty((ring.size, *packed.shape))
    all_gather_single(received.view(-1), packed.view(-1), ring.processes)
    pieces = received.split([x.shape[-1] for x in tensors], dim=-1)
    return [torch.cat([chunk.take(x) for chunk, x in zip(chunks, piece, strict=True)], dim=1) for piece in pieces]


def _for_all(ring: Ring, x: Tensor) -> Tensor:
    """Return ``(B, new tokens without pads, H, F)`` as ``(R, B, S, H, F)``: a padded part for each ring rank."""
    chunks = [ring.layout.chunk(i) for i in range(ring.size)]
    pieces = x.split([chunk.size for chunk in chunks], dim=1)
    return torch.stack([chunk.put(piece) for chunk, piece in zip(chunks, pieces, strict=True)])


def _merge_returned(ring: Ring, queries: Sequence[Tensor], partial: Dual) -> Dual:
    """Send each rank the results of its queries; merge the received results of the rank's own ``queries``."""
    if ring.size == 1:
        return partial
    out, lse, t_out, t_lse = partial
    features = [out, _as_features(lse, out.dtype)]
    if t_out is not None and t_lse is not None:
        features += [t_out, _as_features(t_lse, out.dtype)]
    widths = [x.shape[-1] for x in features]
    sent = _for_all(ring, torch.cat(features, dim=-1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ring.processes)
    chunk, merged = ring.layout.chunk(ring.rank), Merged(queries)
    for x in received:
        pieces = list(chunk.take(x).split(widths, dim=-1))
        pieces[1::2] = [_as_rows(features, lse.dtype) for features in pieces[1::2]]
        merged.add(slice(0, chunk.size), Dual(*pieces))
    return merged.result()


def _sum_returned(ring: Ring, x: Tensor) -> Tensor:
    """Return the sum over ring ranks of the gradients of this rank's queries, ``(B, S, H, D)``."""
    sent = _for_all(ring, x)
    received = torch.empty_like(sent[0])
    reduce_scatter_single(received.view(-1), sent.view(-1), ring.processes)
    return received


attend_by_passing_queries = AttentionOperator("cached_attention", pass_q_attention, pass_q_backward)
"""Operator of this module. Its further tensors are the ``past`` of :func:`pass_q_attention`, without gradients."""
