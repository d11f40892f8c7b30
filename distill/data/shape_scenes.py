"""Scenes of ``data=moving_shapes``: captions, clips of them, their pixels (with centres at .5) and their sound."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from distill.data.encoders.words import COLORS, MOTIONS, SHAPES
from fsdp_cp.errors import UserError

BACKGROUND = 0.1
"""Brightness (0 to 1) of every background pixel, and of a color's dark channels."""

RGB = {
    "red": (1.0, BACKGROUND, BACKGROUND),
    "orange": (1.0, 0.5, BACKGROUND),
    "yellow": (1.0, 1.0, BACKGROUND),
    "green": (BACKGROUND, 1.0, BACKGROUND),
    "cyan": (BACKGROUND, 1.0, 1.0),
    "blue": (BACKGROUND, BACKGROUND, 1.0),
    "magenta": (1.0, BACKGROUND, 1.0),
    "white": (1.0, 1.0, 1.0),
}
"""Each has its brightest channel at 1, so that the coverage of a pixel can be read off without knowing the color."""

BLINK_PERIOD = 4
"""Frames: two on, two off, starting on. (A free phase takes a small model too long to learn; so do free directions.)"""

CAPTIONS = tuple(
    f"{'an' if color[0] in 'aeiou' else 'a'} {color} {shape} {motion}"
    for color, motion, shape in product(COLORS, MOTIONS, SHAPES)
)
UNCOLORED_CAPTIONS = tuple(f"a {shape} {motion}" for motion, shape in product(MOTIONS, SHAPES))
"""Captions of clips whose color is drawn."""
BANDS = 16
"""Number of pitches whose levels make up the sound of a clip, from the lowest to the highest."""
ROWS = 4
"""Number of moments in a frame at which the levels are known."""
SILENCE = 0.16
"""Loudness (0 to 1) below which a moment counts as silent, and is not heard."""
SOUND_RATE = 16000
"""Samples per second of the waveform that is made of the levels."""
LOWEST, OCTAVES = 220.0, 3.0
"""Frequency of the lowest band in Hz, and octaves up to the highest."""
_REFERENCE_SIDE = 16.0
_MAX_OFFSET = 3.0  # pixels of a frame of that side


@dataclass(kw_only=True, slots=True, frozen=True)
class Scene:
    """Content of one clip, frame by frame. Lengths in pixels."""

    color: str
    shape: str
    motion: str
    centres: np.ndarray
    """(T, 2): x, y."""
    radii: np.ndarray
    """(T,): of the circle, or of the circle of the square's area."""
    visible: np.ndarray
    """(T,), bool."""


def captions_of(color_shares: Sequence[float] | None) -> tuple[str, ...]:
    """The data set's captions: with the color, or without where clips of a caption have several."""
    return CAPTIONS if color_shares is None else UNCOLORED_CAPTIONS


def caption_parts(caption: str) -> tuple[str | None, str, str]:
    """(color, shape, motion) of a caption; no color where it names none. Raises UserError for another caption."""
    words = caption.split()
    if caption in UNCOLORED_CAPTIONS:
        return None, words[1], words[2]
    if caption not in CAPTIONS:
        raise UserError(f"caption {caption!r} is not one of moving_shapes; use for example {CAPTIONS[0]!r}")
    return words[1], words[2], words[3]


