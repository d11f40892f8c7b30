"""The HunyuanVideo 1.5 family: diffusers' unmodified ``HunyuanVideo15Transformer3DModel`` as a role's network.

Text to video, or from a first image, by one class and one configuration: the channels of an image's latents and of a
mask are there in both, and stay 0 without one. So the condition decides. Three texts stand beside the video in joint
attention: an image encoder's features, what a caption quotes (``glyphs``, by a byT5 for writing in the picture), and
the caption itself.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample, L tokens of all texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from torch import Tensor, nn

from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.condition import FIRST_FRAME, Condition
from models.families import frames
from models.families.base import LatentShape, Shape, config_of
from models.families.diffusers_family import DiffusersFamily, refuse, refuse_values
from models.families.hunyuan_forward import HunyuanJointAttention, HunyuanRefinerAttention, OwnForward

TIME_FEATURES = 256
"""Sines and cosines of a time, which diffusers has written into ``HunyuanVideo15TimeEmbedding``."""
GLYPH_TOKENS, GLYPH_HIDDEN = 256, 2048
"""Tokens of what a caption quotes, as ``HunyuanVideo15Pipeline`` has it; and the width inside of its projection."""
IMAGE_TOKENS = 729
"""Features that SigLIP so400m gives of an image of 384 x 384 pixels: 27 x 27 patches."""

_RANGES = {
    "num_layers": (1, 512),
    "num_refiner_layers": (0, 64),
    "num_attention_heads": (1, 4096),
    "attention_head_dim": (2, 4096),
    "in_channels": (3, 65536),
    "out_channels": (1, 65536),
    "text_embed_dim": (1, 2**20),
    "text_embed_2_dim": (1, 2**20),
    "image_embed_dim": (1, 2**20),
    "patch_size": (1, 64),
    "patch_size_t": (1, 64),
}
"""Least and greatest of what a HunyuanVideo 1.5 may have."""


class Hunyuan(DiffusersFamily):
    """HunyuanVideo 1.5 by diffusers' ``HunyuanVideo15Transformer3DModel`` (0.42): of text, or of a first image too."""

    name = "hunyuan15"
    class_name = "HunyuanVideo15Transformer3DModel"
    transformer = HunyuanVideo15Transformer3DModel
    label = "HunyuanVideo 1.5"
    masked_attention = True
    published = {
        # The defaults of diffusers' class, with which its conversion script builds all of 480p and 720p.
        "hunyuan_video1_5": {
            "in_channels": 65, "out_channels": 32, "num_attention_heads": 16, "attention_head_dim": 128,
            "num_layers": 54, "num_refiner_layers": 2, "mlp_ratio": 4.0, "patch_size": 1, "patch_size_t": 1,
            "text_embed_dim": 3584, "text_embed_2_dim": 1472, "image_embed_dim": 1152, "rope_axes_dim": [16, 56, 56],
        },
    }  # fmt: skip
    text_encoder = {
        "architectures": ["Qwen2_5_VLTextModel"], "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }  # fmt: skip
    """Qwen2.5-VL 7B's text model, 7.1e9 parameters."""
    text_encoder_2 = {
        "architectures": ["T5EncoderModel"], "vocab_size": 1510, "d_model": 1472, "d_kv": 64, "d_ff": 3584,
        "num_layers": 12, "num_heads": 6, "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    """byT5 small's with tokens of fonts and colours, .22e9 parameters."""
    vae = {"_class_name": "AutoencoderKLHunyuanVideo15"}
    image_encoder = {
        "architectures": ["SiglipVisionModel"], "hidden_size": 1152, "intermediate_size": 4304,
        "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
    }  # fmt: skip
    """SigLIP so400m's, .43e9 parameters."""

    def pipeline_times(self, steps: int) -> list[float]:
        """HunyuanVideo15Pipeline's, before the scheduler's shift: from 1 down to ``1 / steps``."""
        return [1 - i / steps for i in range(steps)]

    def clip_latents(self, num_frames: int, height: int, width: int) -> LatentShape:
        """Its VAE: 32 channels, a latent frame for four frames behind the first, 16 x 16 pixels."""
        if (num_frames - 1) % 4 or height % 16 or width % 16:
            raise UserError(
                f"data.num_frames={num_frames}, data.height={height}, data.width={width}: HunyuanVideo 1.5's VAE takes"
                " 4k + 1 frames of multiples of 16 pixels"
            )
        return 32, (num_frames - 1) // 4 + 1, height // 16, width // 16

    def check_values(self, config: Mapping[str, Any], setting: str) -> None:
        given = self.defaults() | dict(config)
        refuse_values(given, _RANGES, (), setting)
        if given["in_channels"] != 2 * given["out_channels"] + 1:
            wanted = f"the latents' {given['out_channels']} twice, an image's behind a clip's, and a mask's one"
            refuse(given, "in_channels", wanted, setting)
        axes, head_dim = given["rope_axes_dim"], given["attention_head_dim"]
        whole = isinstance(axes, (list, tuple)) and all(type(dim) is int and dim > 1 and dim % 2 == 0 for dim in axes)
        if not whole or len(axes) != 3 or sum(axes) != head_dim:
            refuse(given, "rope_axes_dim", f"three even numbers whose sum is attention_head_dim, {head_dim}", setting)
        if type(given["rope_theta"]) not in (int, float) or given["rope_theta"] <= 0:
            refuse(given, "rope_theta", "a number above 0", setting)
        if type(given["mlp_ratio"]) not in (int, float) or not 0 < given["mlp_ratio"] <= 64:
            refuse(given, "mlp_ratio", "a number above 0, up to 64", setting)
        if given["qk_norm"] != "rms_norm":
            refuse(given, "qk_norm", "rms_norm", setting)
        if given["use_meanflow"] is not False:
            refuse(given, "use_meanflow", "false: networks with a second time of their own are not supported", setting)

    def examples(self) -> dict[str, dict[str, Any]]:
        """One configuration serves text and images; and one with patches, no refiner and another width inside."""
        sizes = {
            "in_channels": 9, "out_channels": 4, "num_attention_heads": 6, "attention_head_dim": 12, "num_layers": 2,
            "num_refiner_layers": 2, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 20, "text_embed_2_dim": 14,
            "image_embed_dim": 10, "rope_axes_dim": [4, 4, 4],
        }  # fmt: skip
        odd = {"patch_size": 2, "num_refiner_layers": 1, "mlp_ratio": 2.5, "rope_axes_dim": [2, 4, 6]}
        return {"t2v, i2v": sizes, "t2v, i2v of patches": sizes | odd}

    def blocks(self, network: HunyuanVideo15Transformer3DModel) -> list[nn.Module]:
        """Behind the video's tokens they return the texts', ``(B, L, width)``."""
        return list(network.transformer_blocks)

    def time_embedder(self, network: HunyuanVideo15Transformer3DModel) -> nn.Module:
        """It computes as the network does, under bf16 too, of sines in fp32: no ``_keep_in_fp32_modules`` of
        HunyuanVideo says otherwise. The token refiner has another one of its own."""
        return network.time_embed.timestep_embedder

    def fp8_excluded(self, network: HunyuanVideo15Transformer3DModel) -> list[nn.Module]:
        return [norm for block in network.transformer_blocks for norm in (block.norm1, block.norm1_context)]

    def never_trained(self, network: HunyuanVideo15Transformer3DModel) -> list[str]:
        """What makes the texts' tokens behind the last block's attention, which nothing reads."""
        last = len(network.transformer_blocks) - 1
        unread = (f"transformer_blocks.{last}.attn.to_add_out.", f"transformer_blocks.{last}.ff_context.")
        return [name for name, _ in network.named_parameters() if name.startswith(unread)]

    def time_features(self, config: Mapping[str, Any]) -> int:
        return TIME_FEATURES

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return config["out_channels"]

    def patch_size(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        return config["patch_size_t"], config["patch_size"], config["patch_size"]

    def condition_shapes(
        self, config: Mapping[str, Any], latent_shape: LatentShape, text_tokens: int
    ) -> dict[str, Shape]:
        """The caption and what it quotes, and which tokens of both count."""
        return {
            "text": (text_tokens, config["text_embed_dim"]),
            "text_mask": (text_tokens,),
            "glyphs": (GLYPH_TOKENS, config["text_embed_2_dim"]),
            "glyph_mask": (GLYPH_TOKENS,),
        }

    def optional_shapes(self, config: Mapping[str, Any], latent_shape: LatentShape) -> dict[str, Shape]:
        """The first frame's latents, for channels of their own, and its features."""
        return {
            FIRST_FRAME: frames.frame_shape(latent_shape),
            "image_embeds": (IMAGE_TOKENS, config["image_embed_dim"]),
        }

    def check_sample(
        self, config: Mapping[str, Any], latent_shape: LatentShape, condition: Mapping[str, Shape], setting: str
    ) -> None:
        _, *sizes = latent_shape
        self.check_channels(config, latent_shape, setting)
        self.check_text_width(config["text_embed_dim"], condition, setting)
        keys = ("data.num_frames", "data.height", "data.width")
        for key, size, patch in zip(keys, sizes, self.patch_size(config), strict=True):
            self.check_patch(key, size, patch, setting)
        needed = self.condition_shapes(config, latent_shape, condition["text"][0])
        of_image = {FIRST_FRAME, "image_embeds", "image_latents"} & condition.keys()
        if of_image:
            needed |= self.optional_shapes(config, latent_shape)
        for name, shape in needed.items():
            given = condition.get(name)
            # However many tokens the encoders of quotations and images give, the network takes.
            free = name in ("glyphs", "glyph_mask", "image_embeds")
            if given is None or (given[1:] if free else given) != (shape[1:] if free else shape):
                raise UserError(
                    f"{setting} is a HunyuanVideo 1.5, which takes {name} of shape {shape}, and the data give"
                    f" {'none' if given is None else given}; use data.encoders of a HunyuanVideo 1.5 pipeline"
                )
        if FIRST_FRAME in condition:
            frames.check_given(latent_shape, condition[FIRST_FRAME], setting)

    def attention_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        return 4 * config["num_layers"] * (tokens + _text_tokens(condition)) ** 2 * self.width(config)

    def products(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> tuple[int, int, int]:
        dim, layers, refiners = self.width(config), config["num_layers"], config["num_refiner_layers"]
        caption, text_dim = condition["text"]
        glyphs, glyph_dim = condition["glyphs"]
        images, image_dim = condition.get("image_embeds", (0, config["image_embed_dim"]))
        both = tokens + _text_tokens(condition)
        inside = int(dim * config["mlp_ratio"])
        # Of a block: four products of attention, two of the feed-forward, two modulations of six parts.
        of_block = both * dim * (4 * dim + 2 * inside) + 12 * dim * dim
        of_attention = 2 * caption * caption * dim
        refining = caption * dim * (4 + 8) * dim + 2 * dim * dim
        # What the first refiner's attention sees knows nothing of the time; later ones' does.
        first = min(refiners, 1) * (4 * caption * dim * dim + of_attention)
        still = first + text_dim * dim + dim * dim + caption * text_dim * dim
        still += glyphs * (glyph_dim * GLYPH_HIDDEN + GLYPH_HIDDEN**2 + GLYPH_HIDDEN * dim)
        still += images * image_dim * (image_dim + dim)
        ends = tokens * dim * math.prod(self.patch_size(config)) * (config["in_channels"] + config["out_channels"])
        times = 2 * (TIME_FEATURES * dim + dim * dim) + 2 * dim * dim  # two embedders, and the last norm
        pairs = layers * 2 * both * both * dim + max(refiners - 1, 0) * of_attention
        others = layers * of_block + refiners * refining - min(refiners, 1) * 4 * caption * dim * dim + ends + times
        return pairs, others, still

    def parallelize(
        self, network: HunyuanVideo15Transformer3DModel, mesh: Mesh, backend: str = "auto", head_groups: int = 1
    ) -> None:
        """Each rank embeds, rotates and works on its own tokens; the texts stay whole on all."""
        plan = {"x_embedder.proj": EmbedOwnTokens(), "proj_out": GatherTokens(gather_dim=1)}
        parallelize_context(network, mesh=mesh, plan=plan)
        for refiner in network.context_embedder.token_refiner.refiner_blocks:
            refiner.attn.set_processor(HunyuanRefinerAttention(backend))
        for block in network.transformer_blocks:
            block.attn.set_processor(HunyuanJointAttention(mesh, backend, head_groups))
        network.forward = OwnForward(network, mesh)

    def outputs(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, ...]:
        given, image = condition.tensors, torch.zeros_like(x)
        mask = image[:, :1]
        if FIRST_FRAME in given:
            image = frames.put_in(image, given[FIRST_FRAME])
            mask = frames.put_in(mask, torch.ones_like(mask[:, :, :1]))
        return network(
            hidden_states=torch.cat([x, image, mask], dim=1),
            timestep=self.time_scale * t.to(torch.promote_types(t.dtype, x.dtype)),
            encoder_hidden_states=given["text"],
            encoder_attention_mask=given["text_mask"].bool(),
            encoder_hidden_states_2=given["glyphs"],
            encoder_attention_mask_2=given["glyph_mask"].bool(),
            # No image has no features; the pipelines hand over zeros, which the network masks.
            image_embeds=given.get("image_embeds", x.new_zeros(len(x), 0, config_of(network)["image_embed_dim"])),
            return_dict=False,
        )


def _text_tokens(condition: Mapping[str, Shape]) -> int:
    """L."""
    return sum(condition[name][0] for name in ("text", "glyphs", "image_embeds") if name in condition)
