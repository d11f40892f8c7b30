"""The encoders of a MiniMax-H3 pipeline folder, as diffusers' modular pipeline (0.42) uses them.

A VAE for the video; another for the waveform of each side of the sound; Qwen3-VL for the caption, without a template.
The transformer sees the state after layer 50 of Qwen3-VL's language model, and no pads: a set tells a text's length.
With keyframes, Qwen3-VL sees them before the caption. Its language model is causal, so the rows of pictures do not
depend on the caption, and are the text of a sample without one.

Shape legend: T H W pixels, C t h w latents of the video, C L 2 channels, latents and sides of the sound's, D width of
an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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
from distill.data.videos.container import VideoFile
from distill.data.videos.decode import ClipFormat, SoundFormat, read_picture
from fsdp_cp.errors import UserError
from models.condition import KEYFRAMES, TEXT_LENGTH, TEXT_TAGS
from models.families.diffusers_family import checked_arguments
from models.families.minimax_h3 import AUDIO_RATE, CHUNK, FRAMES, SIDES, MiniMaxH3, audio_latents, latent_frames
from models.sample import AUDIO, VIDEO, PartShapes

TEXT_LAYER = 50
"""Layer whose output is the embedding. The last layer's output is normalized, so one more layer is loaded."""
PROCESSOR = "processor"
"""Sub-folder of Qwen3-VL's processor of images."""
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

    @torch.no_grad()
    def encode_keyframe(self, frame: Tensor) -> Tensor:
        """Encode a keyframe as it was released: a draw from the posterior by a fixed seed, rounded to fp16."""
        from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

        pixels = to_bytes(frame)[None].to(self.device)
        return encode_vae_condition(self.vae, pixels, _MEAN, _STD)[0]

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

    def _load(self, model_class: Any, folder: EncoderFolder, **options: Any) -> Any:
        settings = part_settings(folder.path, "text_encoder", f"data.encoders={folder.path}")
        config = model_class.config_class(**self.loaded_config(settings))
        return load_layers(model_class, folder, "", {r"^model\.language_model\.": ""}, config=config, **options)

    @staticmethod
    def loaded_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config["text_config"], "architectures": ["Qwen3VLTextModel"], "num_hidden_layers": TEXT_LAYER + 1}

    @staticmethod
    def encode_zeros(models: Any, tokens: int) -> None:
        models[0](torch.zeros(1, tokens, dtype=torch.long), use_cache=False, output_hidden_states=True)

    @torch.no_grad()
    def encode(self, caption: str) -> Tensor:
        """Encode one caption: (tokens, D) on the CPU. The empty one, which the model does not know, is one pad."""
        ids = self.tokenizer(caption, add_special_tokens=False).input_ids
        if caption and not ids:
            raise UserError(
                f"data.encoders={self.folder}: tokenizer/ makes no token of {caption[:60]!r}; use other text"
            )
        ids = ids or [self.tokenizer.pad_token_id]
        self._check_words(ids, self.model, "tokenizer", "text_encoder")
        self.report_cut(caption, "caption", len(ids), self.max_tokens, "data.max_text_tokens=")
        tokens = torch.tensor([ids[: self.max_tokens]], device=self.device)
        return self._embedding(input_ids=tokens)

    def _embedding(self, **inputs: Any) -> Tensor:
        states = self.model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
        return states[TEXT_LAYER][0].float().cpu()


class MiniMaxH3VisionEncoder(MiniMaxH3TextEncoder):
    """Qwen3-VL with its vision, and the same layers of its language model."""

    class_name = "Qwen3VLModel"

    def __init__(self, folder: EncoderFolder, **options: Any) -> None:
        super().__init__(folder, **options)
        from transformers import AutoImageProcessor

        with readable(folder.path, PROCESSOR):
            self.processor = AutoImageProcessor.from_pretrained(folder.path / PROCESSOR, local_files_only=True)
        self.vision_ids = self.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
        if self.vision_ids[1] != self.model.config.image_token_id:
            wrong = f"data.encoders={folder.path}: tokenizer/ and text_encoder/ differ in the token of an image"
            raise UserError(f"{wrong}; give both of one folder")

    def _load(self, model_class: Any, folder: EncoderFolder, **options: Any) -> Any:
        settings = part_settings(folder.path, "text_encoder", f"data.encoders={folder.path}")
        layers = {**settings["text_config"], "num_hidden_layers": TEXT_LAYER + 1}
        config = model_class.config_class(**{**settings, "text_config": layers, "architectures": [self.class_name]})
        return load_layers(model_class, folder, "language_model.", {r"^model\.": ""}, config=config, **options)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @torch.no_grad()
    def embeddings(self, caption: str, images: Tensor | None = None) -> dict[str, Tensor]:
        """Return ``text`` (tokens, D) of a caption after its ``images`` (3, K, H, W), and ``tags`` (tokens, 1): 1 for
        rows that show an image, as MiniMaxH3FL2VATextEncoderStep makes them."""
        assert images is not None
        self.cuts = []
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
        if len(ids) >= self.max_tokens:
            lacks = f"{len(ids) - self.max_tokens} more tokens than data.max_text_tokens and their size leave"
            raise UserError(f"the images take {lacks}; set data.max_text_tokens higher")
        words = self._ids(caption)
        self._check_words(ids + words, self.model, "tokenizer", "text_encoder")
        self.report_cut(caption, "images and caption", len(ids + words), self.max_tokens, "data.max_text_tokens=")
        ids = (ids + words)[: self.max_tokens]
        tokens = torch.tensor([ids], device=self.device)
        text = self._embedding(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=(tokens == pad).long(),
            pixel_values=vision["pixel_values"].to(self.device, self.model.dtype),
            image_grid_thw=vision["image_grid_thw"].to(self.device),
        )
        tags += [0.0] * (len(ids) - len(tags))
        return {"text": text, "tags": torch.tensor(tags)[:, None]}


def load_layers(
    model_class: Any, folder: EncoderFolder, prefix: str, key_mapping: Mapping[str, str], **options: Any
) -> Any:
    """Load a part of Qwen3-VL with its first layers alone; ``prefix`` is that of the language model's names in it."""
    later = "|".join(str(i) for i in range(TEXT_LAYER + 1, MOST_LAYERS))
    unread = [r"^model\.visual\.", r"^lm_head\.", rf"^{prefix}layers\.({later})\."]
    part = type(model_class.__name__, (model_class,), {"_keys_to_ignore_on_load_unexpected": unread})
    return load_part(part, folder.path, "text_encoder", key_mapping=key_mapping, **options)


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

    def read_image(self, file: VideoFile, clip: ClipFormat, *, follows: bool = False) -> Tensor:
        """Return an image as MiniMaxH3ResizeStep fits it: the first is stretched, the second cropped."""
        image, size = read_picture(file), (clip.height, clip.width)
        return as_frame(covering(image, *size) if follows else stretched(image, *size, Image.Resampling.LANCZOS))

    def text_tokens(self, clips: Sequence[ClipFormat], max_text_tokens: int, image: ImageInput | None) -> int:
        """Add the rows of the images, of the largest clips."""
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
            made[TEXT_TAGS] = pad_text(texts["tags"], max_tokens)[:, 0] > 0
        return made
