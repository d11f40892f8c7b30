"""Wan 2.2's TI2V: a given first frame, whose latents stand in the noisy ones' place with a time of their own.

The network is a text-to-video Wan: no channels and no encoder are there for an image. Where the condition has the
tensor ``first_frame``, that takes the place of the latents of frame 0, and the times of its tokens are 0, as in
``WanImageToVideoPipeline`` with ``expand_timesteps``. Without one a sample has one time, as of every Wan: times of
tokens cost a modulation of each, 6 x width numbers (2 GB in fp32 at 720p).

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_cp.errors import UserError
from models.families.base import LatentShape, Shape

CHANNELS = 48
"""Of the latents of Wan 2.2's own VAE, which the 5B network alone is made for."""
LEAST_TIME = 1e-6
"""Below it a velocity towards the frame is taken as at it: at t = 0 it would be 0 / 0."""

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


def frame_shape(latent_shape: LatentShape) -> Shape:
    """Of the first frame beside latents ``(C, T, H, W)``."""
    channels, _, height, width = latent_shape
    return channels, 1, height, width


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
            f"{setting} is an image-to-video Wan 2.1, and data.encoders gives the first frame in its place"
            " (expand_timesteps), as for Wan 2.2's TI2V; use data.encoders of the checkpoint's own pipeline"
        )
    if config["patch_size"][0] != 1:
        raise UserError(
            f"{setting} has tokens of {config['patch_size'][0]} latent frames, of which the first alone would be given;"
            " leave data.image out"
        )
    if latent_shape[1] < 2:
        raise UserError(
            f"data.num_frames gives {latent_shape[1]} latent frame, and data.image=first_frame gives it already; use"
            " more frames, or leave data.image out"
        )
    if frame != frame_shape(latent_shape):
        raise UserError(
            f"{setting} takes first_frame of shape {frame_shape(latent_shape)}, but the data's are {frame}; use"
            " data.encoders of the pipeline that the checkpoint is from"
        )


def put_in(x: Tensor, frame: Tensor) -> Tensor:
    """``x`` ``(B, C, T, H, W)`` with ``frame`` ``(B, C, 1, H, W)`` in the place of frame 0."""
    return torch.cat([frame.to(x.dtype), x[:, :, 1:]], dim=2)


def token_times(t: Tensor, latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """A time for each token, ``(B, S)``: 0 in frame 0, ``t`` ``(B,)`` behind it.

    Args:
        t: ``(B,)``.
        latents: ``(B, C, T, H, W)``.
        patch: latents of a token, one frame among them.
    """
    frames, height, width = latents.shape[2:]
    of_frame = (height // patch[1]) * (width // patch[2])
    later = t[:, None].expand(-1, (frames - 1) * of_frame)
    return torch.cat([t.new_zeros(len(t), of_frame), later], dim=1)


def hold(v: Tensor, x: Tensor, t: Tensor, frame: Tensor) -> Tensor:
    """``v`` with what leads from ``x`` to ``frame`` in frame 0: there ``x - t v`` is the frame.

    Args:
        v: ``(B, C, T, H, W)``.
        x: ``x_t``, of the same shape.
        t: ``(B,)``, fp32 or better.
        frame: ``(B, C, 1, H, W)``.
    """
    held = (x[:, :, :1] - frame) / t.clamp_min(LEAST_TIME).view(-1, 1, 1, 1, 1)
    return torch.cat([held.to(v.dtype), v[:, :, 1:]], dim=2)
