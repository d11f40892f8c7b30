"""The encoders of a MiniMax-H3 pipeline folder, as diffusers' modular pipeline (0.42) uses them.

A VAE for the video; another for the waveform of each side of the sound; Qwen3-VL for the caption, without a template.
The transformer sees the state after layer 50 of Qwen3-VL's language model, and no pads: a set tells a text's length.
With keyframes or references, Qwen3-VL sees them before the caption. Its language model is causal, so the rows before
the caption do not depend on it, and are the text of a sample without one.

Shape legend: T H W pixels, C t h w latents of the video, C L 2 channels, latents and sides of the sound's, D width of
an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from distill.data.base import to_bytes
from distill.data.encoders.folder import MOST_LAYERS, load_part, part_settings, readable, shown, whole_number
from distill.data.encoders.image import ImageInput, as_frame, covering, stretched
from distill.data.encoders.wan import (
    EncoderFolder,
    TextEncoder,
    VideoCodec,
    check_statistics,
    pad_text,
    transformer_patch,
)
from distill.data.videos.container import ClipError, VideoFile
from distill.data.videos.decode import ClipFormat, SoundFormat, read_frames, read_picture
from distill.data.videos.sound import read_heard
from fsdp_cp.errors import UserError
from models.condition import (
    KEYFRAMES,
    REFERENCE_SIZES,
    REFERENCE_SOUNDS,
    REFERENCES,
    TEXT_LENGTH,
    TEXT_TAGS,
)
from models.families.diffusers_family import checked_arguments
from models.families.minimax_h3 import (
    AUDIO_RATE,
    CHUNK,
    CHUNK_LATENTS,
    FRAME_RATE,
    FRAMES,
    SIDES,
    MiniMaxH3,
    audio_latents,
    latent_frames,
)
from models.sample import AUDIO, VIDEO, PartShapes

TEXT_LAYER = 50
"""Layer whose output is the embedding. The last layer's output is normalized, so one more layer is loaded."""
PROCESSOR = "processor"
"""Sub-folder of Qwen3-VL's processor of images, and of videos."""
VIDEO_FILE = "video_preprocessor_config.json"
_SHORTEST = 13
"""Frames of a reference, of which Qwen3-VL sees each twelfth, in pairs."""
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's statistics of colors in [0, 1], by which the VAE's frames are normalized."""


class MiniMaxH3Codec(VideoCodec):
    """MiniMax-H3's two VAEs between a clip and the normalized latents that the transformer sees, in fp32.

    The video's computes in tiles of 256 pixels, as it was released.
    """

    vae_class = "AutoencoderKLMiniMaxH3"

    def __init__(self, folder: EncoderFolder, **options: Any) -> None:
        super().__init__(folder, **options)
        import diffusers

        cls, device = diffusers.AutoencoderKLMiniMaxH3Audio, self.device
        self.sound_vae: Any = load_part(cls, folder.path, "audio_vae", torch_dtype=torch.float32).to(device)
        self.sound_rate = self.sound_vae.config["sampling_rate"]
        statistics = (self.sound_vae.config["latents_mean"], self.sound_vae.config["latents_std"])
        self.sound_mean, self.sound_std = (torch.tensor(values, device=device)[:, None] for values in statistics)
        self.pixel_mean, self.pixel_std = (torch.tensor(v, device=device).view(3, 1, 1, 1) for v in (_MEAN, _STD))

    def _sound_latents(self, sound: Tensor) -> Tensor:
        z = self.sound_vae.encode(sound[:, None]).latent_dist.mode()
        return ((z - self.sound_mean) / self.sound_std).permute(1, 2, 0)

    def encode_keyframe(self, frame: Tensor) -> Tensor:
        """Encode a given frame (3, 1, H, W) in [-1, 1] to latents (C, 1, h, w)."""
        return self._encode_given(to_bytes(frame))

    @torch.no_grad()
    def _encode_given(self, levels: Tensor) -> Tensor:
        """Encode given frames, uint8 (3, T, H, W), as released: a draw from the posterior by a fixed seed, rounded to
        fp16."""
        from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

        return encode_vae_condition(self.vae, levels[None].to(self.device), _MEAN, _STD)[0]

    @torch.no_grad()
    def encode_references(self, references: Sequence[Any]) -> dict[str, Tensor]:
        """Encode references as MiniMaxH3Ref2VAReferenceEncoderStep, whole chunks of a clip, the mean of a sound, to
        latents of pictures (V, C) and of sounds (L, A), and sizes (K, 4) int64: those of ``models/condition.py``,
        without padding."""
        pictures, sounds = [torch.zeros(0, len(self.mean.flatten()))], [torch.zeros(0, len(self.sound_mean))]
        sizes = torch.zeros(len(references), 4, dtype=torch.long)
        for reference, size in zip(references, sizes, strict=True):
            if reference.kind != "audio":
                frames = np.array(reference.image)[None] if reference.kind == "image" else reference.frames
                whole = max(1, (len(frames) - CHUNK_LATENTS) // CHUNK) * CHUNK + CHUNK_LATENTS
                latents = self._encode_given(torch.tensor(frames[:whole]).permute(3, 0, 1, 2))
                pictures.append(latents.flatten(1).mT)
                size[:3] = torch.tensor(latents.shape[1:])
            if reference.has_audio:
                latents = self._sound_latents(reference.audio.to(self.device))
                sounds.append(rearrange(latents, "a l s -> (s l) a").cpu())
                size[3] = latents.shape[1]
        return {REFERENCES: torch.cat(pictures), REFERENCE_SOUNDS: torch.cat(sounds), REFERENCE_SIZES: sizes}

    def _waveform(self, latents: Tensor) -> Tensor:
        z = latents.permute(2, 0, 1) * self.sound_std + self.sound_mean
        return self.sound_vae.decode(z).sample[:, 0]

    def _latents(self, video: Tensor) -> Tensor:
        return super()._latents(((video + 1) / 2 - self.pixel_mean) / self.pixel_std)

    def _pixels(self, z: Tensor) -> Tensor:
        return super()._pixels(z) * self.pixel_std * 2 + self.pixel_mean * 2 - 1


class MiniMaxH3TextEncoder(TextEncoder):
    """The first layers of Qwen3-VL's language model."""

    class_name, stored_class = "Qwen3VLTextModel", "Qwen3VLForConditionalGeneration"
    dropped, prefix = r"^model\.language_model\.", ""
    """Beginnings of names of weights: of those in the folder alone, and of the language model in the loaded one."""

    def _load(self, model_class: Any, folder: EncoderFolder, **options: Any) -> Any:
        settings = part_settings(folder.path, "text_encoder", f"data.encoders={folder.path}")
        later = "|".join(str(i) for i in range(TEXT_LAYER + 1, MOST_LAYERS))
        unread = [r"^model\.visual\.", r"^lm_head\.", rf"^{self.prefix}layers\.({later})\."]
        part = type(model_class.__name__, (model_class,), {"_keys_to_ignore_on_load_unexpected": unread})
        options["config"] = model_class.config_class(**self.loaded_config(settings))
        return load_part(part, folder.path, "text_encoder", key_mapping={self.dropped: ""}, **options)

    @staticmethod
    def loaded_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config["text_config"], "architectures": ["Qwen3VLTextModel"], "num_hidden_layers": TEXT_LAYER + 1}

    @staticmethod
    def encode_zeros(models: Any, tokens: int) -> None:
        models[0](torch.zeros(1, tokens, dtype=torch.long), use_cache=False, output_hidden_states=True)

    @torch.no_grad()
    def encode(self, caption: str) -> Tensor:
        """Encode one caption: (tokens, D) on the CPU. The empty one, which the model does not know, is one pad."""
        if caption and not self._ids(caption):
            raise UserError(
                f"data.encoders={self.folder}: tokenizer/ makes no token of {caption[:60]!r}; use other text"
            )
        return self._embedding(input_ids=self._tokens([] if caption else [self.tokenizer.pad_token_id], caption))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _tokens(self, before: list[int], caption: str) -> Tensor:
        """Return (1, tokens) of a caption after other tokens, cut to ``max_tokens``."""
        ids = before + self._ids(caption)
        self._check_words(ids, self.model, "tokenizer", "text_encoder")
        what = "images and caption" if before else "caption"
        self.report_cut(caption, what, len(ids), self.max_tokens, "data.max_text_tokens=")
        return torch.tensor([ids[: self.max_tokens]], device=self.device)

    def _embedding(self, **inputs: Any) -> Tensor:
        states = self.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
        return states[TEXT_LAYER][0].float().cpu()


