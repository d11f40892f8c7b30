"""The settings of the data sets, ``data=NAME``: each knows its own shapes, checks, and how it is built.

docs/extending.md shows how to add one. Nothing heavy is imported before a data set is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch

from distill.data.base import ClipDataset, ClipSettings
from fsdp_cp.choices import Bounds, Checked, add_installed
from fsdp_cp.errors import UserError, counted
from models.sample import PartShapes

if TYPE_CHECKING:
    from distill.data.sets.encode import Encoding
    from distill.data.sets.encoded_set import EncodedSet
    from distill.data.sources.source import Source

Shape = tuple[int, ...]


@dataclass(kw_only=True)
class DataSettings(Checked):
    """Base of the settings of a data set."""

    prefix = "data."
    has_clips: ClassVar[bool] = True
    """Whether items have latents to train on. Captions alone have none."""
    free_on_resume: ClassVar[tuple[str, ...]] = ("cache", "columns")
    """Settings that do not change an item; a resumed run may have others."""
    name: str = ""

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints of the files that settings name, by dotted key: a resumed run needs the same."""
        return {}

    def sample_shapes(self) -> tuple[PartShapes, dict[str, Shape]]:
        """Return the shapes of a sample's parts and those of its condition, without encoding anything."""
        return self.bucket_shapes()[0]

    def bucket_shapes(self) -> list[tuple[PartShapes, dict[str, Shape]]]:
        """Return the shapes of each bucket, as :meth:`sample_shapes`, those of the first. Override one of both."""
        return [self.sample_shapes()]

    def build(
        self,
        *,
        seed: int,
        device: torch.device,
        run_dir: Path,
        captions: Sequence[str] = (),
        images: Sequence[str] = (),
    ) -> ClipDataset:
        """Build the data set, encoding clips and captions on all ranks together. ``captions`` (and ``images``, one
        each, where images condition) are further ones for ``condition``, since the text encoder is freed;
        ``fingerprint`` does not depend on them."""
        raise NotImplementedError

    def encoding(self) -> Encoding:
        """Return the settings with which the data set encodes clips and captions."""
        raise NotImplementedError

    def check_captions(self, captions: Sequence[str]) -> None:
        """Refuse ``sample.captions`` that can be refused without the text encoder."""

    def table_in_words(self) -> str:
        """Say how many items there are, and where, without decoding any."""
        raise NotImplementedError


