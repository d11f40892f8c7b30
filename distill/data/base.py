"""Interface of all data sets, and the settings of encoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from distill.data.videos.references import COLUMN, KINDS, check_kinds, parse, with_files
from fsdp_cp.choices import Bounds, Checked
from fsdp_cp.errors import NotFinite, UserError, shown
from models.condition import REFERENCES, Condition
from models.sample import PartShapes, Sample, part_name

_LARGEST_UNIT = 32
"""Largest number of pixels of a token's side, of all VAEs; the others are powers of two too."""
IMAGES = {"first_frame": {"image": 0}, "last_frame": {"last_image": -1}, "both": {"image": 0, "last_image": -1}}
IMAGES[REFERENCES] = {COLUMN: 0}
"""Columns of a table that name images, by value of ``data.image``, and the frames of a clip that these are."""


def placed_image(text: str, image: str | None, change: Callable[[Path], Path] = Path, folder: Path = Path()) -> str:
    """Return an image's file, or references by their column, for a value of ``data.image``: as absolute paths, of which
    ``change`` makes others. Relative paths are from ``folder``."""

    def placed(file: str) -> str:
        return str(change((folder / Path(file).expanduser()).absolute()))

    if image != REFERENCES:
        return placed(text)
    try:
        check_kinds([reference.kind for reference in parse(text)])
        return with_files(text, placed)
    except UserError as error:
        raise UserError(f"the image {text!r} {error}") from error


def image_files(text: str, image: str | None) -> list[str]:
    """Return the files of an image or of references (:func:`placed_image`)."""
    placed = placed_image(text, image)
    return [reference.file for reference in parse(placed)] if image == REFERENCES else [placed]


VAE_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class ClipSettings(Checked):
    """Settings that decide what a clip and a caption become."""

    prefix = "data."

    encoders: str | None = None
    """Diffusers pipeline folder with ``vae/``, ``text_encoder/`` and ``tokenizer/``."""
    num_frames: int = 17
    """Frames of a clip; 4k + 1 for Wan's VAE."""
    height: int = 64
    """Pixels, after resizing and cropping."""
    width: int = 112
    """Pixels, after resizing and cropping."""
    fps: float = 8.0
    """Frames per second at which clips are sampled."""
    buckets: list[list[int]] | Literal["auto"] | None = None
    """Sizes ``[frames, height, width]`` of clips, in place of one: each clip gets the size that keeps most of it, and
    samples the first. ``auto``: ``num_frames`` frames upright, square, 4:3 and 3:4 too; null: one size, which may
    enlarge clips."""
    negative_prompt: str = ""
    """Caption of the unconditional branch of guidance."""
    max_text_tokens: Annotated[int, Bounds(least=1, most=8192)] = 512
    """Tokens of a caption; longer ones are cut, and that is logged. Attention over more than 8192 would fill a GPU."""
    vae_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the VAE, which encodes clips and decodes samples: ``fp32``, or ``bf16`` for half the memory."""
    vae_tiling: bool = False
    """Frames through the VAE in tiles of 256 pixels: little memory at 720p, and faint seams."""
    image: Literal["first_frame", "last_frame", "both", "references"] | None = None
    """Images for networks that take some: ``first_frame`` of the clip (in Wan 2.2's TI2V and LTX, it replaces the noisy
    frame), and for MiniMax-H3 also ``last_frame`` or ``both``; ``references`` follows from the next setting; null for
    none."""
    references: list[str] | None = None
    """Most references of a clip, for MiniMax-H3's ``transformer_ref``: a list of ``image``, ``video`` (without its
    sound), ``clip`` (with it) and ``sound``. The column ``references`` names each clip's, as
    ``image:cat.png;sound:cat.wav``. Pictures are counted as 16:9, videos and sounds as long as a clip."""
    reference_image_edge: Annotated[int, Bounds(least=32, most=4096)] = 2048
    """Pixels of the shorter side of pictures among the references, whatever the clip's size; as released."""
    reference_video_edge: Annotated[int, Bounds(least=32, most=4096)] = 768
    """Pixels of the shorter side of videos among the references; as released."""
    silence: Literal["zero"] | None = None
    """Clips without a sound track, for networks that make sound: ``zero`` takes them as silent; null leaves them
    out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(sizes := self.buckets, list):
            if not sizes or not all(len(size) == 3 and min(size) >= 1 and sizes.count(size) == 1 for size in sizes):
                kind = "different sizes [frames, height, width]"
                raise UserError(f"data.buckets={sizes} must be {kind}; use for example [[81,480,832],[81,832,480]]")
            self.num_frames, self.height, self.width = sizes[0]
        self._check_references()

    def _check_references(self) -> None:
        """Let ``references`` choose the kind of images."""
        if self.references is None:
            edges = self.reference_image_edge, self.reference_video_edge
            if self.image == REFERENCES or edges != (2048, 768):
                raise UserError("data.references must be set for data.image=references and for their sizes; list kinds")
            return
        if self.image not in (None, REFERENCES):
            raise UserError(f"data.references and data.image={self.image} exclude each other; leave one out")
        where = f"data.references={shown(self.references)}"
        if unknown := [kind for kind in self.references if kind not in KINDS]:
            raise UserError(f"{where} has {unknown[0]!r}; use {', '.join(KINDS)}")
        try:
            check_kinds(self.references)
        except UserError as error:
            raise UserError(f"{where} {error}") from error
        if len({frames for frames, *_ in self.sizes}) > 1:
            raise UserError(f"data.buckets={shown(self.sizes)} must have one length with data.references")
        self.image = REFERENCES

    @property
    def sizes(self) -> list[list[int]]:
        """Frames, height and width of the clips of each bucket."""
        if isinstance(self.buckets, list):
            return self.buckets
        frames, height, width = self.num_frames, self.height, self.width
        shapes = [(height, width)]
        if self.buckets == "auto":
            unit, area = math.gcd(height, width, _LARGEST_UNIT), height * width
            square, longer, shorter = (
                math.isqrt(pixels) // unit * unit for pixels in (area, area * 4 // 3, area * 3 // 4)
            )
            shapes += [(width, height), (square, square)]
            shapes += [(shorter, longer), (longer, shorter)] if shorter else []
        return [[frames, *sides] for sides in dict.fromkeys(shapes)]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured number and its standard error (same unit)."""

    value: float
    standard_error: float
    higher_is_better: bool

    def worse_by(self, other: Measure) -> float:
        """Return by how many combined standard errors this value is worse than ``other``; NaN if one is not finite."""
        if not (math.isfinite(self.value) and math.isfinite(other.value)):
            return math.nan
        difference = other.value - self.value if self.higher_is_better else self.value - other.value
        error = math.hypot(self.standard_error, other.standard_error)
        if error == 0.0:
            return 0.0 if difference == 0.0 else math.copysign(math.inf, difference)
        return difference / error


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Items of a data set whose clips have one size. Every global batch is of one bucket."""

    latent_shapes: PartShapes
    """Shape of each part of one sample's latents."""
    items: Sequence[int]
    """Numbers of the items. Captions alone have no size: their items are in every bucket."""