class MiniMaxH3VisionEncoder(MiniMaxH3TextEncoder):
    """Qwen3-VL with its vision, and the same layers of its language model."""

    class_name = "Qwen3VLModel"
    dropped, prefix = r"^model\.", "language_model."

    def __init__(self, folder: EncoderFolder, **options: Any) -> None:
        super().__init__(folder, **options)
        from transformers import AutoImageProcessor

        with readable(folder.path, PROCESSOR):
            self.processor = AutoImageProcessor.from_pretrained(folder.path / PROCESSOR, local_files_only=True)
        self.vision_ids = self.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
        if self.vision_ids[1] != self.model.config.image_token_id:
            wrong = f"data.encoders={folder.path}: tokenizer/ and text_encoder/ differ in the token of an image"
            raise UserError(f"{wrong}; give both of one folder")

    @staticmethod
    def loaded_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
        layers = {**config["text_config"], "num_hidden_layers": TEXT_LAYER + 1}
        return {**config, "text_config": layers, "architectures": ["Qwen3VLModel"]}

    @torch.no_grad()
    def embeddings(self, caption: str, images: Tensor | Sequence[Any] | None = None) -> dict[str, Tensor]:
        """Return ``text`` (tokens, D) of a caption after its ``images`` (3, K, H, W) or references, and ``tags``
        (tokens, 1): 1 for rows that show an image, and with references 2 for other rows before the caption."""
        assert images is not None
        self.cuts = []
        ids, tags, vision = self._of_images(images) if isinstance(images, Tensor) else self._of_references(images)
        if len(ids) >= self.max_tokens:
            lacks = f"{len(ids) - self.max_tokens} more tokens than data.max_text_tokens and their size leave"
            raise UserError(f"the images take {lacks}; set data.max_text_tokens higher")
        tokens = self._tokens(ids, caption)
        config = self.model.config
        kinds = (tokens == config.image_token_id).long() + 2 * (tokens == config.video_token_id)
        shown = {
            name: x.to(self.device, self.model.dtype if x.is_floating_point() else None) for name, x in vision.items()
        }
        text = self._embedding(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), mm_token_type_ids=kinds, **shown
        )
        tags += [0.0] * (tokens.shape[1] - len(tags))
        return {"text": text, "tags": torch.tensor(tags)[:, None]}

    @cached_property
    def video_processor(self) -> VideoProcessor:
        where = f"data.encoders={self.folder}"
        return VideoProcessor(part_settings(self.folder, PROCESSOR, where, VIDEO_FILE, optional=True))

    def _of_references(self, references: Sequence[Any]) -> tuple[list[int], list[float], dict[str, Tensor]]:
        """Return ids and tags of the tokens before the caption, and pixels, by MiniMaxH3Ref2VATextEncoderStep (0.42),
        whose methods are private."""
        from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VATextEncoderStep

        step = MiniMaxH3Ref2VATextEncoderStep()
        processors = SimpleNamespace(image_processor=self.processor, video_processor=self.video_processor)
        vision, *counts = step._gather_vision_features(processors, references, FRAME_RATE)
        ids, tags = step._build_presentation(self.tokenizer, "", references, *counts, text_tag=2, video_tag=1)
        return ids, [float(tag) for tag in tags], vision

    def _of_images(self, images: Tensor) -> tuple[list[int], list[float], dict[str, Tensor]]:
        """Return ids and tags of the tokens before the caption, and pixels, as MiniMaxH3FL2VATextEncoderStep."""
        shown = [Image.fromarray(levels.numpy()) for levels in to_bytes(images).permute(1, 2, 3, 0).contiguous()]
        vision = self.processor(images=shown, return_tensors="pt")
        begin, pad, end = self.vision_ids
        ids: list[int] = []
        tags: list[float] = []
        for i, grid in enumerate(vision["image_grid_thw"]):
            label = self._ids(f"<Picture {i + 1}>: ")
            rows = [begin, *[pad] * (int(grid.prod()) // self.processor.merge_size**2), end]
            ids += label + rows
            tags += [0.0] * len(label) + [1.0] * len(rows)
        return ids, tags, {name: vision[name] for name in ("pixel_values", "image_grid_thw")}


class VideoProcessor:
    """Qwen3-VL's processor of videos without torchvision: resized, normalized patches of pairs of frames."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        # By its name: transformers' package refuses the module without torchvision.
        theirs = import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
        self.theirs = theirs.Qwen3VLVideoProcessor
        self.resized = theirs.smart_resize
        names = ("size", "image_mean", "image_std", "patch_size", "temporal_patch_size", "merge_size")
        self.settings = {name: settings.get(name, getattr(self.theirs, name)) for name in names}
        self.temporal_patch_size = self.settings["temporal_patch_size"]

    def __call__(self, videos: Sequence[np.ndarray], **_: Any) -> dict[str, Tensor]:
        """Return patches of videos, uint8 (T, H, W, 3), and the number of patches along each axis."""
        chosen, patches, grids = self.settings, [], []
        sizes = {name: chosen[name] for name in ("patch_size", "merge_size", "temporal_patch_size")}
        edges = chosen["size"]
        mean, std = (255 * torch.tensor(chosen[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        for video in videos:
            frames = torch.tensor(video).permute(0, 3, 1, 2)
            size = self.resized(
                *(len(frames), *frames.shape[2:]),
                temporal_factor=sizes["temporal_patch_size"],
                factor=sizes["patch_size"] * sizes["merge_size"],
                min_pixels=edges["shortest_edge"],
                max_pixels=edges["longest_edge"],
            )
            if size != frames.shape[2:]:
                frames = torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True)
            rows, *grid = self.theirs.patchify(None, ((frames - mean) / std)[None], **sizes)
            patches.append(rows[0])
            grids.append(grid)
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}


@dataclass(kw_only=True, slots=True, frozen=True)
class MiniMaxH3EncoderFolder(EncoderFolder):
    """Settings of the encoders in a MiniMax-H3 pipeline folder, without weights."""

    codec_class = MiniMaxH3Codec
    text_class = MiniMaxH3TextEncoder
    codec_parts = ("vae", "audio_vae")
    text_dtype = torch.bfloat16
    vae_precisions = ("fp32",)

    sound_channels: int
    """C of the sound."""
    rate: int
    """Samples of sound per second."""

    @classmethod
    def read(cls, folder: Path, where: str, vae: dict[str, Any], text: dict[str, Any]) -> MiniMaxH3EncoderFolder:
        """Return the settings of a folder; refuse VAEs with another clock than the transformer's positions too."""
        from diffusers import AutoencoderKLMiniMaxH3Audio

        file = f"{where}: vae/config.json"
        check_statistics(vae, vae["latent_channels"], file)
        clock = {"clip_length": vae["clip_length"], "token_drop": vae["token_drop"]}
        temporal = math.prod(vae["temporal_downsample_factors"])
        if (*clock.values(), temporal) != (CHUNK, 3, 4):
            raise UserError(f"{file} has {shown(clock)} and joins {temporal} frames; use {CHUNK}, 3, and 4 frames")
        file = f"{where}: audio_vae/config.json"
        sound = checked_arguments(AutoencoderKLMiniMaxH3Audio, part_settings(folder, "audio_vae", where), file)
        check_statistics(sound, sound["latent_channels"], file)
        rate, hop = sound["sampling_rate"], math.prod(sound["encoder_rates"])
        if rate != AUDIO_RATE * hop:
            raise UserError(f"{file} has sampling_rate={rate}, but {AUDIO_RATE} latents of {hop} samples a second")
        file, text = f"{where}: text_encoder/config.json", text.get("text_config")
        if not isinstance(text, dict) or whole_number(text, "num_hidden_layers", file) <= TEXT_LAYER:
            raise UserError(f"{file} must have a text_config of more than {TEXT_LAYER} layers; give the folder's own")
        return cls(
            path=folder,
            channels=vae["latent_channels"],
            temporal=temporal,
            spatial=math.prod(vae["spatial_downsample_factors"]),
            patch=transformer_patch(folder, where, (1, 2, 2)),
            text_width=whole_number(text, "hidden_size", file),
            sound_channels=sound["latent_channels"],
            rate=rate,
        )

    def latent_frames(self, clip: ClipFormat) -> int:
        return latent_frames(clip.num_frames, clip.fps)

    def latent_shapes(self, clip: ClipFormat) -> PartShapes:
        return {VIDEO: self.latent_shape(clip), AUDIO: (self.sound_channels, audio_latents(clip.num_frames), SIDES)}

    def sound_format(self, clip: ClipFormat) -> SoundFormat:
        return SoundFormat(
            rate=self.rate, samples=audio_latents(clip.num_frames) * self.rate // AUDIO_RATE, channels=SIDES
        )

    def inspect_image(self, where: str) -> ImageInput:
        if not (self.path / PROCESSOR).is_dir():
            raise UserError(f"{where} has no {PROCESSOR}/, which data.image needs; give the whole pipeline folder")
        part_settings(self.path, PROCESSOR, where, "preprocessor_config.json")
        return ImageInput(latents=KEYFRAMES, processor=PROCESSOR)

    def condition_shapes(
        self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None
    ) -> dict[str, tuple[int, ...]]:
        if image is None or not image.references:
            return super(MiniMaxH3EncoderFolder, self).condition_shapes(clip, max_text_tokens, image)
        room = MiniMaxH3.planning.reference_room(image.references, clip.num_frames, *image.edges)
        config = {"patch_size": self.patch, "in_channels": self.channels, "audio_in_channels": self.sound_channels}
        shapes = super(MiniMaxH3EncoderFolder, self).condition_shapes(clip, max_text_tokens, None)
        return shapes | MiniMaxH3().reference_shapes(config, max_text_tokens, room.count, room.rows, room.sounds)

    def read_reference(self, file: Path, kind: str, num_frames: int, edges: tuple[int, int]) -> tuple[Any, str]:
        """Return a reference of a ``kind`` as MiniMaxH3Ref2VASetupStep makes it of a file: a picture, or a video or a
        sound of the clip's length at most; and what is cut of it, if anything. Frames are picked and sound is resampled
        as those of clips. Raises ``ClipError``."""
        from diffusers.modular_pipelines import minimax_h3 as theirs
        from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size

        if kind == "image":
            return theirs.MiniMaxH3ImageReference(image=_large(read_picture(file), edges[0])), ""
        sound, cut = None, ""
        if kind != "video":
            samples = int(num_frames / FRAME_RATE * self.rate)
            sound = read_heard(file, SoundFormat(rate=self.rate, samples=samples + 1, channels=SIDES))
            cut, sound = "its sound" * (sound.shape[1] > samples), sound[:, :samples]
        if kind == "sound":
            return theirs.MiniMaxH3AudioReference(audio=sound, sample_rate=self.rate), cut

        def on_canvas(rgb_HWC: Tensor) -> Tensor:
            try:
                size = resolve_canvas_size(rgb_HWC.shape[1], rgb_HWC.shape[0], 32, edges[1], edges[1] ** 2 * 7 // 4)
            except ValueError as error:
                raise ClipError(f"is {rgb_HWC.shape[1]} x {rgb_HWC.shape[0]}, not within 1:4 and 4:1") from error
            return rgb_HWC if rgb_HWC.shape[:2] == size else stretched(rgb_HWC, *size, Image.Resampling.LANCZOS)

        frames = read_frames(file, num_frames + 1, FRAME_RATE, on_canvas)
        if len(frames) < _SHORTEST:
            raise ClipError(f"is too short: {len(frames)} frames at {FRAME_RATE} fps; {_SHORTEST} at least")
        cut = "the video" if len(frames) > num_frames else cut
        made = theirs.MiniMaxH3VideoReference(
            frames=torch.stack(frames[:num_frames]).numpy(), audio=sound, sample_rate=self.rate
        )
        return made, cut

    def read_image(self, file: VideoFile, clip: ClipFormat, *, follows: bool = False) -> Tensor:
        """Return an image as MiniMaxH3ResizeStep fits it: the first is stretched, the second cropped."""
        image, size = read_picture(file), (clip.height, clip.width)
        return as_frame(covering(image, *size) if follows else stretched(image, *size, Image.Resampling.LANCZOS))

    def text_tokens(self, clips: Sequence[ClipFormat], max_text_tokens: int, image: ImageInput | None) -> int:
        """Add the rows of the images, of the largest clips, or of references."""
        if image is not None and image.references:
            room = MiniMaxH3.planning.reference_room(image.references, clips[0].num_frames, *image.edges)
            return max_text_tokens + room.text
        rows = max(MiniMaxH3.planning.picture_tokens(clip.height, clip.width) for clip in clips)
        return max_text_tokens + (0 if image is None else len(image.anchors) * rows)

    def text_encoder(self, image: ImageInput | None = None, **options: Any) -> TextEncoder:
        return (self.text_class if image is None else MiniMaxH3VisionEncoder)(self, **options)

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        least, most = FRAMES
        if least <= clip.num_frames <= most:
            return []
        return [f"data.num_frames={clip.num_frames}: diffusers' pipeline samples {least} to {most} frames only"]

    def text_key(self) -> dict[str, Any]:
        return {"dtype": "BF16", "layer": TEXT_LAYER}

    def text_tensors(self, texts: Mapping[str, Tensor], max_tokens: int) -> dict[str, Tensor]:
        """Add the number of the caption's tokens: those that fill it up do not enter the sequence. With keyframes, add
        which rows show them."""
        text = texts["text"]
        made = {"text": pad_text(text, max_tokens), TEXT_LENGTH: torch.tensor(text.shape[0])}
        if "tags" in texts:
            made[TEXT_TAGS] = pad_text(texts["tags"], max_tokens)[:, 0].to(torch.int8)
        return made


def _large(rgb_HWC: Tensor, edge: int) -> Image.Image:
    """Return a picture of the references with its shorter side of ``edge`` pixels, and sides of multiples of 32."""
    sides = rgb_HWC.shape[:2]
    if max(sides) > 4 * min(sides):
        raise ClipError(f"is {sides[1]} x {sides[0]}, not within 1:4 and 4:1")
    scale = edge / min(sides)
    size = [max(32, round(side * scale / 32) * 32) for side in sides]
    return Image.fromarray(stretched(rgb_HWC, *size, Image.Resampling.LANCZOS).numpy())