@dataclass(kw_only=True)
class MovingShapesSettings(DataSettings):
    """``data=moving_shapes``."""

    free_on_resume: ClassVar[tuple[str, ...]] = ("fps",)
    name: str = "moving_shapes"
    encoders: str = "assets/quickstart_teacher"
    """Folder with the word table ``words.safetensors``."""
    # Below these sizes no motion shows: the blinking needs a full period, the small shape a few whole pixels.
    num_frames: Annotated[int, Bounds(least=6)] = 6
    """Frames of a clip."""
    height: Annotated[int, Bounds(least=16)] = 16
    """Pixels."""
    width: Annotated[int, Bounds(least=16)] = 16
    """Pixels."""
    fps: float = 8.0
    """Frames per second of the sample videos."""
    negative_prompt: str = ""
    """Caption of the unconditional branch of guidance."""
    num_clips: Annotated[int, Bounds(least=8, most=2**24)] = 65536
    """Clips in an epoch, whose order is a list of all: at least as many as captions (64; 8 with ``color_shares``)."""
    color_shares: list[float] | None = None
    """Leave the color out of the captions: of a caption's clips, the shares that are red, orange, yellow, green, cyan,
    blue, magenta, white. For looking at which modes a student keeps; null: captions name the color."""
    sound: bool = False
    """Whether a tone goes with the shape, for networks that make sound (``experiment=quickstart_sound``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.color_shares is None and self.num_clips < 64:
            raise UserError(f"data.num_clips must be at least 64, one for each caption, got {self.num_clips}")

    def sample_shapes(self) -> tuple[PartShapes, dict[str, Shape]]:
        data = self.build(seed=0)
        return data.latent_shapes, data.condition_shapes

    def build(self, *, seed: int, captions: Sequence[str] = (), **_: Any) -> ClipDataset:
        from distill.data.moving_shapes import MovingShapes
        from distill.data.videos.decode import ClipFormat

        ClipFormat(num_frames=self.num_frames, height=self.height, width=self.width, fps=self.fps)  # refuses no clips
        data = MovingShapes(self, seed)
        data.condition(list(captions))  # refuses unknown words
        return data

    def fingerprints(self) -> dict[str, str]:
        from distill.data.encoders.words import table_file
        from models.files.checkpoint_files import fingerprint_of

        return {"data.encoders": fingerprint_of([table_file(self.encoders)])}

    def check_captions(self, captions: Sequence[str]) -> None:
        from distill.data.shape_scenes import captions_of

        known = captions_of(self.color_shares)
        for caption in captions:
            if caption not in known:
                raise UserError(f"sample.captions: {caption!r} is not one of moving_shapes, as {known[0]!r}")

    def encoding(self) -> Encoding:
        from distill.data.moving_shapes import CAPTION_WORDS

        return _encoding(self, max_text_tokens=CAPTION_WORDS)

    def table_in_words(self) -> str:
        return f"{counted(self.num_clips, 'clip')}, rendered on the fly"


@dataclass(kw_only=True)
class VideoFolderSettings(DataSettings, ClipSettings):
    """``data=video_folder``."""

    name: str = "video_folder"
    path: str | None = None
    """Folder with videos and their captions: ``metadata.csv`` or ``metadata.jsonl`` with the columns ``file_name`` and
    ``caption``, or a ``.txt`` file next to each video."""
    columns: dict[str, str] | None = None
    """Names that the table has for these columns, as ``{file_name: video, caption: prompt}``; null for their own. Of a
    part of a video (``start``, ``end``, ``cut``), an empty name ignores the column."""
    cache: str | None = None
    """Folder of encoded sets; ``RUN_DIR/cache`` when not set. Another setting or another source makes another set."""

    def bucket_shapes(self) -> list[tuple[PartShapes, dict[str, Shape]]]:
        for key, what in (("path", "folder" if self.has_clips else "file"), ("encoders", "folder")):
            if getattr(self, key) is None:
                raise UserError(f"data.{key} is not set; data={self.name} needs a {what} there")
        return self.encoding().bucket_shapes()

    def build(self, *, seed: int, run_dir: Path, **runtime: Any) -> ClipDataset:
        from distill.data.sets.dataset import encode_source

        return encode_source(self.source, self.encoding(), Path(self.cache or run_dir / "cache"), **runtime)

    def encoding(self) -> Encoding:
        return _encoding(self)

    def source(self) -> Source:
        from distill.data.sources import own

        return own.read(self.path, self.columns, has_clips=self.has_clips, image=self.image)

    def fingerprints(self) -> dict[str, str]:
        table = hashlib.sha256(json.dumps(self.source().sizes()).encode()).hexdigest()[:32]
        encoders = self.encoding().fingerprint(has_clips=self.has_clips or self.image is not None)
        return {"data.path": table, "data.encoders": encoders}

    def table_in_words(self) -> str:
        source, noun = self.source(), "clip" if self.has_clips else "caption"
        left_out = [f"{row.name} {row.problem}" for row in source.rows if row.problem]
        if len(left_out) == len(source.rows):
            raise UserError(f"{source.name}: none of {counted(len(left_out), noun)} can be used, first {left_out[0]}")
        note = f", {len(left_out)} of them left out (first {left_out[0]})" if left_out else ""
        return f"{counted(len(source.rows), noun)} in {Path(self.path).expanduser()}{note}"


@dataclass(kw_only=True)
class CaptionsSettings(VideoFolderSettings):
    """``data=captions``."""

    has_clips: ClassVar[bool] = False
    free_on_resume: ClassVar[tuple[str, ...]] = ("cache", "columns", "fps", "vae_precision", "vae_tiling")
    name: str = "captions"
    path: str | None = None
    """Text file with a caption per line, or ``.csv`` or ``.jsonl`` file with a column ``caption``. Where images
    condition, the columns ``image`` and ``last_image`` name the first and the last one, from the file's folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image is None:
            return
        if self.buckets is not None:
            raise UserError(f"data.buckets={self.buckets}: captions with images have one size; leave it out")
        self.free_on_resume = VideoFolderSettings.free_on_resume  # the others decide the images' latents