class ClipDataset(Protocol):
    """Short clips with captions, as latents and text embeddings, or captions alone."""

    latent_shapes: PartShapes
    """Shape of each part of one sample's latents: ``video`` ``(C, T, H, W)``, and perhaps ``audio`` ``(C, T, F)``. With
    several buckets, those of the first, which are also those of samples."""
    condition_shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor of one sample's condition, by name (models/condition.py): ``text`` ``(L, D)``, ..."""
    fps: float
    """Frames per second of the decoded clips."""
    null: Mapping[str, Tensor]
    """Tensors of the unconditional branch of guidance: ``text`` of the negative prompt, fp32 ``(L, D)``."""
    empty: Mapping[str, Tensor]
    """Tensors that replace those of a dropped caption: ``text`` of the empty caption, fp32 ``(L, D)``."""
    fingerprint: str
    """Short hash of everything that item ``i`` depends on."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``caption``, ``latents`` fp32 ``(C, T, H, W)``, ``latents/PART`` of parts other than the video, and
        each tensor of the condition by its name, fp32. Captions alone have no latents."""

    def caption(self, index: int) -> str:
        """Return the caption of an item, without its tensors."""

    def embeddings(self, caption: str) -> dict[str, Tensor]:
        """Return the embeddings of a caption, ``(tokens, D)`` by name, as encoded sets store them."""

    def captions(self) -> Sequence[str]:
        """Return the distinct captions, in a fixed order."""

    def condition(self, captions: list[str], clips: Sequence[int] | None = None) -> Condition:
        """Return the condition of n samples with these captions, fp32, on the CPU. Images, where they condition, are
        those of the items ``clips``, or of any item with the caption."""

    def decode(self, latents: Sample) -> Tensor:
        """Decode the video of n samples to uint8 ``(n, T, H, W, 3)`` pixels on the CPU, by :func:`to_bytes`."""

    def decode_next(self, latents: Sample, *, is_first: bool) -> Tensor | None:
        """Decode the next latents of clips, as :meth:`decode` does after those of the calls before, or the first ones.
        ``None``, or data without this method, if that cannot be: then the clip is decoded again with each chunk."""

    def decode_sound(self, latents: Sample) -> tuple[Tensor, int]:
        """Decode the audio of n samples to float32 ``(n, channels, samples)`` on the CPU, and return its samples per
        second. Only data sets with the part ``audio`` have it.
        """

    def release(self) -> None:
        """Free the VAE that :meth:`decode` loaded."""


def to_bytes(frames: Tensor) -> Tensor:
    """Return ``frames`` of any shape as uint8: -1 is 0, 1 is 255. Infinite values or NaN raise :class:`NotFinite`."""
    if not frames.isfinite().all():
        raise NotFinite("the VAE's frames are not finite, though the latents are; set data.vae_precision=fp32")
    # Rounded, not cut: cutting darkens every frame by half a level on average.
    return frames.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8)


def buckets_of(data: ClipDataset) -> Sequence[Bucket]:
    """Return ``data.buckets``, which a data set of several sizes has, or one bucket of all items."""
    one = Bucket(latent_shapes=data.latent_shapes, items=range(len(data)))
    return getattr(data, "buckets", [one])


@runtime_checkable
class MeasuredDataset(Protocol):
    """Data set that can tell how good clips are: samples and report then have measures, of held-out captions."""

    def heldout(self) -> ClipDataset:
        """Return items that training never sees."""

    def measure(
        self, clips: np.ndarray, captions: Sequence[str], sounds: np.ndarray | None = None
    ) -> dict[str, Measure]:
        """Measure clips, uint8 ``(n, T, H, W, 3)``, of n captions; data with sound also get their ``sounds``, float32
        ``(n, channels, samples)``."""


def sample_of(items: Mapping[str, Any], clock: Mapping[str, float], name: str = "latents") -> Sample | None:
    """Return the latents (or ``states``), if any, of B collated items; ``clock`` has the parts and their shifts."""
    if name not in items:
        return None
    return Sample({part: items[part_name(name, part)] for part in clock}, clock)


def condition_of(items: Mapping[str, Any], data: ClipDataset) -> Condition:
    """Return the condition of B collated items of ``data``."""
    return Condition({name: items[name] for name in data.condition_shapes}, data.null, data.empty)
