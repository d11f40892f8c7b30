"""Attention with its forward-mode derivative as one Triton kernel: output, log-sum-exp and the tangents of both.

The kernel computes :func:`fsdp_cp.attention.kernels.kernel.attention_dual` in one pass over the keys, with six
matrix products per tile of logits (a forward alone takes two). It is FlashAttention-2 (Dao 2023, algorithm 1) with the
tangents of sCM (Lu and Song 2024, appendix on the JVP of flash attention). It returns the tangent of the log-sum-exp
too, so that a ring can merge chunks of keys exactly.

Requires Triton 3.6 or later, which torch's CUDA builds include. The kernel has no backward.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsdp_cp.attention.kernels.kernel import Dual, contiguous_rows

INTERPRETED = triton.knobs.runtime.interpret
"""Whether Triton's interpreter runs the kernel. It multiplies the raw bits of bf16 in ``tl.dot``, so tiles are cast."""


@triton.jit
def _tile(base, row, column, row_stride, rows, HEAD_DIM: tl.constexpr, CAST: tl.constexpr):
    """Load the tile at ``row`` and ``column`` of a matrix with contiguous rows, with zeros outside of it."""
    x = tl.load(
        base + row[:, None].to(tl.int64) * row_stride + column[None, :],
        mask=(row[:, None] < rows) & (column[None, :] < HEAD_DIM),
        other=0.0,
    )
    return x.to(tl.float32) if CAST else x


@triton.jit
def _attention_dual(
    q_ptr, k_ptr, v_ptr, t_q_ptr, t_k_ptr, t_v_ptr, mask_ptr, out_ptr, lse_ptr, t_out_ptr, t_lse_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    t_q_batch, t_q_token, t_q_head, t_k_batch, t_k_token, t_k_head, t_v_batch, t_v_token, t_v_head,
    mask_batch, mask_token,
    queries, keys, heads, group, scale,
    HAS_T_Q: tl.constexpr, HAS_T_K: tl.constexpr, HAS_T_V: tl.constexpr, HAS_MASK: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Compute ``BLOCK_M`` queries of one head in each program: M queries, N keys, D head size."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    kv_head = head // group
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_MD = _tile(q_ptr + batch * q_batch + head * q_head, rows, dims, q_token, queries, HEAD_DIM, CAST)
    if HAS_T_Q:
        t_q_base = t_q_ptr + batch * t_q_batch + head * t_q_head
        t_q_MD = _tile(t_q_base, rows, dims, t_q_token, queries, HEAD_DIM, CAST)
    k_base = k_ptr + batch * k_batch + kv_head * k_head
    v_base = v_ptr + batch * v_batch + kv_head * v_head
    t_k_base = t_k_ptr + batch * t_k_batch + kv_head * t_k_head
    t_v_base = t_v_ptr + batch * t_v_batch + kv_head * t_v_head

    # Keep for each row the running maximum (in powers of two), the sum, and the sum of the logits' tangents. Divide
    # the two accumulated outputs by the sum after the loop.
    highest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    t_total = tl.zeros([BLOCK_M], tl.float32)
    o_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    t_o_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, keys, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k_ND = _tile(k_base, columns, dims, k_token, keys, HEAD_DIM, CAST)
        seen = columns < keys
        if HAS_MASK:
            allowed = tl.load(mask_ptr + batch * mask_batch + columns.to(tl.int64) * mask_token, mask=seen, other=0)
            seen = seen & (allowed != 0)
        logits = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * 1.4426950408889634)
        logits = tl.where(seen[None, :], logits, -float("inf"))
        raised = tl.maximum(highest, tl.max(logits, 1))
        # A row without a key so far has -inf here, and -inf - -inf is NaN.
        shift = tl.where(raised == -float("inf"), 0.0, raised)
        fade = tl.exp2(highest - shift)
        highest = raised
        p_MN = tl.exp2(logits - shift[:, None])
        total = total * fade + tl.sum(p_MN, 1)
        v_ND = _tile(v_base, columns, dims, v_token, keys, HEAD_DIM, CAST)
        o_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, o_MD * fade[:, None], input_precision=PRECISION)
        t_o_MD = t_o_MD * fade[:, None]
        if HAS_T_Q or HAS_T_K:
            t_logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if HAS_T_Q:
                t_logits = tl.dot(t_q_MD, tl.trans(k_ND), t_logits, input_precision=PRECISION)
            if HAS_T_K:
                t_k_ND = _tile(t_k_base, columns, dims, t_k_token, keys, HEAD_DIM, CAST)
                t_logits = tl.dot(q_MD, tl.trans(t_k_ND), t_logits, input_precision=PRECISION)
            t_p_MN = p_MN * (t_logits * scale)
            t_total = t_total * fade + tl.sum(t_p_MN, 1)
            t_o_MD = tl.dot(t_p_MN.to(v_ND.dtype), v_ND, t_o_MD, input_precision=PRECISION)
        if HAS_T_V:
            t_v_ND = _tile(t_v_base, columns, dims, t_v_token, keys, HEAD_DIM, CAST)
            t_o_MD = tl.dot(p_MN.to(t_v_ND.dtype), t_v_ND, t_o_MD, input_precision=PRECISION)

    # A row without any key has total 0 and highest -inf: its output and tangents are 0, its log-sum-exp is -inf.
    total = tl.where(total == 0, 1.0, total)
    lse = highest * 0.6931471805599453 + tl.log(total)
    o_MD = o_MD / total[:, None]
    t_lse = t_total / total
    t_o_MD = t_o_MD / total[:, None] - t_lse[:, None] * o_MD
    row_of_lse = (batch * heads + head) * queries + rows
    row_of_out = (batch * queries + rows.to(tl.int64)) * heads + head
    whole = (rows[:, None] < queries) & (dims[None, :] < HEAD_DIM)
    place = row_of_out[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + place, o_MD, mask=whole)
    tl.store(t_out_ptr + place, t_o_MD, mask=whole)
    tl.store(lse_ptr + row_of_lse, lse, mask=rows < queries)
    tl.store(t_lse_ptr + row_of_lse, t_lse, mask=rows < queries)


