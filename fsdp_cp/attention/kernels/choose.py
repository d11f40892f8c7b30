"""Local attention kernel of the CPU, and the choice among all kernels."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor

from fsdp_cp.attention.kernels.cuda import CUDA_KERNELS, preferred
from fsdp_cp.attention.kernels.kernel import FLOATS, Kernel, fold_query_groups, unfold_query_groups
from fsdp_cp.attention.kernels.reference import Reference
from fsdp_cp.errors import UserError

log = logging.getLogger("fsdp_cp.attention")


class CpuFlash(Kernel):
    """torch's flash attention for the CPU.

    ``aten::_scaled_dot_product_flash_attention_for_cpu`` is private (torch 2.11 to 2.13).
    """

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
    """Convert a mask ``(B, Sk)`` to a bias of the logits, ``(B, 1, 1, Sk)``."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)[:, None, None, :]


@lru_cache(maxsize=1)
def all_kernels() -> dict[str, Kernel]:
    """Return every kernel by its name, installed or not."""
    return {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Reference())}


@lru_cache(maxsize=256)
def _explain(name: str, what: str, why: str) -> None:
    """Log each choice once. Do not cache the choice itself: deterministic algorithms may be switched on later."""
    log.info("attention backend auto: %s for %s (%s)", name, what, why)


def check_backend(backend: str) -> None:
    """Refuse a ``backend`` that is neither ``"auto"`` nor the name of a kernel.

    Raises:
        UserError: an unknown name.
    """
    if backend == "flash_attn_2":
        raise UserError("backend='flash_attn_2' was removed; use flash, torch's own FlashAttention 2")
    names = ("auto", *all_kernels())
    if backend not in names:
        raise UserError(f"backend={backend!r} is unknown; use {', '.join(names)}")


def choose_kernel(backend: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> Kernel:
    """Return the kernel named ``backend``; for ``"auto"``, return the best that can run and log the reason once.

    Raises:
        UserError: an unknown name, or a kernel that cannot run these tensors.
    """
    check_backend(backend)
    kernels = all_kernels()
    what = f"{dtype} on {device.type}{', masked' if masked else ''}"
    if backend != "auto":
        if reason := kernels[backend].refuses(device, dtype, head_dim, masked):
            able = [name for name, other in kernels.items() if not other.refuses(device, dtype, head_dim, masked)]
            raise UserError(f"backend={backend!r} {reason}; use auto or {', '.join(able)}")
        return kernels[backend]
    order = preferred(device) if device.type == "cuda" else (kernels["cpu_flash"],)
    reasons: list[str] = []
    for kernel in (*order, kernels["reference"]):
        reason = kernel.refuses(device, dtype, head_dim, masked)
        if reason is None:
            _explain(kernel.name, what, "; ".join(reasons) or "first choice")
            return kernel
        reasons.append(f"{kernel.name} {reason}")
    raise UserError(f"no attention kernel takes q of {what}: {'; '.join(reasons)}; cast q, k and v")
