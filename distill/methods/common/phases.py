"""Phase of phased DMD (Fan et al. 2025, arXiv:2510.27684): a student's samples ``x_s`` at the time ``s`` where it ends.

``x_s = (1 - s) x0 + s e_s`` is not clean. Noise leads on from it to a time ``t > s``: ``x_t = a x_s + b e``, with
``a = (1 - t) / (1 - s)`` and ``b^2 = t^2 - a^2 s^2``, has the marginal of ``t``. ``s = 0`` is rectified flow.
x, e, v are samples; times are those of the video, as in :mod:`schedules`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.methods.common.schedules import add_noise, denoise, part_times
from models.sample import Sample


@dataclass(frozen=True)
class Phase:
    """Comparison and training of scores on samples ``x_s``; by default on clean ones, ``s = 0``."""

    end: float = 0.0
    """Time ``s`` at which the phase ends."""

    def _factors(self, x: Sample, t: Tensor) -> tuple[Sample, Sample, Sample, Sample]:
        """Return ``t``, ``s``, ``a`` and ``b`` of each part, shaped to multiply ``x``."""
        t, s = part_times(t, x), part_times(torch.full_like(t, self.end), x)
        a = (1 - t) / (1 - s)
        return t, s, a, (t * t - a * a * s * s).map(Tensor.sqrt)

    def add_noise(self, x_s: Sample, noise: Sample, t: Tensor) -> Sample:
        """Return ``x_t = a x_s + b e``."""
        if not self.end:
            return add_noise(x_s, noise, t)
        _, _, a, b = self._factors(x_s, t)
        return a * x_s + b * noise

    def estimate(self, x_t: Sample, v: Sample, t: Tensor) -> Sample:
        """Return the posterior mean of ``x_s`` that the velocity implies, ``(1 - s) x0 + (a s^2 / t) e``. Comparing x0
        instead would make ``x_s - x_fake`` depend on the query, and a projection along it would take out signal."""
        x0 = denoise(x_t, v, t)
        if not self.end:
            return x0
        time, s, a, _ = self._factors(x_t, t)
        return (1 - s) * x0 + a * s * s / time * (x0 + v)

    def velocity(self, x_s: Sample, noise: Sample, t: Tensor) -> Sample:
        """Return ``v* = -x_s / (1 - s) + c e``, whose mean given ``x_t`` is the marginal's velocity."""
        if not self.end:
            return noise - x_s
        _, s, _, _ = self._factors(x_s, t)
        return self._noise_factor(x_s, t) * noise - x_s / (1 - s)

    def weight(self, x_s: Sample, t: Tensor) -> Sample:
        """Return ``1 / (1 + v)`` for each part ``(B,)``, ``v = (s / t)^2 (b / (1 - s) + a c)^2`` the variance of ``v*``
        that clean sample and noise leave: 256 shortly after ``s = .83``, and none at ``s = 0``."""
        time, s, a, b = self._factors(x_s, t)
        excess = s / time * (b / (1 - s) + a * self._noise_factor(x_s, t))
        return (1 + excess * excess).map(lambda part: part.flatten().reciprocal())

    def _noise_factor(self, x: Sample, t: Tensor) -> Sample:
        """Return ``c = (t + (1 - t) s^2 / (1 - s)^2) / b``."""
        time, s, _, b = self._factors(x, t)
        return (time + (1 - time) * s * s / ((1 - s) * (1 - s))) / b


CLEAN = Phase()
