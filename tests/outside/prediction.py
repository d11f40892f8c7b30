"""Rectified-flow velocities from networks that predict v or noise at discrete, variance-preserving noise levels.

Such a network was trained on ``z = alpha x0 + sigma e`` with ``alpha^2 + sigma^2 = 1`` and ``alpha^2 =
alphas_cumprod[i]`` at the integer time ``i``, as in diffusers' DDIM and DPM schedulers. The project calls every
network at ``x_t = (1 - t) x0 + t e``, ``0 <= t <= 1``, for an estimate of ``e - x0``. Both states have the same
signal-to-noise ratio where ``alpha / sigma = (1 - t) / t``. With ``n = sqrt((1 - t)^2 + t^2)``:

- ``alpha = (1 - t) / n``, ``sigma = t / n``, and the network's state is ``z = x_t / n``.
- ``v = alpha e - sigma x0`` (Salimans & Ho 2022, arXiv:2202.00512, section 4 and appendix D) means ``x0 = alpha z -
  sigma v`` and ``e = sigma z + alpha v``. So ``e - x0 = ((2 t - 1) z + v) / n``, which is finite at every t.
- A prediction of ``e`` gives ``x0 = (x_t - t e) / (1 - t)``. So ``e - x0 = (e - x_t) / (1 - t)``, for ``t < 1``.

The network's time is real. It equals each integer time at that time's noise level and is linear in t between levels.
Outside the levels it is the nearest integer time. The map computes in the dtype of t (fp32 or better) and has
forward-mode derivatives; ``d time / dt`` is constant between two levels and jumps at each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

Prediction = Literal["v_prediction", "epsilon"]
"""Prediction of a network, named as ``prediction_type`` of diffusers' schedulers."""


class DiscretePrediction:
    """Variance-preserving noise schedule and prediction type of a network.

    A family calls its network in three steps, for ``x`` ``(B, C, T, H, W)`` and ``t`` ``(B,)``::

        output = network(prediction.state(x, t), prediction.network_time(t))
        velocity = prediction.velocity(output, x, t)

    Args:
        alphas_cumprod: ``alpha^2`` of each integer time, strictly decreasing; only the last can be 0.
        prediction: ``v_prediction`` or ``epsilon``.

    Raises:
        ValueError: the prediction is unknown, ``alphas_cumprod`` does not decrease, or ``epsilon`` is predicted
            although the last level is pure noise, which does not determine x0.
    """

    def __init__(self, alphas_cumprod: Iterable[float], prediction: Prediction):
        alphas = torch.as_tensor(list(alphas_cumprod), dtype=torch.float64)
        if prediction not in get_args(Prediction):
            raise ValueError(f"prediction must be one of {', '.join(get_args(Prediction))}, got {prediction!r}")
        if len(alphas) < 2 or not (alphas.diff() < 0).all() or alphas[0] >= 1 or alphas[-1] < 0:
            raise ValueError("alphas_cumprod must be at least two values that fall strictly, below 1 and not below 0")
        if prediction == "epsilon" and alphas[-1] == 0:
            raise ValueError(
                "a network that predicts the noise cannot have a noise level without signal; use v_prediction"
            )
        self.prediction = prediction
        signal, noise = alphas.sqrt(), (1 - alphas).sqrt()
        self.levels: list[float] = (noise / (signal + noise)).tolist()
        """Increasing rectified-flow times of the integer times."""

    @classmethod
    def from_scheduler(cls, scheduler: Any) -> DiscretePrediction:
        """Read the levels and the prediction of a diffusers scheduler with ``alphas_cumprod``.

        Its ``alphas_cumprod`` already includes ``snr_shift_scale`` and ``rescale_betas_zero_snr``.
        """
        return cls(scheduler.alphas_cumprod.tolist(), cast("Prediction", scheduler.config.prediction_type))

    def network_time(self, t: Tensor) -> Tensor:
        """Return the network's time, from 0 to the last integer time, for rectified-flow times of any shape."""
        levels = t.new_tensor(self.levels)  # a list, since fake tensors of a plan cannot mix with real tensors
        within = t.clamp(levels[0], levels[-1])
        below = torch.searchsorted(levels, within.detach(), right=True).sub(1).clamp(0, len(self.levels) - 2)
        lower, upper = levels[below], levels[below + 1]
        return below + (within - lower) / (upper - lower)

    def state(self, x: Tensor, t: Tensor) -> Tensor:
        """Return ``z``, the network's state for ``x_t`` ``(B, C, T, H, W)``, in its dtype; ``t`` is ``(B,)`` or ``(B,
        T)``, fp32 or better."""
        return (x / _root(_per_sample(t, x))).to(x.dtype)

    def velocity(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the estimate of ``e - x0`` in the dtype of ``t`` or ``output``, whichever is more precise.

        Args:
            output: output of the network, ``(B, C, T, H, W)``.
            x, t: as for :meth:`state`.

        Raises:
            ValueError: noise is predicted at t = 1. CUDA times are not checked, which would synchronize the device; the
                velocity is then not finite.
        """
        if self.prediction == "epsilon" and t.device.type == "cpu" and type(t) is Tensor and (t.detach() == 1).any():
            raise ValueError("a network that predicts the noise has no velocity at t = 1; keep all times below 1")
        t = _per_sample(t, x)
        if self.prediction == "epsilon":
            return (output - x) / (1 - t)
        root = _root(t)
        return ((2 * t - 1) * (x / root) + output) / root


def _per_sample(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t`` ``(B,)`` or ``(B, T)`` in the shape that broadcasts with ``x`` ``(B, C, T, H, W)``."""
    return t[:, None, None, None, None] if t.ndim == 1 else t[:, None, :, None, None]


def _root(t: Tensor) -> Tensor:
    """Return ``n = sqrt((1 - t)^2 + t^2)``."""
    return ((1 - t).square() + t.square()).sqrt()
