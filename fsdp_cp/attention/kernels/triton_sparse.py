"""Attention between chosen pieces of tokens as Triton kernels: forward with derivative, gradient of q, of k and v.

They compute :mod:`fsdp_cp.attention.kernels.sparse`. A program computes one piece of one head: its rows are loaded by
their token numbers, so pieces need not be neighbors in memory, and may have any number of rows. It walks through a list
of chosen pieces, whose length it reads from memory; no piece that was not chosen is loaded. In backward, the output and
the log-sum-exp come from outside, over the keys of all ranks, as in :class:`fsdp_cp.attention.kernels.kernel.Kernel`.

The algorithm is FlashAttention-2 (Dao 2023, algorithms 1 and 2); the tangents are those of
:mod:`fsdp_cp.attention.kernels.triton_dual`, which has the same requirements. Not yet run on a GPU.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsdp_cp.attention.kernels.kernel import Dual, Kernel, contiguous_rows
from fsdp_cp.attention.kernels.sparse import SparseKernels
from fsdp_cp.attention.kernels.triton_dual import INTERPRETED
from fsdp_cp.attention.pieces import Chosen, Pieces

LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows(base, tokens, row_stride, columns, valid, HEAD_DIM: tl.constexpr, CAST: tl.constexpr):
    """Load the rows ``tokens`` of a matrix with contiguous rows; 0 where a row is not ``valid``."""
    x = tl.load(
        base + tokens[:, None] * row_stride + columns[None, :],
        mask=valid[:, None] & (columns[None, :] < HEAD_DIM),
        other=0.0,
    )
    return x.to(tl.float32) if CAST else x


@triton.jit
def _program(heads):
    """Return the piece, sample and head of this program, and the place of its list."""
    piece, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    return piece, pair // heads, pair % heads, pair * tl.num_programs(0) + piece


@triton.jit
def _lse_and_delta(lse_ptr, delta_ptr, row, queries, is_query):
    """Load the log-sum-exp, to base 2, and delta of the ``queries`` of a head whose first row is ``row``."""
    lse = tl.load(lse_ptr + row + queries, mask=is_query, other=float("inf")) * LOG2_E
    return lse, tl.load(delta_ptr + row + queries, mask=is_query, other=0.0)


@triton.jit
def _piece(tokens_ptr, sizes_ptr, piece, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the token numbers of a piece, and which of them count."""
    lanes = tl.arange(0, BLOCK)
    valid = lanes < tl.load(sizes_ptr + piece)
    return tl.load(tokens_ptr + piece * WIDTH + lanes, mask=valid, other=0), valid


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, t_q_ptr, t_k_ptr, t_v_ptr, out_ptr, lse_ptr, t_out_ptr, t_lse_ptr,
    q_tokens, q_sizes, k_tokens, k_sizes, lists_ptr, counts_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    t_q_batch, t_q_token, t_q_head, t_k_batch, t_k_token, t_k_head, t_v_batch, t_v_token, t_v_head,
    rows, heads, most, scale,
    MOVES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH_M: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH_N: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Compute one query piece of one head: M queries, N keys of a key piece, D head size."""
    piece, batch, head, place = _program(heads)
    queries, is_query = _piece(q_tokens, q_sizes, piece, WIDTH_M, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_MD = _rows(q_ptr + batch * q_batch + head * q_head, queries, q_token, dims, is_query, HEAD_DIM, CAST)
    k_base = k_ptr + batch * k_batch + head * k_head
    v_base = v_ptr + batch * v_batch + head * v_head
    if MOVES:
        t_q_base = t_q_ptr + batch * t_q_batch + head * t_q_head
        t_q_MD = _rows(t_q_base, queries, t_q_token, dims, is_query, HEAD_DIM, CAST)
        t_k_base = t_k_ptr + batch * t_k_batch + head * t_k_head
        t_v_base = t_v_ptr + batch * t_v_batch + head * t_v_head

    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    t_total = tl.zeros([BLOCK_M], tl.float32)
    o_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    t_o_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(tl.load(counts_ptr + place)):
        key_piece = tl.load(lists_ptr + place * most + i)
        keys, is_key = _piece(k_tokens, k_sizes, key_piece, WIDTH_N, BLOCK_N)
        k_ND = _rows(k_base, keys, k_token, dims, is_key, HEAD_DIM, CAST)
        # Scale the product in fp32: keys scaled in 16 bits would be wrong by a factor that grows with the logits.
        logits = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * LOG2_E)
        logits = tl.where(is_key[None, :], logits, -float("inf"))
        raised = tl.maximum(highest, tl.max(logits, 1))
        fade = tl.exp2(highest - raised)  # a piece has a key, so no -inf - -inf
        highest = raised
        p_MN = tl.exp2(logits - raised[:, None])
        total = total * fade + tl.sum(p_MN, 1)
        v_ND = _rows(v_base, keys, v_token, dims, is_key, HEAD_DIM, CAST)
        o_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, o_MD * fade[:, None], input_precision=PRECISION)
        if MOVES:
            t_k_ND = _rows(t_k_base, keys, t_k_token, dims, is_key, HEAD_DIM, CAST)
            t_v_ND = _rows(t_v_base, keys, t_v_token, dims, is_key, HEAD_DIM, CAST)
            t_logits = tl.dot(t_q_MD, tl.trans(k_ND), input_precision=PRECISION)
            t_logits = tl.dot(q_MD, tl.trans(t_k_ND), t_logits, input_precision=PRECISION)
            t_p_MN = p_MN * (t_logits * scale)
            t_total = t_total * fade + tl.sum(t_p_MN, 1)
            t_o_MD = tl.dot(t_p_MN.to(v_ND.dtype), v_ND, t_o_MD * fade[:, None], input_precision=PRECISION)
            t_o_MD = tl.dot(p_MN.to(t_v_ND.dtype), t_v_ND, t_o_MD, input_precision=PRECISION)

    # A piece that chose nothing has total 0 and highest -inf: its output and tangents are 0, its log-sum-exp is -inf.
    total = tl.where(total == 0, 1.0, total)
    o_MD = o_MD / total[:, None]
    row_of_lse = (batch * heads + head) * rows + queries
    at = ((batch * rows + queries) * heads + head)[:, None] * HEAD_DIM + dims[None, :]
    whole = is_query[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(out_ptr + at, o_MD, mask=whole)
    tl.store(lse_ptr + row_of_lse, highest * LOG_2 + tl.log(total), mask=is_query)
    if MOVES:
        t_lse = t_total / total
        tl.store(t_out_ptr + at, t_o_MD / total[:, None] - t_lse[:, None] * o_MD, mask=whole)
        tl.store(t_lse_ptr + row_of_lse, t_lse, mask=is_query)


@triton.jit
def _gradient_of_q(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_tokens, q_sizes, k_tokens, k_sizes, lists_ptr, counts_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    rows, heads, most, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH_M: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH_N: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Sum over the key pieces that one query piece of one head chose."""
    piece, batch, head, place = _program(heads)
    queries, is_query = _piece(q_tokens, q_sizes, piece, WIDTH_M, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_MD = _rows(q_ptr + batch * q_batch + head * q_head, queries, q_token, dims, is_query, HEAD_DIM, CAST)
    g_MD = _rows(g_ptr + batch * g_batch + head * g_head, queries, g_token, dims, is_query, HEAD_DIM, CAST)
    lse, delta = _lse_and_delta(lse_ptr, delta_ptr, (batch * heads + head) * rows, queries, is_query)
    k_base = k_ptr + batch * k_batch + head * k_head
    v_base = v_ptr + batch * v_batch + head * v_head
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(tl.load(counts_ptr + place)):
        key_piece = tl.load(lists_ptr + place * most + i)
        keys, is_key = _piece(k_tokens, k_sizes, key_piece, WIDTH_N, BLOCK_N)
        k_ND = _rows(k_base, keys, k_token, dims, is_key, HEAD_DIM, CAST)
        v_ND = _rows(v_base, keys, v_token, dims, is_key, HEAD_DIM, CAST)
        logits = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * LOG2_E)
        p_MN = tl.where(is_key[None, :], tl.exp2(logits - lse[:, None]), 0.0)
        dp_MN = tl.dot(g_MD, tl.trans(v_ND), input_precision=PRECISION)
        ds_MN = p_MN * (dp_MN - delta[:, None])
        dq_MD = tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision=PRECISION)
    at = ((batch * rows + queries) * heads + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(dq_ptr + at, dq_MD * scale, mask=is_query[:, None] & (dims[None, :] < HEAD_DIM))


@triton.jit
def _gradients_of_k_and_v(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_tokens, q_sizes, k_tokens, k_sizes, lists_ptr, counts_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, g_batch, g_token, g_head,
    rows, key_rows, heads, most, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH_M: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH_N: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Sum over the query pieces that chose one key piece of one head."""
    piece, batch, head, place = _program(heads)
    keys, is_key = _piece(k_tokens, k_sizes, piece, WIDTH_N, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    k_ND = _rows(k_ptr + batch * k_batch + head * k_head, keys, k_token, dims, is_key, HEAD_DIM, CAST)
    v_ND = _rows(v_ptr + batch * v_batch + head * v_head, keys, v_token, dims, is_key, HEAD_DIM, CAST)
    q_base = q_ptr + batch * q_batch + head * q_head
    g_base = g_ptr + batch * g_batch + head * g_head
    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(tl.load(counts_ptr + place)):
        query_piece = tl.load(lists_ptr + place * most + i)
        queries, is_query = _piece(q_tokens, q_sizes, query_piece, WIDTH_M, BLOCK_M)
        q_MD = _rows(q_base, queries, q_token, dims, is_query, HEAD_DIM, CAST)
        g_MD = _rows(g_base, queries, g_token, dims, is_query, HEAD_DIM, CAST)
        lse, delta = _lse_and_delta(lse_ptr, delta_ptr, (batch * heads + head) * rows, queries, is_query)
        logits = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION) * (scale * LOG2_E)
        p_NM = tl.where(is_key[:, None], tl.exp2(logits - lse[None, :]), 0.0)
        dv_ND = tl.dot(p_NM.to(g_MD.dtype), g_MD, dv_ND, input_precision=PRECISION)
        dp_NM = tl.dot(v_ND, tl.trans(g_MD), input_precision=PRECISION)
        ds_NM = p_NM * (dp_NM - delta[None, :])
        dk_ND = tl.dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND, input_precision=PRECISION)
    at = ((batch * key_rows + keys) * heads + head)[:, None] * HEAD_DIM + dims[None, :]
    whole = is_key[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(dk_ptr + at, dk_ND * scale, mask=whole)
    tl.store(dv_ptr + at, dv_ND, mask=whole)


def work_lists(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the True entries of each row, ``(..., n)`` int32, and their number; no device is read."""
    counts = allowed.sum(-1, dtype=torch.int32)
    # The entries that are False go to one further column.
    place = torch.where(allowed, allowed.cumsum(-1, dtype=torch.int32) - 1, allowed.shape[-1])
    lists = torch.zeros((*allowed.shape[:-1], allowed.shape[-1] + 1), dtype=torch.int32, device=allowed.device)
    index = torch.arange(allowed.shape[-1], dtype=torch.int32, device=allowed.device).expand_as(place)
    return lists.scatter_(-1, place.long(), index), counts


def _table(pieces: Pieces) -> tuple[Tensor, Tensor]:
    return pieces.tokens, pieces.sizes


def _strides(*tensors: Tensor | None) -> list[int]:
    return [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]


def _constants(q: Tensor, chosen: Chosen) -> dict[str, Any]:
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    widths = (chosen.queries.tokens.shape[1], chosen.keys.tokens.shape[1])
    block_m, block_n = (max(16, triton.next_power_of_2(width)) for width in widths)
    return {
        "HEAD_DIM": q.shape[-1],
        "BLOCK_D": block_d,
        "WIDTH_M": widths[0],
        "BLOCK_M": block_m,
        "WIDTH_N": widths[1],
        "BLOCK_N": block_n,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "CAST": INTERPRETED,
        "num_warps": 4 if block_m <= 64 else 8,
        "num_stages": 2,
    }


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _attend(tensors: Sequence[Tensor | None], chosen: Chosen, scale: float, out_dtype: torch.dtype) -> Dual:
    q, k, v, t_q, t_k, t_v = contiguous_rows(*tensors)
    moves = t_q is not None
    batch, rows, heads, _ = q.shape
    # Each true token is a row of one piece, so that all rows are written.
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
    t_out, t_lse = (torch.empty_like(out), torch.empty_like(lse)) if moves else (None, None)
    lists, counts = work_lists(chosen.allowed)
    with _on(q):
        _forward[(chosen.allowed.shape[2], batch * heads)](
            q, k, v, *(q if x is None else x for x in (t_q, t_k, t_v)),
            out, lse, *(out if x is None else x for x in (t_out, t_lse)),
            *_table(chosen.queries), *_table(chosen.keys), lists, counts,
            *_strides(q, k, v, t_q, t_k, t_v), rows, heads, lists.shape[-1], scale,
            MOVES=moves, **_constants(q, chosen),
        )  # fmt: skip
    return Dual(out, lse, t_out, t_lse)


def sparse_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t_q: Tensor,
    t_k: Tensor,
    t_v: Tensor,
    chosen: Chosen,
    scale: float,
) -> Dual:
    """Compute :func:`fsdp_cp.attention.kernels.sparse.sparse_dual`, with fp32 results."""
    return _attend((q, k, v, t_q, t_k, t_v), chosen, scale, torch.float32)


class SparseTriton(Kernel):
    """Attention to chosen pieces by the Triton kernels of this module."""

    name = "sparse_triton"

    def forward(self, q, k, v, mask, scale):
        return _attend((q, k, v, None, None, None), mask, scale, q.dtype)[:2]

    def backward(self, grad_out, q, k, v, out, lse, mask, scale):
        g, q, k, v = contiguous_rows(grad_out, q, k, v)
        delta = (g.float() * out).sum(-1).transpose(1, 2).contiguous()
        lse, batch, heads, pieces = lse.contiguous(), q.shape[0], q.shape[2], mask.allowed.shape
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        tables = (*_table(mask.queries), *_table(mask.keys))
        strides, constants = _strides(q, k, v, g), _constants(q, mask)
        with _on(q):
            lists, counts = work_lists(mask.allowed)
            _gradient_of_q[(pieces[2], batch * heads)](
                q, k, v, g, lse, delta, dq, *tables, lists, counts, *strides,
                q.shape[1], heads, lists.shape[-1], scale, **constants,
            )  # fmt: skip
            lists, counts = work_lists(mask.allowed.mT)
            _gradients_of_k_and_v[(pieces[3], batch * heads)](
                q, k, v, g, lse, delta, dk, dv, *tables, lists, counts, *strides,
                q.shape[1], k.shape[1], heads, lists.shape[-1], scale, **constants,
            )  # fmt: skip
        return dq, dk, dv


FUSED = SparseKernels(SparseTriton(), sparse_dual)
