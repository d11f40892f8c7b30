"""The HunyuanVideo 1.5 family: diffusers' unmodified ``HunyuanVideo15Transformer3DModel`` as a role's network.

One class and configuration serves text to video and image to video: both have channels for an image's latents and a
mask, which stay 0 without an image. The condition decides. Joint attention adds three token sequences ("texts") to the
video: features of an image encoder, quoted text (``glyphs``, from byT5, to be written in the picture), and the caption.

diffusers' forward (0.42) reads the data to detect an image, and sorts the tokens of the three texts by their masks.
Both synchronize the device, give data-dependent shapes, and cannot run on fake tensors. A parallel network runs
:func:`own_forward` instead: the same modules in the same order, but masked tokens stay in place. Text has no positions,
so the order of keys does not matter, and attention skips masked keys.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample, L tokens of all texts.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15RotaryPosEmbed
from einops import rearrange
from torch import Tensor, nn

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, parallelize_context
from fsdp_cp.mesh import Mesh
from models.condition import FIRST_FRAME, Condition
from models.families.base import (
    FamilyPlanning,
    LatentShape,
    NetworkConfig,
    Outputs,
    Pipeline,
    Shape,
    config_of,
)
from models.families.diffusers_family import (
    DiffusersFamily,
    first_frame_shape,
    insert_first_frame,
    token_positions,
)
from models.sample import VIDEO, Sample

RotaryTables = tuple[Tensor, Tensor, int]

GLYPH_TOKENS, GLYPH_HIDDEN = 256, 2048
"""Tokens of quoted text, as in ``HunyuanVideo15Pipeline``, and the inner width of their projection."""
IMAGE_TOKENS = 729
"""Number of SigLIP so400m features of an image of 384 x 384 pixels: 27 x 27 patches."""


class HunyuanPlanning(FamilyPlanning):
    """Tencent's network and its encoders."""

    # diffusers' conversion script uses its defaults for all 480p and 720p networks.
    networks = {"hunyuan_video1_5": {"num_layers": 54}}
    text_encoder = {
        "architectures": ["Qwen2_5_VLTextModel"], "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }  # fmt: skip
    """Text model of Qwen2.5-VL 7B, 7.1e9 parameters."""
    text_encoder_2 = {
        "architectures": ["T5EncoderModel"], "vocab_size": 1510, "d_model": 1472, "d_kv": 64, "d_ff": 3584,
        "num_layers": 12, "num_heads": 6, "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    """byT5 small with tokens for fonts and colors, .22e9 parameters."""
    vae = {"_class_name": "AutoencoderKLHunyuanVideo15"}
    image_encoder = {
        "architectures": ["SiglipVisionModel"], "hidden_size": 1152, "intermediate_size": 4304,
        "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
    }  # fmt: skip
    """SigLIP so400m, .43e9 parameters."""

    vae_sizes = {32: ("HunyuanVideo 1.5's VAE", 4, 16)}


class Hunyuan(DiffusersFamily):
    """HunyuanVideo 1.5 by diffusers' ``HunyuanVideo15Transformer3DModel`` (0.42): text to video and image to video."""

    name = "hunyuan15"
    class_name = "HunyuanVideo15Transformer3DModel"
    transformer = HunyuanVideo15Transformer3DModel
    label = "HunyuanVideo 1.5"
    passes_times = True
    masked_attention = True
    open_counts = ("glyphs", "glyph_mask", "image_embeds")
    planning = HunyuanPlanning()
    pipeline = Pipeline(
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        neutral=(),
        parts=("guider=ClassifierFreeGuidance(guidance_scale=1.0)",),
        imports=("ClassifierFreeGuidance",),
        adapters="pipeline.transformer.load_lora_adapter("
        '{where}, weight_name="pytorch_lora_weights.safetensors", prefix="transformer")',
        takes_tokens=False,
        reseeds=False,
    )

    def requirements(self, values: NetworkConfig) -> Iterator[tuple[str, bool, str]]:
        wanted = f"2 x {values['out_channels']} + 1: the latents of a clip and of an image, and a mask"
        yield "in_channels", values["in_channels"] == 2 * (values["out_channels"] or 0) + 1, wanted
        axes, head_dim = values["rope_axes_dim"], values["attention_head_dim"]
        is_right = len(axes) == 3 and not any(dim % 2 for dim in axes) and sum(axes) == head_dim
        yield "rope_axes_dim", is_right, f"three even numbers whose sum is attention_head_dim, {head_dim}"
        yield "qk_norm", values["qk_norm"] == "rms_norm", "rms_norm"
        wanted = "false: networks with a second time of their own are not supported"
        yield "use_meanflow", not values["use_meanflow"], wanted

    def examples(self) -> dict[str, dict[str, Any]]:
        """Return one configuration for text and images, and one with patches, no refiner and another inner width."""
        sizes = {
            "in_channels": 9, "out_channels": 4, "num_attention_heads": 6, "attention_head_dim": 12, "num_layers": 2,
            "num_refiner_layers": 2, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 20, "text_embed_2_dim": 14,
            "image_embed_dim": 10, "rope_axes_dim": [4, 4, 4],
        }  # fmt: skip
        odd = {"patch_size": 2, "num_refiner_layers": 1, "mlp_ratio": 2.5, "rope_axes_dim": [2, 4, 6]}
        return {"t2v, i2v": sizes, "t2v, i2v of patches": sizes | odd}

    def time_embedder(self, network: HunyuanVideo15Transformer3DModel) -> nn.Module:
        """Return the time embedder. Under bf16 it computes in bf16 from fp32 sines, since HunyuanVideo's
        ``_keep_in_fp32_modules`` do not include it. The token refiner has a separate one."""
        return network.time_embed.timestep_embedder

    def fp8_excluded(self, network: HunyuanVideo15Transformer3DModel) -> list[nn.Module]:
        return [norm for block in network.transformer_blocks for norm in (block.norm1, block.norm1_context)]

    def never_trained(self, network: HunyuanVideo15Transformer3DModel) -> list[str]:
        """Return the parameters that compute the texts' tokens after the last block's attention: nothing reads them."""
        last = len(network.transformer_blocks) - 1
        unread = (f"transformer_blocks.{last}.attn.to_add_out.", f"transformer_blocks.{last}.ff_context.")
        return [name for name, _ in network.named_parameters() if name.startswith(unread)]

    def latent_channels(self, config: NetworkConfig) -> int:
        return config["out_channels"]

    def patch_size(self, config: NetworkConfig) -> tuple[int, int, int]:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]

    def condition_shapes(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> dict[str, Shape]:
        """Return the shapes of caption, quoted text and their masks."""
        return {
            "text": (text_tokens, config["text_embed_dim"]),
            "text_mask": (text_tokens,),
            "glyphs": (GLYPH_TOKENS, config["text_embed_2_dim"]),
            "glyph_mask": (GLYPH_TOKENS,),
        }

    def optional_shapes(
        self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int, images: int = 2
    ) -> dict[str, Shape]:
        """Return the shapes of the first frame's latents, which have separate channels, and its features."""
        return {FIRST_FRAME: first_frame_shape(latent_shape), "image_embeds": (IMAGE_TOKENS, config["image_embed_dim"])}

    def parallelize(
        self, network: HunyuanVideo15Transformer3DModel, mesh: Mesh, backend: str, head_groups: int
    ) -> None:
        """Let each rank embed, rotate and process its own tokens. Every rank keeps the whole texts."""
        plan = {"x_embedder.proj": EmbedOwnTokens(), "proj_out": GatherTokens(gather_dim=1)}
        parallelize_context(network, mesh=mesh, plan=plan)
        for refiner in network.context_embedder.token_refiner.refiner_blocks:
            refiner.attn.set_processor(HunyuanRefinerAttention(backend))
        for block in network.transformer_blocks:
            block.attn.set_processor(HunyuanJointAttention(mesh, backend, head_groups))
        network.forward = partial(own_forward, network, mesh)

    def outputs(self, network: nn.Module, sample: Sample, t: Tensor, condition: Condition, *_: Any) -> Outputs:
        tensors, x = condition.tensors, sample.video
        image = torch.zeros_like(x)
        mask = image[:, :1]
        if FIRST_FRAME in tensors:
            image = insert_first_frame(image, tensors[FIRST_FRAME])
            mask = insert_first_frame(mask, torch.ones_like(mask[:, :, :1]))
        v, *others = network(
            hidden_states=torch.cat([x, image, mask], dim=1),
            timestep=self.time_scale * t.to(torch.promote_types(t.dtype, x.dtype)),
            encoder_hidden_states=tensors["text"],
            encoder_attention_mask=tensors["text_mask"].bool(),
            encoder_hidden_states_2=tensors["glyphs"],
            encoder_attention_mask_2=tensors["glyph_mask"].bool(),
            # Without an image pass no features. Pipelines pass zeros, which the network masks.
            image_embeds=tensors.get("image_embeds", x.new_zeros(len(x), 0, config_of(network)["image_embed_dim"])),
            return_dict=False,
        )
        return Outputs(Sample({VIDEO: v}), tuple(others))


def own_forward(
    network: HunyuanVideo15Transformer3DModel,
    mesh: Mesh,
    *,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    encoder_hidden_states_2: Tensor,
    encoder_attention_mask_2: Tensor,
    image_embeds: Tensor,
    return_dict: bool = False,
) -> tuple[Tensor]:
    """Run diffusers' forward on the rank's own tokens, with bool masks and fp32 times.

    The latents, an image's latents and its mask are ``hidden_states`` ``(B, in_channels, T, H, W)``. The caption is
    ``(B, L1, D1)`` and the quoted text, with the suffix ``_2``, ``(B, L2, D2)``. The image's features are ``(B, N,
    D3)``; without one N is 0, and their projection gets zero gradients. Return the velocity, ``(B, C, T, H, W)``.
    """
    dtype, frames, pixels = hidden_states.dtype, network.config.patch_size_t, network.config.patch_size
    assert not return_dict
    rotary = own_rotary_tables(network.rope, mesh, hidden_states)
    embed = network.time_embed
    # Cast the sines to the compute dtype. diffusers casts them to the dtype of the times, which is at least fp32
    # here. Additions to the embedding are fp32 too.
    temb = embed.timestep_embedder(embed.time_proj(timestep).to(dtype)).to(dtype)
    embedded = [
        network.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask),
        network.context_embedder_2(encoder_hidden_states_2),
        network.image_embedder(image_embeds),
    ]
    kinds = network.cond_type_embed.weight.unbind()
    marked = [tokens + kind for tokens, kind in zip(embedded, kinds, strict=True)]
    texts = torch.cat(marked[::-1], dim=1)  # image, quoted text, caption, before the video
    image, video = (encoder_attention_mask.new_ones(len(texts), n) for n in (image_embeds.shape[1], rotary[2]))
    keys = torch.cat([image, encoder_attention_mask_2, encoder_attention_mask, video], dim=1)
    tokens = network.x_embedder(hidden_states)
    for block in network.transformer_blocks:
        tokens, texts = block(tokens, texts, temb, keys, rotary)
    v = network.proj_out(network.norm_out(tokens, temb))  # (B, S, features of a patch)
    grid = {"t": hidden_states.shape[2] // frames, "h": hidden_states.shape[3] // pixels}
    patch = {"pt": frames, "ph": pixels, "pw": pixels}
    return (rearrange(v, "b (t h w) (c pt ph pw) -> b c (t pt) (h ph) (w pw)", **grid, **patch),)


class HunyuanJointAttention:
    """Joint attention of own tokens and all texts: ``HunyuanVideo15AttnProcessor2_0`` (0.42) with forward-mode AD."""

    def __init__(self, mesh: Mesh, backend: str, head_groups: int):
        self.mesh, self.backend, self.head_groups = mesh, backend, head_groups

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: RotaryTables,
    ) -> tuple[Tensor, Tensor]:
        """Attend from video ``(B, S_local, width)`` and texts ``(B, L, width)`` to keys that the mask ``(B, L + S)``
        selects. A masked text token also attends; diffusers sets it to 0. Nothing reads its result."""
        *tables, total = image_rotary_emb
        q, k, v = _projected(attn, hidden_states, "to_q", "to_k", "to_v")
        q, k = (apply_rotary_emb(x, tables, sequence_dim=1) for x in (attn.norm_q(q), attn.norm_k(k)))
        text_q, text_k, text_v = _projected(attn, encoder_hidden_states, "add_q_proj", "add_k_proj", "add_v_proj")
        joint = (attn.norm_added_q(text_q), attn.norm_added_k(text_k), text_v)
        options: dict[str, Any] = {"backend": self.backend, "head_groups": self.head_groups}
        out, text = context_parallel_attention(
            q, k, v, mesh=self.mesh, total_tokens=total, key_mask=attention_mask, joint=joint, **options
        )
        out, text = out.flatten(2, 3).type_as(hidden_states), text.flatten(2, 3).type_as(encoder_hidden_states)
        return attn.to_out[1](attn.to_out[0](out)), attn.to_add_out(text)


def _projected(attn: Attention, tokens: Tensor, *layers: str) -> list[Tensor]:
    """Return the heads of ``tokens`` after each of these linear layers, ``(B, S, heads, head_dim)``."""
    return [getattr(attn, layer)(tokens).unflatten(2, (attn.heads, -1)) for layer in layers]


class HunyuanRefinerAttention:
    """Self-attention of the whole caption, with forward-mode AD and fake tensors, which diffusers' processor lacks."""

    def __init__(self, backend: str):
        # Flash kernels do not take a mask. The text is short, so another kernel is fast enough.
        self.backend = "reference" if backend == "reference" else "auto"

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: None = None, *, attention_mask: Tensor
    ) -> Tensor:
        """Attend within the caption ``(B, L, width)``; a mask ``(B, 1, L, L)`` is true if both tokens count."""
        assert encoder_hidden_states is None
        q, k, v = _projected(attn, hidden_states, "to_q", "to_k", "to_v")
        # Masked tokens also attend; nothing reads their results. total_keys states that the caption is not split, since
        # it can have as many tokens as a rank's share of the video.
        out = cross_attention(
            q, k, v, key_mask=attention_mask[:, 0].any(dim=1), backend=self.backend, total_keys=k.shape[1]
        )
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(hidden_states)))


def own_rotary_tables(rope: HunyuanVideo15RotaryPosEmbed, mesh: Mesh, hidden_states: Tensor) -> RotaryTables:
    """Return ``rope``'s cosines and sines ``(S_local, head_dim)`` of latents ``(B, C, T, H, W)``, for the rank's own
    tokens only (padding tokens have the last token's values), and ``S``."""
    patch = (rope.patch_size_t, rope.patch_size, rope.patch_size)
    positions, total = token_positions(hidden_states, patch, mesh, hidden_states.device)
    tables = [
        get_1d_rotary_pos_embed(dim, at.float(), rope.theta, use_real=True)
        for dim, at in zip(rope.rope_dim, positions, strict=True)
    ]
    cos, sin = (torch.cat(axes, dim=1) for axes in zip(*tables, strict=True))
    return cos, sin, total
