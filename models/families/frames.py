"""First frames that the data give: their latents replace the noisy ones and have a separate time.

Networks without image channels or an image encoder use it (Wan 2.2's TI2V, LTX-Video). The condition's tensor
``first_frame`` replaces the latents of frame 0, and the time of its tokens is 0.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.families.base import LatentShape, Shape

LEAST_TIME = 1e-6
"""Minimum time that :func:`hold` divides by: at t = 0 the velocity would be 0 / 0."""


def frame_shape(latent_shape: LatentShape) -> Shape:
    """Return the shape of the first frame of latents ``(C, T, H, W)``."""
    channels, _, height, width = latent_shape
    return channels, 1, height, width


def put_in(x: Tensor, frame: Tensor) -> Tensor:
    """Replace frame 0 of ``x`` ``(B, C, T, H, W)`` by ``frame`` ``(B, C, 1, H, W)``."""
    return torch.cat([frame.to(x.dtype), x[:, :, 1:]], dim=2)


def token_times(t: Tensor, latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """Return a time for each token, ``(B, S)``: 0 in frame 0, ``t`` after it.

    Args:
        t: ``(B,)``.
        latents: ``(B, C, T, H, W)``.
        patch: size of a token in latents, with one frame.
    """
    frames, height, width = latents.shape[2:]
    of_frame = (height // patch[1]) * (width // patch[2])
    later = t[:, None].expand(-1, (frames - 1) * of_frame)
    return torch.cat([t.new_zeros(len(t), of_frame), later], dim=1)


def hold(v: Tensor, x: Tensor, t: Tensor, frame: Tensor) -> Tensor:
    """Replace frame 0 of ``v`` by the velocity from ``x`` to ``frame``, so that ``x - t v`` is the frame there.

    Args:
        v: ``(B, C, T, H, W)``.
        x: ``x_t``, of the same shape.
        t: ``(B,)``, fp32 or better.
        frame: ``(B, C, 1, H, W)``.
    """
    held = (x[:, :, :1] - frame) / t.clamp_min(LEAST_TIME).view(-1, 1, 1, 1, 1)
    return torch.cat([held.to(v.dtype), v[:, :, 1:]], dim=2)
