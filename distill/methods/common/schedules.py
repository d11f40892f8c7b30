"""Rectified flow: ``x_t = (1 - t) x0 + t e``, ``v = e - x0``, ``t`` in [0, 1] (Liu et al. 2022; Lipman et al. 2022).

x, x0, e, v are samples. t is the time of their video, ``(B,)``, or ``(B, T)`` for a time per latent frame; the formulas
apply to each part at its own time (:meth:`models.sample.Sample.time`).
"""

from dataclasses import replace

from torch import Tensor

from models.sample import Sample, shift_time


def widen(values: Tensor, x: Tensor) -> Tensor:
    """Reshape ``(B,)`` to multiply ``x`` ``(B, ...)``, or ``(B, T)`` to multiply ``(B, C, T, ...)``."""
    if values.ndim == 2:
        return values.view(len(values), 1, -1, *([1] * (x.ndim - 3)))
    return values.view(-1, *([1] * (x.ndim - 1)))


def per_sample(values: Tensor | Sample, x: Sample) -> Sample:
    """Reshape values of each sample, or of each sample and part, to multiply ``x``."""
    return x.map(lambda part, value: widen(value, part), values if isinstance(values, Sample) else x.spread(values))


def part_times(t: Tensor, x: Sample) -> Sample:
    """Return each part's own time, shaped to multiply ``x``."""
    return replace(x, parts={name: widen(x.time(name, t), part) for name, part in x.parts.items()})


def same_time(t: float, x: Sample) -> Tensor:
    """Return the time ``t`` for each of the samples of ``x``, ``(B,)``."""
    return x.video.new_full((len(x),), t)


def add_noise(x0: Sample, noise: Sample, t: Tensor) -> Sample:
    """Return ``x_t = (1 - t) x0 + t e``, where ``e`` is ``noise``."""
    times = part_times(t, x0)
    return (1 - times) * x0 + times * noise


def denoise(x_t: Sample, v: Sample, t: Tensor) -> Sample:
    """Return ``x0 = x_t - t v``."""
    return x_t - part_times(t, x_t) * v


def euler_times(steps: int, shift: float) -> list[float]:
    """Return ``steps + 1`` times from 1 down to 0, evenly spaced before the shift."""
    return [shift_time(1 - i / steps, shift) for i in range(steps + 1)]
