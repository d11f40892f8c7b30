"""The attention kernel of the CPU, behind the interface of kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_cp.attention.kernel import FLOATS, Kernel, fold_query_groups, unfold_query_groups


class CpuFlash(Kernel):
    """torch's flash attention on the CPU (private: ``aten::_scaled_dot_product_flash_attention_for_cpu``, torch 2.11 to
    2.13)."""

    name = "cpu_flash"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        if dtype not in FLOATS:
            return f"takes fp64, fp32, bf16 and fp16, not {dtype}"
        return None

    def forward(self, q, k, v, mask, scale):
        heads = q.shape[2]
        folded = fold_query_groups(q, k.shape[2])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(1, 2) for x in (folded, k, v)), attn_mask=_bias(mask, q.dtype), scale=scale
        )
        return unfold_query_groups(out.transpose(1, 2), heads), lse.reshape(q.shape[0], heads, q.shape[1])

    def backward(self, grad_out, q, k, v, out, lse, mask, scale):
        heads, kv_heads = q.shape[2], k.shape[2]
        grad_out, q, out = (fold_query_groups(x, kv_heads) for x in (grad_out, q, out))
        lse = lse.reshape(lse.shape[0], kv_heads, -1)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in (grad_out, q, k, v, out)),
            lse,
            0.0,
            False,
            attn_mask=_bias(mask, q.dtype),
            scale=scale,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        return unfold_query_groups(dq, heads), dk, dv


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``(B, Sk)`` bool to the ``(B, 1, 1, Sk)`` that is added to the logits."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[:, None, None, :]
