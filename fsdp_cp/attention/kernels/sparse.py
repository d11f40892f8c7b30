"""Attention between chosen pieces of tokens in plain torch: forward, backward, derivative.

It runs everywhere and takes every dtype. Only chosen key pieces are gathered, for a few query pieces at a time. The
mask of these kernels is a :class:`fsdp_cp.attention.pieces.Chosen`. Logits are products of unscaled queries and keys:
keys scaled in 16 bits before the product would be wrong by a factor that grows with the logits.

Shapes: N batch times heads, P pieces, W tokens of a piece, D head size, g query pieces of a batch, c chosen pieces.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_cp.attention.kernels.kernel import Dual, Kernel, accumulation_dtype
from fsdp_cp.attention.pieces import Chosen, Pieces

GATHERED = 1 << 22
"""Elements of the keys that are gathered at a time."""


class SparseReference(Kernel):
    """Attention to chosen pieces in plain torch, in fp32 (fp64 for fp64)."""

    name = "sparse_reference"

    def forward(self, q, k, v, mask, scale):
        out, lse, _, _ = sparse_dual(q, k, v, None, None, None, mask, scale)
        return out.to(q.dtype), lse

    def backward(self, grad_out, q, k, v, out, lse, mask, scale):
        with torch.autocast(q.device.type, enabled=False):  # autocast acts inside operators too
            return _backward(grad_out, q, k, v, out, lse, mask, scale)


class SparseKernels(NamedTuple):
    """Implementations of attention to chosen pieces: forward and backward, and the derivative."""

    kernel: Kernel
    dual: Callable[..., Dual]


def _by_piece(x: Tensor, pieces: Pieces) -> Tensor:
    """Reshape ``(B, n, H, D)`` to ``(N, P, W, D)``, in fp32 or fp64."""
    x = x.transpose(1, 2).to(accumulation_dtype(x.dtype))
    return x[:, :, pieces.tokens].flatten(0, 1)


def _by_token(x: Tensor, pieces: Pieces, batch: int) -> Tensor:
    """Reshape ``(N, P, W, D)`` to ``(B, n, H, D)``."""
    return x.flatten(1, 2)[:, pieces.places].unflatten(0, (batch, -1)).transpose(1, 2)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Take pieces ``(N, g, c)`` of ``(N, P, W, D)``: ``(N, g, c W, D)``."""
    return x[torch.arange(len(x), device=x.device)[:, None, None], index].flatten(2, 3)