@dataclass(kw_only=True)
class EncodedSettings(DataSettings):
    """``data=encoded``."""

    free_on_resume: ClassVar[tuple[str, ...]] = ("cache", "encoders", "vae_precision", "vae_tiling")
    name: str = "encoded"
    path: str | None = None
    """Set of ``python -m distill.encode`` or ``python -m distill.teacher_clips``. It decides frames, sizes and rate."""
    encoders: str | None = None
    """Diffusers pipeline folder of the set, which decodes samples; null: the folder that the set names."""
    cache: str | None = None
    """Folder for embeddings of sample captions that the set lacks; ``RUN_DIR/cache`` when not set."""
    damaged: Literal["refuse", "skip"] = "refuse"
    """``refuse`` a set with damaged shards, or ``skip`` their items."""
    vae_precision: Literal["fp32", "bf16"] | None = None
    """Precision of the VAE that decodes samples; null: as the set was encoded."""
    vae_tiling: bool | None = None
    """Whether the VAE decodes frames in tiles; null: as the set was encoded."""

    @property
    def has_clips(self) -> bool:  # type: ignore[override]
        """Whether the set has clips; sets of captions have none."""
        return self.path is None or "latents" in self.open().parts

    @property
    def image(self) -> str | None:
        return self.encoding().image

    @property
    def negative_prompt(self) -> str:
        return self.encoding().negative_prompt

    def bucket_shapes(self) -> list[tuple[PartShapes, dict[str, Shape]]]:
        return self.encoding().bucket_shapes()

    def encoding(self) -> Encoding:
        return self._read()[1]

    def _read(self) -> tuple[EncodedSet, Encoding]:
        from distill.data.sets.dataset import encoding_of

        encoded, changes = self.open(), {"vae_precision": self.vae_precision, "vae_tiling": self.vae_tiling}
        return encoded, encoding_of(encoded, self.encoders, **changes)

    def open(self) -> EncodedSet:
        from distill.data.sets.encoded_set import EncodedSet

        if self.path is None:
            raise UserError("data.path is not set; give a set of python -m distill.encode or distill.teacher_clips")
        return EncodedSet(Path(self.path).expanduser(), f"data.path={self.path}")

    def build(self, *, seed: int, run_dir: Path, **runtime: Any) -> ClipDataset:
        from distill.data.sets.dataset import open_set

        return open_set(self._read, Path(self.cache or run_dir / "cache"), damaged=self.damaged, **runtime)

    def fingerprints(self) -> dict[str, str]:
        return {"data.path": self.open().fingerprint()}

    def table_in_words(self) -> str:
        encoded = self.open()
        return f"{counted(len(encoded), 'clip')} of the encoded set {self.path}"


def _encoding(settings: DataSettings, **others: Any) -> Encoding:
    from distill.data.sets.encode import Encoding

    names = {field.name for field in fields(Encoding)} & {field.name for field in fields(settings)}
    return Encoding(**{name: getattr(settings, name) for name in names}, **others)


DATA: dict[str, type[DataSettings]] = {
    "moving_shapes": MovingShapesSettings,
    "video_folder": VideoFolderSettings,
    "captions": CaptionsSettings,
    "encoded": EncodedSettings,
}
BROKEN: dict[str, UserError] = {}
"""Error of each data set of another package that could not be loaded, by name."""


def _add(name: str, settings: Any) -> None:
    if not issubclass(settings, DataSettings) or settings().name != name:
        raise TypeError(f"{settings!r} is not a subclass of DataSettings with name={name}")
    DATA[name] = settings


def _add_installed() -> None:
    BROKEN.update(add_installed("fsdp_cp.data_sets", "data", DATA, _add))


_add_installed()
