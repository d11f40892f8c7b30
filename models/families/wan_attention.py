"""Wan's attention over tokens split over the mesh, and rotary tables of a rank's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from torch import Tensor, nn

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.attention.cached import KeyValues, cached_attention
from fsdp_cp.mesh import Mesh
from models.families.causal_forward import CausalForward
from models.families.diffusers_family import token_positions

Table = tuple[Tensor, Tensor]
"""Cosines and sines."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """History of a causal forward, for all layers. An opaque object, so that no hook walks through its tensors."""

    forward: CausalForward
    shift: Table | None
    """Table ``(1, 1, 1, head_dim)`` that moves sinks by ``forward.shift`` frames; ``None`` for no shift."""

    def past(self, layer: int) -> list[KeyValues]:
        """Return the keys and values of earlier chunks in ``layer``, with sinks at their moved positions."""
        past = [chunk[layer] for chunk in self.forward.past]
        if self.shift is not None:
            for i in range(self.forward.sinks):
                past[i] = replace(past[i], k=_rotate(past[i].k, *self.shift))
        return past


RotaryTables = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, int] | tuple[Tensor, Tensor, int, History]
TEXT_TOKENS = 512
"""Number of text tokens in networks with image features: diffusers' processor takes the last 512 context tokens as
text."""


class WanSelfAttention(WanAttnProcessor):
    """Wan's self-attention over tokens that are split over ``mesh.cp``.

    Projections, norms and the rotary embedding are those of :class:`WanAttnProcessor`; only the attention over all
    tokens is replaced, at cp = 1 too, since diffusers' attention has no forward-mode AD.
    """

    def __init__(self, mesh: Mesh, backend: str = "auto", head_groups: int = 1, *, layer: int = 0):
        super().__init__()
        self.mesh, self.backend, self.head_groups, self.layer = mesh, backend, head_groups, layer

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> Tensor:
        """Attend within ``hidden_states`` ``(B, S_local, dim)``; ``rotary_emb`` is from :func:`own_rotary_tables`."""
        # Pass the number of tokens and the history with the tables, as an argument of the block, so that recomputation
        # in backward uses those of its own forward even if the network was called with others since.
        assert rotary_emb is not None and attention_mask is None
        cos, sin, total, history = (*rotary_emb, None, None)[:4]
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        options = {"total_tokens": total, "backend": self.backend, "head_groups": self.head_groups}
        if history is None or history.forward.mask is not None:
            mask = None if history is None else history.forward.mask
            out = context_parallel_attention(q, k, v, mesh=self.mesh, mask=mask, **options)
            assert isinstance(out, Tensor)  # without joint text
        else:
            out, chunk = cached_attention(q, k, v, history.past(self.layer), mesh=self.mesh, **options)
            if history.forward.record is not None:
                history.forward.record.layers[self.layer] = chunk
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


@dataclass(frozen=True, slots=True, eq=False)
class CachedText:
    """Text of a forward without gradient, with its keys and values by layer: those of a cache, or a record to fill."""

    text: Tensor
    forward: CausalForward

    def keys_values(self, attn: WanAttention, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the text in ``layer``."""
        if layer in self.forward.text:
            return self.forward.text[layer]
        computed = _keys_values(attn, self.text)
        if self.forward.record is not None:
            self.forward.record.text[layer] = computed
        return computed


def _keys_values(attn: WanAttention, text: Tensor) -> tuple[Tensor, Tensor]:
    k = attn.norm_k(attn.to_k(text)).unflatten(2, (attn.heads, -1))
    return k, attn.to_v(text).unflatten(2, (attn.heads, -1))


class WanCrossAttention(WanAttnProcessor):
    """Wan's attention to the text, and to an image's features where the network has projections for them.

    Every rank holds both whole. It is :class:`WanAttnProcessor` with forward-mode AD.
    """

    def __init__(self, backend: str = "auto", *, layer: int = 0):
        super().__init__()
        self.backend, self.layer = backend, layer

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | CachedText,
        attention_mask: Tensor | None = None,
        rotary_emb: RotaryTables | None = None,
    ) -> Tensor:
        """Attend from ``(B, S_local, dim)`` to ``encoder_hidden_states`` ``(B, N + L, dim)``, with N image features
        first."""
        assert attention_mask is None and rotary_emb is None
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        image = None
        if isinstance(encoder_hidden_states, CachedText):
            k, v = encoder_hidden_states.keys_values(attn, self.layer)
        else:
            text = encoder_hidden_states
            if attn.add_k_proj is not None:
                image, text = text.split([text.shape[1] - TEXT_TOKENS, TEXT_TOKENS], dim=1)
            k, v = _keys_values(attn, text)
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


