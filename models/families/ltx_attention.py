"""LTX-Video's attention over tokens that are split over the mesh, and the coordinates that its rotary tables are of."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_ltx import LTXAttention, LTXVideoAttnProcessor
from torch import Tensor

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.mesh import Mesh


class LTXSelfAttention(LTXVideoAttnProcessor):
    """LTX's self-attention over tokens that are split over ``mesh.cp``.

    Projections, norms and the rotary embedding are those of diffusers' processor (0.42); only the attention over all
    tokens is replaced, at cp = 1 too: diffusers' own has no forward-mode AD.
    """

    def __init__(self, mesh: Mesh, backend: str = "auto", head_groups: int = 1):
        super().__init__()
        self.mesh, self.backend, self.head_groups = mesh, backend, head_groups

    def __call__(
        self,
        attn: LTXAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """``hidden_states`` is ``(B, S_local, dim)``; tables of the rank's own tokens, ``(B, S_local, dim)`` each."""
        if encoder_hidden_states is not None or attention_mask is not None or image_rotary_emb is None:
            raise ValueError("context-parallel LTX self-attention takes tokens and their rotary tables, and no mask")
        q = _rotate(attn.norm_q(attn.to_q(hidden_states)), *image_rotary_emb).unflatten(2, (attn.heads, -1))
        k = _rotate(attn.norm_k(attn.to_k(hidden_states)), *image_rotary_emb).unflatten(2, (attn.heads, -1))
        v = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        # "hidden_states" is the name under which the plan splits the tokens: a caption may have as many as a share has.
        out = context_parallel_attention(
            q, k, v, mesh=self.mesh, total_tokens="hidden_states" if self.mesh.cp_size > 1 else None,
            backend=self.backend, head_groups=self.head_groups,
        )  # fmt: skip
        assert isinstance(out, Tensor)  # without joint text
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


class LTXCrossAttention(LTXVideoAttnProcessor):
    """LTX's attention to the text, which every rank holds whole, with its mask; and with forward-mode AD."""

    def __init__(self, backend: str = "auto"):
        super().__init__()
        # Flash kernels, which a role may ask for, take no mask; the text is short.
        self.backend = "reference" if backend == "reference" else "auto"

    def __call__(
        self,
        attn: LTXAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """``(B, S_local, dim)`` attends to ``(B, L, dim)``; the mask is the network's bias ``(B, 1, L)``, 0 or -10000.

        A weight under that bias underflows to 0 in every dtype, so leaving its key out is the same.
        """
        if image_rotary_emb is not None:
            raise ValueError("LTX's cross-attention takes no rotary embedding")
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1))
        mask = None if attention_mask is None else attention_mask[:, 0] == 0
        # total_keys: a caption as long as a rank's share of the video would pass for a share of its own.
        out = cross_attention(q, k, v, key_mask=mask, backend=self.backend, total_keys=k.shape[1])
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """LTX's rotary embedding of neighbouring pairs of all heads' features, ``(B, S, dim)``, in the tables' fp32."""
    x1, x2 = x.unflatten(2, (-1, 2)).unbind(-1)
    turned = torch.stack((-x2, x1), dim=-1).flatten(2)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def video_coordinates(spacing: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Where the tokens of a video are: seconds, pixels down and pixels to the right, as LTX's rotary tables take them.

    Args:
        spacing: ``(B, 4)`` fp32, from a latent to the next: seconds in time, pixels down, pixels to the right; and
            seconds by which all latent frames but the first come earlier than that says (0 for ``LTXPipeline``).
        grid: latent frames, height and width.

    Returns:
        ``(B, 3, S)`` fp32, tokens in the order frames, height, width.
    """
    axes = [torch.arange(size, dtype=torch.float32, device=spacing.device) for size in grid]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
    spacing = spacing.float()
    frames, rows, columns = (places[None] * spacing[:, :3, None]).unbind(1)
    return torch.stack([(frames - spacing[:, 3:]).clamp_min(0), rows, columns], dim=1)
