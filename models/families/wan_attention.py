"""Wan's attention over tokens split over the mesh, and rotary tables of a rank's own tokens."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from torch import Tensor

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.mesh import Mesh
from models.families.diffusers_family import token_positions

RotaryTables = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, int]
TEXT_TOKENS = 512
"""Number of text tokens in networks with image features: diffusers' processor takes the last 512 context tokens as
text."""


class WanSelfAttention(WanAttnProcessor):
    """Wan's self-attention over tokens that are split over ``mesh.cp``.

    Projections, norms and the rotary embedding are those of :class:`WanAttnProcessor`; only the attention over all
    tokens is replaced, at cp = 1 too, since diffusers' attention has no forward-mode AD.
    """

    def __init__(self, mesh: Mesh, backend: str = "auto", head_groups: int = 1):
        super().__init__()
        self.mesh, self.backend, self.head_groups = mesh, backend, head_groups

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> Tensor:
        """Attend within ``hidden_states`` ``(B, S_local, dim)``; ``rotary_emb`` is from :func:`own_rotary_tables`."""
        if attention_mask is not None:
            raise ValueError("context-parallel Wan self-attention takes no attention_mask")
        # Pass the number of tokens with the tables, as an argument of the block, so that recomputation in backward uses
        # its own forward's number even if the network was called with another one since.
        assert rotary_emb is not None
        cos, sin, total = rotary_emb if len(rotary_emb) == 3 else (*rotary_emb, None)
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = context_parallel_attention(
            q, k, v, mesh=self.mesh, total_tokens=total, backend=self.backend, head_groups=self.head_groups
        )
        assert isinstance(out, Tensor)  # without joint text
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


class WanCrossAttention(WanAttnProcessor):
    """Wan's attention to the text, and to an image's features where the network has projections for them.

    Every rank holds both whole. It is :class:`WanAttnProcessor` with forward-mode AD.
    """

    def __init__(self, backend: str = "auto"):
        super().__init__()
        self.backend = backend

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> Tensor:
        """Attend from ``(B, S_local, dim)`` to ``encoder_hidden_states`` ``(B, N + L, dim)``, with N image features
        first."""
        if attention_mask is not None or rotary_emb is not None:
            raise ValueError("Wan's cross-attention takes neither attention_mask nor rotary_emb")
        text, image = encoder_hidden_states, None
        if attn.add_k_proj is not None:
            image, text = text.split([text.shape[1] - TEXT_TOKENS, TEXT_TOKENS], dim=1)
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(text).unflatten(2, (attn.heads, -1))
        out = cross_attention(q, k, v, backend=self.backend).flatten(2, 3)
        if image is not None:
            k = attn.norm_added_k(attn.add_k_proj(image)).unflatten(2, (attn.heads, -1))
            v = attn.add_v_proj(image).unflatten(2, (attn.heads, -1))
            out = out + cross_attention(q, k, v, backend=self.backend).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](out.type_as(q)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighboring pairs of ``x`` ``(B, S, H, D)`` in the tables' fp32, as Wan does."""
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2).type_as(x)


def own_rotary_tables(rope: WanRotaryPosEmbed, mesh: Mesh, hidden_states: Tensor) -> RotaryTables:
    """Return the tables that ``rope`` computes for latents ``(B, C, T, H, W)``, for the rank's own tokens only.

    Returns:
        Cosines and sines ``(1, S_local, 1, head_dim)``, with the last token's values for padding; and ``S``.

    Raises:
        ValueError: an axis has more positions than ``rope_max_seq_len``.
    """
    sizes = [n // patch for n, patch in zip(hidden_states.shape[2:], rope.patch_size, strict=True)]
    if max(sizes) > rope.max_seq_len:
        raise ValueError(
            f"{max(sizes)} token positions along an axis are more than rope_max_seq_len={rope.max_seq_len}"
        )
    positions, total = token_positions(hidden_states, rope.patch_size, mesh, rope.freqs_cos.device)
    dims = (rope.t_dim, rope.h_dim, rope.w_dim)
    cos, sin = (
        torch.cat([part[at] for part, at in zip(table.split(dims, dim=1), positions, strict=True)], dim=1)
        for table in (rope.freqs_cos, rope.freqs_sin)
    )
    return cos[None, :, None], sin[None, :, None], total
