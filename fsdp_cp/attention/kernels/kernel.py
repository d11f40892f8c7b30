"""Interface of local attention kernels, functions that they share, and the kernels of the CPU: flash and plain torch.

The kernel in plain torch works tile by tile, so that memory grows linearly in tokens, and takes every dtype on every
device. :mod:`fsdp_cp.attention.kernels.triton_dual` computes the same derivative in one kernel on CUDA. The algorithm
follows FlashAttention (Dao et al. 2022, algorithms 1 and 4). The tangent follows sCM (Lu and Song 2024, appendix on JVP
of flash attention): with ``P = softmax(S)``, ``t_S = scale (t_q k' + q t_k')`` and ``t_lse = rowsum(P t_S)``,
``t_out = (P t_S) v - t_lse out + P t_v``.

Shapes: B batch, Sq and Sk query and key tokens, H query heads, Hk key/value heads (Hk divides H), D head size.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_cp.measure.fake_world import device_type

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Kernel(ABC):
    """Attention of some queries to some keys on one device, forward and backward."""

    name: str
    checked_at_setup: bool = False
    """Whether ``auto`` takes the kernel only after :func:`fsdp_cp.attention.kernels.choose.prepare_kernels`."""

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
        """Return why this kernel cannot run such tensors ("takes bf16, not fp32"), or ``None`` if it can.

        Sparse kernels take all: :func:`fsdp_cp.attention.kernels.choose.choose_sparse` knows their limits.
        """
        return None

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Compute the output and the log-sum-exp of the logits.

        Args:
            q: ``(B, Sq, H, D)``; its last dimension is contiguous, the other strides are arbitrary.
            k, v: ``(B, Sk, Hk, D)``; neither ``Sq`` nor ``Sk`` is 0.
            mask: ``(B, Sk)`` bool, True where a key may be attended to, or ``None``. Kernels of sparse attention get a
                :class:`fsdp_cp.attention.pieces.Chosen`.
            scale: factor on the logits.

        Returns:
            ``(B, Sq, H, D)`` in the dtype of ``q``, and ``(B, H, Sq)`` in fp32 or fp64; any value without a key.
        """

    @abstractmethod
    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Any,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the contribution of these keys to the gradients of ``q``, ``k`` and ``v``.

        ``grad_out`` and ``out`` are ``(B, Sq, H, D)``. ``out`` and ``lse`` ``(B, H, Sq)`` are those of whole rows, over
        the keys of all ranks; ``lse`` is +inf for a row without any key.
        """

    def slower_than_others(self, tokens: int, gradients: bool) -> str | None:
        """Return why ``auto`` prefers another kernel for calls of ``tokens`` queries and keys, or ``None``."""
        return None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over chunks and of log-sum-exps: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def contiguous_rows(*tensors: Any) -> list[Any]:
    """Return tensors with contiguous rows of a head: kernels assume them, and would read the wrong memory otherwise.

    ``None`` stays ``None``.
    """
    return [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in tensors]


def fold_query_groups(q: Tensor, kv_heads: int) -> Tensor:
    """Reshape ``(B, S, H, D)`` to ``(B, G S, Hk, D)``, for kernels without grouped-query attention.

    The G = H / Hk query heads that share a K/V head become G times as many queries: rows of attention are independent.
    """
    return q if q.shape[2] == kv_heads else rearrange(q, "b s (k g) d -> b (g s) k d", k=kv_heads)


def unfold_query_groups(out: Tensor, heads: int) -> Tensor:
    """Invert :func:`fold_query_groups`."""
    kv_heads = out.shape[2]
    return out if kv_heads == heads else rearrange(out, "b (g s) k d -> b s (k g) d", g=heads // kv_heads)


class UngroupedKernel(Kernel):
    """Kernel without grouped-query attention, which computes folded queries (:func:`fold_query_groups`)."""

    @abstractmethod
    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
        """Compute :meth:`forward` of as many query heads as key heads."""

    @abstractmethod
    def differentiate(self, grad_out, q, k, v, out, lse, mask: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compute :meth:`backward` of as many query heads as key heads."""

    def forward(self, q, k, v, mask, scale):
        batch, queries, heads, _ = q.shape
        out, lse = self.compute(fold_query_groups(q, k.shape[2]), k, v, mask, scale)
        return unfold_query_groups(out, heads), lse.reshape(batch, heads, queries)

    def backward(self, grad_out, q, k, v, out, lse, mask, scale):
        heads, kv_heads = q.shape[2], k.shape[2]
        grad_out, q, out = (fold_query_groups(x, kv_heads) for x in (grad_out, q, out))
        lse = lse.reshape(lse.shape[0], kv_heads, -1)  # (B, Hk, G * Sq), in the order of the folded queries
        dq, dk, dv = self.differentiate(grad_out, q, k, v, out, lse, mask, scale)
        return unfold_query_groups(dq, heads), dk, dv


