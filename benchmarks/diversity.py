"""Diversity of the clips of one caption, on moving shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distill.data.base import Measure
from distill.data.shape_measures import geometry_of, is_coherent


def diversity(clips: np.ndarray, captions: Sequence[str], *, resamples: int = 100, seed: int = 0) -> dict[str, Measure]:
    """Measure how much clips (uint8, (n, T, H, W, 3)) of the same caption differ in what the caption leaves open.

    spread/position is the spread of the shape's centre, in frame sides. spread/phase is the spread of its phase of
    motion: its radius in the first and last frame and its path between them, in frame sides. Both are standard
    deviations within a caption (root of the unbiased variance, averaged over captions and coordinates) of the clips
    that the detector understands, or NaN if no caption has two such clips. Standard errors come from a bootstrap over
    captions. Compare with the spread of renders.
    """
    geometry = geometry_of(clips)
    side = min(clips.shape[2:4])
    understood = [is_coherent(geometry, i, ~np.isnan(geometry.sharpness[i])) for i in range(len(clips))]
    groups: dict[str, list[int]] = {}
    for i, (caption, _) in enumerate(zip(captions, clips, strict=True)):
        if understood[i]:
            groups.setdefault(caption, []).append(i)
    variances: dict[str, list[float]] = {"spread/position": [], "spread/phase": []}
    for members in groups.values():
        if len(members) < 2:
            continue
        positions, phases = [], []
        for i in members:
            seen = ~np.isnan(geometry.sharpness[i])
            centre, radius = geometry.centre[i, seen] / side, np.sqrt(geometry.area[i, seen] / np.pi) / side
            positions.append(centre.mean(axis=0))
            phases.append([radius[0], radius[-1], centre[-1, 1] - centre[0, 1]])
        variances["spread/position"].append(float(np.var(positions, axis=0, ddof=1).mean()))
        variances["spread/phase"].append(float(np.var(phases, axis=0, ddof=1).mean()))
    rng = np.random.default_rng(seed)
    return {name: _root_of_mean(np.array(values), resamples, rng) for name, values in variances.items()}


def _root_of_mean(values: np.ndarray, resamples: int, rng: np.random.Generator) -> Measure:
    if not len(values):
        return Measure(float("nan"), float("nan"), higher_is_better=False)
    drawn = [np.sqrt(values[rng.integers(len(values), size=len(values))].mean()) for _ in range(resamples)]
    return Measure(float(np.sqrt(values.mean())), float(np.std(drawn, ddof=1)), higher_is_better=False)
