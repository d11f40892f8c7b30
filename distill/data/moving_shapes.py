"""`data=moving_shapes`: short clips of one moving shape, rendered on the fly, in pixel space, with a tone if ``sound``.

A caption is "a COLOR SHAPE MOTION", for example "a red circle growing". What it leaves open is drawn for each clip:
position, size, amount of growth, start and speed of the fall; with ``color_shares`` the color too, so that a
caption's clips have eight modes of known weight. There is no VAE: latents are pixels scaled to [-1, 1].
"""

import copy
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from distill.data.base import Measure
from distill.data.encoders.words import COLORS, PixelCodec, WordTable
from distill.data.shape_scenes import (
    BANDS,
    ROWS,
    SOUND_RATE,
    Scene,
    captions_of,
    draw_scene,
    raised,
    render,
    render_sound,
    waveform,
)
from fsdp_cp.errors import UserError
from models.condition import Condition
from models.sample import AUDIO, VIDEO, Sample, part_name

CAPTION_WORDS = 4
SPLITS = ("train", "heldout")
REFERENCE_CLIPS = 512
"""Number of held-out renders that distances are measured against."""


class MovingShapes:
    """Data set of the rendered clips. Item i has caption i modulo 64, and depends on seed, split, i and sizes."""

    def __init__(self, settings: Any, seed: int) -> None:
        """Make the data of :class:`distill.data.settings.MovingShapesSettings`."""
        shares, frames = settings.color_shares, settings.num_frames
        self._captions = captions_of(shares)
        self._color_shares = None if shares is None else _checked_shares(shares)
        self._table = WordTable(settings.encoders)
        self._frame = {"height": settings.height, "width": settings.width}
        self._size = {"num_frames": frames, **self._frame}
        self._seed, self._split, self._num_clips = seed, "train", settings.num_clips
        self.fps = float(settings.fps)
        self._has_sound = settings.sound
        self.latent_shapes = {VIDEO: (3, frames, *self._frame.values())}
        if self._has_sound:
            self.latent_shapes[AUDIO] = (1, ROWS * frames, BANDS)
        self._caption_text = self._table.embed(list(self._captions), CAPTION_WORDS)
        prompts = [settings.negative_prompt, ""]
        null_text, empty_text = self._table.embed(prompts, CAPTION_WORDS, "data.negative_prompt")
        self.null, self.empty = self._tensors(null_text), self._tensors(empty_text)
        self.condition_shapes = {name: tuple(value.shape) for name, value in self.null.items()}

    def heldout(self) -> Self:
        data = copy.copy(self)
        data._split = "heldout"
        return data

    @cached_property
    def _reference(self) -> np.ndarray:
        """Held-out renders of the second half of the stream: the report shows those of its beginning."""
        return self.heldout().clips(REFERENCE_CLIPS, first=len(self) // 2).numpy()

    def measure(
        self, clips: np.ndarray, captions: Sequence[str], sounds: np.ndarray | None = None
    ) -> dict[str, Measure]:
        from distill.data.shape_measures import measure  # lazily: SciPy

        return measure(clips, captions, self._reference, sounds)

    @property
    def fingerprint(self) -> str:
        decides = (self.latent_shapes[VIDEO], self._seed, self._split, self._num_clips, self._table.words)
        identity = repr(("moving_shapes", 1, *decides)).encode()
        identity += self._table.vectors.numpy().tobytes() + self.null["text"].numpy().tobytes()
        if self._color_shares is not None:  # not always: fingerprints of before must stay
            identity += repr(self._color_shares).encode()
        if self._has_sound:
            identity += repr(("sound", self.fps)).encode()
        return hashlib.sha256(identity).hexdigest()[:16]

    def __len__(self) -> int:
        return self._num_clips

    def __getitem__(self, index: int) -> dict:
        """Return {"latents": fp32 (3, T, H, W) in [-1, 1], "caption": str}, with sound "latents/audio": fp32 (1, ROWS
        T, BANDS) in [-1, 1] too, and the condition's tensors."""
        if not 0 <= index < self._num_clips:
            raise IndexError(index)
        scene = self._scene(index)
        item = {
            "latents": torch.from_numpy(render(scene, **self._frame)) * 2 - 1,
            "caption": self.caption(index),
            **self._tensors(self._caption_text[index % len(self._captions)]),
        }
        if self._has_sound:
            item[part_name("latents", AUDIO)] = torch.from_numpy(render_sound(scene, **self._frame))[None]
        return item

    def _tensors(self, text: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a condition, or of several, by their ``text`` (..., L, D)."""
        if not self._has_sound:
            return {"text": text}
        return {"text": text, "audio_text": text, "fps": torch.full((*text.shape[:-2], 1), self.fps)}

    def caption(self, index: int) -> str:
        return self._captions[index % len(self._captions)]

    def captions(self) -> list[str]:
        """The 64 captions, color varying slowest; the 8 without a color, with ``color_shares``."""
        return list(self._captions)

    def condition(self, captions: list[str], clips: Sequence[int] | None = None) -> Condition:
        return Condition(self._tensors(self._table.embed(captions, CAPTION_WORDS)), self.null, self.empty)

    def embeddings(self, caption: str) -> dict[str, Tensor]:
        return {"text": self._table.embed([caption], CAPTION_WORDS)[0]}

    def decode(self, latents: Sample) -> Tensor:
        return PixelCodec().decode(latents.video)

    def decode_next(self, latents: Sample, *, is_first: bool) -> Tensor:
        return self.decode(latents)

    def decode_sound(self, latents: Sample) -> tuple[Tensor, int]:
        levels = latents.parts[AUDIO].float().cpu().numpy()
        return torch.from_numpy(waveform(levels, fps=self.fps)), SOUND_RATE

    def release(self) -> None:
        """Nothing to free: there is no VAE."""

    def clips(self, count: int, first: int = 0) -> Tensor:
        """Items ``first`` and following (cyclically), decoded: uint8 (count, T, H, W, 3), to compare with."""
        items = [self[i % self._num_clips]["latents"] for i in range(first, first + count)]
        return PixelCodec().decode(torch.stack(items))

    def _scene(self, index: int) -> Scene:
        stream = (self._seed, SPLITS.index(self._split), index)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(stream)))
        color = None
        if self._color_shares is not None:
            color = str(np.random.default_rng((*stream, 1)).choice(COLORS, p=self._color_shares))
        scene = draw_scene(self._captions[index % len(self._captions)], rng, **self._size, color=color)
        if not self._has_sound:
            return scene
        # Heights over the whole frame: near the middle, a tone that follows the shape would sound like a constant.
        return raised(scene, float(np.random.default_rng((*stream, 2)).random()), height=self._size["height"])


def _checked_shares(shares: Sequence[float]) -> list[float]:
    shares = [float(share) for share in shares]
    if len(shares) != len(COLORS) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        wanted = f"{len(COLORS)} numbers of at least 0 with the sum 1, of {', '.join(COLORS)}"
        raise UserError(f"data.color_shares={shares} must be {wanted}")
    return [share / sum(shares) for share in shares]
