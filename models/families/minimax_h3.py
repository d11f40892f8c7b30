"""The MiniMax-H3 family: diffusers' unmodified ``MiniMaxH3Transformer3DModel``, which makes sound with the picture.

The network attends over one packed sequence of text, given, audio and video rows. A video row is a patch of latents,
an audio row one latent of the left or the right channel. Each stream is split over ``mesh.cp`` before its projection
(the text after its refiner), so a rank's sequence joins its own rows of all streams and no rank holds all of them at
the network's width. diffusers' plan splits the packed rows instead.

The network's time is 1 - t, without a scale, and its velocity points to the data; :meth:`MiniMaxH3.outputs` converts
both. Each stream has its own time; text rows have the video's.

Keyframes are given frames at a clip's start or end, rows of patches before those that are generated, with almost no
noise (:data:`KEYFRAME_TIME`). The text shows them too: its rows of a picture are tagged as video.

References are given pictures, clips and sounds of any sizes, for a network of their own (``transformer_ref``). They
stand on the rotary clock one after another, between the text and the generated rows. Pictures and clips have the
keyframes' noise, sounds none. Samples of a batch can have other references: rows of all are filled up with zeros, which
do not enter the sequence, and the sizes on the host tell which.

The packed sequence has no batch axis: samples of a forward would share times and text length. So :meth:`outputs` calls
the network for one sample after another. A micro-batch of several samples then works everywhere (sampling, guidance,
``models.verify``) but gathers the weights once per sample, so ``micro_batch_size=1`` needs less memory at equal speed.

Shape legend: B samples, C T H W latents of the video, A L 2 channels, latents and sides of the audio's, S rows.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel, SchedulerMixin
from diffusers.models.transformers.transformer_minimax_h3 import (
    MINIMAX_H3_MODALITY_NUM,
    MiniMaxH3Attention,
    _apply_rotary_emb,
)
from einops import rearrange
from torch import Tensor, nn

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.context_parallel import SplitTokens, parallelize_context
from fsdp_cp.errors import UserError
from fsdp_cp.measure.fake_world import real_tensors
from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import gather_tokens, split_tokens
from fsdp_cp.sequence_lengths import split_names
from fsdp_cp.tiles import Tiles
from models.condition import (
    KEYFRAME_ANCHORS,
    KEYFRAME_NOISE,
    KEYFRAMES,
    REFERENCE_NOISE,
    REFERENCE_SIZES,
    REFERENCE_SOUNDS,
    REFERENCES,
    TEXT_LENGTH,
    TEXT_TAGS,
    Condition,
)
from models.families.base import (
    FamilyPlanning,
    GateLayer,
    LastLayer,
    LatentShape,
    NetworkConfig,
    Outputs,
    ReferenceRoom,
    Shape,
    Shapes,
    config_of,
)
from models.families.diffusers_family import DiffusersFamily
from models.files import fastvideo
from models.files.scheduler import TOLERANCE
from models.sample import AUDIO, VIDEO, PartShapes, Sample
from models.sparse import SparseTables, gates_of, sparse_roles

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = range(MINIMAX_H3_MODALITY_NUM)
VIDEO_ROWS, GIVEN_ROWS = "hidden_states[0]", "hidden_states[1]"
AUDIO_ROWS, GIVEN_SOUND_ROWS = "audio_hidden_states[0]", "audio_hidden_states[1]"
TEXT_ROWS = "token_refiner[0]"
"""Names of the split streams in the plan: arguments of the network, two tuples, and the output of the text's
refiner."""
KEYFRAME_TIME = 0.001
"""Noise on keyframes, and the most that is the time of their rows (diffusers' ``keyframe_noise_aug`` of .999)."""
TEXT, GIVEN, GIVEN_SOUND = "text", "given", "given sound"
"""Streams of the text, of given pictures and of given sounds."""
ReferenceSize = tuple[int, int, int, int]
"""Frames, height and width of a reference's latents, and latents of a side of its sound; 0 for what it has not."""
SIDES = 2
"""Left and right channel of the sound."""
FRAME_RATE, AUDIO_RATE = 24, 40
"""Frames, and audio latents of a side, in a second."""
CHUNK, CHUNK_LATENTS = 17, 5
"""Frames that the VAE encodes at a time, and their latent frames."""
FRAMES = 124, 345
"""Frames of the shortest and of the longest clip that diffusers' pipeline samples: 5 to 15 seconds."""
RELEASED_SHIFT = 12.0
_ORIGINAL_NAMES = (
    (r"^token_refiner\.refiner_blocks\.", "token_refiner.blocks."),
    (r"^transformer_blocks\.", "blocks."),
    (r"\.attn\.to_out\.0$", ".attn.out_proj"),
    (r"\.ff\.net\.0\.proj$", ".mlp.fc1"),
    (r"\.ff\.net\.2$", ".mlp.fc2"),
    (r"^time_embedder\.linear_1$", "time_embedder.proj_in"),
    (r"^time_embedder\.linear_2$", "time_embedder.proj_out"),
    (r"^proj_in$", "video_patch_proj"),
    (r"^audio_proj_in$", "audio_patch_proj"),
    (r"^context_embedder$", "condition_proj"),
    (r"^norm_out\.linear$", "final_layer.adaln_proj.linear"),
    (r"^proj_out$", "final_layer.video_out"),
    (r"^audio_proj_out$", "final_layer.audio_out"),
)
"""Patterns of diffusers' names of linear layers, and the names in MiniMax's own code, which ComfyUI uses."""


REFERENCE_FOLDER = "transformer_ref"
"""Folder of the network for references in MiniMax's repository."""


class MiniMaxH3Planning(FamilyPlanning):
    """MiniMax's network and encoders."""

    networks = {"minimax_h3": {}}
    """The defaults of its class: 33.1e9 parameters."""
    text_encoder = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {
            "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
            },
        },
    }  # fmt: skip
    """Qwen3-VL 32B, without its vision."""
    vae = {"_class_name": "AutoencoderKLMiniMaxH3"}

    def picture_tokens(self, height: int, width: int) -> int:
        """Return the number of Qwen3-VL's tokens of a picture: one for 32 x 32 pixels, and its ends. Those of its label
        count as the caption's."""
        return (height // 32) * (width // 32) + 2

    def reference_room(
        self, kinds: Sequence[str], num_frames: int, image_edge: int, video_edge: int
    ) -> "ReferenceRoom":
        from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size

        image = image_edge // 32 * round(image_edge * 16 / 9 / 32)
        height, width = resolve_canvas_size(16, 9, 32, video_edge, video_edge**2 * 7 // 4)
        video, pairs = height * width // 32**2, math.ceil(math.ceil(num_frames / 12) / 2)
        images, sounds = kinds.count("image"), kinds.count("clip") + kinds.count("sound")
        videos = kinds.count("video") + kinds.count("clip")
        rows = images * image + videos * latent_frames(num_frames, FRAME_RATE) * video
        of_sounds = sounds * SIDES * math.ceil(num_frames * AUDIO_RATE / FRAME_RATE)
        text = images * (image + 2) + videos * pairs * (video + 2)
        return ReferenceRoom(count=len(kinds), rows=rows, sounds=of_sounds, text=text)

    def shapes_of_clip(self, channels: int, num_frames: int, height: int, width: int, fps: float) -> PartShapes:
        frames = latent_frames(num_frames, fps)
        if height % 32 or width % 32:
            raise UserError(f"data.height={height}, data.width={width} must be multiples of 32 for MiniMax-H3")
        return {
            VIDEO: (channels, frames, height // 16, width // 16),
            AUDIO: (32, audio_latents(num_frames), SIDES),
        }


class MiniMaxH3(DiffusersFamily):
    """MiniMax-H3 by diffusers' ``MiniMaxH3Transformer3DModel`` (0.42): text and keyframes to video and audio."""

    name = "minimax_h3"
    class_name = "MiniMaxH3Transformer3DModel"
    transformer = MiniMaxH3Transformer3DModel
    label = "MiniMax-H3"
    planning = MiniMaxH3Planning()
    time_scale = 0.0
    takes_times = False
    knows_empty_text = False
    parts = {VIDEO: 1.0, AUDIO: 3 / RELEASED_SHIFT}
    """The released schedules shift one base time by 12 and by 3."""
    export_note = (
        "Sample with diffusers' modular pipeline: the workflow t2va from text, fl2va from keyframes (image, last_image;"
        " the first is stretched onto the clip's size, a second one is cropped), ref2va from references, whose network"
        " is the component transformer_ref. It adds the noise of keyframes and references. Give it"
        " scheduler/ and audio_scheduler/ of this run, and one more num_inference_steps than the student takes."
    )
    adapter_targets = ("*.attn.to_q", "*.attn.to_k", "*.attn.to_v", "*.attn.to_out.0", "*.ff.net.0.proj", "*.ff.net.2")
    """Layers of LightX2V's recipe: those of all blocks, the text refiner's too, without the modulation."""

    keeps_peft_infix = True  # DiffSynth's files, whose joined query, key and value are interleaved by head
    adapter_alpha = "alpha"

    def schedulers(
        self, *, shifts: Mapping[str, float] | None = None, listed: bool = False, **steps: Any
    ) -> dict[str, SchedulerMixin]:
        """Return one scheduler for each part: it takes Euler steps at even times that its shift moves. With ``listed``
        times that are not even it has the released shift.

        The pipeline's ``num_inference_steps`` counts the time 0 too: 4 steps of the student are 5.
        """
        times, part_shifts = steps["times"], shifts or self.parts
        if steps["stochastic"]:
            raise UserError("MiniMax-H3's pipeline adds no noise between steps; train with method.student_sampler=ode")
        last, count = times[-1], len(times)
        shift = round(last * (count - 1) / (1 - last), 4) if count > 1 else RELEASED_SHIFT
        video = MiniMaxH3Scheduler(shift=shift)
        video.set_timesteps(count + 1)
        made = video.sigmas[:-1].tolist()
        is_even = len(made) == count and max(abs(a - b) for a, b in zip(made, times, strict=True)) <= TOLERANCE
        if not is_even and listed:
            shift = RELEASED_SHIFT
            video = MiniMaxH3Scheduler(shift=shift)
        elif not is_even:
            raise UserError(
                f"MiniMax-H3's pipeline samples even times under a shift, not {', '.join(f'{t:.6g}' for t in times)};"
                f" the nearest method.step_list is [{', '.join(f'{t:.6f}' for t in made)}]"
            )
        return {"scheduler": video, "audio_scheduler": MiniMaxH3Scheduler(shift=shift * part_shifts[AUDIO])}

    def contract(
        self, times: Sequence[float], schedulers: Mapping[str, Any], sparse: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        video, audio = (schedulers[name].config.shift for name in ("scheduler", "audio_scheduler"))
        return fastvideo.contract(times, video_shift=video, audio_shift=audio, sparse=sparse)

    def check_guidance(self, scale: float, setting: str) -> None:
        why = "is distilled for guidance, and has nothing to guide by without a caption"
        raise UserError(f"{setting}={scale} must be 1: {self.name} {why}")

    def check_export(self, shapes: PartShapes, few_steps: Mapping[str, Any]) -> None:
        least, most = FRAMES
        frames = (shapes[VIDEO][1] - 2) // CHUNK_LATENTS * CHUNK + CHUNK_LATENTS
        if not least <= frames <= most:
            raise UserError(f"data.num_frames={frames} must be {least} to {most}: diffusers' pipeline samples no other")
        super().check_export(shapes, few_steps)

    def requirements(self, values: NetworkConfig) -> Iterator[tuple[str, bool, str]]:
        patch, rotated = values["patch_size"], 6 * values["rope_freq_dim"]
        yield "patch_size", len(patch) == 3 and patch[0] == 1, "three numbers, of which the first (frames) is 1"
        is_right = rotated <= values["attention_head_dim"]
        yield "rope_freq_dim", is_right, "at most a sixth of attention_head_dim: three axes of cosines and sines"
        yield "freq_dim", values["freq_dim"] % 2 == 0, "even: cosines and sines"

    def restore_buffers(self, network: MiniMaxH3Transformer3DModel, device: torch.device) -> None:
        config = network.config
        fresh = type(network.rope)(config.rope_freq_dim, config.rope_theta)
        network.rope.inv_freq = fresh.inv_freq.to(device, network.rope.inv_freq.dtype)

    def examples(self) -> dict[str, dict[str, Any]]:
        """Return a small network, and one without refiner and patches."""
        sizes = {
            "num_attention_heads": 6, "attention_head_dim": 12, "hidden_size": 60, "num_layers": 2,
            "num_refiner_layers": 2, "ffn_dim": 40, "in_channels": 4, "audio_in_channels": 6, "patch_size": [1, 2, 2],
            "text_dim": 20, "freq_dim": 16, "time_embed_hidden_dim": 32, "time_embed_dim": 24, "rope_freq_dim": 2,
        }  # fmt: skip
        return {"t2av": sizes, "t2av of pixels": sizes | {"num_refiner_layers": 0, "patch_size": [1, 1, 1]}}

    def blocks(self, network: MiniMaxH3Transformer3DModel) -> list[nn.Module]:
        """Return the text refiner's blocks, whose output is the whole text ``(1, L, width)``, and those of all rows.

        The modulation, 40 % of a block's weights, stays in the block's unit. As a unit of its own under adapters it
        would stay gathered until the end of the backward (25 GiB): no gradient reaches it, so FSDP2 does not free it.
        """
        return [*network.token_refiner.refiner_blocks, *network.transformer_blocks]

    def full_precision_units(self, network: MiniMaxH3Transformer3DModel) -> list[nn.Module]:
        """Return the layers that the released checkpoint stores in fp32."""
        ends = [network.proj_in, network.audio_proj_in, network.proj_out, network.audio_proj_out]
        return [*ends, network.time_embedder]

    def time_embedder(self, network: MiniMaxH3Transformer3DModel) -> nn.Module:
        """Return the embedder of a sample's times, video, audio and perhaps keyframes: its output is ``(2 or 3,
        time_width)``."""
        return network.time_embedder

    def fp8_excluded(self, network: MiniMaxH3Transformer3DModel) -> list[nn.Module]:
        return [block.adaln_proj for block in network.transformer_blocks]

    def original_name(self, layer: str) -> str:
        for ours, theirs in _ORIGINAL_NAMES:
            layer = re.sub(ours, theirs, layer)
        return layer

    def original_adapters(self, adapters: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Convert adapters to MiniMax's own layers: one of query, key and value, and one of gate and value.

        The joint A stacks those of query, key and value, so its rank is their sum, and the joint B is block-diagonal.
        The gated layer has the gate before the value; diffusers has it after.
        """
        converted: dict[str, dict[str, Tensor]] = {}
        joined: dict[str, dict[str, Mapping[str, Tensor]]] = {}
        for layer, matrices in adapters.items():
            attention, _, side = layer.rpartition(".to_")
            if side in ("q", "k", "v"):
                joined.setdefault(f"{self.original_name(attention)}.qkv_proj", {})[side] = matrices
                continue
            converted[self.original_name(layer)] = matrices = dict(matrices)
            if layer.endswith(".ff.net.0.proj"):
                matrices["B.weight"] = torch.cat(matrices["B.weight"].chunk(2)[::-1])
        for layer, sides in joined.items():
            up = next(iter(sides.values()))["B.weight"]
            ups = [sides[side]["B.weight"] if side in sides else up.new_zeros(len(up), 0) for side in "qkv"]
            downs = [sides[side]["A.weight"] for side in "qkv" if side in sides]
            converted[layer] = {"A.weight": torch.cat(downs), "B.weight": torch.block_diag(*ups)}
        return converted

    def diffusers_adapters(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the layers of MiniMax's own code, with the prefixes of ComfyUI (``diffusion_model.``) and musubi
        (``lora_unet_``) or none."""
        from diffusers.loaders import MiniMaxH3LoraLoaderMixin

        return MiniMaxH3LoraLoaderMixin.lora_state_dict(dict(tensors), use_safetensors=True)

    def last_layers(self, config: NetworkConfig) -> Mapping[str, LastLayer]:
        width, patch = self.width(config), math.prod(self.patch_size(config))
        return {
            VIDEO: LastLayer("proj_out", width, config["in_channels"] * patch),
            AUDIO: LastLayer("audio_proj_out", width, config["audio_in_channels"]),
        }

    def gates(self, config: NetworkConfig) -> list[GateLayer]:
        """Return FastVideo's gates: children of the attention, without a bias."""
        sizes, layers = (self.width(config), super().width(config)), range(self.layers(config))
        return [GateLayer(f"transformer_blocks.{layer}.attn", *sizes, bias=False) for layer in layers]

    def dense_rows(self, config: NetworkConfig, shapes: PartShapes, condition: Shapes) -> list[int]:
        given = list(filter(None, self._reference_rows(config, condition)))
        if KEYFRAMES in condition:
            given = [self.tokens(config, {VIDEO: condition[KEYFRAMES]})]
        return [condition["text"][0], *given, SIDES * shapes[AUDIO][1]]

    def width(self, config: NetworkConfig) -> int:
        return config["hidden_size"]

    def time_width(self, config: NetworkConfig) -> int:
        return config["time_embed_dim"]

    def time_features(self, config: NetworkConfig) -> int:
        return config["freq_dim"]

    def latent_channels(self, config: NetworkConfig) -> int:
        return config["in_channels"]

    def patch_size(self, config: NetworkConfig) -> tuple[int, int, int]:
        return tuple(config["patch_size"])

    def condition_shapes(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> dict[str, Shape]:
        return {"text": (text_tokens, config["text_dim"])}

    def optional_shapes(
        self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int, images: int = 2
    ) -> dict[str, Shape]:
        """Return the shapes of keyframes, and of the text's length: rows after it do not enter the sequence."""
        channels, _, height, width = latent_shape
        keyframes = {KEYFRAMES: (channels, images, height, width), KEYFRAME_ANCHORS: (images,)}
        return {**keyframes, TEXT_LENGTH: (), TEXT_TAGS: (text_tokens,)}

    def reference_shapes(
        self, config: NetworkConfig, text_tokens: int, count: int, rows: int, sounds: int
    ) -> dict[str, Shape]:
        """Return the shapes of ``count`` references at most with so many ``rows`` of pictures and of sounds."""
        return {
            REFERENCES: (rows * math.prod(self.patch_size(config)), config["in_channels"]),
            REFERENCE_SOUNDS: (sounds, config["audio_in_channels"]),
            REFERENCE_SIZES: (count, 4),
            TEXT_LENGTH: (),
            TEXT_TAGS: (text_tokens,),
        }

    def options(self, config: NetworkConfig, latent_shape: LatentShape, text_tokens: int) -> list[dict[str, Shape]]:
        """Return the shapes of keyframes, and of three references with 6 rows of pictures and 8 of sound."""
        references = self.reference_shapes(config, text_tokens, count=3, rows=6, sounds=8)
        return [*super().options(config, latent_shape, text_tokens), references]

    def sample_shapes(self, config: NetworkConfig, latent_shape: LatentShape) -> PartShapes:
        """Return the shapes for ``models.verify``: with 7 text and 16 video rows in 2 frames there are 51 rows."""
        return {VIDEO: latent_shape, AUDIO: (config["audio_in_channels"], 4 * latent_shape[1] + 6, SIDES)}

    def check_sample(self, config: NetworkConfig, shapes: PartShapes, condition: Shapes, setting: str) -> None:
        needed = self.condition_shapes(config, shapes[VIDEO], condition["text"][0])
        if KEYFRAMES in condition:
            needed |= self.optional_shapes(config, shapes[VIDEO], condition["text"][0], condition[KEYFRAMES][1])
        if REFERENCES in condition:
            rows, sounds = self._reference_rows(config, condition)
            needed |= self.reference_shapes(config, condition["text"][0], condition[REFERENCE_SIZES][0], rows, sounds)
        self.check_data(config, shapes[VIDEO], needed, condition, setting)
        self.check_patches(config, shapes[VIDEO], setting)
        wanted = (config["audio_in_channels"], SIDES)
        if (shapes[AUDIO][0], *shapes[AUDIO][2:]) != wanted:
            raise UserError(
                f"{setting} ({self.label}) takes sound of shape ({wanted[0]}, latents, {SIDES}), but the data have"
                f" {shapes[AUDIO]}; use data with sound of the encoders that the checkpoint is from"
            )

    def check_folder(self, folder: Path, condition: Shapes, setting: str) -> None:
        of_references, is_wanted = folder.parent / REFERENCE_FOLDER, REFERENCES in condition
        where = f"{setting}={folder}"
        if folder.name == REFERENCE_FOLDER and not is_wanted:
            raise UserError(f"{where} is the network for references; set data.references, or use {folder.parent}")
        if folder.name == "transformer" and is_wanted and of_references.is_dir():
            raise UserError(f"{where} takes no references (data.references); use {of_references}")

    def _reference_rows(self, config: NetworkConfig, condition: Shapes) -> tuple[int, int]:
        """Return the rows of the pictures and of the sounds of all references."""
        if REFERENCES not in condition:
            return 0, 0
        return condition[REFERENCES][0] // math.prod(self.patch_size(config)), condition[REFERENCE_SOUNDS][0]

    def parallelize(self, network: MiniMaxH3Transformer3DModel, mesh: Mesh, backend: str, head_groups: int) -> None:
        """Let each rank embed, rotate and process its own rows of each stream. :meth:`outputs` gathers them."""
        plan = {
            "": {"hidden_states": SplitTokens(split_dim=1), "audio_hidden_states": SplitTokens(split_dim=1)},
            "token_refiner": {0: SplitTokens(split_dim=1, split_output=True)},
        }
        calls = SparseRows(sparse_roles(network), mesh)
        parallelize_context(network, mesh=mesh, plan=plan, tiles=calls.tiles)
        network.register_forward_pre_hook(join_rows, with_kwargs=True)
        vars(network)["mesh_of_rows"], vars(network)["sparse_rows"] = mesh, calls
        self._attend_by_rows(network, calls, backend, head_groups)

    def serve_pipeline(self, network: MiniMaxH3Transformer3DModel, mesh: Mesh) -> None:
        calls = SparseRows(sparse_roles(network), mesh)
        network.register_forward_pre_hook(calls.begin_packed, with_kwargs=True)
        self._attend_by_rows(network, calls, "auto", 1)

    def _attend_by_rows(
        self, network: MiniMaxH3Transformer3DModel, calls: "SparseRows", backend: str, head_groups: int
    ) -> None:
        mesh = calls.mesh
        network.rope.register_forward_hook(calls.add)
        for block in self.blocks(network):
            cast(MiniMaxH3Attention, block.attn).set_processor(MiniMaxH3SplitAttention(mesh, backend, head_groups))

    def outputs(self, network: nn.Module, sample: Sample, t: Tensor, condition: Condition, *_: Any) -> Outputs:
        additions = getattr(network, "additions", nn.ModuleDict()).modules()
        if len(sample) > 1 and any(getattr(addition, "by_sample", False) for addition in additions):
            raise UserError(f"micro_batch_size must be 1: {self.label} takes a second time of one sample only")
        tensors, lengths = condition.tensors, [condition.tensors["text"].shape[1]] * len(sample)
        if type(given := tensors.get(TEXT_LENGTH)) is Tensor:  # fake tensors of a plan have no values
            lengths = given.tolist()
        each = []
        for i, length in enumerate(lengths):
            one = {name: tensor[i : i + 1] for name, tensor in tensors.items()}
            one |= {name: one[name][:, :length] for name in ("text", TEXT_TAGS) if name in one}
            each.append(self._output(network, sample[i : i + 1], t[i], one))
        # Heads return several velocities of each sample: first those of the first head.
        return Outputs(Sample.cat(each).map(lambda v: v.unflatten(0, (len(each), -1)).transpose(0, 1).flatten(0, 1)))

    def _output(self, network: nn.Module, sample: Sample, t: Tensor, tensors: Mapping[str, Tensor]) -> Sample:
        """Return the velocity of one sample at the time ``t``, a scalar, with its condition; of each head."""
        mesh = vars(network).get("mesh_of_rows")
        _, p, q = self.patch_size(config_of(network))
        streams, times = packed_streams(sample, t, tensors, (p, q))
        own, tiles = streams, None
        if mesh is not None:
            own, tiles = self._split(network, sample, streams, mesh)
        places = places_of_rows(own)
        kinds = {"hidden_states": (VIDEO, GIVEN), "audio_hidden_states": (AUDIO, GIVEN_SOUND)}
        joined = {key: [name for name in names if name in streams] for key, names in kinds.items()}
        rows = {key: tuple(streams[name].rows for name in names) for key, names in joined.items()}
        of_video, of_audio = (torch.cat([places[name] for name in reversed(names)]) for names in joined.values())
        v, audio_v = network(
            **(rows if mesh is not None else join_rows(network, (), rows)[1]),
            encoder_hidden_states=tensors["text"],
            timestep=1 - times,
            timestep_indices=torch.cat([torch.full_like(places[name], own[name].time) for name in own]),
            token_tags=torch.cat([stream.tags for stream in own.values()]),
            position_ids=torch.cat([stream.positions for stream in own.values()]),
            video_indices=of_video,
            audio_indices=of_audio,
            text_indices=places[TEXT],
            return_dict=False,
        )
        v, audio_v = v[:, -len(places[VIDEO]) :], audio_v[:, -len(places[AUDIO]) :]
        if mesh is not None:
            v = gather_tokens(v, mesh, streams[VIDEO].rows.shape[1])
            audio_v = gather_tokens(audio_v, mesh, streams[AUDIO].rows.shape[1])
        if tiles is not None:
            v = tiles.restore(v, 1)
        video, audio = sample.video, sample.parts[AUDIO]
        sizes = {"t": video.shape[2], "h": video.shape[3] // p, "p": p, "q": q}
        v = rearrange(v, "1 (t h w) (n c p q) -> n c t (h p) (w q)", c=video.shape[1], **sizes)
        audio_v = rearrange(audio_v, "1 (s l) (n a) -> n a l s", s=SIDES, a=audio.shape[1])
        return Sample({VIDEO: -v, AUDIO: -audio_v}, sample.shifts)

    def _split(
        self, network: nn.Module, sample: Sample, streams: Mapping[str, "Stream"], mesh: Mesh
    ) -> tuple[dict[str, "Stream"], Tiles | None]:
        """Begin a call on ``mesh``. Return the rank's own part of each stream, and the tiles of a video with sparse
        attention."""
        grid = self.token_grid(config_of(network), {VIDEO: tuple(sample.video.shape[1:])})
        calls = vars(network)["sparse_rows"]
        calls.begin(grid, tuple(len(stream.positions) for stream in streams.values()))
        tiles = calls.video
        own = {name: stream.split(mesh, tiles if name == VIDEO else None) for name, stream in streams.items()}
        return own, tiles


class Stream(NamedTuple):
    """Rows of one kind in the packed sequence of a sample."""

    rows: Tensor
    """``(1, S, features)``."""
    positions: Tensor
    """Time, height and width ``(S, 3)``, fp64."""
    tags: Tensor
    """Kinds of the rows for their modulation, ``(S,)``."""
    time: int
    """Position of the rows' time in those of the sample."""

    def split(self, mesh: Mesh, tiles: Tiles | None = None) -> "Stream":
        """Return the stream with the positions and tags of the rank's own rows, in the order of ``tiles`` if given; the
        plan splits the rows."""
        positions = self.positions if tiles is None else tiles.reorder(self.positions, 0)
        return self._replace(positions=split_tokens(positions, mesh, dim=0), tags=split_tokens(self.tags, mesh, dim=0))


class SparseRows(SparseTables):
    """Sparse attention of the network's current call. Its blocks also get the numbers of rows of all streams."""

    def begin_packed(self, _network: nn.Module, _args: tuple, packed: Mapping[str, Any]) -> None:
        """Begin a call with the arguments of diffusers' pipeline, whose rows are text, keyframes, sound and video."""
        positions, audio, text = packed["position_ids"], len(packed["audio_indices"]), len(packed["text_indices"])
        start = int(packed["audio_indices"][-1]) + 1
        frames, rows, columns = (len(axis.unique()) for axis in positions[start:].unbind(-1))
        given = start - audio - text
        segments = [text, *([given] if given else []), audio, len(positions) - start]
        self.begin((frames, rows, columns), tuple(segments))

    def tiles(self, *_args: Any, **_kwargs: Any) -> dict[str, Tiles]:
        """Return the tiles of the streams that the plan splits."""
        return {} if self.video is None else {VIDEO_ROWS: self.video}


def packed_streams(
    sample: Sample, t: Tensor, tensors: Mapping[str, Tensor], patch: tuple[int, int]
) -> tuple[dict[str, Stream], Tensor]:
    """Return the streams of one sample in their order, and its times ``(2,)`` to ``(4,)``.

    Args:
        sample: one sample.
        t: its time, a scalar.
        tensors: tensors of its condition, the text without rows that do not count.
        patch: height and width of a patch in latents.
    """
    video, audio, text = sample.video, sample.parts[AUDIO], tensors["text"]
    anchors: Sequence[float] = ()
    if KEYFRAMES in tensors:  # fake tensors of a plan have no values
        given_at = tensors[KEYFRAME_ANCHORS][0]
        anchors = given_at.tolist() if type(given_at) is Tensor else [0] * len(given_at)
    references = sizes_of_references(tensors, patch)
    grid = tuple(video.shape[2:])
    positions = stream_positions(text.shape[1], audio.shape[2], grid, patch, video.device, anchors, references)
    times = [sample.time(VIDEO, t), sample.time(AUDIO, t)]
    shown = tensors.get(TEXT_TAGS, torch.zeros(text.shape[:2], device=video.device))
    rows = {TEXT: text, AUDIO: rearrange(audio, "b a l s -> b (s l) a"), VIDEO: patched(video, patch)}
    time, tag = {TEXT: 0, AUDIO: 1, VIDEO: 0}, {AUDIO: AUDIO_TAG, GIVEN_SOUND: AUDIO_TAG}
    for name, given in ((GIVEN, times[0].clamp_max(KEYFRAME_TIME)), (GIVEN_SOUND, torch.zeros_like(t))):
        if name in positions:
            time[name] = len(times)
            times.append(given)
    if KEYFRAMES in tensors:
        noisy = torch.lerp(tensors[KEYFRAMES], tensors[KEYFRAME_NOISE], KEYFRAME_TIME)
        rows[GIVEN] = patched(noisy.to(video.dtype), patch)
    elif GIVEN in positions:
        noisy = torch.lerp(tensors[REFERENCES], tensors[REFERENCE_NOISE], KEYFRAME_TIME).to(video.dtype)
        counts = [math.prod(size[:3]) for size in references]
        pieces = noisy[:, : sum(counts)].mT.split(counts, dim=2)
        pictures = [x.unflatten(2, size[:3]) for x, size in zip(pieces, references, strict=True) if x.shape[2]]
        rows[GIVEN] = torch.cat([patched(picture, patch) for picture in pictures], dim=1)
    if GIVEN_SOUND in positions:
        sounds = tensors[REFERENCE_SOUNDS][:, : SIDES * sum(size[3] for size in references)]
        rows[GIVEN_SOUND] = sounds.to(video.dtype)
    tags = {name: torch.full((len(p),), tag.get(name, VIDEO_TAG), device=p.device) for name, p in positions.items()}
    tags[TEXT] = torch.where(shown[0] == 1, VIDEO_TAG, TEXT_TAG)
    streams = {name: Stream(rows[name], positions[name], tags[name], time[name]) for name in positions}
    return streams, torch.stack(times)


def places_of_rows(streams: Mapping[str, Stream]) -> dict[str, Tensor]:
    """Return the places of each stream's rows in the sequence."""
    counts = [len(stream.positions) for stream in streams.values()]
    device = streams[VIDEO].positions.device
    return dict(zip(streams, torch.arange(sum(counts), device=device).split(counts), strict=True))


def sizes_of_references(tensors: Mapping[str, Tensor], patch: tuple[int, int]) -> list[ReferenceSize]:
    """Return the sizes of one sample's references."""
    if REFERENCES not in tensors:
        return []
    if type(sizes := tensors[REFERENCE_SIZES]) is Tensor:
        return [(t, h, w, sound) for t, h, w, sound in sizes[0].tolist() if t or sound]
    # Fake tensors of a plan have no values: as if one reference had all rows.
    return [(1, tensors[REFERENCES].shape[1] // patch[1], patch[1], tensors[REFERENCE_SOUNDS].shape[1] // SIDES)]


def patched(latents: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return latents ``(B, C, T, H, W)`` as rows ``(B, S, C p q)``."""
    return rearrange(latents, "b c t (h p) (w q) -> b (t h w) (c p q)", p=patch[0], q=patch[1])


def join_rows(_network: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Join generated and given rows of the video and of the sound, the given ones last in the call and first in the
    sequence, after the plan has split each."""
    names = ("hidden_states", "audio_hidden_states")
    return args, {**kwargs, **{name: torch.cat(kwargs[name][::-1], dim=1) for name in names}}


def latent_frames(num_frames: int, fps: float) -> int:
    """Return the number of latent frames of a clip. Raises ``UserError`` for one that MiniMax-H3's VAE does not take.

    The VAE encodes chunks of 17 frames, fills the last one up and drops its last 3 of 5 latent frames.
    """
    if fps != FRAME_RATE:
        raise UserError(f"data.fps={fps:g} must be {FRAME_RATE} for MiniMax-H3")
    chunks, rest = divmod(num_frames - CHUNK_LATENTS, CHUNK)
    if chunks < 1 or rest:
        low = CHUNK * max(chunks, 1) + CHUNK_LATENTS
        raise UserError(
            f"data.num_frames={num_frames} must be {CHUNK}k + {CHUNK_LATENTS} for MiniMax-H3's VAE; use {low} or"
            f" {low + CHUNK}"
        )
    return CHUNK_LATENTS * chunks + 2


def audio_latents(num_frames: int) -> int:
    """Return the number of latents of each side of a clip's sound, rounded as diffusers' pipeline does."""
    return round(num_frames / FRAME_RATE * AUDIO_RATE)


def stream_positions(
    text: int,
    audio: int,
    grid: tuple[int, ...],
    patch: tuple[int, int],
    device: torch.device,
    anchors: Sequence[float] = (),
    references: Sequence[ReferenceSize] = (),
) -> dict[str, Tensor]:
    """Return time, height and width ``(rows, 3)``, fp64, of the rows of each stream, in order, by diffusers' layouts.

    Args:
        text: number of text rows.
        audio: number of audio latents of a side.
        grid: frames, height and width of the video's latents.
        patch: height and width of a patch in latents.
        device: device of the positions.
        anchors: 0 for a keyframe at the first frame and 1 for one at the last.
        references: sizes of the references in their order.
    """
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    layout = (*grid, audio, (1, *patch), SIDES, AUDIO_TAG, VIDEO_TAG)
    with real_tensors():  # positions are values, which those of a plan have not
        tags = torch.ones(text)
        if references:
            kinds = [_reference(size) for size in references]
            pictures = [torch.empty(1, 0, *size[:3]) for size in references if size[0]]
            sounds = [torch.empty(SIDES * size[3], 0) for size in references if size[3]]
            build = before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence
            packed = build(tags, kinds, pictures, sounds, *layout)
        else:
            names = tuple("last" if anchor else "first" for anchor in anchors)
            packed = before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *layout, names)
        positions, _, videos, audios, texts, given, given_sounds = packed
        # diffusers packs the sound of each reference before its picture; here are all pictures before all sounds.
        places = {TEXT: texts, GIVEN: videos[:given], GIVEN_SOUND: audios[:given_sounds]}
        places |= {AUDIO: audios[given_sounds:], VIDEO: videos[given:]}
        rows = {name: positions[place] for name, place in places.items() if len(place)}
    return {name: of_stream.to(device) for name, of_stream in rows.items()}


def _reference(size: ReferenceSize) -> Any:
    """Return what diffusers' layout reads of a reference."""
    frames, _, _, sound = size
    kind = "audio" if not frames else "image" if (frames, sound) == (1, 0) else "video"
    return SimpleNamespace(kind=kind, has_audio=sound > 0)


class MiniMaxH3SplitAttention:
    """Attention of a rank's own rows to all rows of all streams, and of the whole text in its refiner.

    Projections, norms and the rotary embedding are those of diffusers' ``MiniMaxH3AttnProcessor`` (0.42), whose
    attention has no forward-mode AD.
    """

    def __init__(self, mesh: Mesh, backend: str, head_groups: int):
        self.mesh, self.backend, self.head_groups = mesh, backend, head_groups

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: Tensor,
        rotary_emb: tuple[Any, ...] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``(1, S_local, width)`` with the rotary tables of the rank's own rows, or within a whole text."""
        assert attention_mask is None
        q, k, v = (linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if rotary_emb is None:
            # total_keys states that the text is not split, since it can have as many tokens as a rank's share.
            out = cross_attention(q, k, v, backend=self.backend, total_keys=k.shape[1])
        else:
            cos, sin, *sparse = rotary_emb
            q, k = _apply_rotary_emb(q, cos, sin), _apply_rotary_emb(k, cos, sin)
            streams = None
            if self.mesh.cp_size > 1:
                names = (TEXT_ROWS, GIVEN_ROWS, GIVEN_SOUND_ROWS, AUDIO_ROWS, VIDEO_ROWS)
                streams = split_names(names, self.mesh.context)
            options: dict[str, Any] = {"backend": self.backend, "head_groups": self.head_groups}
            if sparse:
                call, streams = sparse
                options |= call.options(gates_of(attn), hidden_states, attn.heads)
            whole = context_parallel_attention(q, k, v, mesh=self.mesh, total_tokens=streams, **options)
            out = cast(Tensor, whole)  # no joint text
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).type_as(q)))
