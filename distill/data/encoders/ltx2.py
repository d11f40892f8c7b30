"""The encoders of an LTX-2 pipeline folder (2.0, 2.3, 2.5), as ``LTX2Pipeline`` of diffusers (0.42) uses them.

A VAE for the video; another for the sound's log-mel spectrogram, with a vocoder back to a waveform; Gemma 3 (2.5: Gemma
4) for the caption, with a connector for each stream of the transformer. A connector fills a caption up with learned
registers, so its embeddings have no mask. diffusers has no way from a waveform to a spectrogram; :func:`log_mel` is
that of Lightricks' ``AudioProcessor`` (https://github.com/Lightricks/LTX-2, ``ltx_core``).

Shape legend: T H W pixels, C L F channels, rows and bands of the sound's latents, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from distill.data.encoders.folder import load_part, part_settings, require_class, shown, whole_number
from distill.data.encoders.image import ImageInput, as_frame, stretched
from distill.data.encoders.ltx import LtxVideoCodec, video_sizes
from distill.data.encoders.ltx2_5 import check_decoded, decoder_settings, image_crf, load_decoder, refuse_dfr
from distill.data.encoders.wan import EncoderFolder, TextEncoder
from distill.data.videos.container import VideoFile
from distill.data.videos.decode import ClipFormat, SoundFormat, read_picture
from fsdp_cp.errors import UserError
from fsdp_cp.rng import stream
from models.condition import FIRST_FRAME
from models.families.diffusers_family import checked_arguments
from models.families.ltx2_5 import is_ltx2_5
from models.sample import AUDIO, VIDEO, PartShapes

WINDOW = 1024
"""Samples of a window of the spectrogram, and of its transform: ``filter_length`` in the preprocessing of Lightricks'
checkpoints, which a diffusers folder does not hold."""
QUIETEST = 1e-5
"""Least magnitude of the spectrogram, before its logarithm."""
SOUND_CHANNELS = 2
PIPELINE_TOKENS = 1024
"""``max_sequence_length`` of LTX2Pipeline."""
VOCODERS = ("LTX2Vocoder", "LTX2VocoderWithBWE")
"""Classes of 2.0 and of later versions."""


class Ltx2Codec(LtxVideoCodec):
    """LTX-2's two VAEs and its vocoder between a clip and the normalized latents that the transformer sees.

    The sound's networks are small and compute in fp32 whatever the VAE's precision. They take sound at
    :attr:`Ltx2EncoderFolder.rate`.
    """

    vae_class = "AutoencoderKLLTX2Video"

    def __init__(self, folder: Ltx2EncoderFolder, **options: Any) -> None:
        super().__init__(folder, **options)
        import diffusers

        self.folder, self.tiling = folder, bool(options.get("tiling"))
        kinds = {"audio_vae": diffusers.AutoencoderKLLTX2Audio, "vocoder": getattr(_parts(), folder.vocoder)}
        parts = (load_part(kind, folder.path, part, torch_dtype=torch.float32) for part, kind in kinds.items())
        self.sound_vae, self.vocoder = (part.to(self.device) for part in parts)
        self.sound_rate = self.vocoder.config["output_sampling_rate"]
        # One number for each channel and band, in the order in which LTX2Pipeline packs them into a row.
        statistics = (self.sound_vae.latents_mean, self.sound_vae.latents_std)
        self.sound_mean, self.sound_std = (x.view(-1, 1, folder.bands) for x in statistics)
        if not (self.sound_std > 0).all():
            raise UserError(f"data.encoders={folder.path}: audio_vae/ has latents_std of 0 or less; copy it again")

    @cached_property
    def _decoder(self) -> Any:
        return load_decoder(self.folder.path, device=self.device, dtype=self.dtype, tiling=self.tiling)

    def _pixels(self, z: Tensor) -> Tensor:
        if self.folder.decoder is None:
            return super()._pixels(z)
        return self._decoder.decode(z.to(self.dtype), generator=stream(0, "decode/noise")).sample

    def _sound_latents(self, sound: Tensor) -> Tensor:
        mel = log_mel(sound, self.folder.rate, self.folder.hop, self.folder.mel_bins)
        z = self.sound_vae.encode(mel[None]).latent_dist.mode()[0]
        # Centered windows give one latent more than the sound has rows: its last frame is centered on the sound's end.
        return (z[:, : sound.shape[1] // self.folder.samples_of_row] - self.sound_mean) / self.sound_std

    def _waveform(self, latents: Tensor) -> Tensor:
        z = latents * self.sound_std + self.sound_mean
        return self.vocoder(self.sound_vae.decode(z[None]).sample)[0]


def log_mel(sound: Tensor, rate: int, hop: int, bins: int) -> Tensor:
    """Return the log-mel spectrogram ``(channels, samples // hop + 1, bins)`` of ``sound``, fp32 ``(channels,
    samples)``: magnitudes in Slaney's bands up to half the rate. Frames are centered on every ``hop``-th sample; ends
    are mirrored."""
    from transformers.audio_utils import mel_filter_bank

    window = torch.hann_window(WINDOW, device=sound.device)
    spectrum = torch.stft(sound, WINDOW, hop_length=hop, window=window, return_complex=True).abs()
    slaney = {"norm": "slaney", "mel_scale": "slaney"}
    filters = mel_filter_bank(WINDOW // 2 + 1, bins, 0.0, rate / 2, rate, **slaney)
    return (spectrum.mT @ torch.from_numpy(filters).to(spectrum)).clamp_min(QUIETEST).log()


class Ltx2TextEncoder(TextEncoder):
    """Gemma and the two connectors."""

    class_name, pipeline = "Gemma3ForConditionalGeneration or Gemma4UnifiedForConditionalGeneration", "LTX2Pipeline"

    def __init__(self, folder: Ltx2EncoderFolder, *, dtype: torch.dtype, **options: Any) -> None:
        self.class_name = folder.gemma
        super().__init__(folder, dtype=dtype, **options)
        connectors = load_part(_parts().LTX2TextConnectors, folder.path, "connectors", torch_dtype=dtype)
        self.connectors = connectors.to(self.device)

    @staticmethod
    def encode_zeros(models: Any, tokens: int) -> None:
        gemma, connectors = models
        ids, mask = torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.long)
        layers = gemma(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        connectors(torch.stack(layers, dim=-1), mask)

    @torch.no_grad()
    def embeddings(self, caption: str) -> dict[str, Tensor]:
        """Return ``text`` and ``audio_text`` (``max_tokens``, D), of the two streams."""
        self.cuts = []
        _, (hidden, mask, *_) = self._piped(caption)
        video, audio, _ = self.connectors(hidden, mask, padding_side=self.tokenizer.padding_side)
        return {"text": video[0].float().cpu(), "audio_text": audio[0].float().cpu()}

    def cleaned(self, caption: str) -> str:
        return caption.strip()


@dataclass(kw_only=True, slots=True, frozen=True)
class Ltx2EncoderFolder(EncoderFolder):
    """Settings of the encoders in an LTX-2 pipeline folder, without weights."""

    codec_class = Ltx2Codec
    text_class = Ltx2TextEncoder
    codec_parts = ("vae", "audio_vae", "vocoder")
    text_parts = ("text_encoder", "tokenizer", "connectors")
    text_dtype = torch.bfloat16

    audio_width: int
    """D of the embeddings for the sound's stream."""
    registers: int
    """Number of registers that fill captions up. It divides the number of tokens."""
    rate: int
    """Samples per second of the sound that is encoded."""
    hop: int
    """Samples from one frame of the spectrogram to the next."""
    mel_bins: int
    """Bands of the spectrogram."""
    sound_channels: int
    """C."""
    ratio: int
    """Frames of the spectrogram in a row of latents, and its bands in a band of them."""
    vocoder: str
    """Class of the vocoder."""
    gemma: str
    """Class of the text encoder."""
    decoder: Mapping[str, Any] | None
    """Settings of the diffusion decoder, of a folder that has one."""

    @classmethod
    def read(cls, folder: Path, where: str, vae: dict[str, Any], text: dict[str, Any]) -> Ltx2EncoderFolder:
        """Return the settings of a folder; refuse parts that do not fit each other too."""
        from diffusers import AutoencoderKLLTX2Audio
        from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import LATENT_DOWNSAMPLE_FACTOR as ratio

        refuse_dfr(folder, where)
        named = part_settings(folder, "vocoder", where).get("_class_name")
        vocoder = require_class(where, "vocoder", [named], " or ".join(VOCODERS))
        file = f"{where}: audio_vae/config.json"
        sound = checked_arguments(AutoencoderKLLTX2Audio, part_settings(folder, "audio_vae", where), file)
        bins, channels = sound["mel_bins"], sound["latent_channels"]
        if bins is None or bins % ratio or sound["base_channels"] != channels * bins // ratio:
            sizes = ", ".join(f"{key}={shown(sound[key])}" for key in ("base_channels", "latent_channels", "mel_bins"))
            raise UserError(f"{file} has {sizes}, which do not fit each other; give the folder's own")
        if sound["in_channels"] != SOUND_CHANNELS:
            raise UserError(f"{file} has in_channels={shown(sound['in_channels'])}; use {SOUND_CHANNELS}, for stereo")
        file = f"{where}: connectors/config.json"
        named = part_settings(folder, "connectors", where)
        connectors = checked_arguments(_parts().LTX2TextConnectors, named, file)
        gemma = text.get("text_config") if isinstance(text.get("text_config"), dict) else text
        of_text = f"{where}: text_encoder/config.json"
        given = [whole_number(gemma, key, of_text) for key in ("hidden_size", "num_hidden_layers")]
        wanted = [connectors["caption_channels"], connectors["text_proj_in_factor"] - 1]
        if given != wanted:
            layers = f"{wanted[1]} layers of width {wanted[0]}, but text_encoder/ has {given[1]} of {given[0]}"
            raise UserError(f"{file} takes {layers}; give both of one folder")
        streams = ("video_connector", "audio_connector")
        registers = [whole_number(connectors, f"{stream}_num_learnable_registers", file) for stream in streams]
        if len(set(registers)) > 1:
            raise UserError(f"{file} has {registers[0]} and {registers[1]} registers; give the folder's own")
        widths = [connectors[f"{s}_num_attention_heads"] * connectors[f"{s}_attention_head_dim"] for s in streams]
        return cls(
            path=folder,
            **video_sizes(folder, where, vae),
            text_width=widths[0],
            audio_width=widths[1],
            registers=registers[0],
            rate=sound["sample_rate"],
            hop=sound["mel_hop_length"],
            mel_bins=bins,
            sound_channels=channels,
            ratio=ratio,
            vocoder=vocoder,
            gemma=require_class(where, "text_encoder", text["architectures"], Ltx2TextEncoder.class_name),
            decoder=decoder_settings(folder, where, vae),
        )

    def check_network(self, config: Mapping[str, Any], setting: str) -> None:
        """Refuse a network of LTX-2.5 with encoders of another version, and the reverse: shapes are the same."""
        if is_ltx2_5(config) != ("Gemma4" in self.gemma):
            version = "LTX-2.5" if is_ltx2_5(config) else "LTX-2.0 or 2.3"
            raise UserError(f"{setting} is {version}, but data.encoders={self.path} has {self.gemma}; give its own")

    @property
    def bands(self) -> int:
        return self.mel_bins // self.ratio

    @property
    def samples_of_row(self) -> int:
        """Samples of sound in a row of latents."""
        return self.hop * self.ratio

    def latent_shapes(self, clip: ClipFormat) -> PartShapes:
        # LTX2Pipeline's expression: another order of the operations could round otherwise.
        rows = round(clip.num_frames / clip.fps * (self.rate / self.hop / float(self.ratio)))
        if rows < 1:
            raise UserError(f"data.num_frames={clip.num_frames} has no sound at data.fps={clip.fps:g}; use more")
        video = self.latent_shape(clip)
        if self.decoder is not None:
            check_decoded(self.decoder, video[1:], clip)
        return {VIDEO: video, AUDIO: (self.sound_channels, rows, self.bands)}

    def sound_format(self, clip: ClipFormat) -> SoundFormat:
        rows = self.latent_shapes(clip)[AUDIO][1]
        return SoundFormat(rate=self.rate, samples=rows * self.samples_of_row, channels=SOUND_CHANNELS)

    def inspect_image(self, where: str) -> ImageInput:
        return ImageInput(latents=FIRST_FRAME)

    def read_image(self, file: VideoFile, clip: ClipFormat, *, follows: bool = False) -> Tensor:
        """Return an image as LTX2ImageToVideoPipeline sees it: re-compressed by H.264, then stretched."""
        image = _recompressed(read_picture(file), image_crf(self.gemma))
        return as_frame(stretched(image, clip.height, clip.width, Image.Resampling.BILINEAR))

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        if max_text_tokens == PIPELINE_TOKENS:
            return []
        seen = f"but LTX2Pipeline fills captions up to {PIPELINE_TOKENS}, and the transformer sees what fills them"
        return [f"data.max_text_tokens={max_text_tokens}, {seen}; use {PIPELINE_TOKENS}"]

    def text_key(self) -> dict[str, Any]:
        return {"dtype": "BF16"}

    def text_sizes(self, max_tokens: int) -> dict[str, tuple[int, int]]:
        if max_tokens % self.registers:
            multiple = f"a multiple of the connectors' {self.registers} registers"
            raise UserError(f"data.max_text_tokens={max_tokens} must be {multiple}; use {PIPELINE_TOKENS}")
        return {"text": (max_tokens, self.text_width), "audio_text": (max_tokens, self.audio_width)}

    def clip_tensors(self, clip: ClipFormat) -> dict[str, Tensor]:
        """Return ``fps`` (1,); see models/families/ltx2.py."""
        return {"fps": torch.tensor([float(clip.fps)])}


def _recompressed(rgb_HWC: Tensor, crf: int) -> Tensor:
    """Return uint8 (H, W, 3) after H.264 as strong as that of the clips that LTX-2 was trained on (diffusers 0.42)."""
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf

    return torch.from_numpy(apply_image_conditioning_crf(rgb_HWC.numpy(), crf))


def _parts() -> Any:
    """Return the module (diffusers 0.42) with the classes of the connectors and of the vocoders."""
    from diffusers.pipelines import ltx2

    return ltx2
