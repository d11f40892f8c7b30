"""Local attention kernels behind one small interface, and the choice among them.

Shapes: B batch, Sq and Sk query and key tokens, H query heads, Hk key/value heads (Hk divides H), D head size.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from einops import rearrange
from torch import Tensor

log = logging.getLogger("fsdp_cp.attention")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Kernel(ABC):
    """Attention of some queries to some keys on one device, forward and backward."""

    name: str

    @abstractmethod
    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
        """Why this kernel cannot run such tensors ("takes bf16, not fp32"); ``None`` if it can."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the logits.

        Args:
            q: ``(B, Sq, H, D)``; its last dimension is contiguous, the other strides are arbitrary.
            k, v: ``(B, Sk, Hk, D)``; neither ``Sq`` nor ``Sk`` is 0.
            mask: ``(B, Sk)`` bool, True where a key may be attended to.
            scale: factor on the logits.

        Returns:
            ``(B, Sq, H, D)`` in the dtype of ``q``, and ``(B, H, Sq)`` in fp32 (fp64 for fp64). Rows without any key
            may hold anything.
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
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What these keys add to the gradients, where ``out`` and ``lse`` belong to the whole rows.

        Args:
            grad_out, out: ``(B, Sq, H, D)``.
            lse: ``(B, H, Sq)`` over all keys of the row, wherever they are; +inf for a row without any key.

        Returns:
            Gradients of ``q``, ``k`` and ``v``.
        """


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over chunks, log-sum-exps and their merging are kept in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def fold_query_groups(q: Tensor, kv_heads: int) -> Tensor:
    """``(B, S, H, D)`` to ``(B, G S, Hk, D)``: rows of attention are independent, so the G = H / Hk query heads that
    share a K/V head are as good as G times the queries, and no kernel needs to know of grouped-query attention."""
    return q if q.shape[2] == kv_heads else rearrange(q, "b s (k g) d -> b (g s) k d", k=kv_heads)


def unfold_query_groups(out: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`fold_query_groups`."""
    kv_heads = out.shape[2]
    return out if kv_heads == heads else rearrange(out, "b (g s) k d -> b s (k g) d", g=heads // kv_heads)


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


def _kernels() -> dict[str, Kernel]:
    # Imported here: these files build on the interface above.
    from fsdp_cp.attention.cuda_kernels import CUDA_KERNELS
    from fsdp_cp.attention.reference import Reference

    return {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Reference())}


@lru_cache(maxsize=1)
def all_kernels() -> dict[str, Kernel]:
    """Every kernel by its name, installed or not."""
    return _kernels()


@lru_cache(maxsize=256)
def _explain(name: str, what: str, why: str) -> None:
    """Once for each choice. The choice itself is made anew: deterministic algorithms may be switched on meanwhile."""
    log.info("attention backend auto: %s for %s (%s)", name, what, why)


def choose_kernel(
    backend: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool, jvp: bool = False
) -> Kernel:
    """The kernel called ``backend``, or for ``"auto"`` the best that can run; the log says once which and why.

    Raises:
        ValueError: an unknown name, a kernel that cannot run these tensors, or that has no JVP where one is asked for.
    """
    from fsdp_cp.attention.cuda_kernels import preferred

    kernels = all_kernels()
    if backend == "auto":
        order = preferred(device) if device.type == "cuda" else (kernels["cpu_flash"],)
        candidates = [kernels["reference"]] if jvp else [*order, kernels["reference"]]
        reasons = []
        for kernel in candidates:
            reason = kernel.refuses(device, dtype, head_dim, masked)
            if reason is None:
                break
            reasons.append(f"{kernel.name} {reason}")
        else:
            raise ValueError(
                f"no attention kernel takes {dtype} on {device.type}: {'; '.join(reasons)}; cast q, k and v"
            )
        why = "the only one with a forward-mode derivative" if jvp else "; ".join(reasons) or "first choice"
        what = f"{dtype} on {device.type}{', masked' if masked else ''}{', JVP' if jvp else ''}"
        _explain(kernel.name, what, why)
        return kernel
    if backend not in kernels:
        raise ValueError(f"backend={backend!r} is unknown; use auto or {', '.join(kernels)}")
    kernel = kernels[backend]
    if jvp and kernel.name != "reference":
        raise ValueError(
            f"backend={backend!r} has no forward-mode derivative (JVP); use backend='auto' or backend='reference'"
        )
    reason = kernel.refuses(device, dtype, head_dim, masked)
    if reason is not None:
        able = [name for name, other in kernels.items() if other.refuses(device, dtype, head_dim, masked) is None]
        raise ValueError(f"backend={backend!r} {reason}; use auto or {', '.join(able)}")
    return kernel