def draw_scene(
    caption: str, rng: np.random.Generator, *, num_frames: int, height: int, width: int, color: str | None = None
) -> Scene:
    """Return the content of a clip of ``caption``. ``rng`` draws all that it leaves open, except the ``color``."""
    named, shape, motion = caption_parts(caption)
    color = named or color
    unit = min(height, width) / _REFERENCE_SIDE
    progress = np.linspace(0.0, 1.0, num_frames)
    u = rng.random(8)  # always eight numbers, so that a change to one motion leaves the clips of the others alone
    fall = 0.0
    visible = np.ones(num_frames, dtype=bool)
    if motion in ("growing", "shrinking"):
        small, large = (1.7 + 0.8 * u[0]) * unit, (4.6 + 1.4 * u[1]) * unit
        radii = small + (large - small) * (progress if motion == "growing" else progress[::-1])
    elif motion == "falling":
        radii = np.full(num_frames, (2.6 + 0.8 * u[0]) * unit)
        fall = height - 2 * radii[0] - (0.5 + 2.5 * u[1]) * unit
    else:
        radii = np.full(num_frames, (3.0 + 1.8 * u[0]) * unit)
        visible = (np.arange(num_frames) // (BLINK_PERIOD // 2)) % 2 == 0
    reach = radii.max()
    # The shape stays inside the frame from its first frame to its last, and its centre near the middle: small shapes
    # anywhere in the frame are not kept in one place by a small model.
    free = np.minimum(np.array([width, height - fall]) / 2 - reach, _MAX_OFFSET * unit)
    start = np.array([width, height - fall]) / 2 + free * (2 * u[4:6] - 1)
    centres = start + progress[:, None] * np.array([0.0, fall])
    return Scene(color=color, shape=shape, motion=motion, centres=centres, radii=radii, visible=visible)


def render(scene: Scene, *, height: int, width: int) -> np.ndarray:
    """The clip, float32 (3, T, H, W) in [0, 1]; edges are anti-aliased by the distance to the outline."""
    dx = np.arange(width) + 0.5 - scene.centres[:, :1]
    dy = np.arange(height) + 0.5 - scene.centres[:, 1:]
    if scene.shape == "circle":
        distance = np.sqrt(dx[:, None, :] ** 2 + dy[:, :, None] ** 2) - scene.radii[:, None, None]
        alpha = np.clip(0.5 - distance, 0.0, 1.0)
    else:
        half = scene.radii[:, None] * (np.pi**0.5 / 2)
        inside_x, inside_y = (np.clip(0.5 + half - abs(d), 0.0, 1.0) for d in (dx, dy))
        alpha = inside_y[:, :, None] * inside_x[:, None, :]
    alpha = alpha * scene.visible[:, None, None]
    color = np.array(RGB[scene.color])[:, None, None, None]
    return (BACKGROUND + alpha[None] * (color - BACKGROUND)).astype(np.float32)


def raised(scene: Scene, share: float, *, height: int) -> Scene:
    """Return ``scene`` moved up or down: ``share`` in [0, 1] covers all heights but 3/16 at each border."""
    border, path = height * _MAX_OFFSET / _REFERENCE_SIDE, scene.centres[:, 1]
    low, high = border - path.min(), height - border - path.max()
    moved = scene.centres + np.array([0.0, min(low, high) + share * abs(high - low)])
    return replace(scene, centres=moved)


def render_sound(scene: Scene, *, height: int, width: int) -> np.ndarray:
    """Return the sound of a scene, levels of its bands at each moment: float32 (ROWS T, BANDS) in [-1, 1]. A tone is as
    high as the shape's center and as loud as the shape is large, and stops while it is blinked off."""
    frames = np.arange(len(scene.radii))
    times = np.arange(ROWS * len(frames)) / ROWS
    # The tone of a falling shape glides; all others have one center.
    centre = np.interp(times, frames, scene.centres[:, 1])
    loudness = np.repeat(scene.radii * scene.visible, ROWS) / (min(height, width) * 6 / _REFERENCE_SIDE)
    pitch = (1 - centre / height) * (BANDS - 1)
    levels = loudness[:, None] * np.exp(-0.5 * (np.arange(BANDS) - pitch[:, None]) ** 2)
    return (2 * levels - 1).astype(np.float32)


def waveform(levels: np.ndarray, *, fps: float) -> np.ndarray:
    """Return the sound of levels (..., ROWS T, BANDS), float32 (..., samples) at ``SOUND_RATE``, both in [-1, 1]: one
    tone of their pitch and loudness, silent below ``SILENCE``, whose phase is continuous, so that nothing clicks."""
    energy = np.clip((levels + 1) / 2, 0.0, None)
    loudness = np.minimum(energy.max(axis=-1), 1.0)
    loudness = np.where(loudness < SILENCE, 0.0, loudness)
    heard = np.where(energy > SILENCE / 2, energy, 0.0)
    pitch = (heard * np.arange(BANDS)).sum(axis=-1) / np.maximum(heard.sum(axis=-1), 1e-6)
    count = round(levels.shape[-2] / (ROWS * fps) * SOUND_RATE)
    at = np.arange(count) / SOUND_RATE * ROWS * fps - 0.5  # a level holds for the middle of its moment
    flat = [x.reshape(-1, x.shape[-1]) for x in (pitch, loudness)]
    pitch, loudness = (np.stack([np.interp(at, np.arange(row.size), row) for row in rows]) for rows in flat)
    frequency = LOWEST * 2.0 ** (OCTAVES * pitch / (BANDS - 1))
    sound = 0.5 * loudness * np.sin(2 * np.pi * np.cumsum(frequency, axis=-1) / SOUND_RATE)
    return sound.reshape(*levels.shape[:-2], count).astype(np.float32)