_TILES = {"cpu": (256, 512), "cuda": (1024, 2048)}
"""Rows and columns of a tile of the attention matrix, by device type."""


class Dual(NamedTuple):
    """Attention and its tangent: ``out`` and ``t_out`` ``(B, Sq, H, D)``, ``lse`` and ``t_lse`` ``(B, H, Sq)``."""

    out: Tensor
    lse: Tensor
    t_out: Tensor | None = None
    t_lse: Tensor | None = None


def _heads_first(x: Tensor) -> Tensor:
    """Transpose ``(B, S, H, D)`` to ``(B, H, S, D)``, in the compute dtype of products: only CUDA sums bf16 in fp32."""
    return x.transpose(1, 2).to(x.dtype if device_type(x) == "cuda" else accumulation_dtype(x.dtype)).contiguous()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in fp32 or better. ``a`` ``(B, H, M, K)`` is rounded to the dtype of ``b`` ``(B, H, K, N)``."""
    a = a.to(b.dtype)
    with torch.autocast(a.device.type, enabled=False):  # autocast acts inside operators too and would round to bf16
        if b.dtype == accumulation_dtype(b.dtype):
            return a @ b
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])


def _tile_sizes(x: Tensor) -> tuple[int, int]:
    return _TILES.get(device_type(x), _TILES["cpu"])


def _starts(x: Tensor, step: int) -> range:
    """Return the start of each tile of ``(B, H, S, D)``; for a fake tensor of two, which reach the peak memory."""
    return range(0, min(x.shape[2], 2 * step) if isinstance(x, FakeTensor) else x.shape[2], step)


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    logits = product(q, k.mT).mul_(scale)
    return logits if mask is None else logits.masked_fill_(~mask[:, None, None, :], -torch.inf)


def _tangent_of_logits(q: Tensor, k: Tensor, t_q: Tensor | None, t_k: Tensor | None) -> Tensor | None:
    """Return the tangent of ``q k'``; ``None`` for 0."""
    from_q = None if t_q is None else product(t_q, k.mT)
    if t_k is None:
        return from_q
    from_k = product(q, t_k.mT)
    return from_k if from_q is None else from_k + from_q


def _tile(x: Tensor | None, positions: slice) -> Tensor | None:
    """Return some positions of ``(B, H, S, D)``; ``None`` of ``None``."""
    return None if x is None else x[:, :, positions]


def _refused(dtype: torch.dtype) -> str | None:
    return None if dtype in FLOATS else f"takes fp64, fp32, bf16 and fp16, not {dtype}"


