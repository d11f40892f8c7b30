"""The Wan family: diffusers' unmodified ``WanTransformer3DModel`` as a role's network.

Wan 2.1, text to video and image to video. The latter takes, behind its latents, the channels of a mask and of the
encoded first image, and an image encoder's features, to which a second cross-attention attends. Wan 2.2's A14B is two
such networks for two ranges of times (models/role.py), without those features. Its TI2V 5B is a text-to-video one that
takes a first frame where the data give it (models/families/wan_frames.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from fsdp_cp.context_parallel import EmbedOwnTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.condition import FIRST_FRAME, Condition
from models.families import frames, wan_frames
from models.families.base import LatentShape, Shape, config_of
from models.families.diffusers_family import DiffusersFamily, refuse, refuse_values
from models.families.wan_attention import TEXT_TOKENS, WanCrossAttention, WanSelfAttention, own_rotary_tables
from models.families.wan_names import original_adapters, original_name

IMAGE_TOKENS = 257
"""Features that CLIP ViT-H/14 gives of an image: 16 x 16 patches, and the class token."""


def _own_token_plan(network: WanTransformer3DModel) -> dict[str, Any]:
    """diffusers' plan, but split before the patch embedding instead of behind it, and rotary tables of own tokens.

    Raises:
        ValueError: another plan than the one known: diffusers' ``_cp_plan`` is private.
    """
    plan = network._cp_plan
    known = {"rope": {0, 1}, "blocks.0": {"hidden_states"}, "proj_out": None, "": {"timestep"}}
    found = {name: set(entry) if isinstance(entry, Mapping) else None for name, entry in plan.items()}
    if found != known:
        raise ValueError(
            f"this diffusers' WanTransformer3DModel._cp_plan splits {found}, not {known}; use diffusers 0.42"
        )
    return {"": plan[""], "patch_embedding": EmbedOwnTokens(), "proj_out": plan["proj_out"]}


_RANGES = {
    "num_layers": (1, 512),
    "num_attention_heads": (1, 4096),
    "attention_head_dim": (2, 4096),
    "in_channels": (1, 65536),
    "out_channels": (1, 65536),
    "text_dim": (1, 2**20),
    "freq_dim": (2, 65536),
    "ffn_dim": (1, 2**20),
    "rope_max_seq_len": (1, 65536),
    "pos_embed_seq_len": (1, 2**20),
    "image_dim": (1, 2**20),
    "added_kv_proj_dim": (1, 2**20),
}
"""Least and greatest of what a Wan may have."""
_OPTIONAL = ("out_channels", "pos_embed_seq_len", "image_dim", "added_kv_proj_dim")
"""Which may be null: as many as go in; none."""


_PUBLISHED = {"in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "patch_size": [1, 2, 2]}


class Wan(DiffusersFamily):
    """Wan 2.1, and 2.2's A14B and TI2V 5B, by diffusers' ``WanTransformer3DModel`` (0.42)."""

    name = "wan"
    class_name = "WanTransformer3DModel"
    transformer = WanTransformer3DModel
    label = "Wan"
    published = {
        "wan2_1_t2v_1_3b": {
            **_PUBLISHED, "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 8960,
        },
        "wan2_1_t2v_14b": {
            **_PUBLISHED, "num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824,
        },
        "wan2_1_i2v_14b": {
            **_PUBLISHED, "num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824,
            "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120,
        },
        "wan2_2_ti2v_5b": wan_frames.PUBLISHED,
        "wan2_2_t2v_a14b": {
            **_PUBLISHED, "num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824,
        },
        "wan2_2_i2v_a14b": {
            **_PUBLISHED, "num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "ffn_dim": 13824,
            "in_channels": 36,
        },
    }  # fmt: skip
    published_boundaries = {"wan2_2_t2v_a14b": 0.875, "wan2_2_i2v_a14b": 0.9}
    text_encoder = {
        "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    """umT5-XXL's, 5.7e9 parameters."""
    image_encoder = {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14,
    }  # fmt: skip
    """CLIP ViT-H/14's, .63e9 parameters."""

    def clip_latents(self, num_frames: int, height: int, width: int) -> LatentShape:
        """Wan 2.1's VAE: 16 channels, a latent frame for four frames behind the first, 8 x 8 pixels."""
        if (num_frames - 1) % 4 or height % 8 or width % 8:
            raise UserError(
                f"data.num_frames={num_frames}, data.height={height}, data.width={width}: Wan's VAE takes 4k + 1 frames"
                " of multiples of 8 pixels"
            )
        return 16, (num_frames - 1) // 4 + 1, height // 8, width // 8

    def latents_for(self, config: Mapping[str, Any], num_frames: int, height: int, width: int) -> LatentShape:
        of = wan_frames.clip_latents if self.latent_channels(config) == wan_frames.CHANNELS else self.clip_latents
        return of(num_frames, height, width)

    def encoders_for(self, channels: int) -> dict[str, Mapping[str, Any]]:
        found = super().encoders_for(channels)
        return found | ({"vae": wan_frames.VAE, "image_encoder": {}} if channels == wan_frames.CHANNELS else {})

    def check_values(self, config: Mapping[str, Any], setting: str) -> None:
        given = self.defaults() | dict(config)
        refuse_values(given, _RANGES, _OPTIONAL, setting)
        if given["attention_head_dim"] % 2:
            refuse(given, "attention_head_dim", "even, for the rotary embedding", setting)
        patch = given["patch_size"]
        if not isinstance(patch, (list, tuple)) or len(patch) != 3 or any(type(p) is not int or p < 1 for p in patch):
            wanted = "three whole numbers (frames, height, width) of 1 or more, such as [1, 2, 2]"
            refuse(given, "patch_size", wanted, setting)
        if max(patch) > 64:
            refuse(given, "patch_size", "three whole numbers up to 64", setting)
        if type(given["eps"]) not in (int, float) or not 0 <= given["eps"] < 1:
            refuse(given, "eps", "a number from 0 to 1", setting)
        if type(given["cross_attn_norm"]) is not bool:
            refuse(given, "cross_attn_norm", "true or false", setting)
        if not isinstance(given["qk_norm"], (str, type(None))):
            refuse(given, "qk_norm", "a name, such as rms_norm_across_heads", setting)
        _check_image(config, setting)

    def restore_buffers(self, network: WanTransformer3DModel, device: torch.device) -> None:
        """Compute the non-persistent rotary tables again, on ``device``; ``to_empty`` leaves garbage in them."""
        config = network.config
        fresh = type(network.rope)(config.attention_head_dim, tuple(config.patch_size), config.rope_max_seq_len)
        network.rope.freqs_cos = fresh.freqs_cos.to(device)
        network.rope.freqs_sin = fresh.freqs_sin.to(device)

    def examples(self) -> dict[str, dict[str, Any]]:
        """Text to video, image to video with its second cross-attention and without, text or a first frame to video."""
        sizes = {
            "patch_size": [1, 2, 2], "num_attention_heads": 6, "attention_head_dim": 12, "in_channels": 4,
            "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32,
        }  # fmt: skip
        image = {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 72}
        latents_of_image = {"in_channels": 12}
        latents = {"in_channels": wan_frames.CHANNELS, "out_channels": wan_frames.CHANNELS}
        return {
            "t2v": sizes,
            "i2v": sizes | image,
            "i2v of latents alone": sizes | latents_of_image,
            "ti2v": sizes | latents,
        }

    def blocks(self, network: WanTransformer3DModel) -> list[nn.Module]:
        return list(network.blocks)

    def full_precision_units(self, network: WanTransformer3DModel) -> list[nn.Module]:
        """What computes in fp32 under ``precision=bf16``, as an FSDP unit of its own.

        diffusers keeps ``rope``, ``time_embedder``, ``scale_shift_table`` and the block norms in fp32 when it loads
        weights in bf16. Here the time embedder is a unit of its own in fp32; rope has no parameters and its tables
        stay fp32; the norms compute in fp32 and the modulation adds in fp32 as diffusers writes them, from weights
        rounded to bf16 (the masters are fp32), since they are gathered with their block.
        """
        return [network.condition_embedder.time_embedder]

    def time_embedder(self, network: WanTransformer3DModel) -> nn.Module:
        return network.condition_embedder.time_embedder

    def original_name(self, layer: str) -> str:
        return original_name(layer)

    def diffusers_adapters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from diffusers import WanPipeline

        theirs = original_adapters(tensors)
        return tensors if theirs is None else WanPipeline.lora_state_dict(theirs, use_safetensors=True)

    def time_features(self, config: Mapping[str, Any]) -> int:
        return config["freq_dim"]

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return config["out_channels"] if config["out_channels"] is not None else config["in_channels"]

    def patch_size(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        return tuple(config["patch_size"])

    def condition_shapes(
        self, config: Mapping[str, Any], latent_shape: LatentShape, text_tokens: int
    ) -> dict[str, Shape]:
        """The text; of an image its latents and mask; of Wan 2.1's its features too, and 512 tokens of text."""
        shapes: dict[str, Shape] = {"text": (text_tokens, config["text_dim"])}
        if takes_image(config):
            channels, *sizes = latent_shape
            shapes["image_latents"] = (channels, *sizes)
            shapes["image_mask"] = (config["in_channels"] - 2 * channels, *sizes)
        if takes_features(config):
            shapes["text"] = (TEXT_TOKENS, config["text_dim"])
            shapes["image_embeds"] = (IMAGE_TOKENS, config["image_dim"])
        return shapes

    def optional_shapes(self, config: Mapping[str, Any], latent_shape: LatentShape) -> dict[str, Shape]:
        """A first frame, for Wan 2.2's TI2V: a text-to-video Wan of its VAE's latents."""
        if takes_image(config) or self.latent_channels(config) != wan_frames.CHANNELS:
            return {}
        return {FIRST_FRAME: frames.frame_shape(latent_shape)}

    def check_sample(
        self, config: Mapping[str, Any], latent_shape: LatentShape, condition: Mapping[str, Shape], setting: str
    ) -> None:
        """Can the network take such samples?

        Raises:
            UserError: channels or sizes that it cannot take (more positions than ``rope_max_seq_len`` along an axis
                among them), text embeddings of another size, an image for a text-to-video Wan, or none for the other.
                A text-to-video Wan may be given a first frame.
        """
        text_tokens, _ = condition["text"]
        self.check_text_width(config["text_dim"], condition, setting)
        channels, *sizes = latent_shape
        outgoing = self.latent_channels(config)
        wanted = outgoing if takes_image(config) else config["in_channels"]
        if channels != wanted:
            raise UserError(
                f"{setting} takes latents of {wanted} channels, but the data has {channels};"
                " use a checkpoint made for this VAE, or other data.encoders"
            )
        if outgoing != channels:
            raise UserError(
                f"{setting} has out_channels={outgoing}, and a velocity has {channels} channels, as the"
                " latents; use a network with as many"
            )
        self._check_positions(config, sizes, setting)
        needed = self.condition_shapes(config, latent_shape, text_tokens)
        if FIRST_FRAME in condition:
            of_text, frame = not takes_image(config), condition[FIRST_FRAME]
            wan_frames.check_frame(config, latent_shape, frame, of_text=of_text, setting=setting)
        if takes_image(config) and "image_latents" not in condition:
            raise UserError(
                f"{setting} is an image-to-video Wan, and the data give it no image; use data.image=first_frame with"
                " data=video_folder, or a text-to-video checkpoint"
            )
        if not takes_image(config) and "image_latents" in condition:
            raise UserError(
                f"{setting} is a text-to-video Wan, which takes no image; leave data.image out, or use an"
                " image-to-video checkpoint"
            )
        if text_tokens != needed["text"][0]:
            raise UserError(
                f"data.max_text_tokens={text_tokens}: {setting} is an image-to-video Wan, which takes {TEXT_TOKENS}"
                f" text tokens; use {TEXT_TOKENS}"
            )
        if takes_image(config) and ("image_embeds" in needed) != ("image_embeds" in condition):
            has, lacks = ("features of it", "none") if "image_embeds" in condition else ("none", "such features")
            raise UserError(
                f"{setting}: the data give its image with {has}, of an image encoder, and the network takes {lacks};"
                " use data.encoders of the pipeline that the checkpoint is from"
            )
        for name in sorted(needed.keys() - {"text"}):
            given = condition[name]
            # However many features an image encoder gives, the network takes.
            if given[1:] != needed[name][1:] or (name != "image_embeds" and given != needed[name]):
                raise UserError(
                    f"{setting} takes {name} of shape {needed[name]}, but the data's are {given}; use"
                    " data.encoders of the pipeline that the checkpoint is from"
                )

    def _check_positions(self, config: Mapping[str, Any], sizes: Sequence[int], setting: str) -> None:
        positions = config["rope_max_seq_len"]
        for key, size, patch in zip(
            ("data.num_frames", "data.height", "data.width"), sizes, config["patch_size"], strict=True
        ):
            most = positions * patch
            if size > most:
                # What a latent is of the clip, only the data's VAE says: none, or one of the two that Wan has.
                with_vae = 4 * most - 3 if key == "data.num_frames" else 8 * most
                raise UserError(
                    f"{key} gives {size} latent positions, but {setting} has rope_max_seq_len={positions} in patches of"
                    f" {patch}; use at most {most} latent positions ({key}={most} without a VAE, {with_vae} with Wan's)"
                )
            self.check_patch(key, size, patch, setting)

    def attention_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        keys = tokens + condition["text"][0] + (condition["image_embeds"][0] if takes_features(config) else 0)
        return 4 * config["num_layers"] * tokens * keys * self.width(config)

    def products(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> tuple[int, int, int]:
        dim, layers, text_tokens = self.width(config), config["num_layers"], condition["text"][0]
        of_block = 6 * tokens * dim * dim + 2 * tokens * text_tokens * dim + 2 * tokens * dim * config["ffn_dim"]
        still = layers * 2 * text_tokens * dim * dim + text_tokens * dim * (config["text_dim"] + dim)
        if takes_features(config):
            image_tokens, image_dim = condition["image_embeds"]
            of_block += 2 * tokens * image_tokens * dim
            still += layers * 2 * image_tokens * dim * dim + image_tokens * image_dim * (image_dim + dim)
        ends = tokens * dim * math.prod(config["patch_size"]) * (config["in_channels"] + self.latent_channels(config))
        pairs = layers * 2 * tokens * tokens * dim
        times = tokens if FIRST_FRAME in condition else 1
        return pairs, layers * of_block + times * dim * (config["freq_dim"] + 7 * dim) + ends, still

    def parallelize(
        self, network: WanTransformer3DModel, mesh: Mesh, backend: str = "auto", head_groups: int = 1
    ) -> None:
        """Each rank embeds, rotates and works on its own tokens; this family's processors on every attention.

        Raises:
            ValueError: a diffusers version whose plan is not the one known.
        """
        if mesh.cp_size > 1:
            parallelize_context(network, mesh=mesh, plan=_own_token_plan(network))
            network.rope.forward = partial(own_rotary_tables, network.rope, mesh)
        for block in network.blocks:
            block.attn1.set_processor(WanSelfAttention(mesh, backend, head_groups))
            block.attn2.set_processor(WanCrossAttention(backend))

    def outputs(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, ...]:
        given, hidden, times = condition.tensors, x, t
        if "image_latents" in given:
            hidden = torch.cat([x, given["image_mask"], given["image_latents"]], dim=1)
        if FIRST_FRAME in given:
            hidden = frames.put_in(x, given[FIRST_FRAME])
            times = frames.token_times(t, x, self.patch_size(config_of(network)))
        v, *others = network(
            hidden_states=hidden,
            timestep=self.time_scale * times,
            encoder_hidden_states=given["text"],
            encoder_hidden_states_image=given.get("image_embeds"),
            return_dict=False,
        )
        return self.hold(v, x, t, condition), *others

    def hold(self, v: Tensor, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        frame = condition.tensors.get(FIRST_FRAME)
        return v if frame is None else frames.hold(v, x, t, frame)


def takes_image(config: Mapping[str, Any]) -> bool:
    """Is it an image-to-video Wan, which takes an image's latents and a mask behind the clip's latents?"""
    going = config.get("out_channels", 16)
    return takes_features(config) or (going is not None and going < config.get("in_channels", 16))


def takes_features(config: Mapping[str, Any]) -> bool:
    """Is it an image-to-video Wan 2.1, which attends to an image encoder's features too?"""
    return config.get("image_dim") is not None


def _check_image(config: Mapping[str, Any], setting: str) -> None:
    """The image-to-video configurations that are none of Wan's, or that no network can run.

    Raises:
        UserError: by name.
    """
    coming = config.get("in_channels", 16)
    going = config.get("out_channels", 16) or coming
    if (config.get("image_dim") is None) != (config.get("added_kv_proj_dim") is None):
        raise UserError(
            f"{setting} has image_dim={config.get('image_dim')} and"
            f" added_kv_proj_dim={config.get('added_kv_proj_dim')}; an image-to-video Wan 2.1 has both, others neither"
        )
    if config.get("pos_embed_seq_len") is not None:
        raise UserError(f"{setting} is a Wan for a first and a last image (pos_embed_seq_len), which is not supported")
    if not takes_image(config):
        return
    width = config.get("num_attention_heads", 40) * config.get("attention_head_dim", 128)
    if takes_features(config) and config["added_kv_proj_dim"] != width:
        raise UserError(f"{setting} has added_kv_proj_dim={config['added_kv_proj_dim']}, but its width is {width}")
    if coming <= 2 * going:
        raise UserError(
            f"{setting} takes {coming} channels and returns {going}: an image-to-video Wan takes the latents, as"
            f" many channels of an image, and a mask's; more than {2 * going}"
        )
