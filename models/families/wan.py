"""The Wan family: diffusers' unmodified ``WanTransformer3DModel`` as a role's network.

Wan 2.1 does text to video and image to video. Image-to-video networks take channels of a mask and of the encoded first
image after their latents. A second cross-attention attends to features of an image encoder. Wan 2.2's A14B has two such
networks for two ranges of times (models/roles/role.py), without those features.

Wan 2.2's TI2V 5B is a text-to-video network with a different VAE, without image channels or an image encoder. A first
frame in the data replaces the noisy one (models/families/diffusers_family.py), as in ``WanImageToVideoPipeline`` with
``expand_timesteps``. Without it a sample has one time: a time per token would need a modulation per token of 6 x width
numbers (2 GB in fp32 at 720p).
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from diffusers import WanTransformer3DModel
from einops import rearrange
from torch import Tensor, nn

from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from models.condition import FIRST_FRAME, Condition
from models.families.base import (
    FamilyPlanning,
    GateLayer,
    LastLayer,
    LatentShape,
    NetworkConfig,
    Outputs,
    Pipeline,
    Shape,
    Shapes,
    config_of,
)
from models.families.causal_forward import CausalForward
from models.families.diffusers_family import (
    FrameFamily,
    first_frame_shape,
    insert_first_frame,
    token_times,
)
from models.families.wan_attention import TEXT_TOKENS, BlockArguments, WanCrossAttention, WanSelfAttention
from models.files.originals import own_names
from models.sample import VIDEO, PartShapes, Sample
from models.sparse import gates_of

IMAGE_TOKENS = 257
"""Number of CLIP ViT-H/14 features of an image: 16 x 16 patches and the class token."""
TI2V_CHANNELS = 48
"""Latent channels of Wan 2.2's VAE, which only the 5B network uses."""

TI2V_VAE: Mapping[str, Any] = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": TI2V_CHANNELS, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
    "attn_scales": [], "temperal_downsample": [False, True, True], "is_residual": True, "in_channels": 12,
    "out_channels": 12, "patch_size": 2, "scale_factor_temporal": 4, "scale_factor_spatial": 16,
    "latents_mean": [0.0] * TI2V_CHANNELS, "latents_std": [1.0] * TI2V_CHANNELS,
}  # fmt: skip
"""``config.json`` of its VAE, without latent statistics, which plans do not need."""

_PREFIX = re.compile(r"^(base_model\.model|transformer|diffusion_model|pipe\.dit)\.")
_ORIGINAL_LAYER = re.compile(r"blocks\.\d+\.((self|cross)_attn|ffn\.\d)\.")
_DOT_OF_KOHYA = re.compile(r"_(?!attn|img$|embedding|projection|emb_)")
"""Underscores of kohya's names that are dots in Wan's own; others are within parts, as in ``self_attn``, ``k_img``."""


def _original_of_kohya(name: str) -> str:
    """Return Wan's own name of a tensor with kohya's name; return others unchanged."""
    layer, dot, matrix = name.partition(".")
    if not layer.startswith("lora_unet_"):
        return name
    return _DOT_OF_KOHYA.sub(".", layer.removeprefix("lora_unet_")) + dot + matrix


