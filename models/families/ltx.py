"""The LTX-Video family: diffusers' unmodified ``LTXVideoTransformer3DModel`` as a role's network.

Text to video, or from a given first frame, which stands in the noisy one's place (models/families/frames.py) as in
``LTXImageToVideoPipeline``. A token is one latent. Beside the text the network takes which of its tokens count, and how
far latents are from each other in seconds and pixels, which its rotary embedding is made of: ``text_mask`` and
``latent_spacing`` of the condition, as LTX's encoders give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import LTXVideoTransformer3DModel
from torch import Tensor, nn

from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.condition import FIRST_FRAME, Condition
from models.families import frames
from models.families.base import LatentShape, Shape
from models.families.diffusers_family import DiffusersFamily, refuse, refuse_values
from models.families.ltx_attention import LTXCrossAttention, LTXSelfAttention, video_coordinates

TIME_FEATURES = 256
"""Sines and cosines of a time, which diffusers has written into ``PixArtAlphaCombinedTimestepSizeEmbeddings``."""

_RANGES = {
    "num_layers": (1, 512),
    "num_attention_heads": (1, 4096),
    "attention_head_dim": (2, 4096),
    "in_channels": (1, 65536),
    "out_channels": (1, 65536),
    "cross_attention_dim": (1, 2**20),
    "caption_channels": (1, 2**20),
    "patch_size": (1, 64),
    "patch_size_t": (1, 64),
}
"""Least and greatest of what an LTX may have."""


class LTX(DiffusersFamily):
    """LTX-Video by diffusers' ``LTXVideoTransformer3DModel`` (0.42): of text, or of a first frame too."""

    name = "ltx"
    class_name = "LTXVideoTransformer3DModel"
    transformer = LTXVideoTransformer3DModel
    label = "LTX"
    published = {
        # The defaults of diffusers' class, with which its conversion script builds 0.9.0 and 0.9.1.
        "ltx_video_2b": {
            "in_channels": 128, "out_channels": 128, "num_attention_heads": 32, "attention_head_dim": 64,
            "cross_attention_dim": 2048, "num_layers": 28, "caption_channels": 4096,
        },
        # Lightricks' xora_v1.2-13B-balanced-128.json, as AI-Hypercomputer/maxdiffusion has it (0.9.7).
        "ltx_video_13b": {
            "in_channels": 128, "out_channels": 128, "num_attention_heads": 32, "attention_head_dim": 128,
            "cross_attention_dim": 4096, "num_layers": 48, "caption_channels": 4096,
        },
    }  # fmt: skip
    text_encoder = {
        "architectures": ["T5EncoderModel"], "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240,
        "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    """T5 v1.1 XXL's, 4.8e9 parameters."""
    vae = {"_class_name": "AutoencoderKLLTXVideo"}
    """0.9.0's, which has the class's own sizes."""

    def pipeline_times(self, steps: int) -> list[float]:
        """LTXPipeline's, before the scheduler's shift: from 1 down to ``1 / steps``."""
        return [1 - i / steps for i in range(steps)]

    def clip_latents(self, num_frames: int, height: int, width: int) -> LatentShape:
        """LTX's VAE: 128 channels, a latent frame for eight frames behind the first, 32 x 32 pixels."""
        if (num_frames - 1) % 8 or height % 32 or width % 32:
            raise UserError(
                f"data.num_frames={num_frames}, data.height={height}, data.width={width}: LTX's VAE takes 8k + 1 frames"
                " of multiples of 32 pixels"
            )
        return 128, (num_frames - 1) // 8 + 1, height // 32, width // 32

    def check_values(self, config: Mapping[str, Any], setting: str) -> None:
        given = self.defaults() | dict(config)
        refuse_values(given, _RANGES, ("out_channels",), setting)
        for key in ("patch_size", "patch_size_t"):
            if given[key] != 1:
                refuse(given, key, "1: diffusers' LTX pipelines count a token for each latent", setting)
        if given["out_channels"] not in (None, given["in_channels"]):
            refuse(given, "out_channels", f"as many as go in, {given['in_channels']}", setting)
        width = self.width(given)
        if width % 2:
            refuse(given, "attention_head_dim", "even, or the heads, for the rotary embedding", setting)
        if given["cross_attention_dim"] != width:
            wanted = f"the network's width {width}, to which it projects the text"
            refuse(given, "cross_attention_dim", wanted, setting)
        for key in ("norm_elementwise_affine", "attention_bias", "attention_out_bias"):
            if type(given[key]) is not bool:
                refuse(given, key, "true or false", setting)
        if given["activation_fn"] not in ("gelu", "gelu-approximate"):  # products() counts a plain feed-forward
            refuse(given, "activation_fn", "gelu-approximate or gelu", setting)
        if type(given["norm_eps"]) not in (int, float) or not 0 <= given["norm_eps"] < 1:
            refuse(given, "norm_eps", "a number from 0 to 1", setting)

    def examples(self) -> dict[str, dict[str, Any]]:
        """Norms without weights and biases everywhere, as published; and the other way round.

        Rotary tables cover the width in sixths: 72 is twelve of them, and of 64 four features are not rotated.
        """
        sizes = {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 6, "attention_head_dim": 12,
            "cross_attention_dim": 72, "num_layers": 2, "caption_channels": 24,
        }  # fmt: skip
        other = {"norm_elementwise_affine": True, "attention_bias": False, "attention_out_bias": False}
        odd = {"num_attention_heads": 4, "attention_head_dim": 16, "cross_attention_dim": 64}
        return {"t2v": sizes, "t2v of other norms": sizes | odd | other}

    def blocks(self, network: LTXVideoTransformer3DModel) -> list[nn.Module]:
        return list(network.transformer_blocks)

    def time_embedder(self, network: LTXVideoTransformer3DModel) -> nn.Module:
        """It computes as the network does, under bf16 too: diffusers casts its sines, and no ``_keep_in_fp32_modules``
        of LTX says otherwise."""
        return network.time_embed.emb.timestep_embedder

    def time_features(self, config: Mapping[str, Any]) -> int:
        return TIME_FEATURES

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return config["in_channels"]

    def patch_size(self, config: Mapping[str, Any]) -> tuple[int, int, int]:
        return 1, 1, 1

    def condition_shapes(
        self, config: Mapping[str, Any], latent_shape: LatentShape, text_tokens: int
    ) -> dict[str, Shape]:
        """The text, which of its tokens count, and the spacing of latents."""
        text = (text_tokens, config["caption_channels"])
        return {"text": text, "text_mask": (text_tokens,), "latent_spacing": (4,)}

    def optional_shapes(self, config: Mapping[str, Any], latent_shape: LatentShape) -> dict[str, Shape]:
        return {FIRST_FRAME: frames.frame_shape(latent_shape)}

    def check_sample(
        self, config: Mapping[str, Any], latent_shape: LatentShape, condition: Mapping[str, Shape], setting: str
    ) -> None:
        self.check_text_width(config["caption_channels"], condition, setting)
        self.check_channels(config, latent_shape, setting)
        needed = self.condition_shapes(config, latent_shape, condition["text"][0])
        for name, shape in needed.items():
            if condition.get(name) != shape:
                raise UserError(
                    f"{setting} is an LTX-Video, which takes {name} of shape {shape}, and the data give"
                    f" {condition.get(name, 'none')}; use data.encoders of an LTX pipeline"
                )
        if "image_latents" in condition:
            raise UserError(
                f"{setting} is an LTX-Video, which takes an image as the first frame, and the data give its latents for"
                " channels of their own; use data.encoders of an LTX pipeline"
            )
        if FIRST_FRAME in condition:
            frames.check_given(latent_shape, condition[FIRST_FRAME], setting)

    def attention_flops(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> int:
        return 4 * config["num_layers"] * tokens * (tokens + condition["text"][0]) * self.width(config)

    def products(self, config: Mapping[str, Any], tokens: int, condition: Mapping[str, Shape]) -> tuple[int, int, int]:
        dim, layers, text_tokens = self.width(config), config["num_layers"], condition["text"][0]
        # Self-attention has four products, attention to the text two of tokens; the feed-forward is four times as wide.
        of_block = (4 + 2 + 8) * tokens * dim * dim + 2 * tokens * text_tokens * dim
        still = layers * 2 * text_tokens * dim * dim + text_tokens * dim * (config["caption_channels"] + dim)
        times = tokens if FIRST_FRAME in condition else 1
        ends = tokens * dim * 2 * config["in_channels"] + times * dim * (TIME_FEATURES + 7 * dim)
        return layers * 2 * tokens * tokens * dim, layers * of_block + ends, still

    def parallelize(
        self, network: LTXVideoTransformer3DModel, mesh: Mesh, backend: str = "auto", head_groups: int = 1
    ) -> None:
        """Each rank works on its own tokens, and makes its rotary tables of their coordinates; the text stays whole.

        diffusers' own plan splits the text too, and tables that every rank has made of all tokens.
        """
        plan = {
            "": {"hidden_states": SplitTokens(split_dim=1), "timestep": SplitTokens(split_dim=1, expected_dims=2)},
            "rope": {"video_coords": SplitTokens(split_dim=2)},
            "proj_out": GatherTokens(gather_dim=1),
        }
        parallelize_context(network, mesh=mesh, plan=plan)
        for block in network.transformer_blocks:
            block.attn1.set_processor(LTXSelfAttention(mesh, backend, head_groups))
            block.attn2.set_processor(LTXCrossAttention(backend))
        # What an addition adds to the embedding of the time is fp32 under bf16, which the layers behind are not.
        network.time_embed.emb.register_forward_hook(_in_hidden_dtype, with_kwargs=True)

    def outputs(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> tuple[Tensor, ...]:
        given = condition.tensors
        grid = (x.shape[2], x.shape[3], x.shape[4])
        hidden, times = x, t
        if FIRST_FRAME in given:
            hidden = frames.put_in(x, given[FIRST_FRAME])
            times = frames.token_times(t, x, (1, 1, 1))
        velocity, *others = network(
            hidden_states=hidden.flatten(2).transpose(1, 2),
            encoder_hidden_states=given["text"],
            timestep=self.time_scale * times,
            encoder_attention_mask=given["text_mask"].bool(),
            video_coords=video_coordinates(given["latent_spacing"], grid),
            return_dict=False,
        )
        return self.hold(velocity.transpose(1, 2).unflatten(2, grid), x, t, condition), *others

    def hold(self, v: Tensor, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        frame = condition.tensors.get(FIRST_FRAME)
        return v if frame is None else frames.hold(v, x, t, frame)


def _in_hidden_dtype(_embedding: nn.Module, _args: tuple, kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
    return output.to(kwargs["hidden_dtype"])
