"""`data=moving_shapes`: short clips of one moving shape, rendered on the fly, in pixel space.

A caption is "a COLOUR SHAPE MOTION", for example "a red circle growing". What the caption leaves open is drawn for each
clip: position, size, amount of growth, start and speed of the fall; with ``colour_shares`` the colour too, so that a
caption's clips have eight modes of known weight. There is no VAE: latents are pixels scaled to [-1, 1]. Pixel
coordinates run from 0 to the side length, with pixel centres at .5.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from distill.data.encoders.words import COLOURS, MOTIONS, SHAPES, PixelCodec, WordTable
from distill.data.videos.decode import ClipFormat
from fsdp_cp.choices import check_range
from fsdp_cp.errors import UserError
from models.condition import Condition

if TYPE_CHECKING:
    from distill.data.settings import MovingShapesSettings

BACKGROUND = 0.1
"""Brightness (0 to 1) of every background pixel, and of a colour's dark channels."""

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
"""Each has its brightest channel at 1, so that the coverage of a pixel can be read off without knowing the colour."""

BLINK_PERIOD = 4
"""Frames: two on, two off, starting on. (A free phase takes a small model too long to learn; so do free directions.)"""

CAPTIONS = tuple(
    f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape} {motion}"
    for colour, motion, shape in product(COLOURS, MOTIONS, SHAPES)
)
UNCOLOURED_CAPTIONS = tuple(f"a {shape} {motion}" for motion, shape in product(MOTIONS, SHAPES))
"""Captions of clips whose color is drawn."""
CAPTION_WORDS = 4
SPLITS = ("train", "heldout")
BANDS = 16
"""Number of pitches whose levels make up the sound of a clip, from the lowest to the highest."""
ROWS = 4
"""Number of moments in a frame at which the levels are known."""
SILENCE = 0.16
"""Loudness (0 to 1) below which a moment counts as silent, and is not heard."""
_MAX_CLIPS = 2**24
_REFERENCE_SIDE = 16.0
_MAX_OFFSET = 3.0  # pixels of a frame of that side


@dataclass(kw_only=True, slots=True, frozen=True)
class Scene:
    """Content of one clip, frame by frame. Lengths in pixels."""

    colour: str
    shape: str
    motion: str
    centres: np.ndarray
    """(T, 2): x, y."""
    radii: np.ndarray
    """(T,): of the circle, or of the circle of the square's area."""
    visible: np.ndarray
    """(T,), bool."""


def captions_of(colour_shares: Sequence[float] | None) -> tuple[str, ...]:
    """The data set's captions: with the colour, or without where clips of a caption have several."""
    return CAPTIONS if colour_shares is None else UNCOLOURED_CAPTIONS


def caption_parts(caption: str) -> tuple[str | None, str, str]:
    """(colour, shape, motion) of a caption; no colour where it names none. Raises UserError for another caption."""
    words = caption.split()
    if caption in UNCOLOURED_CAPTIONS:
        return None, words[1], words[2]
    if caption not in CAPTIONS:
        raise UserError(f"caption {caption!r} is not one of moving_shapes; use for example {CAPTIONS[0]!r}")
    return words[1], words[2], words[3]


def draw_scene(
    caption: str,
    rng: np.random.Generator,
    *,
    num_frames: int,
    height: int,
    width: int,
    colour: str | None = None,
) -> Scene:
    """Return the content of a clip of ``caption``. ``rng`` draws all that it leaves open, except the ``colour``."""
    named, shape, motion = caption_parts(caption)
    colour = named or colour
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
    return Scene(colour=colour, shape=shape, motion=motion, centres=centres, radii=radii, visible=visible)


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
    colour = np.array(RGB[scene.colour])[:, None, None, None]
    return (BACKGROUND + alpha[None] * (colour - BACKGROUND)).astype(np.float32)


def raised(scene: Scene, share: float, *, height: int) -> Scene:
    """Return ``scene`` moved up or down, so that ``share`` in [0, 1] covers all heights of the frame (``height``).

    Its center stays at least 3/16 of the frame away from both borders, from the first frame to the last.
    """
    border, path = height * _MAX_OFFSET / _REFERENCE_SIDE, scene.centres[:, 1]
    low, high = border - path.min(), height - border - path.max()
    moved = scene.centres + np.array([0.0, min(low, high) + share * abs(high - low)])
    return replace(scene, centres=moved)


def render_sound(scene: Scene, *, height: int, width: int) -> np.ndarray:
    """Return the sound of a scene: levels of its bands at each moment, float32 (ROWS T, BANDS) in [-1, 1].

    A tone is as high as the center of the shape, and as loud as the shape is large; it stops while the shape is
    blinked off.
    """
    frames = np.arange(len(scene.radii))
    times = np.arange(ROWS * len(frames)) / ROWS
    # The tone of a falling shape glides; all others have one center.
    centre = np.interp(times, frames, scene.centres[:, 1])
    loudness = np.repeat(scene.radii * scene.visible, ROWS) / (min(height, width) * 6 / _REFERENCE_SIDE)
    pitch = (1 - centre / height) * (BANDS - 1)
    levels = loudness[:, None] * np.exp(-0.5 * (np.arange(BANDS) - pitch[:, None]) ** 2)
    return (2 * levels - 1).astype(np.float32)


