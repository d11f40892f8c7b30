"""Measures of clips that need no model: of one clip, and of a prompt's clips next to the teacher's of the same noises.

Clips are uint8 (T, H, W, 3), and values are in units of the full range of a pixel, 1 = 255 levels.
"""

from collections.abc import Callable, Mapping
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from models.sample import Sample

VERSION = 2
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
    "distance/lpips": "LPIPS between the clip and the teacher's of the same noise",
    "distance/dino": "1 - cosine similarity of DINO's features of the clip and of the teacher's of the same noise",
    "diversity": "root mean square distance of two clips of a prompt",
    "diversity/teacher": "diversity divided by the teacher's of the same prompt",
    "diversity/lpips": "LPIPS between two clips of a prompt",
    "diversity/dino": "1 - cosine similarity of DINO's features of two clips of a prompt",
}
"""Measures and their meaning, in the order of tables."""

SHARES = ("static",)
"""Measures that are shares of clips."""

TO_REFERENCE = (*(name for name in MEASURES if name.startswith("distance/")), "diversity/teacher")
"""Measures of a participant next to the reference, so that they mean nothing next to another one."""

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
    values = {name: float(np.mean(numbers or [np.nan])) for name, numbers in sums.items()}  # two frames: no flicker
    return values | {"static": float(values["motion"] < _STATIC)}


def prompt_measures(
    clips: Mapping[str, np.ndarray],
    latents: Mapping[str, Sample],
    reference: str | None,
    networks: Mapping[str, Callable[[np.ndarray], Tensor]] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Measure the clips of one prompt, uint8 (seeds, T, H, W, 3) of each participant.

    Clips of a seed start from the same noise. Distances are to the ``reference``, the teacher, in latents, pixels and
    between the embeddings that ``networks`` make of clips. Return by participant and measure a number per seed, or one
    of all seeds together; NaN: not defined.
    """
    spaces = {"pixels": (clips, _distance)}
    for space, network in (networks or {}).items():
        spaces[space] = ({name: network(own) for name, own in clips.items()}, _squared_distance)
    result = {}
    for name, own in clips.items():
        per_clip = [clip_measures(clip) for clip in own]
        values = {key: [clip[key] for clip in per_clip] for key in per_clip[0]}
        if reference not in (None, name):
            values["distance/latents"] = _relative_distance(latents[name], latents[reference])
            for space, (points, distance) in spaces.items():
                pairs = zip(points[name], points[reference], strict=True)
                values[f"distance/{space}"] = [distance(*pair) for pair in pairs]
        for space, (points, distance) in spaces.items() if len(own) > 1 else ():
            key = "diversity" if space == "pixels" else f"diversity/{space}"
            values[key] = [float(np.mean([distance(*pair) for pair in combinations(points[name], 2)]))]
        result[name] = values
    _divide_diversity(result, reference)
    return result


def _divide_diversity(result: dict[str, dict[str, list[float]]], reference: str | None) -> None:
    """Add each diversity divided by the reference's, in place."""
    if "diversity" not in result.get(reference, {}):
        return
    (of_reference,) = result[reference]["diversity"]
    for name in result.keys() - {reference}:
        (own,) = result[name]["diversity"]
        result[name]["diversity/teacher"] = [own / of_reference if of_reference > 0 else float("nan")]


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    pairs = zip(torch.from_numpy(a), torch.from_numpy(b), strict=True)  # frame by frame
    squares = [float((x.float() - y.float()).square().mean()) for x, y in pairs]
    return float(np.mean(squares) ** 0.5 / 255)


def _squared_distance(a: Tensor, b: Tensor) -> float:
    """Return the squared distance of two clips' embeddings, the mean over frames."""
    return float((a - b).square().sum(-1).mean())


def _relative_distance(own: Sample, reference: Sample) -> list[float]:
    """Return the distance of each sample from its partner, over all parts, relative to the partner's norm."""
    pairs = [(own.parts[part].flatten(1), reference.parts[part].flatten(1)) for part in reference.parts]
    off = sum((a - b).double().square().sum(1) for a, b in pairs)
    norm = sum(b.double().square().sum(1) for _, b in pairs)
    return torch.sqrt(torch.as_tensor(off) / torch.as_tensor(norm)).tolist()