def _tiles(block_d: int) -> dict[str, int]:
    """Return tile sizes, warps and pipeline stages: the fastest of ten configurations on an H200 in bf16."""
    if block_d <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3}


def attention_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    t_q: Tensor | None,
    t_k: Tensor | None,
    t_v: Tensor | None,
    mask: Tensor | None,
    scale: float,
) -> Dual:
    """Compute :func:`fsdp_cp.attention.kernels.kernel.attention_dual` in one kernel launch, with fp32 results.

    Give at least one tangent. Tensors have any strides; they are copied if the last dimension is not contiguous.
    """
    batch, queries, heads, head_dim = q.shape
    tensors = contiguous_rows(q, k, v, t_q, t_k, t_v)
    out = torch.empty((batch, queries, heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    t_out, t_lse = torch.empty_like(out), torch.empty_like(lse)
    strides = [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
    mask_bytes = None if mask is None else mask.view(torch.uint8)
    block_d = max(16, triton.next_power_of_2(head_dim))
    tiles = _tiles(block_d)
    with torch.cuda.device(q.device) if q.device.type == "cuda" else torch.no_grad():
        _attention_dual[(math.ceil(queries / tiles["BLOCK_M"]), batch * heads)](
            *(q if x is None else x for x in tensors), q if mask_bytes is None else mask_bytes,
            out, lse, t_out, t_lse, *strides, *((0, 0) if mask is None else mask.stride()),
            queries, k.shape[1], heads, heads // k.shape[2], scale,
            HAS_T_Q=t_q is not None, HAS_T_K=t_k is not None, HAS_T_V=t_v is not None, HAS_MASK=mask is not None,
            HEAD_DIM=head_dim, BLOCK_D=block_d, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            CAST=INTERPRETED, **tiles,
        )  # fmt: skip
    return Dual(out, lse, t_out, t_lse)


FUSED = attention_dual