class WanPlanning(FamilyPlanning):
    """Wan's networks and their encoders."""

    networks = {
        "wan2_1_t2v_1_3b": {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        "wan2_1_t2v_14b": {"num_layers": 40},
        "wan2_1_i2v_14b": {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        "wan2_2_ti2v_5b": {
            "num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336,
            "in_channels": TI2V_CHANNELS, "out_channels": TI2V_CHANNELS,
        },
        "wan2_2_t2v_a14b": {"num_layers": 40},
        "wan2_2_i2v_a14b": {"in_channels": 36},
    }  # fmt: skip
    boundaries = {"wan2_2_t2v_a14b": 0.875, "wan2_2_i2v_a14b": 0.9}
    text_encoder = {
        "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    """umT5-XXL, 5.7e9 parameters."""
    image_encoder = {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14,
    }  # fmt: skip
    """CLIP ViT-H/14, .63e9 parameters."""

    vae_sizes = {16: ("Wan's VAE", 4, 8), TI2V_CHANNELS: ("Wan 2.2's VAE", 4, 16)}

    def encoders(self, channels: int, model: str | None) -> dict[str, Mapping[str, Any]]:
        vae_and_image = {"vae": TI2V_VAE, "image_encoder": {}} if channels == TI2V_CHANNELS else {}
        return super().encoders(channels, model) | vae_and_image


class Wan(FrameFamily):
    """Wan 2.1, and 2.2's A14B and TI2V 5B, by diffusers' ``WanTransformer3DModel`` (0.42)."""

    name = "wan"
    class_name = "WanTransformer3DModel"
    transformer = WanTransformer3DModel
    label = "Wan"
    planning = WanPlanning()
    pipeline = Pipeline("WanPipeline", "WanImageToVideoPipeline", sets_times=True)
    open_counts = ("image_embeds",)
    frame_times = True
    causal = True

    def requirements(self, values: NetworkConfig) -> Iterator[tuple[str, bool, str]]:
        patch, width = values["patch_size"], self.width(values) if takes_features(values) else None
        yield "attention_head_dim", values["attention_head_dim"] % 2 == 0, "even, for the rotary embedding"
        is_right = len(patch) == 3 and max(patch) <= 64
        yield "patch_size", is_right, "three numbers (frames, height, width) up to 64, such as [1, 2, 2]"
        is_right = values["pos_embed_seq_len"] is None
        yield "pos_embed_seq_len", is_right, "null: a Wan for a first and a last image is not supported"
        is_right = values["added_kv_proj_dim"] == width
        yield "added_kv_proj_dim", is_right, f"{width}: with image_dim the network's width, without it null"
        inputs, outputs = values["in_channels"], values["out_channels"] or values["in_channels"]
        is_right = outputs <= inputs and not (takes_image(values) and inputs <= 2 * outputs)
        wanted = f"out_channels={outputs}, or more than twice as many: those of an image and of a mask too"
        yield "in_channels", is_right, wanted

    def restore_buffers(self, network: WanTransformer3DModel, device: torch.device) -> None:
        """Recompute the non-persistent rotary tables on ``device``, since ``to_empty`` leaves garbage in them."""
        config = network.config
        fresh = type(network.rope)(config.attention_head_dim, tuple(config.patch_size), config.rope_max_seq_len)
        network.rope.freqs_cos = fresh.freqs_cos.to(device)
        network.rope.freqs_sin = fresh.freqs_sin.to(device)

    def examples(self) -> dict[str, dict[str, Any]]:
        """Return configurations for text, images with and without features, and first frames to video."""
        sizes = {
            "patch_size": [1, 2, 2], "num_attention_heads": 6, "attention_head_dim": 12, "in_channels": 4,
            "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 96, "num_layers": 2, "rope_max_seq_len": 32,
        }  # fmt: skip
        image = {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 72}
        latents = {"in_channels": TI2V_CHANNELS, "out_channels": TI2V_CHANNELS}
        others = {"i2v": image, "i2v of latents alone": {"in_channels": 12}, "ti2v": latents}
        return {"t2v": sizes} | {name: sizes | other for name, other in others.items()}

    def blocks(self, network: WanTransformer3DModel) -> list[nn.Module]:
        return list(network.blocks)

    def full_precision_units(self, network: WanTransformer3DModel) -> list[nn.Module]:
        """Return the time embedder.

        diffusers also keeps ``rope``, ``scale_shift_table`` and the block norms in fp32 when it loads weights in bf16.
        Here rope's tables stay fp32. Norms and modulation are gathered with their block, so their fp32 masters are
        rounded to bf16; they still compute in fp32, as in diffusers.
        """
        return [network.condition_embedder.time_embedder]

    def time_embedder(self, network: WanTransformer3DModel) -> nn.Module:
        return network.condition_embedder.time_embedder

    def original_name(self, layer: str) -> str:
        return own_names([f"{layer}.weight"])[f"{layer}.weight"].removesuffix(".weight")

    def diffusers_adapters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert names with the prefixes of musubi and kohya (``lora_unet_``), DiffSynth (``pipe.dit.`` or none) and
        ComfyUI (``diffusion_model.``).

        diffusers' own conversion of kohya's names expects all layers of all blocks, each with its alpha.
        """
        from diffusers import WanPipeline

        bare = {_PREFIX.sub("", _original_of_kohya(name)): tensor for name, tensor in tensors.items()}
        if not any(_ORIGINAL_LAYER.match(name) for name in bare):
            return tensors
        theirs = {f"diffusion_model.{name}": tensor for name, tensor in bare.items()}
        return WanPipeline.lora_state_dict(theirs, use_safetensors=True)

    def check_causal(self, config: NetworkConfig, setting: str) -> None:
        if takes_image(config):
            raise UserError(f"{setting} is not for an image-to-video Wan 2.1 or A14B; use a text-to-video Wan or TI2V")
        if config["patch_size"][0] != 1:
            raise UserError(f"{setting} needs tokens of one latent frame, not of {config['patch_size'][0]}")

    def time_features(self, config: NetworkConfig) -> int:
        return config["freq_dim"]

    def latent_channels(self, config: NetworkConfig) -> int:
        return config["out_channels"] if config["out_channels"] is not None else config["in_channels"]

    def patch_size(self, config: NetworkConfig) -> tuple[int, int, int]:
        return tuple(config["patch_size"])

    def last_layers(self, config: NetworkConfig) -> Mapping[str, LastLayer]:
        outputs = math.prod(config["patch_size"]) * self.latent_channels(config)
        return {VIDEO: LastLayer("proj_out", self.width(config), outputs)}

    def gates(self, config: NetworkConfig) -> list[GateLayer]:
        """Return FastVideo's gates: children of the blocks, with a bias, on the input of the self-attention."""
        width = self.width(config)
        return [GateLayer(f"blocks.{layer}", width, width, bias=True) for layer in range(self.layers(config))]

    def stacked_outputs(self, config: NetworkConfig, part: str, outputs: Tensor) -> Tensor:
        """Stack outputs along the channels, which are last in a patch."""
        return rearrange(outputs, "b s p (patch c) -> b s (patch p c)", c=self.latent_channels(config))

    def condition_shapes(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> dict[str, Shape]:
        """Return the shapes of the text and, for image to video, latents and mask; for Wan 2.1 also features."""
        shapes: dict[str, Shape] = {"text": (text_tokens, config["text_dim"])}
        if takes_image(config):
            channels, *sizes = latent_shape
            shapes["image_latents"] = (channels, *sizes)
            shapes["image_mask"] = (config["in_channels"] - 2 * channels, *sizes)
        if takes_features(config):
            shapes["text"] = (TEXT_TOKENS, config["text_dim"])
            shapes["image_embeds"] = (IMAGE_TOKENS, config["image_dim"])
        return shapes

    def optional_shapes(
        self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int, images: int = 2
    ) -> dict[str, Shape]:
        """Return the shape of a first frame for Wan 2.2's TI2V: a text-to-video Wan with 48 latent channels."""
        if takes_image(config) or self.latent_channels(config) != TI2V_CHANNELS:
            return {}
        return super().optional_shapes(config, latent_shape, text_tokens, images)

    def check_sample(self, config: NetworkConfig, shapes: PartShapes, condition: Shapes, setting: str) -> None:
        """Check that the network accepts such samples. A text-to-video Wan accepts a first frame."""
        latent_shape, text_tokens = shapes[VIDEO], condition["text"][0]
        needed = self.condition_shapes(config, latent_shape, text_tokens)
        if text_tokens != needed["text"][0]:
            raise UserError(f"data.max_text_tokens={text_tokens} must be {TEXT_TOKENS} for {setting}, with images")
        if FIRST_FRAME in condition and not takes_image(config):
            needed[FIRST_FRAME] = first_frame_shape(latent_shape)
            if config["patch_size"][0] != 1:
                raise UserError(f"{setting} has tokens of several frames, but a first frame is one; drop data.image")
        self.check_data(config, latent_shape, needed, condition, setting)
        self.check_patches(config, latent_shape, setting, most=config["rope_max_seq_len"])

    def parallelize(self, network: WanTransformer3DModel, mesh: Mesh, backend: str, head_groups: int) -> None:
        """Let each rank embed, rotate and process its own tokens; set this family's processors on every attention.

        diffusers' plan splits tokens after their embedding, and rotary tables of all tokens.
        """
        plan = {
            "": {"timestep": SplitTokens(split_dim=1, expected_dims=2)},
            "patch_embedding": EmbedOwnTokens(),
            "proj_out": GatherTokens(gather_dim=1),
        }
        network.block_arguments = BlockArguments(network, mesh)
        parallelize_context(network, mesh=mesh, plan=plan, tiles=network.block_arguments.tiles)
        for block in network.blocks:
            block.attn1.set_processor(WanSelfAttention(mesh, backend, head_groups, gates_of(block)))
            block.attn2.set_processor(WanCrossAttention(backend))

    def outputs(
        self, network: nn.Module, sample: Sample, t: Tensor, condition: Condition, causal: CausalForward | None = None
    ) -> Outputs:
        tensors, x, times, clean = condition.tensors, sample.video, t, []
        hidden = x
        if "image_latents" in tensors:
            hidden = torch.cat([x, tensors["image_mask"], tensors["image_latents"]], dim=1)
        if FIRST_FRAME in tensors and causal is None:
            hidden, clean = insert_first_frame(x, tensors[FIRST_FRAME]), [0]
        elif FIRST_FRAME in tensors and causal is not None:
            clean = [frame for frame, position in enumerate(causal.positions) if position == 0]
            if clean:  # a clean and a noisy clip both begin with the frame
                clips = [insert_first_frame(clip, tensors[FIRST_FRAME]) for clip in x.chunk(len(clean), dim=2)]
                hidden = torch.cat(clips, dim=2)
        if clean or t.ndim == 2:
            patch = self.patch_size(config_of(network))
            if patch[0] != 1:
                raise ValueError(f"a time for each latent frame needs tokens of one frame, not of {patch[0]}")
            times = token_times(t, x, patch, clean)
        with nullcontext() if causal is None else cast(BlockArguments, network.block_arguments).causal(causal):
            v, *others = network(
                hidden_states=hidden,
                timestep=self.time_scale * times,
                encoder_hidden_states=tensors["text"],
                encoder_hidden_states_image=tensors.get("image_embeds"),
                return_dict=False,
            )
        channels = self.latent_channels(config_of(network))
        v = rearrange(v, "b (p c) t h w -> (p b) c t h w", c=channels)  # p velocities of fused heads, or one
        v = self.hold(v, x, t, condition) if causal is None else v
        return Outputs(Sample({VIDEO: v}), tuple(others))


def takes_image(config: NetworkConfig) -> bool:
    """Return whether this is an image-to-video Wan, which takes image latents and a mask after the clip's latents."""
    outputs = config.get("out_channels", 16)
    return takes_features(config) or (outputs is not None and outputs < config.get("in_channels", 16))


def takes_features(config: NetworkConfig) -> bool:
    """Return whether this is an image-to-video Wan 2.1, which attends to image features too."""
    return config.get("image_dim") is not None
