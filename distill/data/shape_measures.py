"""Measures of `moving_shapes` clips, computed from their pixels and their sound, each with a standard error.

*Caption accuracy*: an analytic detector reads color and motion off each clip; what is blurred, incoherent or fits no
caption counts as wrong. *Distances*: the Wasserstein distance of an analytic feature over the clips from that over
held-out renders, in standard deviations of the latter. *Pitch correlation* and *lateness*: whether sound follows.

Shapes: clips are uint8 (n, T, H, W, 3), their sounds float32 (n, C, samples). Coverage (n, T, H, W) is the share of
each pixel that the foreground covers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import label, maximum_filter
from scipy.signal import hilbert
from scipy.stats import wasserstein_distance

from distill.data.base import Measure
from distill.data.shape_scenes import (
    BACKGROUND,
    BLINK_PERIOD,
    LOWEST,
    OCTAVES,
    RGB,
    ROWS,
    SILENCE,
    SOUND_RATE,
    caption_parts,
)

FEATURES = ("area", "compactness", "edge_sharpness", "displacement")
MEASURES = ("color_accuracy", "motion_accuracy", *(f"distance/{name}" for name in FEATURES))
"""Keys of the result of :func:`measure` without sound, in order."""
MOST_LATE = 2.0
"""Frames that a clip counts whose sound is later or earlier than this, or does not follow its picture at all."""

# Limits of the detector. Lengths are in units of min(H, W) / 16, the scale in which moving_shapes draws.
_MIN_AREA = 4.5  # area of a visible shape; renders: 9 or more
_EMPTY_AREA = 1.5  # area of stray pixels in a frame that counts as empty
_MIN_STEP = 0.8  # step across the outline over two pixels; renders: 0.95 or more; blurred by 0.7 pixels: at most 0.78
_MIN_ROUNDNESS = 0.72  # renders: 0.78 or more; torn or scattered shapes: less
_MAX_STRAY = 0.1  # share of the foreground outside its largest piece
_MAX_COLOR_ERROR = 0.25  # distance in RGB (0 to 1) to the nearest color; two colors differ by 0.4 or more
_MIN_GROWTH = 1.2  # change of the radius, first frame to last; renders: 2.1 to 4.3
_MAX_RADIUS_RANGE = 0.6  # range of the radius of a shape that keeps its size
_MIN_FALL = 3.5  # fall of the center, first frame to last; renders: 6.2 to 10.3
_MAX_WANDER = 1.0  # range of the center in directions in which it should not move
_MAX_MISFIT = 0.45  # deviation of radius or center from a straight line in time
_RESAMPLES = 100  # of the bootstrap over clips


@dataclass(frozen=True, slots=True)
class Geometry:
    """Geometry of the foreground per frame: arrays (n, T), centers (n, T, 2); NaN for a frame without foreground."""

    coverage: np.ndarray
    mask: np.ndarray
    area: np.ndarray
    compactness: np.ndarray
    sharpness: np.ndarray
    step: np.ndarray
    roundness: np.ndarray
    centre: np.ndarray
    unit: float


def coverage(clips: np.ndarray) -> np.ndarray:
    """Return each pixel's foreground share, (n, T, H, W) in [0, 1]. Each color has one channel at full brightness."""
    brightest = clips.max(axis=-1) / 255.0
    return np.clip((brightest - BACKGROUND) / (1 - BACKGROUND), 0.0, 1.0)


