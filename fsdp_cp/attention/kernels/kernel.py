"""Interface of local attention kernels, and functions that they share.

Shapes: B batch, Sq and Sk query and key tokens, H query heads, Hk key/value heads (Hk divides H), D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from einops import rearrange
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Kernel(ABC):
    """Attention of some queries to some keys on one device, forward and backward."""

    name: str

    @abstractmethod
    def refuses(self, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
        """Return why this kernel cannot run such tensors ("takes bf16, not fp32"), or ``None`` if it can."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Compute the output and the log-sum-exp of the logits.

        Args:
            q: ``(B, Sq, H, D)``; its last dimension is contiguous, the other strides are arbitrary.
            k, v: ``(B, Sk, Hk, D)``; neither ``Sq`` nor ``Sk`` is 0.
            mask: ``(B, Sk)`` bool, True where a key may be attended to.
            scale: factor on the logits.

        Returns:
            ``(B, Sq, H, D)`` in the dtype of ``q``, and ``(B, H, Sq)`` in fp32 (fp64 for fp64). Rows without any key
            may hold any value.
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
        """Compute the contribution of these keys to the gradients. ``out`` and ``lse`` are those of the whole rows.

        Args:
            grad_out, out: ``(B, Sq, H, D)``.
            lse: ``(B, H, Sq)`` over all keys of the row, on all ranks; +inf for a row without any key.

        Returns:
            Gradients of ``q``, ``k`` and ``v``.
        """

    def next_to_messages(self) -> Kernel:
        """Return the kernel to use while messages are in flight, as in a ring of several ranks.

        It computes the same values. A kernel that occupies every SM returns a variant that leaves some to the messages.
        """
        return self


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over chunks and of log-sum-exps: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def fold_query_groups(q: Tensor, kv_heads: int) -> Tensor:
    """Reshape ``(B, S, H, D)`` to ``(B, G S, Hk, D)``, for kernels without grouped-query attention.

    Rows of attention are independent, so the G = H / Hk query heads that share a K/V head can become G times as many
    queries of one head.
    """
    return q if q.shape[2] == kv_heads else rearrange(q, "b s (k g) d -> b (g s) k d", k=kv_heads)


def unfold_query_groups(out: Tensor, heads: int) -> Tensor:
    """Invert :func:`fold_query_groups`."""
    kv_heads = out.shape[2]
    return out if kv_heads == heads else rearrange(out, "b (g s) k d -> b s (k g) d", g=heads // kv_heads)
