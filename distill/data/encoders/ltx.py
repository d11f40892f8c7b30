"""The VAE and the text encoder of an LTX-Video pipeline folder, as diffusers' pipelines (0.42) use them.

``model_index.json`` says whether it is an ``LTXPipeline`` (0.9.0, 0.9.1), with the same parts an
``LTXImageToVideoPipeline``, or an ``LTXConditionPipeline`` (as diffusers documents 0.9.5 and later); without that file,
or with any other class, it is taken for the first. The last differs in the text encoder's mask and in when latent
frames are.

Shape legend: C latent channels, t h w latent frames and sides, T H W pixels, L tokens, D width of an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.data.encoders.folder import part_settings, shown, whole_number
from distill.data.encoders.image import ImageInput
from distill.data.encoders.wan import EncoderFolder, TextEncoder, VideoCodec
from distill.data.videos.decode import ClipFormat
from models.condition import FIRST_FRAME

PIPELINE_TOKENS = 128
"""``max_sequence_length`` of LTXPipeline."""
PIPELINE, IMAGE_PIPELINE, CONDITION_PIPELINE = "LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"


class LtxVideoCodec(VideoCodec):
    """LTX's VAE between pixels and the normalized latents that the transformer sees.

    Latents are ``(z - latents_mean) * scaling_factor / latents_std``, which ``LTXPipeline.__call__`` undoes before it
    decodes; ``z`` is the mode of the posterior. A VAE that is conditioned on a time decodes at the time 0 without noise
    in the latents, the pipeline's ``decode_timestep`` and ``decode_noise_scale`` by default.
    """

    vae_class = "AutoencoderKLLTXVideo"

    def _statistics(self) -> tuple[Any, Any]:
        return self.vae.latents_mean, self.vae.latents_std.float() / self.vae.config["scaling_factor"]

    def _pixels(self, z: torch.Tensor) -> torch.Tensor:
        times = [z.new_zeros(1, dtype=self.dtype)] if self.vae.config["timestep_conditioning"] else []
        # Decoders that put noise into their layers draw it: a clip must not depend on which others were decoded before.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            return self.vae.decode(z.to(self.dtype), *times).sample


class LtxTextEncoder(TextEncoder):
    """T5 with its tokenizer. Of an ``LTXPipeline``, it sees what fills a caption up; the transformer does not."""

    class_name = "T5EncoderModel"

    def __init__(self, folder: LtxEncoderFolder, **options: Any) -> None:
        super().__init__(folder, **options)
        self.pipeline = CONDITION_PIPELINE if folder.later else PIPELINE

    def cleaned(self, caption: str) -> str:
        """Return ``caption`` unchanged: the pipelines clean nothing."""
        return caption


def video_sizes(folder: Path, where: str, vae: dict[str, Any]) -> dict[str, Any]:
    """Return ``channels``, ``temporal``, ``spatial`` and ``patch`` of a folder with a VAE of LTX-Video or LTX-2."""
    ratios = {"spatial_compression_ratio": "patch_size", "temporal_compression_ratio": "patch_size_t"}
    # As diffusers' VAEs compute them, where their settings leave them open.
    scaling = vae["spatio_temporal_scaling"]
    doublings = sum(scaling) if not isinstance(scaling, bool) else scaling * (len(vae["layers_per_block"]) - 1)
    spatial, temporal = (vae[key] or vae[patch] * 2**doublings for key, patch in ratios.items())
    transformer = part_settings(folder, "transformer", where, optional=True)
    for key in ratios.values():
        whole_number(transformer, key, f"{where}: transformer/config.json", default=1, most=1)
    return {"channels": vae["latent_channels"], "temporal": temporal, "spatial": spatial, "patch": (1, 1, 1)}


@dataclass(kw_only=True, slots=True, frozen=True)
class LtxEncoderFolder(EncoderFolder):
    """Settings of the encoders in an LTX pipeline folder, without weights."""

    codec_class = LtxVideoCodec
    text_class = LtxTextEncoder
    text_masks = {"text": "text_mask"}  # the transformer must not attend to what fills a caption up

    pipeline: str | None
    """``_class_name`` of ``model_index.json``, if the folder has one."""

    @classmethod
    def read(cls, folder: Path, where: str, vae: dict[str, Any], text: dict[str, Any]) -> LtxEncoderFolder:
        """Return the settings of a folder; refuse patches of more than one latent too."""
        index = part_settings(folder, ".", where, "model_index.json", optional=True)
        return cls(
            path=folder,
            **video_sizes(folder, where, vae),
            text_width=whole_number(text, "d_model", f"{where}: text_encoder/config.json"),
            pipeline=index.get("_class_name"),
        )

    @property
    def later(self) -> bool:
        """Whether it is an ``LTXConditionPipeline``. The time of its latent frames is that of their first frame, not
        that of the previous latent frame plus its length; its text encoder does not see what fills a caption up."""
        return self.pipeline == CONDITION_PIPELINE

    def remarks(self, clip: ClipFormat, max_text_tokens: int, image: ImageInput | None) -> list[str]:
        remarks = []
        if self.pipeline not in (CONDITION_PIPELINE, PIPELINE, IMAGE_PIPELINE):
            has = f"names a {shown(self.pipeline)}" if self.pipeline else "has no model_index.json"
            remarks.append(
                f"data.encoders={self.path} {has}: it is taken for an {PIPELINE} (0.9.0, 0.9.1); of later versions"
                f" coordinates and captions would be wrong: give the folder its model_index.json"
            )
        if not self.later and max_text_tokens != PIPELINE_TOKENS:
            remarks.append(
                f"data.max_text_tokens={max_text_tokens}, but LTXPipeline fills captions up to {PIPELINE_TOKENS}, which"
                f" its text encoder sees; use {PIPELINE_TOKENS}"
            )
        return remarks

    def inspect_image(self, where: str) -> ImageInput:
        """Return the first frame's latents in place of the noisy ones, for all of LTX's pipelines."""
        return ImageInput(latents=FIRST_FRAME)

    def text_key(self) -> dict[str, Any]:
        return {"masked": True} if self.later else {}

    def clip_tensors(self, clip: ClipFormat) -> dict[str, torch.Tensor]:
        """Return ``latent_spacing`` (4,), LTXPipeline's ``rope_interpolation_scale``; see models/families/ltx.py."""
        shift = (self.temporal - 1) / clip.fps if self.later else 0.0
        return {"latent_spacing": torch.tensor([self.temporal / clip.fps, self.spatial, self.spatial, shift])}
