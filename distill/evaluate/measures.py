"""Measures of clips that need no model: of one clip, and of a prompt's clips next to the teacher's of the same noises.

Clips are uint8 (T, H, W, 3), and values are in units of the full range of a pixel, 1 = 255 levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from models.sample import Sample

VERSION = 1
"""Version of the measures. Raise it with any change of a value: files of different versions are not compared."""

MEASURES = {
    "motion": "mean change of a pixel from a frame to the next",
    "flicker": "mean distance of a pixel from the mean of the frames before and after it",
    "static": "share of clips that change by less than half a level from a frame to the next",
    "saturation": "mean distance of a pixel's largest color channel from its smallest",
    "contrast": "standard deviation of the brightness within a frame",
    "sharpness": "mean absolute Laplacian of the brightness",
    "distance/latents": "distance from the teacher's latents of the same noise, relative to their norm",
    "distance/pixels": "root mean square distance from the teacher's pixels of the same noise",
    "diversity": "root mean square distance of two clips of a prompt",
    "diversity/teacher": "diversity divided by the teacher's of the same prompt",
}
"""Measures and their meaning, in the order of tables."""

SHARES = ("static",)
"""Measures that are shares of clips."""

_STATIC = 0.5 / 255
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def clip_measures(clip: np.ndarray) -> dict[str, float]:
    """Measure one clip of at least 3 frames of 3 x 3 pixels: motion, flicker, static, saturation and so on."""
    sums: dict[str, list[float]] = {name: [] for name in ("motion", "flicker", "saturation", "contrast", "sharpness")}
    window: list[Tensor] = []  # the last frames alone: a clip in floats would be four times its bytes
    for frame in torch.from_numpy(clip):
        x = frame.float() / 255
        window = [*window[-2:], x]
        if len(window) > 1:
            sums["motion"].append(float((x - window[-2]).abs().mean()))
        if len(window) > 2:
            sums["flicker"].append(float((window[1] - (window[0] + window[2]) / 2).abs().mean()))
        sums["saturation"].append(float((x.amax(-1) - x.amin(-1)).mean()))
        luma = x @ x.new_tensor(_LUMA)
        sums["contrast"].append(float(luma.std(correction=0)))
        inner = luma[1:-1, 1:-1]
        around = luma[2:, 1:-1] + luma[:-2, 1:-1] + luma[1:-1, 2:] + luma[1:-1, :-2]
        sums["sharpness"].append(float((around - 4 * inner).abs().mean()))
    values = {name: float(np.mean(numbers)) if numbers else float("nan") for name, numbers in sums.items()}
    return values | {"static": float(values["motion"] < _STATIC)}


def prompt_measures(
    clips: Mapping[str, np.ndarray], latents: Mapping[str, Sample], reference: str | None
) -> dict[str, dict[str, list[float]]]:
    """Measure the clips of one prompt, uint8 (seeds, T, H, W, 3) of each participant; a seed's start from the same
    noise. Return by participant and measure a number per seed, or one of all seeds together; NaN: not defined.
    Distances are to the ``reference``, the teacher."""
    result = {}
    diversity = {name: _diversity(own) for name, own in clips.items()}
    for name, own in clips.items():
        per_clip = [clip_measures(clip) for clip in own]
        values = {key: [clip[key] for clip in per_clip] for key in MEASURES if key in per_clip[0]}
        if reference is not None and name != reference:
            values["distance/latents"] = _relative_distance(latents[name], latents[reference])
            values["distance/pixels"] = [_distance(*pair) for pair in zip(own, clips[reference], strict=True)]
        if len(own) > 1:
            values["diversity"] = [diversity[name]]
            if reference is not None and name != reference:
                of_teacher = diversity[reference]
                values["diversity/teacher"] = [diversity[name] / of_teacher if of_teacher > 0 else float("nan")]
        result[name] = values
    return result


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    pairs = zip(torch.from_numpy(a), torch.from_numpy(b), strict=True)
    return float(np.mean([float((x.float() - y.float()).square().mean()) for x, y in pairs]) ** 0.5 / 255)


def _diversity(clips: np.ndarray) -> float:
    """Return the mean distance of the pairs of clips; NaN for one clip."""
    pairs = [_distance(a, b) for a, b in combinations(clips, 2)]
    return float(np.mean(pairs)) if pairs else float("nan")


def _relative_distance(own: Sample, reference: Sample) -> list[float]:
    """Return the distance of each sample from its partner, over all parts, relative to the partner's norm."""
    pairs = [(own.parts[part].flatten(1), reference.parts[part].flatten(1)) for part in reference.parts]
    off = sum((a - b).double().square().sum(1) for a, b in pairs)
    norm = sum(b.double().square().sum(1) for _, b in pairs)
    return torch.sqrt(torch.as_tensor(off) / torch.as_tensor(norm)).tolist()
