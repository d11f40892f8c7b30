"""Conditioning inputs of a network, in addition to latents and time: caption embeddings, a first image, and others.

Methods pass a condition on without reading its tensors. They can concatenate, select, repeat and move samples. They can
get the condition that guidance subtracts (:attr:`Condition.null`) and the one that replaces a dropped caption
(:attr:`Condition.empty`); the two differ if a negative prompt is set. Families read the tensors by name.

Tensor names:

- ``text`` ``(B, L, D)``: embeddings of the caption.
- ``text_mask`` ``(B, L)`` bool: true for the text tokens that count.
- ``glyphs`` ``(B, L, D)`` and ``glyph_mask``: the same for quoted text that the video should show.
- ``image_latents`` ``(B, C, T, H, W)``: encoded clip of the first image followed by grey frames.
- ``image_mask`` ``(B, F, T, H, W)``: 1 for a given frame, for each of the F frames of a latent frame.
- ``image_embeds`` ``(B, N, D)``: features of an image encoder.
- ``first_frame`` ``(B, C, 1, H, W)``: encoded first frame. It replaces the noisy frame or has separate channels.
- ``latent_spacing`` ``(B, 4)`` fp32: distances between latents in seconds and pixels (``models/families/ltx.py``).
- ``text_length`` ``(B,)`` int64, always on the host: number of text tokens that count; the network drops the others.
- ``audio_text`` ``(B, L, D)``, ``fps`` ``(B, 1)`` fp32: text of the sound, frames a second (LTX-2).
- ``keyframes`` ``(B, C, K, H, W)``: latents of K given frames, which are rows of the sequence (MiniMax-H3).
- ``keyframe_anchors`` ``(B, K)`` int64, always on the host: 0 for a clip's first frame, 1 for its last.
- ``keyframe_noise`` ``(B, C, K, H, W)``: their noise, drawn once for all calls (:meth:`Condition.with_noise`).
- ``text_tags`` ``(B, L)`` int8: 1 for rows of the text that show a picture, 2 for other rows before the caption.
- ``references`` ``(B, V, C)``: latents of given pictures and clips of any sizes (MiniMax-H3), as rows of a frame.
- ``reference_noise`` ``(B, V, C)``: their noise, as that of keyframes.
- ``reference_sounds`` ``(B, L, A)``: latents of given sounds: first all of the left side of each sound.
- ``reference_sizes`` ``(B, K, 4)`` int64, always on the host: frames, height and width of each reference's latents, and
  latents of a side of its sound; 0 for what it has not. A picture has one frame. V, L and K are the most of a set:
  further rows and references are 0.

Frames, rows and features that are given are never part of a sample: no loss, noise or step reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST_FRAME = "first_frame"
KEYFRAMES = "keyframes"
KEYFRAME_ANCHORS = "keyframe_anchors"
KEYFRAME_NOISE = "keyframe_noise"
REFERENCES = "references"
REFERENCE_NOISE = "reference_noise"
REFERENCE_SOUNDS = "reference_sounds"
REFERENCE_SIZES = "reference_sizes"
REFERENCE_PARTS = (REFERENCES, REFERENCE_SOUNDS, REFERENCE_SIZES)
"""Names of the tensors of given references, whose first axis is filled up with zeros."""
TEXT_TAGS = "text_tags"
EXACT = ("latent_spacing", "fps", KEYFRAMES, KEYFRAME_NOISE, REFERENCES, REFERENCE_NOISE, REFERENCE_SOUNDS)
"""Names of tensors that stay fp32: bf16 would round a frame of 1/24 s to .0417 s, and 23.976 to 24 frames a second.
Keyframes and references get their noise before they are rounded."""

TEXT_LENGTH = "text_length"
ON_HOST = (TEXT_LENGTH, KEYFRAME_ANCHORS, REFERENCE_SIZES)
"""Names of the tensors that stay on the host, since they determine shapes and positions."""
NOISE = {KEYFRAMES: KEYFRAME_NOISE, REFERENCES: REFERENCE_NOISE}
"""Names of given tensors that get noise, with the names of their noise."""


def has_image(names: Collection[str]) -> bool:
    """Return whether a condition with tensors of these names has an image for each sample."""
    return not {"image_latents", FIRST_FRAME, KEYFRAMES, REFERENCES}.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class Condition:
    """Conditioning inputs of B samples."""

    tensors: Mapping[str, Tensor]
    """Tensors ``(B, ...)``, by name."""
    null_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors ``(...)`` of one sample, by name, that replace those of each sample in :attr:`null`."""
    empty_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors ``(...)`` of one sample, by name, that replace those of each sample in :attr:`empty`."""

    def __len__(self) -> int:
        """Return the number of samples, B."""
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, samples: slice | Tensor) -> Condition:
        """Select samples by a slice or an index ``(n,)``."""
        return self._with({name: value[samples] for name, value in self.tensors.items()})

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the floating-point tensors."""
        return next(value.dtype for value in self.tensors.values() if value.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(value.device for name, value in self.tensors.items() if name not in ON_HOST)

    @property
    def null(self) -> Condition:
        """Condition that guidance subtracts, for the same samples: the negative prompt's text and the same images. Of a
        text that shows the images, it is the rows before the caption."""
        return self._replaced(self.null_values)

    @property
    def empty(self) -> Condition:
        """Condition of the same samples without a caption."""
        return self._replaced(self.empty_values)

    def with_noise(self, draw: Callable[[str, tuple[int, ...]], Tensor]) -> Condition:
        """Return the condition with noise for its given tensors. ``draw(name, shape)`` gets the shape of one sample and
        returns that of all."""
        given = {name: noise for name, noise in NOISE.items() if name in self.tensors}
        drawn = {noise: draw(noise, tuple(self.tensors[name].shape[1:])) for name, noise in given.items()}
        return self._with({**self.tensors, **drawn})

    def repeat(self, times: int) -> Condition:
        """Repeat the whole batch ``times`` times."""
        return Condition.cat([self] * times)

    def to(self, device: torch.device | torch.dtype, *, non_blocking: bool = False) -> Condition:
        """Move to a device or floating-point dtype. Masks, indices and :data:`EXACT` keep their dtype, and those
        :data:`ON_HOST` their device."""

        def moved(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            is_cast = isinstance(device, torch.dtype)
            stay = {n for n, x in values.items() if is_cast and (not x.is_floating_point() or n in EXACT)}
            stay.update(ON_HOST)
            return {n: x if n in stay else x.to(device, non_blocking=non_blocking) for n, x in values.items()}

        return Condition(moved(self.tensors), moved(self.null_values), moved(self.empty_values))

    @staticmethod
    def cat(conditions: Sequence[Condition]) -> Condition:
        """Concatenate conditions with tensors of the same names. ``null`` and ``empty`` come from the first."""
        first = conditions[0]
        return first._with({name: torch.cat([c.tensors[name] for c in conditions]) for name in first.tensors})

    @staticmethod
    def where(choice: Tensor, first: Condition, second: Condition) -> Condition:
        """Select each sample from ``first`` if ``choice`` ``(B,)`` is true, otherwise from ``second``."""
        chosen = {}
        for name, value in first.tensors.items():
            by_sample = choice.to(value.device).view(-1, *[1] * (value.ndim - 1))
            chosen[name] = torch.where(by_sample, value, second.tensors[name])
        return second._with(chosen)

    def _replaced(self, values: Mapping[str, Tensor]) -> Condition:
        missing = values.keys() - self.tensors.keys()
        assert not missing, f"the condition has no {sorted(missing)}"
        replaced = {name: value.expand(len(self), *value.shape) for name, value in values.items()}
        if (shown := self.tensors.get(TEXT_TAGS)) is not None:
            # A causal text encoder's rows before the caption are the same without it.
            rows = torch.arange(1, shown.shape[1] + 1)
            replaced[TEXT_LENGTH] = ((shown.cpu() > 0) * rows).amax(dim=1)
        return self._with({**self.tensors, **replaced})

    def _with(self, tensors: Mapping[str, Tensor]) -> Condition:
        return Condition(tensors, self.null_values, self.empty_values)
