"""First frames that the data give: their latents replace the noisy ones and have a separate time.

Networks without image channels or an image encoder use it (Wan 2.2's TI2V, LTX-Video). The condition's tensor
``first_frame`` replaces the latents of frame 0, and the time of its tokens is 0.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Collection

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


def token_times(t: Tensor, latents: Tensor, patch: tuple[int, int, int], given: Collection[int] = (0,)) -> Tensor:
    """Return a time for each token, ``(B, S)``: 0 in ``given`` frames, ``t`` in others.

    Args:
        t: ``(B,)``, or ``(B, T)``.
        latents: ``(B, C, T, H, W)``.
        patch: size of a token in latents, with one frame.
        given: numbers of the frames that are given.
    """
    frames, height, width = latents.shape[2:]
    of_frame = (height // patch[1]) * (width // patch[2])
    times = [t if t.ndim == 1 else t[:, i] for i in range(frames)]
    times = [torch.zeros_like(time) if i in given else time for i, time in enumerate(times)]
    return torch.stack(times, dim=1).repeat_interleave(of_frame, dim=1)


def hold(v: Tensor, x: Tensor, t: Tensor, frame: Tensor) -> Tensor:
    """Replace frame 0 of ``v`` by the velocity from ``x`` to ``frame``, so that ``x - t v`` is the frame there.

    Args:
        v: ``(B, C, T, H, W)``.
        x: ``x_t``, of the same shape.
        t: ``(B,)`` or ``(B, T)``, fp32 or better.
        frame: ``(B, C, 1, H, W)``.
    """
    first = t if t.ndim == 1 else t[:, 0]
    held = (x[:, :, :1] - frame) / first.clamp_min(LEAST_TIME).view(-1, 1, 1, 1, 1)
    return torch.cat([held.to(v.dtype), v[:, :, 1:]], dim=2)