def geometry_of(clips: np.ndarray) -> Geometry:
    """Measure the foreground of uint8 clips (n, T, H, W, 3)."""
    alpha = coverage(clips)
    height, width = alpha.shape[2:]
    unit = min(height, width) / 16.0
    mask = alpha > 0.5
    # Count only the mask and its rim: noise on the background would dominate sums over the whole frame.
    soft = np.clip((alpha - 0.25) / 0.5, 0.0, 1.0) * maximum_filter(mask, size=(1, 1, 3, 3))
    area = soft.sum(axis=(2, 3))
    seen = mask.sum(axis=(2, 3)) >= _MIN_AREA * unit**2
    padded = np.pad(soft, ((0, 0), (0, 0), (1, 1), (1, 1)))
    dx, dy = np.diff(padded, axis=3), np.diff(padded, axis=2)
    gx, gy = (dx[:, :, :-1] + dx[:, :, 1:]) / 2, (dy[..., :-1] + dy[..., 1:]) / 2  # at the corners of pixels
    perimeter = np.sqrt(gx**2 + gy**2).sum(axis=(2, 3))
    # Steps between neighboring pixels, weighted by themselves: 1 for a step edge, about 1/k for a ramp over k pixels.
    outer = np.pad(alpha, ((0, 0), (0, 0), (1, 1), (1, 1)))
    steps = [abs(np.diff(outer, axis=axis)).reshape(*alpha.shape[:2], -1) for axis in (2, 3)]
    steps = np.concatenate(steps, axis=-1)
    steps = np.where(steps > 0.15, steps, 0.0)
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    step = _step_over_two_pixels(alpha, mask)
    with np.errstate(divide="ignore", invalid="ignore"):
        compactness = 4 * np.pi * area / perimeter**2
        sharpness = (steps**2).sum(axis=-1) / steps.sum(axis=-1)
        centre_x, centre_y = (soft * x).sum(axis=(2, 3)) / area, (soft * y[:, None]).sum(axis=(2, 3)) / area
        centre = np.stack([centre_x, centre_y], axis=-1)
        # Area against its second moment about its center: 1 for a disc, 0.95 for a square, less for spread-out shapes.
        from_x, from_y = x - centre_x[..., None, None], y[:, None] - centre_y[..., None, None]
        spread = from_x**2 + from_y**2 + 1 / 6
        roundness = area**2 / (2 * np.pi * (soft * spread).sum(axis=(2, 3)))
    for values in (compactness, sharpness, step, roundness, centre):
        values[~seen] = np.nan
    return Geometry(alpha, mask, area, compactness, sharpness, step, roundness, centre, unit)