class Reference(UngroupedKernel):
    """Attention kernel in plain torch, in fp32 (fp64 for fp64), tile by tile."""

    name = "reference"

    def refuses(self, device, dtype, head_dim, masked):
        return _refused(dtype)

    def compute(self, q, k, v, mask, scale):
        dual = attention_dual(q, k, v, None, None, None, mask, scale)
        return dual.out.to(q.dtype), dual.lse

    def differentiate(self, grad_out, q, k, v, out, lse, mask, scale):
        dtype = q.dtype
        grad_out, q, k, v, out = (_heads_first(x) for x in (grad_out, q, k, v, out))
        sums = accumulation_dtype(dtype)
        delta = (grad_out.to(sums) * out).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(x, dtype=sums) for x in (q, k, v))
        rows, columns = _tile_sizes(q)
        for i in _starts(q, rows):
            r = slice(i, i + rows)
            for j in _starts(k, columns):
                c = slice(j, j + columns)
                tile_mask = None if mask is None else mask[:, c]
                p = _logits(q[:, :, r], k[:, :, c], tile_mask, scale).sub_(lse[:, :, r, None]).exp_()
                dv[:, :, c] += product(p.mT, grad_out[:, :, r])
                ds = product(grad_out[:, :, r], v[:, :, c].mT).sub_(delta[:, :, r]).mul_(p).mul_(scale)
                dq[:, :, r] += product(ds, k[:, :, c])
                dk[:, :, c] += product(ds.mT, q[:, :, r])
        return tuple(x.transpose(1, 2).to(dtype) for x in (dq, dk, dv))


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
    """Compute attention of queries to keys, and its derivative along the tangents, in one pass.

    Args:
        q, t_q: ``(B, Sq, H, D)``.
        k, v, t_k, t_v: ``(B, Sk, Hk, D)``, ``Hk`` divides ``H``. A tangent of ``None`` is zero.
        mask: ``(B, Sk)``, True where a key may be attended to.

    Returns:
        All in fp32 (fp64 for fp64); no tangents if none is given. A row without a key has 0, and -inf as ``lse``.
    """
    heads = q.shape[2]
    q = _heads_first(fold_query_groups(q, k.shape[2]))
    t_q = None if t_q is None else _heads_first(fold_query_groups(t_q, k.shape[2]))
    k, v = _heads_first(k), _heads_first(v)
    t_k, t_v = (None if t is None else _heads_first(t) for t in (t_k, t_v))
    moves = t_q is not None or t_k is not None or t_v is not None
    out = torch.empty_like(q, dtype=accumulation_dtype(q.dtype))
    lse = out.new_empty(q.shape[:3])
    tangents = (torch.zeros_like(out), torch.zeros_like(lse)) if moves else None
    rows, columns = _tile_sizes(q)
    for i in _starts(q, rows):
        r = slice(i, i + rows)
        queries, t_queries = q[:, :, r], _tile(t_q, r)
        o = torch.zeros_like(out[:, :, r])
        largest = o.new_full((*o.shape[:3], 1), -torch.inf)
        total = torch.zeros_like(largest)
        t_total, t_o = torch.zeros_like(largest), torch.zeros_like(o)
        for j in _starts(k, columns):
            c = slice(j, j + columns)
            keys, values, t_keys, t_values = k[:, :, c], v[:, :, c], _tile(t_k, c), _tile(t_v, c)
            logits = _logits(queries, keys, None if mask is None else mask[:, c], scale)
            raised = torch.maximum(largest, logits.amax(-1, keepdim=True))
            # A row without a key so far has -inf here, and -inf - -inf is NaN.
            shift = raised.masked_fill(raised == -torch.inf, 0)
            fade, largest = (largest - shift).exp_(), raised
            p = logits.sub_(shift).exp_()
            total = total.mul_(fade).add_(p.sum(-1, keepdim=True))
            o = o.mul_(fade).add_(product(p, values))
            if not moves:
                continue
            t_o.mul_(fade)
            if t_values is not None:
                t_o += product(p, t_values)
            if (t_logits := _tangent_of_logits(queries, keys, t_queries, t_keys)) is not None:
                p_t = t_logits.mul_(scale).mul_(p)
                t_total.mul_(fade).add_(p_t.sum(-1, keepdim=True))
                t_o += product(p_t, values)
        lse[:, :, r] = (total.log() + largest).squeeze(-1)
        total = total.masked_fill_(total == 0, 1)
        out[:, :, r] = o.div_(total)
        if tangents is not None:
            t_out, t_lse = tangents
            t_total = t_total.div_(total)
            t_out[:, :, r] = t_o.div_(total).sub_(t_total * out[:, :, r])
            t_lse[:, :, r] = t_total.squeeze(-1)
    out, lse = unfold_query_groups(out.transpose(1, 2), heads), lse.reshape(q.shape[0], heads, -1)
    if tangents is None:
        return Dual(out, lse)
    t_out, t_lse = tangents
    return Dual(out, lse, unfold_query_groups(t_out.transpose(1, 2), heads), t_lse.reshape(lse.shape))


class CpuFlash(UngroupedKernel):
    """torch's flash attention for the CPU (``aten::_scaled_dot_product_flash_attention_for_cpu``, private)."""

    name = "cpu_flash"

    def refuses(self, device, dtype, head_dim, masked):
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        return _refused(dtype)

    def compute(self, q, k, v, mask, scale):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=_bias(mask, q.dtype), scale=scale
        )
        return out.transpose(1, 2), lse

    def differentiate(self, grad_out, q, k, v, out, lse, mask, scale):
        tensors = [x.transpose(1, 2) for x in (grad_out, q, k, v, out)]
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = flash_backward(*tensors, lse, 0.0, False, attn_mask=_bias(mask, q.dtype), scale=scale)
        return tuple(x.transpose(1, 2) for x in grads)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask ``(B, Sk)`` to a bias of the logits, ``(B, 1, 1, Sk)``."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[:, None, None, :]
