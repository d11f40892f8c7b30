"""What a method saw on the way to its losses: means over the samples of a step, for the metrics."""

from __future__ import annotations

import torch
from torch import Tensor


class Observations:
    """Sums of what was observed since the last :meth:`drain`, as tensors: nothing waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, where: Tensor | None = None) -> None:
        """Observe one number per sample.

        Which names a step observes must not depend on the values: they are summed over ranks by position.

        Args:
            name: of the metric, without the role.
            values: ``(B,)``.
            where: ``(B,)`` booleans: which samples count; all by default.
        """
        values = values.detach().double()
        counted = torch.ones_like(values) if where is None else where.double()
        # A value that does not count may be NaN, which a product with 0 would keep.
        total = torch.stack([torch.where(counted > 0, values, 0.0).sum(), counted.sum()])
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def drain(self) -> dict[str, tuple[float, float]]:
        """Sum and count of each name, by name; and forget them."""
        names = sorted(self._sums)
        pairs = torch.stack([self._sums[name] for name in names]).tolist() if names else []
        self._sums = {}
        return {name: (total, count) for name, (total, count) in zip(names, pairs, strict=True)}


def per_sample_mean(x: Tensor) -> Tensor:
    """Mean over all but the first dimension, ``(B,)``."""
    return x.flatten(1).mean(1)


def per_sample_norm(x: Tensor) -> Tensor:
    """Root mean square over all but the first dimension, ``(B,)``: a norm that does not grow with the resolution."""
    return x.flatten(1).square().mean(1).sqrt()


def observe_latents(observations: Observations, prefix: str, x: Tensor) -> None:
    """Per channel mean and standard deviation of each sample, and how much it moves from frame to frame.

    Args:
        observations: where to.
        prefix: of the names: ``PREFIX_mean/CHANNEL``, ``PREFIX_std/CHANNEL``, ``PREFIX_motion``.
        x: latents ``(B, C, T, H, W)``.
    """
    x = x.detach()
    flat = x.flatten(2)
    for channel, (mean, std) in enumerate(
        zip(flat.mean(2).unbind(1), flat.std(2, correction=0).unbind(1), strict=True)
    ):
        observations.add(f"{prefix}_mean/{channel}", mean)
        observations.add(f"{prefix}_std/{channel}", std)
    moved = x.diff(dim=2).abs()
    observations.add(f"{prefix}_motion", per_sample_mean(moved) if moved.numel() else torch.zeros_like(flat[:, 0, 0]))


def observe_by_time(observations: Observations, name: str, values: Tensor, t: Tensor, buckets: int = 4) -> None:
    """Mean of ``values`` ``(B,)`` within each of ``buckets`` equal parts of [0, 1] of the time ``t`` ``(B,)``.

    Named ``NAME/t0.00`` by the lower end of each; null in the metrics where no sample fell.
    """
    index = (t.detach() * buckets).long().clamp(0, buckets - 1)
    for bucket in range(buckets):
        observations.add(f"{name}/t{bucket / buckets:.2f}", values, index == bucket)
