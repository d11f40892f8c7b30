"""A sample: the latents of clips by part, such as ``video`` and ``audio``.

- **Methods** add noise to samples, step, compare and take losses without asking which parts there are. A part's loss is
  a mean over the part; losses of parts are summed with weights (:meth:`Sample.total`).
- **Time.** A step has one time per sample, that of its video: the *clock*. Another part's own time is a shift of it,
  :meth:`Sample.time`, which only adding noise, denoising, stepping and a family's call ask for. A family names its
  parts with their shifts as released (``Family.parts``); ``Method.clock`` returns those of a run.
- **Families** get a sample in ``Family.outputs`` and return a velocity with the same parts and shifts.
- **Names.** The video keeps the plain names of draws, tensors and metrics; other parts append theirs, ``NAME/PART``
  (:func:`part_name`). Items of a data set hold ``latents``, ``latents/audio`` and perhaps ``states``,
  ``states/audio``, as encoded sets store them.
- **Shapes** are a mapping from part to ``(C, T, ...)``: ``latent_shapes`` of a data set, the first of the pair of
  ``sample_shapes()``, and ``FamilyPlanning.shapes_of_clip``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

VIDEO = "video"
"""Part that every sample has. It keeps the plain names of draws, tensors and metrics."""
AUDIO = "audio"
"""Part that some families have."""
PartShapes = Mapping[str, tuple[int, ...]]
"""Shape ``(C, T, ...)`` of each part of one sample, by name."""
Time = TypeVar("Time", Tensor, float)


def part_name(name: str, part: str) -> str:
    """Return the name of a part's draw, tensor or metric: ``name`` for the video, otherwise ``NAME/PART``."""
    return name if part == VIDEO else f"{name}/{part}"


def shift_time(t: Time, shift: float) -> Time:
    """Return ``s t / (1 + (s - 1) t)`` (Esser et al. 2024, eq. 23): more time at high noise for ``s > 1``."""
    return shift * t / (1 + (shift - 1) * t)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Tensors of B samples by part, with arithmetic by part.

    The other operand of ``+ - * /`` is a number, a sample with the same parts and shifts, or a mapping with a factor
    for each part. Parts are latents ``(B, C, T, ...)``, or values of each sample such as ``(B,)`` errors.
    """

    parts: Mapping[str, Tensor]
    """Tensors by part, the video first."""
    shifts: Mapping[str, float] = field(default_factory=dict)
    """Shift from the clock to a part's own time; 1 for parts that are not named."""

    @property
    def video(self) -> Tensor:
        """The video's tensor, ``(B, C, T, H, W)`` for latents."""
        return self.parts[VIDEO]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each part of one sample."""
        return {name: tuple(part.shape[1:]) for name, part in self.parts.items()}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the video."""
        return self.video.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.video.device

    def __len__(self) -> int:
        """Return the number of samples, B."""
        return len(self.video)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a sample is not a sequence; index it by sample, or read its parts")

    def __getitem__(self, samples: slice | Tensor | list[int]) -> Sample:
        """Select samples by a slice or an index."""
        return self.map(lambda part: part[samples])

    def frames(self, frames: slice) -> Sample:
        """Select latent frames of the video; for samples of the video alone."""
        assert [*self.parts] == [VIDEO], f"parts {[*self.parts]} have different frames"
        return self.map(lambda part: part[:, :, frames])

    def shift(self, part: str) -> float:
        """Return the shift from the clock to the part's own time."""
        return self.shifts.get(part, 1.0)

    def time(self, part: str, t: Time) -> Time:
        """Return the part's own time at the clock's ``t``, a number or a tensor of any shape."""
        shift = self.shift(part)
        return t if shift == 1.0 else shift_time(t, shift)

    def on_clock(self, times: Mapping[str, float]) -> Sample:
        """Return the sample with the shifts with which each part has its own of ``times``, in (0, 1), at the video's
        time: a state between the times of one clock."""
        odds = {part: time / (1 - time) for part, time in times.items()}
        return replace(self, shifts={part: own / odds[VIDEO] for part, own in odds.items()})

    def map(self, function: Callable[..., Tensor], *others: Sample | Mapping[str, Any]) -> Sample:
        """Return the sample of ``function(part, *other)`` for each part and the same part of each of ``others``."""
        for other in others:
            if isinstance(other, Sample):
                assert other.parts.keys() == self.parts.keys(), f"parts {[*other.parts]} and {[*self.parts]} differ"
                assert all(other.shift(name) == self.shift(name) for name in self.parts), "samples of different clocks"
        parts = [other.parts if isinstance(other, Sample) else other for other in others]
        return replace(self, parts={name: function(x, *(p[name] for p in parts)) for name, x in self.parts.items()})

    def spread(self, value: Any) -> dict[str, Any]:
        """Return ``value`` for each part."""
        return dict.fromkeys(self.parts, value)

    def _by_part(self, function: Callable[[Any, Any], Tensor], other: Any) -> Sample:
        if isinstance(other, (Sample, Mapping)):
            return self.map(function, other)
        return self.map(lambda part: function(part, other))

    def __add__(self, other: Any) -> Sample:
        return self._by_part(operator.add, other)

    def __sub__(self, other: Any) -> Sample:
        return self._by_part(operator.sub, other)

    def __mul__(self, other: Any) -> Sample:
        return self._by_part(operator.mul, other)

    def __truediv__(self, other: Any) -> Sample:
        return self._by_part(operator.truediv, other)

    def __rsub__(self, other: Any) -> Sample:
        return self._by_part(lambda part, value: value - part, other)

    __radd__, __rmul__ = __add__, __mul__

    def to(self, *args: Any, **kwargs: Any) -> Sample:
        """Move or convert each part, as :meth:`torch.Tensor.to`."""
        return self.map(lambda part: part.to(*args, **kwargs))

    def detach(self) -> Sample:
        """Return the sample without a graph."""
        return self.map(Tensor.detach)

    def chunk(self, count: int) -> list[Sample]:
        """Split the samples into ``count`` equal groups."""
        size = len(self) // count
        return [self[i * size : (i + 1) * size] for i in range(count)]

    @staticmethod
    def cat(samples: Sequence[Sample], dim: int = 0) -> Sample:
        """Join samples along ``dim``: 0 for more samples, 2 for later frames."""
        first = samples[0]
        return first.map(lambda *parts: torch.cat(parts, dim=dim), *samples[1:])

    def total(self, weights: Mapping[str, float]) -> Tensor:
        """Return the sum of the parts, which have one shape, with these weights; 1 for parts that are not named."""
        first, *others = (weights.get(name, 1.0) * part for name, part in self.parts.items())
        return sum(others, first)
