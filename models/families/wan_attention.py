"""Wan's attention over tokens split over the mesh, and rotary tables of a rank's own tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from torch import Tensor, nn

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.mesh import Mesh
from fsdp_cp.tiles import Tiles
from models.families.causal_forward import Attend, CausalForward
from models.families.diffusers_family import token_positions
from models.sparse import SparseCall, sparse_roles

RotaryTables = tuple[Tensor, Tensor, int, Attend, SparseCall | None]
"""Tables, the number of tokens, the attention, and that of a sparse role. They are arguments of the block, so that
recomputation in backward uses those of its own forward even if the network was called with others since."""
TEXT_TOKENS = 512
"""Number of text tokens, the last ones of the context, in networks with image features, as in diffusers' processor."""


class WanSelfAttention(WanAttnProcessor):
    """Wan's self-attention over tokens that are split over ``mesh.cp``.

    Projections, norms and the rotary embedding are those of :class:`WanAttnProcessor`; only the attention over all
    tokens is replaced, at cp = 1 too, since diffusers' attention has no forward-mode AD.
    """

    def __init__(self, mesh: Mesh, backend: str, head_groups: int, gates: Mapping[str, nn.Module]):
        super().__init__()
        self.mesh, self.backend, self.head_groups, self.gates = mesh, backend, head_groups, gates

    def __call__(
        self, attn: WanAttention, hidden_states: Tensor, text: None, mask: None, rotary_emb: RotaryTables
    ) -> Tensor:
        """Attend within ``hidden_states`` ``(B, S_local, dim)``; ``rotary_emb`` is from :class:`BlockArguments`."""
        assert text is None and mask is None
        cos, sin, total, attend, sparse = rotary_emb
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k, v = _keys_values(attn, hidden_states)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        options = {"total_tokens": total, "backend": self.backend, "head_groups": self.head_groups}
        options |= {} if sparse is None else sparse.options(self.gates, hidden_states, attn.heads)
        out = attend(q, k, v, mesh=self.mesh, **options)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))


def _keys_values(attn: WanAttention, tokens: Tensor) -> tuple[Tensor, Tensor]:
    k = attn.norm_k(attn.to_k(tokens)).unflatten(2, (attn.heads, -1))
    return k, attn.to_v(tokens).unflatten(2, (attn.heads, -1))


class WanCrossAttention(WanAttnProcessor):
    """:class:`WanAttnProcessor` with forward-mode AD, to whole text and, where projected, an image's features."""

    def __init__(self, backend: str):
        super().__init__()
        self.backend = backend

    def __call__(self, attn: WanAttention, hidden_states: Tensor, text: Tensor, mask: None, _: None) -> Tensor:
        """Attend from ``(B, S_local, dim)`` to ``text`` ``(B, N + L, dim)``, with N image features first."""
        assert mask is None
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        image = None
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
    # Round before the stack: a compiled stack is a buffer, which would be fp32 and need a further kernel to round it.
    return torch.stack(((x1 * cos - x2 * sin).type_as(x), (x1 * sin + x2 * cos).type_as(x)), dim=-1).flatten(-2)


