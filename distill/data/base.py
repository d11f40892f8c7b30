"""What a data set is, whatever it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from models.condition import Condition


class ClipDataset(Protocol):
    """Short clips with captions, as latents and text embeddings; or captions alone."""

    latent_shape: tuple[int, int, int, int]
    """``(C, T, H, W)`` of one sample's latents."""
    condition_shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor of one sample's condition, by name (models/condition.py): ``text`` ``(L, D)``, ..."""
    fps: float
    """Frames per second of the decoded clips."""
    null: Mapping[str, Tensor]
    """What guidance subtracts has of these names in their place: ``text`` of the negative prompt, fp32 ``(L, D)``."""
    empty: Mapping[str, Tensor]
    """What a dropped caption is replaced by: ``text`` of the empty caption, fp32 ``(L, D)``."""
    fingerprint: str
    """Short hash of all that decides what item ``i`` is."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``{"latents": fp32 (C, T, H, W), "caption": str}``, and each tensor of the condition by its name, fp32.

        Captions alone have no ``latents``.
        """
        ...

    def captions(self) -> list[str]:
        """The distinct captions, in a fixed order."""
        ...

    def condition(self, captions: list[str], clips: Sequence[int] | None = None) -> Condition:
        """Of n samples with these captions, fp32, on the CPU.

        Where images condition too, those of the items ``clips``; of any item with the caption where that is ``None``.

        Raises:
            UserError: a caption that is neither known nor told of.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """``(n, C, T, H, W)`` to uint8 ``(n, T, H, W, 3)`` pixels."""
        ...

    def release(self) -> None:
        """Free what :meth:`decode` loaded (a VAE)."""
        ...


def condition_of(items: Mapping[str, Any], data: ClipDataset) -> Condition:
    """The condition of B items of ``data``, collated."""
    return Condition({name: items[name] for name in data.condition_shapes}, data.null, data.empty)
