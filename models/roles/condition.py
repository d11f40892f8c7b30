"""What conditions a network beside its state and time: caption embeddings, a first image, whatever a family needs.

Methods hand a condition on and never look inside. They may put samples together, pick, repeat and move them, and ask
for what guidance subtracts (:attr:`Condition.null`) or what a dropped caption is replaced by (:attr:`Condition.empty`);
the two differ where a negative prompt is set. Families read the tensors by name.

Names in use: ``text`` ``(B, L, D)``, embeddings of the caption; ``image_latents`` ``(B, C, T, H, W)``, a clip of the
first image and grey frames behind it, encoded; ``image_mask`` ``(B, F, T, H, W)``, 1 where a frame is given, of the F
frames of each latent frame; ``image_embeds`` ``(B, N, D)``, an image encoder's features; ``first_frame``
``(B, C, 1, H, W)``, the first frame alone, encoded, which takes the place of the noisy one or stands in channels of its
own; ``text_mask`` ``(B, L)`` bool, which tokens of the text count; ``glyphs`` ``(B, L, D)`` and ``glyph_mask``, the
same of what a caption quotes, to be written in the picture; ``latent_spacing`` ``(B, 4)`` fp32, how far latents are
from each other in seconds and pixels (``models/families/ltx.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST_FRAME = "first_frame"
EXACT = ("latent_spacing",)
"""Names of tensors that no dtype of compute rounds: in bf16 a frame of 1/24 s would be of .0417."""


def has_image(names: Collection[str]) -> bool:
    """Does an image belong to each sample of a condition with tensors of these names?"""
    return "image_latents" in names or FIRST_FRAME in names


@dataclass(frozen=True, slots=True)
class Condition:
    """The conditions of B samples."""

    tensors: Mapping[str, Tensor]
    """By name, each ``(B, ...)``."""
    null_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Of one sample, ``(...)``: what takes the place of the tensors of these names in :attr:`null`."""
    empty_values: Mapping[str, Tensor] = field(default_factory=dict)
    """The same for :attr:`empty`."""

    def __len__(self) -> int:
        """B, the number of samples."""
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, samples: slice | Tensor) -> Condition:
        """Some of the samples, as a slice or an index ``(n,)``."""
        return self._of({name: value[samples] for name, value in self.tensors.items()})

    @property
    def dtype(self) -> torch.dtype:
        """Of the floating-point tensors."""
        return next(value.dtype for value in self.tensors.values() if value.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Of the tensors."""
        return next(iter(self.tensors.values())).device

    @property
    def null(self) -> Condition:
        """The other branch of guidance, for the same samples: the negative prompt's text, the same image."""
        return self._replaced(self.null_values)

    @property
    def empty(self) -> Condition:
        """The same samples without a caption."""
        return self._replaced(self.empty_values)

    def repeat(self, times: int) -> Condition:
        """All samples ``times`` times, one round behind the other."""
        return Condition.cat([self] * times)

    def to(self, device: torch.device | torch.dtype, *, non_blocking: bool = False) -> Condition:
        """On another device, or in another floating-point dtype, which masks, indices and :data:`EXACT` do not take."""

        def moved(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: value
                if isinstance(device, torch.dtype) and (not value.is_floating_point() or name in EXACT)
                else value.to(device, non_blocking=non_blocking)
                for name, value in values.items()
            }

        return Condition(moved(self.tensors), moved(self.null_values), moved(self.empty_values))

    @staticmethod
    def cat(conditions: Sequence[Condition]) -> Condition:
        """The samples of all, in turn; they must have tensors of the same names. ``null`` is that of the first."""
        first = conditions[0]
        return first._of({name: torch.cat([each.tensors[name] for each in conditions]) for name in first.tensors})

    @staticmethod
    def where(choice: Tensor, first: Condition, second: Condition) -> Condition:
        """Of each sample the ``first``'s where ``choice`` ``(B,)`` is true, the ``second``'s elsewhere."""
        chosen = {
            name: torch.where(choice.view(-1, *[1] * (value.ndim - 1)), value, second.tensors[name])
            for name, value in first.tensors.items()
        }
        return second._of(chosen)

    def _replaced(self, values: Mapping[str, Tensor]) -> Condition:
        missing = values.keys() - self.tensors.keys()
        assert not missing, f"the condition has no {sorted(missing)}"
        replaced = {name: value.expand(len(self), *value.shape) for name, value in values.items()}
        return self._of({**self.tensors, **replaced})

    def _of(self, tensors: Mapping[str, Tensor]) -> Condition:
        return Condition(tensors, self.null_values, self.empty_values)


def text_condition(text: Tensor, null_text: Tensor | None = None, empty_text: Tensor | None = None) -> Condition:
    """A condition of caption embeddings alone.

    Args:
        text: ``(B, L, D)``.
        null_text: of the negative prompt, ``(L, D)``.
        empty_text: of the empty caption, ``(L, D)``.
    """
    null = {} if null_text is None else {"text": null_text}
    empty = {} if empty_text is None else {"text": empty_text}
    return Condition({"text": text}, null, empty)
