"""Wan 2.2's TI2V: a text-to-video Wan with a VAE of its own, which may be given a first frame.

No channels and no encoder are there for an image: the frame stands in the noisy one's place
(models/families/frames.py), as in ``WanImageToVideoPipeline`` with ``expand_timesteps``. Without one a sample has one
time, as of every Wan: times of tokens cost a modulation of each, 6 x width numbers (2 GB in fp32 at 720p).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_cp.errors import UserError
from models.families.base import LatentShape, Shape
from models.families.frames import check_given

CHANNELS = 48
"""Of the latents of Wan 2.2's own VAE, which the 5B network alone is made for."""

PUBLISHED: Mapping[str, Any] = {
    "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 14336,
    "in_channels": CHANNELS, "out_channels": CHANNELS, "text_dim": 4096, "freq_dim": 256, "patch_size": [1, 2, 2],
}  # fmt: skip
"""Wan 2.2 TI2V 5B's network, 5.0e9 parameters."""

VAE: Mapping[str, Any] = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": CHANNELS, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
    "attn_scales": [], "temperal_downsample": [False, True, True], "is_residual": True, "in_channels": 12,
    "out_channels": 12, "patch_size": 2, "scale_factor_temporal": 4, "scale_factor_spatial": 16,
    "latents_mean": [0.0] * CHANNELS, "latents_std": [1.0] * CHANNELS,
}  # fmt: skip
"""Its VAE's ``config.json`` without the statistics of its latents, which no plan needs."""


def clip_latents(num_frames: int, height: int, width: int) -> LatentShape:
    """``(C, T, H, W)`` of a clip: a latent frame for four frames behind the first, 16 x 16 pixels.

    Raises:
        UserError: a clip that the VAE does not divide.
    """
    if (num_frames - 1) % 4 or height % 16 or width % 16:
        raise UserError(
            f"data.num_frames={num_frames}, data.height={height}, data.width={width}: Wan 2.2's VAE takes 4k + 1 frames"
            " of multiples of 16 pixels"
        )
    return CHANNELS, (num_frames - 1) // 4 + 1, height // 16, width // 16


def check_frame(
    config: Mapping[str, Any], latent_shape: LatentShape, frame: Shape, *, of_text: bool, setting: str
) -> None:
    """Can a Wan of ``config`` be given a first frame of the shape ``frame``?

    Args:
        config: of the network.
        latent_shape: ``(C, T, H, W)`` of a sample, of as many channels as the network takes.
        frame: of the condition's tensor.
        of_text: is it a text-to-video network?
        setting: for messages.

    Raises:
        UserError: a network that takes an image in other channels, tokens of several frames, a clip that is the frame.
    """
    if not of_text:
        raise UserError(
            f"{setting} is an image-to-video Wan, and data.encoders gives the first frame in its place"
            " (expand_timesteps), as for Wan 2.2's TI2V; use data.encoders of the checkpoint's own pipeline"
        )
    if config["patch_size"][0] != 1:
        raise UserError(
            f"{setting} has tokens of {config['patch_size'][0]} latent frames, of which the first alone would be given;"
            " leave data.image out"
        )
    check_given(latent_shape, frame, setting)
