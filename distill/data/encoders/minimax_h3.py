"""The encoders of a MiniMax-H3 pipeline folder, as diffusers' modular pipeline (0.42) uses them.

A VAE for the video; another for the waveform of each side of the sound; Qwen3-VL for the caption, without a template.
The transformer sees the state after layer 50 of Qwen3-VL's language model, and no pads: a set tells a text's length.

Shape legend: T H W pixels, C t h w latents of the video, C L 2 channels, latents and sides of the sound's, D width of
an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.data.encoders.folder import MOST_LAYERS, load_part, part_settings, shown, whole_number
from distill.data.encoders.image import ImageInput
from distill.data.encoders.wan import (
    EncoderFolder,
    TextEncoder,
    VideoCodec,
    check_statistics,
    pad_text,
    transformer_patch,
)
from distill.data.videos.decode import ClipFormat, SoundFormat
from fsdp_cp.errors import UserError
from models.condition import TEXT_LENGTH
from models.families.diffusers_family import checked_arguments
from models.families.minimax_h3 import AUDIO_RATE, CHUNK, FRAMES, SIDES, audio_latents, latent_frames
from models.sample import AUDIO, VIDEO, PartShapes

TEXT_LAYER = 50
"""Layer whose output is the embedding. The last layer's output is normalized, so one more layer is loaded."""
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
        later = "|".join(str(i) for i in range(TEXT_LAYER + 1, MOST_LAYERS))
        unread = [r"^model\.visual\.", r"^lm_head\.", rf"^layers\.({later})\."]
        part = type(self.class_name, (model_class,), {"_keys_to_ignore_on_load_unexpected": unread})
        settings = part_settings(folder.path, "text_encoder", f"data.encoders={folder.path}")
        options["config"] = model_class.config_class(**self.loaded_config(settings))
        return super()._load(part, folder, key_mapping={r"^model\.language_model\.": ""}, **options)

    @staticmethod
    def loaded_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**config["text_config"], "architectures": ["Qwen3VLTextModel"], "num_hidden_layers": TEXT_LAYER + 1}

    @staticmethod
    def encode_zeros(models: Any, tokens: int) -> None:
        models[0](torch.zeros(1, tokens, dtype=torch.long), use_cache=False, output_hidden_states=True)

    @torch.no_grad()
    def encode(self, caption: str) -> Tensor:
        """Encode one caption: (tokens, D) on the CPU. The empty one, which the model does not know, is one pad."""
        ids = self.tokenizer(caption, add_special_tokens=False).input_ids or [self.tokenizer.pad_token_id]
        self._check_words(ids, self.model, "tokenizer", "text_encoder")
        self.report_cut(caption, "caption", len(ids), self.max_tokens, "data.max_text_tokens=")
        tokens = torch.tensor([ids[: self.max_tokens]], device=self.device)
        states = self.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
        return states[TEXT_LAYER][0].float().cpu()


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
        raise UserError(f"{where}: MiniMax-H3 makes clips of text alone here, without keyframes; set data.image=null")

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        least, most = FRAMES
        if least <= clip.num_frames <= most:
            return []
        return [f"data.num_frames={clip.num_frames}: diffusers' pipeline samples {least} to {most} frames only"]

    def text_key(self) -> dict[str, Any]:
        return {"dtype": "BF16", "layer": TEXT_LAYER}

    def text_tensors(self, texts: Mapping[str, Tensor], max_tokens: int) -> dict[str, Tensor]:
        """Add the number of the caption's tokens: those that fill it up do not enter the sequence."""
        text = texts["text"]
        return {"text": pad_text(text, max_tokens), TEXT_LENGTH: torch.tensor(text.shape[0])}