class BlockArguments:
    """Arguments that a network's blocks get in addition to hidden states, text and time."""

    def __init__(self, network: WanTransformer3DModel, mesh: Mesh):
        self._rope, self._mesh, self._layers = network.rope, mesh, len(network.blocks)
        self._sparse = sparse_roles(network)
        self._heads = (network.config.num_attention_heads, network.config.attention_head_dim)
        self._causal: CausalForward | None = None
        network.rope.forward = self._tables
        for index, block in enumerate(network.blocks):
            block.register_forward_pre_hook(partial(self._of_layer, index))

    @contextmanager
    def causal(self, forward: CausalForward) -> Iterator[None]:
        """Pass ``forward`` to the blocks of the call of the network in this context."""
        self._causal = forward
        try:
            with nullcontext() if forward.history.compiles else torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._causal = None

    def tiles(self, hidden_states: Tensor, **_: Any) -> dict[str, Tiles]:
        """Return the tiles of the sequences that the plan splits, of latents ``(B, C, T, H, W)``; none if dense."""
        sparse = self._sparse.call(self._grid(hidden_states), self._mesh)
        return {} if sparse is None else dict.fromkeys(("hidden_states", "timestep"), sparse.sparse.tiles)

    def _grid(self, hidden_states: Tensor) -> list[int]:
        return [n // patch for n, patch in zip(hidden_states.shape[2:], self._rope.patch_size, strict=True)]

    def _tables(self, hidden_states: Tensor) -> RotaryTables:
        causal, sparse = self._causal, self._sparse.call(self._grid(hidden_states), self._mesh)
        positions = None if causal is None else causal.positions
        tiles = None if sparse is None else sparse.sparse.tiles
        tables = own_rotary_tables(self._rope, self._mesh, hidden_states, positions, tiles)
        if causal is not None:
            k = hidden_states.new_empty((len(hidden_states), 0, *self._heads))
            rotate = partial(_shifted, self._rope, causal.shift)
            causal.history.begin(k, tables[2], self._layers, self._mesh, causal.shift, rotate)
        return *tables, cast(Attend, context_parallel_attention), sparse

    def _of_layer(self, index: int, _block: nn.Module, args: tuple) -> tuple | None:
        """Give a block the attention to the history of its layer."""
        if self._causal is None:
            return None
        hidden, text, time, tables = args
        return hidden, text, time, (*tables[:3], self._causal.history.layer(index), None)


def own_rotary_tables(
    rope: WanRotaryPosEmbed,
    mesh: Mesh,
    hidden_states: Tensor,
    frames: Sequence[int] | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Return ``rope``'s cosines and sines ``(1, S_local, 1, head_dim)`` of latents ``(B, C, T, H, W)``, for the rank's
    own tokens only (padding tokens have the last token's values), and ``S``. ``frames`` are the positions of the latent
    frames, 0 to T - 1 by default; ``tiles`` the order of the tokens."""
    sizes = [n // patch for n, patch in zip(hidden_states.shape[2:], rope.patch_size, strict=True)]
    bounded = sizes if frames is None else sizes[1:]
    if max(bounded) > rope.max_seq_len:
        raise ValueError(f"{max(bounded)} positions along an axis exceed rope_max_seq_len={rope.max_seq_len}")
    positions, total = token_positions(hidden_states, rope.patch_size, mesh, rope.freqs_cos.device, tiles)
    dims = (rope.t_dim, rope.h_dim, rope.w_dim)
    tables = [list(table.split(dims, dim=1)) for table in (rope.freqs_cos, rope.freqs_sin)]
    if frames is not None:
        for axes, frame_rows in zip(tables, _frame_table(rope, frames), strict=True):
            axes[0] = frame_rows
    cos, sin = (
        torch.cat([rows[at] for rows, at in zip(axes, positions, strict=True)], dim=1)[None, :, None] for axes in tables
    )
    return cos, sin, total


def _frame_table(rope: WanRotaryPosEmbed, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the time axis' rows ``(T, t_dim)`` of the tables, also of positions beyond ``rope_max_seq_len``."""
    if max(positions) < rope.max_seq_len:
        at = torch.tensor(positions, device=rope.freqs_cos.device)
        return rope.freqs_cos[:, : rope.t_dim][at], rope.freqs_sin[:, : rope.t_dim][at]
    cos, sin = get_1d_rotary_pos_embed(
        rope.t_dim, torch.tensor(positions), use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64
    )
    return cos.to(rope.freqs_cos), sin.to(rope.freqs_sin)


def _shifted(rope: WanRotaryPosEmbed, frames: int, k: Tensor) -> Tensor:
    """Return rotated keys ``(B, S, H, D)`` moved by ``frames``: rotations of an axis add."""
    cos, sin = _frame_table(rope, [frames])
    rest = rope.h_dim + rope.w_dim
    cos, sin = torch.cat([cos, cos.new_ones(1, rest)], 1), torch.cat([sin, sin.new_zeros(1, rest)], 1)
    return _rotate(k, cos[None, :, None], sin[None, :, None])