def _batches(chosen: Chosen, k: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some query pieces, their chosen key pieces ``(N, g, c)``, and which keys of these count ``(N, g, c W)``.

    ``k`` is ``(N, P, W, D)``. The number c does not depend on values of the device, only on the CPU, where it is exact.
    """
    allowed, dense = chosen.allowed.flatten(0, 1), chosen.queries.dense
    slots, every = allowed.shape[1:]
    for first, last, most in ((0, dense, every), (dense, slots, min(chosen.most, every))):
        count = max(1, GATHERED // max(1, most * k[:, 0].numel()))
        starts = range(first, last, count)
        for start in starts[:2] if isinstance(k, FakeTensor) else starts:
            rows = slice(start, min(start + count, last))
            some = allowed[:, rows]
            if some.device.type == "cpu" and not isinstance(k, FakeTensor):
                most = int(some.sum(-1).max())
            if most:
                index = some.byte().argsort(dim=-1, descending=True, stable=True)[..., :most]
                yield rows, index, (some.gather(-1, index)[..., None] & chosen.keys.valid[index]).flatten(2)


def sparse_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    chosen: Chosen,
    scale: float,
) -> Dual:
    """Compute attention to the chosen pieces, and its derivative along the tangents: all of them, or none.

    Arguments and results are those of :func:`fsdp_cp.attention.kernels.kernel.attention_dual`.
    """
    with torch.autocast(q.device.type, enabled=False):  # autocast acts inside operators too
        return _forward(q, k, v, t_q, t_k, t_v, chosen, scale)


def _forward(q, k, v, t_q, t_k, t_v, chosen: Chosen, scale: float) -> Dual:
    batch, queries, keys = len(q), chosen.queries, chosen.keys
    q, k, v = _by_piece(q, queries), _by_piece(k, keys), _by_piece(v, keys)
    moves = t_q is not None
    t_q, t_k, t_v = (
        None if x is None else _by_piece(x, pieces)
        for x, pieces in zip((t_q, t_k, t_v), (queries, keys, keys), strict=True)
    )
    out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -torch.inf)
    t_out, t_lse = (torch.zeros_like(out), torch.zeros_like(lse)) if moves else (None, None)
    for rows, index, seen in _batches(chosen, k):
        some_q, some_k, some_v = q[:, rows], _take(k, index), _take(v, index)
        logits = _logits(some_q, some_k, seen, scale)
        lse[:, rows] = logits.logsumexp(-1, keepdim=True)
        p = logits.sub_(_finite(lse[:, rows])).exp_()
        out[:, rows] = p @ some_v
        if t_out is None or t_lse is None:
            continue
        p_t = (t_q[:, rows] @ some_k.mT + some_q @ _take(t_k, index).mT).mul_(scale).mul_(p)
        t_lse[:, rows] = p_t.sum(-1, keepdim=True)
        t_out[:, rows] = p_t @ some_v + p @ _take(t_v, index) - t_lse[:, rows] * out[:, rows]
    dual = Dual(_by_token(out, queries, batch), _rows(_by_token(lse, queries, batch)))
    if t_out is None or t_lse is None:
        return dual
    return dual._replace(t_out=_by_token(t_out, queries, batch), t_lse=_rows(_by_token(t_lse, queries, batch)))


def _rows(x: Tensor) -> Tensor:
    """Reshape ``(B, n, H, 1)`` to ``(B, H, n)``."""
    return x.squeeze(-1).transpose(1, 2)


def _logits(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    return (q @ k.mT).mul_(scale).masked_fill_(~seen[:, :, None], -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """Replace the -inf of rows without a key by 0, so that their probabilities are 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _backward(g, q, k, v, out, lse, chosen: Chosen, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    batch, queries, keys = len(q), chosen.queries, chosen.keys
    dtypes = [x.dtype for x in (q, k, v)]
    sums = accumulation_dtype(q.dtype)
    delta = _by_piece((g.to(sums) * out).sum(-1, keepdim=True), queries)
    lse = _by_piece(lse.transpose(1, 2).unsqueeze(-1), queries)
    lse = lse.masked_fill(~queries.valid[..., None], torch.inf)  # rows after a piece's last token add nothing
    g, q, k, v = (_by_piece(x, p) for x, p in zip((g, q, k, v), (queries, queries, keys, keys), strict=True))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    which = torch.arange(len(q), device=q.device)[:, None, None]
    for rows, index, seen in _batches(chosen, k):
        some_q, some_g, some_k = q[:, rows], g[:, rows], _take(k, index)
        p = _logits(some_q, some_k, seen, scale).sub_(lse[:, rows]).exp_()
        ds = (some_g @ _take(v, index).mT).sub_(delta[:, rows]).mul_(p).mul_(scale)
        dq[:, rows] = ds @ some_k
        for total, x in ((dk, ds.mT @ some_q), (dv, p.mT @ some_g)):
            total.index_put_((which, index), x.unflatten(2, (index.shape[-1], -1)), accumulate=True)
    grads = zip((dq, dk, dv), (queries, keys, keys), dtypes, strict=True)
    dq, dk, dv = (_by_token(x, pieces, batch).to(dtype) for x, pieces, dtype in grads)
    return dq, dk, dv


PLAIN_SPARSE = SparseKernels(SparseReference(), sparse_dual)
