"""A given first frame, whose latents stand in the noisy ones' place with a time of their own.

For networks without channels or an encoder for an image (Wan 2.2's TI2V, LTX-Video): where the condition has the tensor
``first_frame``, that takes the place of the latents of frame 0, and the times of its tokens are 0.

Shape legend: B samples, C T H W latents of one sample, S tokens of one sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_cp.errors import UserError
from models.families.base import LatentShape, Shape

LEAST_TIME = 1e-6
"""Below it a velocity towards the frame is taken as at it: at t = 0 it would be 0 / 0."""


def frame_shape(latent_shape: LatentShape) -> Shape:
    """Of the first frame beside latents ``(C, T, H, W)``."""
    channels, _, height, width = latent_shape
    return channels, 1, height, width


def check_given(latent_shape: LatentShape, frame: Shape, setting: str) -> None:
    """Can samples of latents ``(C, T, H, W)`` be given a first frame of the shape ``frame``?

    Raises:
        UserError: a clip that is the frame; a frame of another shape.
    """
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