def _step_over_two_pixels(alpha: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return (n, T) the median of the steepest rises and falls over two pixels, of rows and columns through the mask.
    Steps over one pixel would depend on whether an outline lies between pixels."""
    changes = []
    for axis in (2, 3):
        lines = np.pad(np.moveaxis(alpha, axis, 3), [(0, 0)] * 3 + [(2, 2)])
        change = lines[..., 2:] - lines[..., :-2]
        for steepest in (change.max(axis=3), -change.min(axis=3)):
            changes.append(np.where(mask.any(axis=axis), steepest, np.nan))
    steps = np.concatenate(changes, axis=-1)
    steps[np.isnan(steps).all(axis=-1)] = 0.0  # an empty frame, which the caller sets to NaN
    return np.nanmedian(steps, axis=-1)


def features(clips: np.ndarray) -> dict[str, np.ndarray]:
    """Return analytic features of uint8 clips (n, T, H, W, 3), each (n, T) or less; NaN for a frame without foreground,
    and 0 for a clip without any, so that it cannot drop out. ``area`` is the foreground's share of the frame;
    ``compactness`` 4 pi area / perimeter^2 (1 for a disc, 0.79 for a square, less for torn shapes); ``edge_sharpness``
    the mean step between pixels along the outline (1 for a hard edge); ``displacement`` how far the center moves to the
    next frame, in frame sides."""
    geometry = geometry_of(clips)
    height, width = geometry.coverage.shape[2:]
    moved = np.diff(geometry.centre, axis=1) / min(height, width)
    result = {
        "area": geometry.area / (height * width),
        "compactness": geometry.compactness,
        "edge_sharpness": geometry.sharpness,
        "displacement": np.sqrt((moved**2).sum(axis=-1)),
    }
    for values in result.values():
        values[np.isnan(values).all(axis=1)] = 0.0
    return result


def detect(clips: np.ndarray) -> list[tuple[str | None, str | None]]:
    """Return (color, motion) of each of uint8 clips (n, T, H, W, 3); None for what the detector cannot decide."""
    geometry = geometry_of(clips)
    detected = []
    for i in range(len(clips)):
        seen = ~np.isnan(geometry.sharpness[i])
        if not is_coherent(geometry, i, seen):
            detected.append((None, None))
        else:
            detected.append((_color(clips[i], geometry.coverage[i]), _motion(geometry, i, seen)))
    return detected


def is_coherent(geometry: Geometry, i: int, seen: np.ndarray) -> bool:
    """Return whether clip ``i`` shows one sharp, round shape in every frame of ``seen`` (T,)."""
    if not seen.any():
        return False
    if geometry.step[i, seen].mean() < _MIN_STEP or geometry.roundness[i, seen].min() < _MIN_ROUNDNESS:
        return False
    for mask in geometry.mask[i, seen]:
        pieces, count = label(mask)
        sizes = np.bincount(pieces.ravel(), minlength=count + 1)[1:]
        if sizes.max() < (1 - _MAX_STRAY) * sizes.sum():
            return False
    return True


def _color(clip: np.ndarray, alpha: np.ndarray) -> str | None:
    inside = alpha > 0.8  # only covered pixels: the edge is mixed with the background
    if not inside.any():
        return None
    names = list(RGB)
    mean = clip[inside].mean(axis=0) / 255.0
    errors = np.linalg.norm(np.array([RGB[name] for name in names]) - mean, axis=1)
    best = int(errors.argmin())
    return names[best] if errors[best] <= _MAX_COLOR_ERROR else None


def _line_misfit(values: np.ndarray) -> float:
    """Return the largest distance of (T,) or (T, 2) values from their least-squares line in time."""
    time = np.linspace(-1.0, 1.0, len(values))
    speed, start = np.polyfit(time, values, 1)
    return float(abs(values - start - np.multiply.outer(time, speed)).max())


def _motion(geometry: Geometry, i: int, seen: np.ndarray) -> str | None:
    centre = geometry.centre[i] / geometry.unit
    radius = np.sqrt(geometry.area[i] / np.pi) / geometry.unit
    still = np.ptp(centre[seen], axis=0).max() <= _MAX_WANDER
    constant = np.ptp(radius[seen]) <= _MAX_RADIUS_RANGE
    if not seen.all():
        regular = ((np.arange(len(seen)) // (BLINK_PERIOD // 2)) % 2 == 0).tolist() == seen.tolist()
        empty = (geometry.mask[i, ~seen].sum(axis=(1, 2)) <= _EMPTY_AREA * geometry.unit**2).all()
        return "blinking" if regular and empty and still and constant else None
    if _line_misfit(radius) > _MAX_MISFIT or _line_misfit(centre) > _MAX_MISFIT:
        return None
    if still and abs(radius[-1] - radius[0]) >= _MIN_GROWTH:
        return "growing" if radius[-1] > radius[0] else "shrinking"
    if constant and np.ptp(centre[:, 0]) <= _MAX_WANDER and centre[-1, 1] - centre[0, 1] >= _MIN_FALL:
        return "falling"
    return None


def _accuracy(right: Sequence[bool]) -> Measure:
    n, share = len(right), float(np.mean(right))
    # Agresti-Coull: at a share of 0 or 1 the binomial error is 0, and any difference would look infinitely significant.
    smoothed = (sum(right) + 2) / (n + 4)
    return Measure(share, float(np.sqrt(smoothed * (1 - smoothed) / (n + 4))), higher_is_better=True)


def _distance(values: np.ndarray, reference: np.ndarray) -> Measure:
    target = reference[~np.isnan(reference)]
    scale = max(float(target.std()), 1e-12)

    def distance(rows: np.ndarray) -> float:
        return float(wasserstein_distance(rows[~np.isnan(rows)], target)) / scale

    return _bootstrapped(distance, values, higher_is_better=False)


def _bootstrapped(statistic: Callable[..., float], *arrays: np.ndarray, higher_is_better: bool) -> Measure:
    """Return a statistic of the clips' rows, with the standard error of drawing the clips again."""
    rng, count = np.random.default_rng(0), len(arrays[0])
    draws = [rng.integers(count, size=count) for _ in range(_RESAMPLES)]
    drawn = [statistic(*(rows[draw] for rows in arrays)) for draw in draws]
    return Measure(statistic(*arrays), float(np.std(drawn, ddof=1)), higher_is_better)


def heard(sounds: np.ndarray, frames: int) -> np.ndarray:
    """Return the height that the tone says at each moment, (n, ROWS T), from 0 at the top; NaN while it is silent."""
    moments, mono = ROWS * frames, sounds.mean(axis=1)
    length = mono.shape[1] // moments
    analytic = hilbert(mono)
    # The angle from a sample to the next is the frequency; loud samples count more.
    turns = np.pad(analytic[:, 1:] * analytic[:, :-1].conj(), ((0, 0), (0, 1)))
    turn, power = (
        values[:, : moments * length].reshape(-1, moments, length).mean(axis=2)
        for values in (turns, abs(analytic) ** 2)
    )
    frequency = np.maximum(np.angle(turn) / (2 * np.pi) * SOUND_RATE, 1.0)
    loudness = 2 * np.sqrt(power)  # a tone of loudness 1 has the amplitude .5
    return np.where(loudness < SILENCE, np.nan, 1 - np.log2(frequency / LOWEST) / OCTAVES)


def _correlation(shown: np.ndarray, told: np.ndarray) -> float:
    """Return the correlation of (n, T) heights in the picture and by the tone, where a shape is visible. A silent frame
    has the mean tone."""
    visible = ~np.isnan(shown)
    shown, told = shown[visible], told[visible]
    if np.isnan(told).all():
        return 0.0
    told = np.where(np.isnan(told), np.nanmean(told), told)
    return float(np.corrcoef(shown, told)[0, 1]) if min(np.ptp(shown), np.ptp(told)) > 0 else 0.0


def late_by_loudness(visible: np.ndarray, audible: np.ndarray) -> float:
    """Return by how many frames a clip's sound (ROWS T,) goes on and off after its shape (T,); NaN if it does not."""
    appears = np.diff(np.repeat(visible, ROWS).astype(int))
    sounds = np.diff(audible.astype(int))
    # The shift at which most changes meet; of several, the least.
    most = round(MOST_LATE * ROWS)
    shifts = sorted(range(-most, most + 1), key=abs)
    padded = np.pad(sounds, most)
    met = [int(appears @ padded[most + shift :][: len(appears)]) for shift in shifts]
    return shifts[int(np.argmax(met))] / ROWS if max(met) > 0 else np.nan


def late_by_pitch(shown: np.ndarray, told: np.ndarray) -> float:
    """Return by how many frames the heights of a tone (ROWS T,) come after those of its falling shape (T,); NaN if it
    does not fall or sound."""
    frames, seen = np.arange(len(shown)), ~np.isnan(shown)
    times = np.arange(len(told)) / ROWS
    used = ~np.isnan(told) & (times <= frames[-1])  # the last frame's tone does not glide on
    if seen.sum() < 2 or not used.any():
        return np.nan
    speed, start = np.polyfit(frames[seen], shown[seen], 1)
    return float(np.mean(times[used] - (told[used] - start) / speed)) if speed > 0.02 else np.nan


def measure_sound(clips: np.ndarray, captions: Sequence[str], sounds: np.ndarray) -> dict[str, Measure]:
    """Measure whether sounds, as ``decode_sound`` returns them, follow the pictures of n clips: the correlation of
    pitch and height where the shape is visible, and how late it blinks (loudness) or falls (pitch)."""
    shown = geometry_of(clips).centre[..., 1] / clips.shape[2]
    told = heard(sounds, clips.shape[1])
    moments = told.reshape(*shown.shape, ROWS)
    audible = ~np.isnan(moments)
    count = np.where(audible.any(axis=2), audible.sum(axis=2), np.nan)
    mean = np.where(audible, moments, 0).sum(axis=2) / count
    late: dict[str, list[float]] = {"blinking": [], "falling": []}
    for caption, picture, tone in zip(captions, shown, told, strict=True):
        if (motion := caption_parts(caption)[2]) == "blinking":
            late[motion].append(late_by_loudness(~np.isnan(picture), ~np.isnan(tone)))
        elif motion == "falling":
            late[motion].append(late_by_pitch(picture, tone))
    return {
        "pitch_correlation": _bootstrapped(_correlation, shown, mean, higher_is_better=True),
        "lateness/loudness": _lateness(late["blinking"]),
        "lateness/pitch": _lateness(late["falling"]),
    }


def _lateness(late: Sequence[float]) -> Measure:
    distances = np.minimum(np.nan_to_num(np.abs(late), nan=MOST_LATE), MOST_LATE)
    if not len(distances):
        return Measure(np.nan, np.nan, higher_is_better=False)
    error = distances.std() / np.sqrt(max(len(distances) - 1, 1))
    return Measure(float(distances.mean()), float(error), higher_is_better=False)


def measure(
    clips: np.ndarray, captions: Sequence[str], reference: np.ndarray, sounds: np.ndarray | None = None
) -> dict[str, Measure]:
    """Measure uint8 clips (n, T, H, W, 3) of n captions against held-out renders (m, T, H, W, 3), and their sounds.
    Accuracies are shares of clips with binomial standard errors; distances, in standard deviations of the reference,
    have those of a seeded bootstrap over clips. Both sets should have the same balance of captions."""
    asked = [caption_parts(caption) for caption in captions]
    colors, motions = [], []
    for (wanted, _, motion), (color, seen) in zip(asked, detect(clips), strict=True):
        colors.append(color is not None and wanted in (None, color))
        motions.append(motion == seen)
    result = {"color_accuracy": _accuracy(colors), "motion_accuracy": _accuracy(motions)}
    ours, theirs = features(clips), features(reference)
    for name in FEATURES:
        result[f"distance/{name}"] = _distance(ours[name], theirs[name])
    return result | ({} if sounds is None else measure_sound(clips, captions, sounds))
