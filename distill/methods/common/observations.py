"""Intermediate values of a method's losses, averaged over the samples of a step for the metrics."""

import torch
from torch import Tensor

from models.sample import VIDEO, Sample, part_name


class Observations:
    """Sums of the values since the last :meth:`drain`, as tensors, so that the host does not wait for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor | Sample, where: Tensor | None = None) -> None:
        """Add the ``values`` ``(B, ...)`` of a metric that ``where`` selects, or all; of a sample, those of each part.
        The names in a step must not depend on the values: ranks sum them by position."""
        if isinstance(values, Sample):
            for part, of_part in values.parts.items():
                self.add(part_name(name, part), of_part, where)
            return
        values = values.detach().double()
        counted = torch.ones_like(values) if where is None else where.double()
        # An unselected value may be NaN, and NaN times 0 is NaN.
        total = torch.stack([torch.where(counted > 0, values, 0.0).sum(), counted.sum()])
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def add_latents(self, prefix: str, sample: Sample) -> None:
        """Add each sample's ``PREFIX_mean/CHANNEL``, ``PREFIX_std/CHANNEL``, and ``PREFIX_motion``, its mean absolute
        change between frames; other parts than the video have ``PREFIX_PART``."""
        for name, part in sample.parts.items():
            of_part, x = prefix if name == VIDEO else f"{prefix}_{name}", part.detach()
            flat, moved = x.flatten(2), x.diff(dim=2).abs()
            for kind, values in (("mean", flat.mean(2)), ("std", flat.std(2, correction=0))):
                for channel, of_channel in enumerate(values.unbind(1)):
                    self.add(f"{of_part}_{kind}/{channel}", of_channel)
            motion = per_sample_mean(moved) if moved.numel() else torch.zeros_like(flat[:, 0, 0])
            self.add(f"{of_part}_motion", motion)

    def add_by_time(self, name: str, values: Tensor, t: Tensor) -> None:
        """Add the means of ``values`` over four equal intervals of the time ``t`` in [0, 1], both ``(B,)`` or
        ``(B, T)``, as ``NAME/t0.00`` by the lower end. An interval without samples is null in the metrics."""
        index = (t.detach() * 4).long().clamp(0, 3)
        for bucket in range(4):
            self.add(f"{name}/t{bucket / 4:.2f}", values, index == bucket)

    def drain(self) -> dict[str, tuple[float, float]]:
        """Return the sum and count of each name, and reset them."""
        names = sorted(self._sums)
        pairs = torch.stack([self._sums[name] for name in names]).tolist() if names else []
        self._sums = {}
        return {name: (total, count) for name, (total, count) in zip(names, pairs, strict=True)}


def per_sample_mean(x: Tensor) -> Tensor:
    """Return the mean over all but the first dimension, ``(B,)``."""
    return x.flatten(1).mean(1)


def squared_error(x: Sample, y: Sample, t: Tensor | None = None) -> Sample:
    """Return the mean squared difference of each sample and part, ``(B,)``; for times ``t`` ``(B, T)`` that of each
    latent frame, ``(B, T)``."""
    squares = (x - y).map(Tensor.square)
    if t is None or t.ndim == 1:
        return squares.map(per_sample_mean)
    return squares.map(lambda part: part.mean((1, *range(3, part.ndim))))


def per_sample_norm(x: Tensor) -> Tensor:
    """Return the root mean square over all but the first dimension, ``(B,)``. It does not grow with the resolution."""
    return x.flatten(1).square().mean(1).sqrt()