class MovingShapes:
    """Data set of the rendered clips. Item i has caption i modulo 64; it depends on (seed, split, i) and sizes alone.

    Clips have at least 6 frames of 16 x 16 pixels. ``seed`` renders them; :meth:`heldout` is another stream of it.

    Raises:
        UserError: a number out of range, an unknown word in the negative prompt, a missing word table.
    """

    def __init__(self, settings: MovingShapesSettings, *, seed: int = 0) -> None:
        self._captions = captions_of(settings.colour_shares)
        # Below these sizes no motion shows: the blinking needs a full period, the small shape a few whole pixels. An
        # epoch's order is a list of all clips.
        check_range(settings, "num_frames", least=6, where="data.")
        check_range(settings, "height", "width", least=16, where="data.")
        check_range(settings, "num_clips", least=len(self._captions), most=_MAX_CLIPS, where="data.")
        size = {name: getattr(settings, name) for name in ("num_frames", "height", "width")}
        ClipFormat(**size, fps=settings.fps)  # refuses sizes of no clip
        shares = settings.colour_shares
        self._colour_shares = None if shares is None else _checked_shares(shares)
        self._table = WordTable(settings.encoders)
        self._size, self._seed, self._split, self._num_clips = size, seed, "train", settings.num_clips
        self.fps = float(settings.fps)
        self.latent_shape = (3, *size.values())
        self.condition_shapes = {"text": (CAPTION_WORDS, self._table.vectors.shape[1])}
        self._caption_text = self._table.embed(list(self._captions), CAPTION_WORDS)
        prompts = [settings.negative_prompt, ""]
        null_text, empty_text = self._table.embed(prompts, CAPTION_WORDS, "data.negative_prompt")
        self.null, self.empty = {"text": null_text}, {"text": empty_text}

    def heldout(self) -> MovingShapes:
        """Return the same data set from the held-out stream, which training never sees."""
        data = copy.copy(self)
        data._split = "heldout"
        return data

    @property
    def fingerprint(self) -> str:
        """Short hash of everything that item ``i`` depends on."""
        decides = (self.latent_shape, self._seed, self._split, self._num_clips, self._table.words)
        identity = repr(("moving_shapes", 1, *decides)).encode()
        identity += self._table.vectors.numpy().tobytes() + self.null["text"].numpy().tobytes()
        if self._colour_shares is not None:  # not always: fingerprints of before must stay
            identity += repr(self._colour_shares).encode()
        return hashlib.sha256(identity).hexdigest()[:16]

    def __len__(self) -> int:
        return self._num_clips

    def __getitem__(self, index: int) -> dict:
        """Return {"latents": fp32 (3, T, H, W) in [-1, 1], "text": fp32 (L, D), "caption": str}."""
        if not 0 <= index < self._num_clips:
            raise IndexError(index)
        return {
            "latents": torch.from_numpy(self._render(index)) * 2 - 1,
            "text": self._caption_text[index % len(self._captions)],
            "caption": self._captions[index % len(self._captions)],
        }

    def caption(self, index: int) -> str:
        """Return the caption of an item."""
        return self._captions[index % len(self._captions)]

    def captions(self) -> list[str]:
        """The 64 captions, colour varying slowest; the 8 without a colour, with ``colour_shares``."""
        return list(self._captions)

    def condition(self, captions: list[str], clips: Sequence[int] | None = None) -> Condition:
        """Return ``text`` (n, L, D) of captions made of the table's words, or empty ones. UserError for others."""
        return Condition({"text": self._table.embed(captions, CAPTION_WORDS)}, self.null, self.empty)

    def embeddings(self, caption: str) -> dict[str, Tensor]:
        """Return ``text`` fp32 (L, D) of a caption made of the table's words, as encoded sets store it."""
        return {"text": self._table.embed([caption], CAPTION_WORDS)[0]}

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (n, 3, T, H, W) -> uint8 (n, T, H, W, 3); values outside [-1, 1] are clipped."""
        return PixelCodec().decode(latents)

    def release(self) -> None:
        """Nothing to free: there is no VAE."""

    def clips(self, count: int, first: int = 0) -> Tensor:
        """Items ``first`` and following (cyclically), decoded: uint8 (count, T, H, W, 3), to compare with."""
        items = [torch.from_numpy(self._render(i % self._num_clips)) for i in range(first, first + count)]
        return self.decode(torch.stack(items) * 2 - 1)

    def _render(self, index: int) -> np.ndarray:
        stream = (self._seed, SPLITS.index(self._split), index)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(stream)))
        colour = None
        if self._colour_shares is not None:
            colour = str(np.random.default_rng((*stream, 1)).choice(COLOURS, p=self._colour_shares))
        scene = draw_scene(self._captions[index % len(self._captions)], rng, **self._size, colour=colour)
        return render(scene, height=self._size["height"], width=self._size["width"])


def _checked_shares(shares: Sequence[float]) -> list[float]:
    shares = [float(share) for share in shares]
    if len(shares) != len(COLOURS) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise UserError(
            f"data.colour_shares={shares} must be {len(COLOURS)} numbers of at least 0 that sum to 1, of"
            f" {', '.join(COLOURS)}"
        )
    return [share / sum(shares) for share in shares]
