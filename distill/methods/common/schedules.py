"""Rectified flow: ``x_t = (1 - t) x0 + t e``, ``v = e - x0``, ``t`` in [0, 1] (Liu et al. 2022; Lipman et al. 2022).

Shapes: x, x0, e, v are ``(B, C, T, H, W)``; t is ``(B,)``, or ``(B, T)`` for a time per latent frame.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Time = TypeVar("Time", Tensor, float)


def per_sample(t: Tensor, x: Tensor) -> Tensor:
    """Reshape ``t`` ``(B,)`` to multiply ``x`` ``(B, ...)``, or ``t`` ``(B, T)`` to multiply ``(B, C, T, H, W)``."""
    if t.ndim == 2:
        return t[:, None, :, None, None]
    return t.view(-1, *([1] * (x.ndim - 1)))


def add_noise(x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Return ``x_t = (1 - t) x0 + t e``, where ``e`` is ``noise``."""
    t = per_sample(t, x0)
    return (1 - t) * x0 + t * noise


def denoise(x_t: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """Return ``x0 = x_t - t v``."""
    return x_t - per_sample(t, x_t) * v


def shift_time(t: Time, shift: float) -> Time:
    """Return ``s t / (1 + (s - 1) t)`` (Esser et al. 2024, eq. 23): more time at high noise for ``s > 1``."""
    return shift * t / (1 + (shift - 1) * t)


def euler_times(steps: int, shift: float) -> list[float]:
    """Return ``steps + 1`` times from 1 down to 0, evenly spaced before the shift."""
    return [shift_time(1 - i / steps, shift) for i in range(steps + 1)]
