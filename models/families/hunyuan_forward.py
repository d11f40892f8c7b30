"""HunyuanVideo 1.5's forward and attention over tokens that are split over the mesh, and its rotary tables.

diffusers' class (0.42) decides in its forward by the data whether an image is shown, and sorts the tokens of its three
texts by their masks. Both wait for the device, give shapes that depend on data, and cannot run on fake tensors. Here
the same modules are called in the same order, and masked tokens stay where they are: the network has no positions of
text, so attention does not see in which order its keys stand, and a masked one is no key.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample, L tokens of all texts.
"""

from __future__ import annotations

import math

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15RotaryPosEmbed
from torch import Tensor

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import local_token_count

RotaryTables = tuple[Tensor, Tensor, int]


class OwnForward:
    """What a parallel network runs instead of diffusers' forward, on whole latents and the rank's own tokens."""

    def __init__(self, network: HunyuanVideo15Transformer3DModel, mesh: Mesh):
        self.network, self.mesh = network, mesh

    def __call__(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor,
        encoder_hidden_states_2: Tensor,
        encoder_attention_mask_2: Tensor,
        image_embeds: Tensor,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """As diffusers' forward, with bool masks, and with an image's features where there are any.

        Args:
            hidden_states: latents, those of an image and its mask, ``(B, in_channels, T, H, W)``.
            timestep: ``(B,)``, fp32 or better.
            encoder_hidden_states, encoder_attention_mask: the caption, ``(B, L1, D1)`` and ``(B, L1)``.
            encoder_hidden_states_2, encoder_attention_mask_2: what it quotes, ``(B, L2, D2)`` and ``(B, L2)``.
            image_embeds: features of the image, ``(B, N, D3)``; N is 0 without one. Its projection gets gradients all
                the same, zeros, as in diffusers.
            return_dict: of diffusers; not supported.

        Returns:
            The velocity ``(B, C, T, H, W)``.
        """
        network, dtype = self.network, hidden_states.dtype
        assert not return_dict
        rotary = own_rotary_tables(network.rope, self.mesh, hidden_states)
        embed = network.time_embed
        # diffusers' casts its sines to the dtype of the times, which no time below fp32 can have. An addition to the
        # embedding is in fp32.
        temb = embed.timestep_embedder(embed.time_proj(timestep).to(dtype)).to(dtype)
        texts, mask = self._texts(
            (encoder_hidden_states, encoder_hidden_states_2, image_embeds),
            (encoder_attention_mask, encoder_attention_mask_2),
            timestep,
        )
        # Text stands in front where attention puts the two together.
        keys = torch.cat([mask, mask.new_ones(len(mask), rotary[2])], dim=1)
        tokens = network.x_embedder(hidden_states)
        for block in network.transformer_blocks:
            tokens, texts = block(tokens, texts, temb, keys, rotary)
        return (self._unpatched(network.proj_out(network.norm_out(tokens, temb)), hidden_states),)

    def _texts(
        self, texts: tuple[Tensor, Tensor, Tensor], masks: tuple[Tensor, Tensor], timestep: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tokens ``(B, L, width)`` of image, quotations and caption, and which of them count, ``(B, L)``."""
        network, (caption, quoted, image) = self.network, texts
        parts = [
            network.context_embedder(caption, timestep, masks[0]),
            network.context_embedder_2(quoted),
            network.image_embedder(image),
        ]
        kinds = network.cond_type_embed.weight.unbind()
        marked = [part + kind for part, kind in zip(parts, kinds, strict=True)]
        return torch.cat(marked[::-1], dim=1), torch.cat([masks[0].new_ones(image.shape[:2]), *masks[::-1]], dim=1)

    def _unpatched(self, tokens: Tensor, latents: Tensor) -> Tensor:
        """``(B, S, features of a patch)`` as ``(B, C, T, H, W)``."""
        of_time, of_space = self.network.config.patch_size_t, self.network.config.patch_size
        patch = (of_time, of_space, of_space)
        grid = [size // of for size, of in zip(latents.shape[2:], patch, strict=True)]
        x = tokens.unflatten(1, grid).unflatten(4, (-1, *patch))
        # (B, t, h, w, C, pt, ph, pw) to (B, C, t, pt, h, ph, w, pw)
        return x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class HunyuanJointAttention:
    """Attention of a block: of the rank's own tokens and of all texts, to both, with forward-mode AD.

    Projections, norms and the rotary embedding are those of diffusers' ``HunyuanVideo15AttnProcessor2_0`` (0.42).
    """

    def __init__(self, mesh: Mesh, backend: str = "auto", head_groups: int = 1):
        self.mesh, self.backend, self.head_groups = mesh, backend, head_groups

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: RotaryTables,
    ) -> tuple[Tensor, Tensor]:
        """``hidden_states`` is ``(B, S_local, width)``, ``encoder_hidden_states`` ``(B, L, width)``, the mask ``(B, L +
        S)``: which of all keys count. A masked text token may attend here, where in diffusers it gets 0; nothing ever
        reads it."""
        *tables, total = image_rotary_emb
        q, k, v = (of(hidden_states).unflatten(2, (attn.heads, -1)) for of in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (apply_rotary_emb(x, tables, sequence_dim=1) for x in (attn.norm_q(q), attn.norm_k(k)))
        of_text = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text_q, text_k, text_v = (of(encoder_hidden_states).unflatten(2, (attn.heads, -1)) for of in of_text)
        out, text = context_parallel_attention(
            q,
            k,
            v,
            mesh=self.mesh,
            total_tokens=total,
            backend=self.backend,
            key_mask=attention_mask,
            joint=(attn.norm_added_q(text_q), attn.norm_added_k(text_k), text_v),
            head_groups=self.head_groups,
        )
        out, text = out.flatten(2, 3).type_as(hidden_states), text.flatten(2, 3).type_as(encoder_hidden_states)
        return attn.to_out[1](attn.to_out[0](out)), attn.to_add_out(text)


class HunyuanRefinerAttention:
    """Attention of the caption's tokens to each other, which every rank holds whole, with forward-mode AD.

    diffusers' own has none, and cannot run on fake tensors.
    """

    def __init__(self, backend: str = "auto"):
        # Flash kernels, which a role may ask for, take no mask; the text is short.
        self.backend = "reference" if backend == "reference" else "auto"

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """``(B, L, width)``; the mask is the network's ``(B, 1, L, L)``, true where both tokens count."""
        if encoder_hidden_states is not None or attention_mask is None:
            raise ValueError("HunyuanVideo's token refiner attends to its own tokens alone, under a mask")
        q, k, v = (of(hidden_states).unflatten(2, (attn.heads, -1)) for of in (attn.to_q, attn.to_k, attn.to_v))
        # A token that does not count may attend here; nothing reads it. total_keys: the caption is not split, though
        # it may have as many tokens as a rank's share of the video.
        out = cross_attention(
            q, k, v, key_mask=attention_mask[:, 0].any(dim=1), backend=self.backend, total_keys=k.shape[1]
        )
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(hidden_states)))


def own_rotary_tables(rope: HunyuanVideo15RotaryPosEmbed, mesh: Mesh, hidden_states: Tensor) -> RotaryTables:
    """What ``rope`` makes for latents ``(B, C, T, H, W)``, of the rank's own tokens only.

    Returns:
        Cosines and sines ``(S_local, head_dim)``, where pads have those of the last token; and ``S``.
    """
    patch = (rope.patch_size_t, rope.patch_size, rope.patch_size)
    sizes = [size // of for size, of in zip(hidden_states.shape[2:], patch, strict=True)]
    (_, height, width), total = sizes, math.prod(sizes)
    local, rank = local_token_count(total, mesh.cp_size), mesh.cp_rank
    tokens = torch.arange(rank * local, (rank + 1) * local, device=hidden_states.device).clamp_max(total - 1)
    positions = (tokens // (height * width), tokens // width % height, tokens % width)
    tables = [
        get_1d_rotary_pos_embed(dim, at.float(), rope.theta, use_real=True)
        for dim, at in zip(rope.rope_dim, positions, strict=True)
    ]
    cos, sin = (torch.cat(parts, dim=1) for parts in zip(*tables, strict=True))
    return cos, sin, total
