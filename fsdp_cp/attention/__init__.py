"""Context-parallel attention: each rank holds some tokens of every head and attends to all tokens."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fsdp_cp.attention.ulysses import heads_to_tokens, tokens_to_heads
from fsdp_cp.mesh import Mesh

__all__ = ["context_parallel_attention"]


def _local_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Bidirectional attention on one rank; ``(B, S, H, D)`` in and out."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale)
    return out.transpose(1, 2)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    total_tokens: int | None = None,
    scale: float | None = None,
    backend: Literal["auto", "sdpa"] = "auto",
) -> Tensor:
    """Full bidirectional self-attention over tokens that are split over ``mesh.cp``, by Ulysses all-to-all.

    One all-to-all gives each rank all tokens of its share of the heads, one brings the output back
    (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3). Backward is the same two exchanges reversed.

    Args:
        q, k, v: ``(B, S / cp, H, D)``, the rank's own tokens, in rank order.
        mesh: the mesh.
        total_tokens: ``S``, checked when given.
        scale: factor on the logits, ``D ** -0.5`` by default.
        backend: the attention of one rank; ``"auto"`` and ``"sdpa"`` are torch's scaled_dot_product_attention, which
            chooses among its own kernels.

    Returns:
        ``(B, S / cp, H, D)``.

    Raises:
        ValueError: if ``cp`` does not divide the heads, ``total_tokens`` does not fit, or the backend is unknown.
    """
    if backend not in ("auto", "sdpa"):
        raise ValueError(f"backend={backend!r} is unknown; use 'auto' or 'sdpa'")
    if total_tokens is not None and total_tokens != q.shape[1] * mesh.cp_size:
        raise ValueError(f"total_tokens={total_tokens} is not {q.shape[1]} local tokens x cp={mesh.cp_size}")
    if mesh.cp_size == 1:
        return _local_attention(q, k, v, scale)
    if q.shape[2] % mesh.ulysses.size():
        raise ValueError(f"mesh.ulysses={mesh.ulysses.size()} does not divide {q.shape[2]} heads")
    group = mesh.ulysses.get_group()
    out = _local_attention(*tokens_to_heads((q, k, v), group), scale)
    return heads_to_tokens(out, group)
