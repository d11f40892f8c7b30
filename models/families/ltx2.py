"""The LTX-2 family: diffusers' unmodified ``LTX2VideoTransformer3DModel``, which makes sound with the picture.

LTX-2.0, 2.3 and 2.5, text to video and audio, or a given first frame too. The frame replaces the noisy one
(models/families/diffusers_family.py): its tokens have time 0 in ``timestep``, and ``sigma`` stays the sample's time,
as in ``LTX2ImageToVideoPipeline``. A video token is one latent, an audio token one row of the sound's latents.
Both streams are split over ``mesh.cp``, and attend to each other in every block. The text has an embedding for each
stream, and ``fps``, the frames per second, places the frames in seconds next to the sound. Each stream has its own
time, and the attention between the streams is modulated by the other stream's (``use_cross_timestep``), as in
diffusers' pipeline.

In a sparse role the video's self-attention is sparse. A given frame's tokens stay dense. Sound, text, and the attention
between the streams are dense too. LTX-2.3's own gate, ``to_gate_logits``, multiplies the output of either attention.

Shape legend: B samples, C T H W latents of the video, A L F channels, rows and bands of the audio's, S tokens.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2AdaLayerNormSingle
from einops import rearrange
from torch import Tensor, nn

from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.tiles import Tiles
from models.condition import FIRST_FRAME, Condition
from models.families import ltx2_5
from models.families.base import (
    FamilyPlanning,
    GateLayer,
    LatentShape,
    NetworkConfig,
    Outputs,
    Pipeline,
    Shape,
    Shapes,
    config_of,
)
from models.families.diffusers_family import FrameFamily
from models.families.ltx import SplitAttention, in_hidden_dtype
from models.files.originals_ltx2 import PREFIX, own_names
from models.sample import AUDIO, VIDEO, PartShapes, Sample
from models.sparse import SparseRoles, SparseTables, sparse_roles

ROWS_PER_SECOND = 25.0
"""Rows of sound in a second, as released: 16 kHz, 160 samples in a frame of the spectrogram, 4 frames in a row."""
VIDEO_TOKENS, AUDIO_TOKENS = "hidden_states", "audio_hidden_states"
"""Names of the two split sequences in the plan, arguments of the network."""
_RELEASED = {"rope_type": "split"}
_RELEASED_2_3 = {
    **_RELEASED, "gated_attn": True, "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False, "perturbed_attn": True,
}  # fmt: skip
_RELEASED_2_5 = {**_RELEASED_2_3, **ltx2_5.CHANGES}


class LTX2Planning(FamilyPlanning):
    """Lightricks' networks, and the encoders of 2.3 and 2.5, by diffusers' conversion scripts. All versions have the
    same latents and audio VAE, 2.0 and 2.3 the same Gemma."""

    networks = {"ltx2": _RELEASED, "ltx2_3": _RELEASED_2_3, "ltx2_5": _RELEASED_2_5}
    text_encoder = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 896, "patch_size": 14,
        },
    }  # fmt: skip
    """Gemma 3 12B, 12.2e9 parameters."""
    text_encoder_2 = {
        "_class_name": "LTX2TextConnectors", "video_connector_num_attention_heads": 32, "video_connector_num_layers": 8,
        "video_gated_attn": True, "audio_connector_num_attention_heads": 32, "audio_connector_attention_head_dim": 64,
        "audio_connector_num_layers": 8, "audio_gated_attn": True, "rope_type": "split",
        "per_modality_projections": True, "proj_bias": True,
    }  # fmt: skip
    """The connectors of 2.3, 3.2e9 parameters."""
    vae = {
        "_class_name": "AutoencoderKLLTX2Video", "block_out_channels": (256, 512, 1024, 1024),
        "decoder_block_out_channels": (256, 512, 512, 1024), "layers_per_block": (4, 6, 4, 2, 2),
        "decoder_layers_per_block": (4, 6, 4, 2, 2), "decoder_spatio_temporal_scaling": (True,) * 4,
        "decoder_inject_noise": (False,) * 5, "upsample_residual": (False,) * 4, "upsample_factor": (2, 2, 1, 2),
        "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"), "decoder_causal": False,
        "decoder_spatial_padding_mode": "zeros", "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
    }  # fmt: skip
    vae_sizes = {128: ("LTX-2's VAE", 8, 32)}

    def encoders(self, channels: int, model: str | None) -> dict[str, Mapping[str, Any]]:
        named = {"audio_vae": "AutoencoderKLLTX2Audio", "vocoder": "LTX2VocoderWithBWE"}  # defaults are 2.3's
        settings = super().encoders(channels, model)
        if model == "ltx2_5":
            settings["text_encoder"] = ltx2_5.TEXT_ENCODER
            named[ltx2_5.DECODER] = ltx2_5.DECODER_CLASS
        return settings | {part: {"_class_name": name} for part, name in named.items()}

    def shapes_of_clip(self, channels: int, num_frames: int, height: int, width: int, fps: float) -> PartShapes:
        shapes = super().shapes_of_clip(channels, num_frames, height, width, fps)
        return {**shapes, AUDIO: (8, round(num_frames / fps * ROWS_PER_SECOND), 16)}


class LTX2(FrameFamily):
    """LTX-2.0, 2.3 and 2.5 by diffusers' ``LTX2VideoTransformer3DModel`` (0.42): text or a first frame to both."""

    name = "ltx2"
    class_name = "LTX2VideoTransformer3DModel"
    transformer = LTX2VideoTransformer3DModel
    label = "LTX-2"
    passes_times = True
    planning = LTX2Planning()
    parts = {VIDEO: 1.0, AUDIO: 1.0}
    export_note = (
        "Sample with LTX2Pipeline, or from a first frame with LTX2ImageToVideoPipeline, which compresses the picture by"
        " H.264 (image_crf=33; 18 for LTX-2.5). The sound is `clip.audio`. A few-step student needs all scales neutral."
    )
    pipeline = Pipeline(
        "LTX2Pipeline",
        "LTX2ImageToVideoPipeline",
        neutral=tuple(
            f"{prefix}{name}={scale}"
            for prefix in ("", "audio_")
            for name, scale in (
                ("guidance_scale", 1.0),
                ("modality_scale", 1.0),
                ("stg_scale", 0.0),
                ("guidance_rescale", 0.0),
            )
        ),
        takes_fps=True,
        same_noise=False,  # it draws both parts from one stream
    )
    # Lightricks' and ComfyUI's, and the only ones that diffusers (0.42) converts.
    original_matrices = {"A.weight": "lora_A.weight", "B.weight": "lora_B.weight", "B.bias": "lora_B.bias"}

    def requirements(self, values: NetworkConfig) -> Iterator[tuple[str, bool, str]]:
        for key in ("patch_size_t", "audio_patch_size", "audio_patch_size_t"):
            yield key, values[key] == 1, "1: a token is one latent frame, or one row of sound"
        for prefix in ("", "audio_"):
            inputs = values[f"{prefix}in_channels"]
            outputs = values[f"{prefix}out_channels"]
            yield f"{prefix}out_channels", outputs in (None, inputs), f"{inputs}, as many as go in"
        yield "in_channels", values["in_channels"] % values["patch_size"] ** 2 == 0, "a multiple of patch_size squared"
        video, audio = self.width(values), audio_width(values)
        wanted = f"the audio's width {audio}"
        yield "audio_cross_attention_dim", values["audio_cross_attention_dim"] == audio, wanted
        if values["use_prompt_embeddings"]:
            wanted = f"the network's width {video}, to which it projects the text"
            yield "cross_attention_dim", values["cross_attention_dim"] == video, wanted
        modulated = values["cross_attn_mod"]
        yield "audio_cross_attn_mod", values["audio_cross_attn_mod"] == modulated, f"{modulated}, as cross_attn_mod"

    def fill_special(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        if name in ("scale_shift_table", "audio_scale_shift_table"):
            super().fill_special(module, "scale_shift_table", tensor)
        elif name == "keyframes_abs_pos_embedding":
            tensor.zero_()
        elif name.endswith("_scale_shift_table"):  # of the captions and between the streams: not scaled down
            tensor.normal_()

    def examples(self) -> dict[str, dict[str, Any]]:
        """Return small networks of each version, one of patches and the other rotary embedding, and one of 2.5 whose
        text does not depend on the time, which is not released."""
        sizes = {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 6, "attention_head_dim": 12,
            "cross_attention_dim": 72, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 6,
            "audio_attention_head_dim": 8, "audio_cross_attention_dim": 48, "num_layers": 2, "caption_channels": 24,
        }  # fmt: skip
        odd = {"patch_size": 2, "in_channels": 8, "out_channels": 8, "rope_type": "interleaved"}
        still = {"audio_ff_bias": False, "use_prompt_adaln_single": False}
        return {
            "2.0": sizes | _RELEASED, "2.3": sizes | _RELEASED_2_3, "2.0 of patches": sizes | odd,
            "2.5": sizes | _RELEASED_2_5, "2.5 of still text": sizes | _RELEASED_2_5 | still,
        }  # fmt: skip

    def time_embedder(self, network: LTX2VideoTransformer3DModel) -> nn.Module:
        """Return the embedder of the video's time, one of six in LTX-2.0 and of eight since. Under bf16 it computes in
        bf16: diffusers casts its sines."""
        return network.time_embed.emb.timestep_embedder

    def never_trained(self, network: LTX2VideoTransformer3DModel) -> list[str]:
        """Return LTX-2.5's embedding of keyframes, which no forward reads."""
        return [name for name, _ in network.named_parameters(recurse=False) if name == "keyframes_abs_pos_embedding"]

    def gates(self, config: NetworkConfig) -> list[GateLayer]:
        """Return FastVideo's gates: children of the video's self-attention, with a bias."""
        width, layers = self.width(config), range(self.layers(config))
        return [GateLayer(f"transformer_blocks.{layer}.attn1", width, width, bias=True) for layer in layers]

    def given_frames(self, condition: Shapes) -> int:
        return int(FIRST_FRAME in condition)

    def heads(self, config: NetworkConfig) -> int:
        return math.gcd(config["num_attention_heads"], config["audio_num_attention_heads"])

    def latent_channels(self, config: NetworkConfig) -> int:
        return config["in_channels"] // config["patch_size"] ** 2

    def patch_size(self, config: NetworkConfig) -> tuple[int, int, int]:
        return 1, config["patch_size"], config["patch_size"]

    def condition_shapes(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> dict[str, Shape]:
        """Return the shapes of the two texts and of the frames per second."""
        projected = config["caption_channels"] if config["use_prompt_embeddings"] else None
        widths = (projected or config["cross_attention_dim"], projected or config["audio_cross_attention_dim"])
        return {"text": (text_tokens, widths[0]), "audio_text": (text_tokens, widths[1]), "fps": (1,)}

    def sample_shapes(self, config: NetworkConfig, latent_shape: LatentShape) -> PartShapes:
        """Return the shapes for ``models.verify``: 13 rows of sound for 3 latent frames, which no mesh divides; one for
        fewer, so that queries and keys have no gradient there and most ranks have no sound."""
        rows = 4 * latent_shape[1] + 1 if latent_shape[1] > 2 else 1
        return {VIDEO: latent_shape, AUDIO: (config["audio_in_channels"] // 2, rows, 2)}

    def check_sample(self, config: NetworkConfig, shapes: PartShapes, condition: Shapes, setting: str) -> None:
        super().check_sample(config, shapes, condition, setting)
        channels, _, bands = shapes[AUDIO]
        if channels * bands != config["audio_in_channels"]:
            raise UserError(
                f"{setting} takes {config['audio_in_channels']} numbers of sound a row, but the data have"
                f" {channels} channels of {bands} bands; use the encoders that the checkpoint is from"
            )

    def original_name(self, layer: str) -> str:
        return own_names([layer])[layer].removeprefix(PREFIX)

    def diffusers_adapters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the names of Lightricks' own code, with the prefix ``diffusion_model.``."""
        from diffusers import LTX2Pipeline

        if not any(name.startswith("diffusion_model.") for name in tensors):
            return tensors
        known = ("diffusion_model.", "text_embedding_projection.")  # diffusers drops others
        if (other := next((name for name in tensors if not name.startswith(known)), None)) is not None:
            raise ValueError(f"{other} has another prefix than the others")
        return LTX2Pipeline.lora_state_dict(dict(tensors), use_safetensors=True)

    def parallelize(self, network: LTX2VideoTransformer3DModel, mesh: Mesh, backend: str, head_groups: int) -> None:
        """Let each rank process its own tokens of both streams, with rotary tables from their coordinates.

        The texts stay whole. diffusers' plan cannot be used: it expects rotary tables of three dimensions, and does not
        split the audio.
        """
        plan = {
            "": {
                VIDEO_TOKENS: SplitTokens(split_dim=1),
                "timestep": SplitTokens(split_dim=1, expected_dims=2),
                AUDIO_TOKENS: SplitTokens(split_dim=1),
                "video_coords": SplitTokens(split_dim=2),
                "audio_coords": SplitTokens(split_dim=2),
            },
            "proj_out": GatherTokens(gather_dim=1),
            "audio_proj_out": GatherTokens(gather_dim=1, source=AUDIO_TOKENS),
        }
        tables = VideoTables(sparse_roles(network), mesh, network.config.patch_size)
        parallelize_context(network, mesh=mesh, plan=plan, tiles=tables.tiles)
        network.register_forward_pre_hook(tables.begin_call, with_kwargs=True, prepend=True)
        network.rope.register_forward_hook(tables.add)
        for block in network.transformer_blocks:
            for attention, queries, keys in (
                (block.attn1, VIDEO_TOKENS, VIDEO_TOKENS),
                (block.audio_attn1, AUDIO_TOKENS, AUDIO_TOKENS),
                (block.attn2, VIDEO_TOKENS, None),
                (block.audio_attn2, AUDIO_TOKENS, None),
                (block.audio_to_video_attn, VIDEO_TOKENS, AUDIO_TOKENS),
                (block.video_to_audio_attn, AUDIO_TOKENS, VIDEO_TOKENS),
            ):
                attention.set_processor(SplitAttention(queries, keys, mesh, backend, head_groups))
        for module in network.modules():
            if isinstance(module, LTX2AdaLayerNormSingle):
                module.emb.register_forward_hook(in_hidden_dtype, with_kwargs=True)

    def outputs(self, network: nn.Module, sample: Sample, t: Tensor, condition: Condition, *_: Any) -> Outputs:
        video, audio, tensors = sample.video, sample.parts[AUDIO], condition.tensors
        patch = config_of(network)["patch_size"]
        hidden, clock = self.with_frame(video, t, condition, (1, patch, patch))
        count, (frames, height, width) = len(video), video.shape[2:]
        # Times in the network's unit, of each stream; diffusers takes them as ``sigma`` too, unscaled.
        times, audio_times = (self.time_scale * sample.time(part, t) for part in (VIDEO, AUDIO))
        plain = cast(LTX2VideoTransformer3DModel, network)
        coordinates = plain.rope.prepare_video_coords(count, frames, height, width, video.device, fps=1.0)
        coordinates[:, 0] /= tensors["fps"].float()[:, :, None]
        v, audio_v = network(
            hidden_states=rearrange(hidden, "b c t (h p) (w q) -> b (t h w) (c p q)", p=patch, q=patch),
            audio_hidden_states=rearrange(audio, "b a l f -> b l (a f)"),
            encoder_hidden_states=tensors["text"],
            audio_encoder_hidden_states=tensors["audio_text"],
            timestep=self.time_scale * clock,
            audio_timestep=audio_times,
            sigma=times,
            audio_sigma=audio_times,
            num_frames=frames,
            height=height,
            width=width,
            video_coords=coordinates,
            audio_coords=plain.audio_rope.prepare_audio_coords(count, audio.shape[2], audio.device),
            use_cross_timestep=True,
            return_dict=False,
        )[:2]
        grid = {"t": frames, "h": height // patch, "w": width // patch, "p": patch, "q": patch}
        v = rearrange(v, "b (t h w) (c p q) -> b c t (h p) (w q)", **grid)
        audio_v = rearrange(audio_v, "b l (a f) -> b a l f", a=audio.shape[1])
        return Outputs(Sample({VIDEO: self.hold(v, video, t, condition), AUDIO: audio_v}, sample.shifts))


class VideoTables(SparseTables):
    """Sparse attention of the network's current call, which its blocks get with the video's rotary tables."""

    def __init__(self, roles: SparseRoles, mesh: Mesh, patch: int):
        super().__init__(roles, mesh)
        self.patch = patch

    def begin_call(self, _network: nn.Module, _args: tuple, call: Mapping[str, Any]) -> None:
        """Begin a ``call`` of the network. A given first frame has time 0, and the call a time for each token."""
        if self.roles.plans:
            rows, columns = call["height"] // self.patch, call["width"] // self.patch
            times = call["timestep"]
            has_frame = times.ndim == 2
            if has_frame and type(times) is Tensor:  # a pipeline always has such times; those of a plan have no values
                has_frame = not times[:, : rows * columns].any()
            self.begin((call["num_frames"], rows, columns), given_frames=int(has_frame))

    def tiles(self, *_args: Any, **_kwargs: Any) -> dict[str, Tiles]:
        """Return the tiles of the sequences that the plan splits."""
        return {} if self.video is None else dict.fromkeys((VIDEO_TOKENS, "timestep", "video_coords"), self.video)


def audio_width(config: NetworkConfig) -> int:
    """Return the number of features of an audio token between blocks."""
    return config["audio_num_attention_heads"] * config["audio_attention_head_dim"]