class BlockArguments:
    """Arguments that a network's blocks get in addition to hidden states, text and time."""

    def __init__(self, network: WanTransformer3DModel, mesh: Mesh):
        self._rope, self._mesh = network.rope, mesh
        self._causal: CausalForward | None = None
        network.rope.forward = self._tables
        network.condition_embedder.register_forward_hook(self._text)

    @contextmanager
    def causal(self, forward: CausalForward) -> Iterator[None]:
        """Pass ``forward`` to the blocks of the call of the network in this context."""
        self._causal = forward
        try:
            yield
        finally:
            self._causal = None

    def _tables(self, hidden_states: Tensor) -> RotaryTables:
        if self._causal is None and self._mesh.cp_size == 1:
            return type(self._rope).forward(self._rope, hidden_states)
        return own_rotary_tables(self._rope, self._mesh, hidden_states, self._causal)

    def _text(self, _embedder: nn.Module, _args: tuple, output: tuple) -> tuple | None:
        """Give the blocks the cached keys and values of the text. With gradients they are computed: they have some."""
        if self._causal is None or self._causal.mask is not None or torch.is_grad_enabled():
            return None
        time, modulation, text, image = output
        return time, modulation, CachedText(text, self._causal), image


def own_rotary_tables(
    rope: WanRotaryPosEmbed, mesh: Mesh, hidden_states: Tensor, causal: CausalForward | None = None
) -> RotaryTables:
    """Return the tables that ``rope`` computes for latents ``(B, C, T, H, W)``, for the rank's own tokens only.

    ``causal`` gives the positions of the latent frames, and the history, of a causal forward.

    Returns:
        Cosines and sines ``(1, S_local, 1, head_dim)``, with the last token's values for padding; ``S``; and the
        history of a causal forward.

    Raises:
        ValueError: an axis has more positions than ``rope_max_seq_len``.
    """
    sizes = [n // patch for n, patch in zip(hidden_states.shape[2:], rope.patch_size, strict=True)]
    bounded = sizes if causal is None else sizes[1:]
    if max(bounded) > rope.max_seq_len:
        raise ValueError(
            f"{max(bounded)} token positions along an axis are more than rope_max_seq_len={rope.max_seq_len}"
        )
    positions, total = token_positions(hidden_states, rope.patch_size, mesh, rope.freqs_cos.device)
    dims = (rope.t_dim, rope.h_dim, rope.w_dim)
    tables = [list(table.split(dims, dim=1)) for table in (rope.freqs_cos, rope.freqs_sin)]
    if causal is not None:
        for axes, frame_rows in zip(tables, _frame_table(rope, causal.positions), strict=True):
            axes[0] = frame_rows
    cos, sin = (
        torch.cat([rows[at] for rows, at in zip(axes, positions, strict=True)], dim=1)[None, :, None] for axes in tables
    )
    if causal is None:
        return cos, sin, total
    return cos, sin, total, History(causal, _shift_table(rope, causal.shift) if causal.shift else None)


def _frame_table(rope: WanRotaryPosEmbed, positions: Sequence[int]) -> Table:
    """Return the time axis' rows ``(T, t_dim)`` of the tables, also of positions beyond ``rope_max_seq_len``."""
    if max(positions) < rope.max_seq_len:
        at = torch.tensor(positions, device=rope.freqs_cos.device)
        return rope.freqs_cos[:, : rope.t_dim][at], rope.freqs_sin[:, : rope.t_dim][at]
    cos, sin = get_1d_rotary_pos_embed(
        rope.t_dim, torch.tensor(positions), use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64
    )
    return cos.to(rope.freqs_cos), sin.to(rope.freqs_sin)


def _shift_table(rope: WanRotaryPosEmbed, frames: int) -> Table:
    """Return the table that moves rotated keys by ``frames``, ``(1, 1, 1, head_dim)``: rotations of an axis add."""
    cos, sin = _frame_table(rope, [frames])
    rest = rope.h_dim + rope.w_dim
    cos, sin = torch.cat([cos, cos.new_ones(1, rest)], 1), torch.cat([sin, sin.new_zeros(1, rest)], 1)
    return cos[None, :, None], sin[None, :, None]
