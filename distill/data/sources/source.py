"""Rows to encode, of our own tables or of a data set of another project, and what their readers share.

A reader is a function of this folder that takes a path and returns a :class:`Source`, or ``None`` for other formats;
``choose.py`` lists them. A row is left out by its ``problem``, whatever the format.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from distill.data.shares import Shares
from distill.data.videos.container import ClipError, Cut, FilePart, VideoFile
from distill.data.videos.video_folder import ListedClip, not_listed
from fsdp_cp.errors import UserError, first_line
from models.files.checkpoint_files import fingerprint_of


@dataclass(frozen=True, kw_only=True)
class Source:
    """Clips or captions, perhaps with latents of a VAE and embeddings of the text encoder that another project
    stored."""

    name: str
    """Setting and path, for messages."""
    rows: Sequence[ListedClip]
    """Clips and captions; ``file`` is relative to ``folder``, or names the place of a clip that is no file of its
    own."""
    folder: Path | None
    """Folder of the videos or images; ``None``: captions alone."""
    has_latents: bool = True
    """Whether rows have clips. Otherwise only first frames are encoded, as conditions."""
    format: str = ""
    """Name of another project's format."""
    files: Sequence[Path] = ()
    """Files with the clips, latents and embeddings; none where these are the files of ``rows``."""
    videos: Mapping[str, FilePart] = field(default_factory=dict)
    """Videos in archives, by the ``file`` of their row."""
    latents: Callable[[str], torch.Tensor] | None = None
    """Read the stored latents (C, t, h, w) of a row by its ``file``; ``ClipError`` if they are damaged."""
    text: Callable[[str], torch.Tensor] | None = None
    """Read the stored embedding (tokens, D) of a row's caption likewise, perhaps filled up with zeros."""
    fps: Callable[[str], Any] | None = None
    """Read the frame rate of a row's clip, where the format tells it."""
    vae_class: str = "AutoencoderKLWan"
    """Class of the VAE of the model that stored tensors are for."""
    is_normalized: bool = True
    """Whether stored latents are as the transformer takes them, or as the VAE's encoder gives them."""
    is_checked: bool = True
    """Whether the scale of latents must show that."""

    @property
    def clips(self) -> list[ListedClip]:
        """The first row of each distinct clip, in their order."""
        clips: dict[str, ListedClip] = {}
        for row in () if self.folder is None else self.rows:
            if not row.problem:
                clips.setdefault(row.name, row)
        return list(clips.values())

    def video(self, clip: ListedClip) -> VideoFile:
        """Return the place of a clip, which may be missing."""
        file = self.videos.get(clip.file, self.folder / clip.file)
        return file if clip.span is None else Cut(file, clip.span)

    def not_used(self) -> list[str]:
        """Return the names of clips and archives in the folder that are no rows."""
        return not_listed(self.folder, self.rows) if self.has_latents and not self.files else []

    def sizes(self) -> list[Any]:
        """Return file name, bytes (``None``: missing), caption and part, if any, of each row; without files, the
        captions."""
        if self.folder is None:
            return [row.caption for row in self.rows]
        sizes = []
        for row in self.rows:
            files = [value for file in row.files for value in _size(self.folder / file)]
            sizes.append((*files, row.caption, *(row.span or ())))
        return sizes

    def fingerprint(self) -> str:
        """Return a hash of the rows and of samples of every file's bytes; a collective, shared by all ranks."""
        names = dict.fromkeys(name for clip in self.clips for name in clip.files)
        files = self.files or [self.folder / name for name in names]

        def look(file: Path) -> str:
            try:
                return fingerprint_of([file]) if file.is_file() else "missing"
            except OSError as error:
                return f"unreadable {type(error).__name__}"

        hashes = Shares().run(files, look)
        return hashlib.sha256(json.dumps([self.table_hash(), hashes]).encode()).hexdigest()[:32]

    def table_hash(self) -> str:
        rows = [
            (*row.files, row.caption, row.problem, *(row.span or ()), *filter(None, [row.references]))
            for row in self.rows
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]


def _size(file: Path) -> tuple[str, int | None]:
    return file.name, file.stat().st_size if file.is_file() else None


def files_ending(path: Path, *suffixes: str) -> list[Path]:
    """Return the files with these endings in a folder and its sub-folders, but hidden ones, or ``path`` itself, if it
    is one."""
    files = path.rglob("[!.]*") if path.is_dir() else [path]
    return sorted(file for file in files if file.name.endswith(suffixes))


def place_in(file: Path, path: Path, place: str) -> str:
    """Return the name of a row by its place in one of the files of ``path``."""
    return f"{file.relative_to(path) if file != path else file.name}:{place}"


def stored_row(name: str, caption: str | None, *, lacks: Sequence[str] = (), problem: str = "") -> ListedClip:
    """Return the row of a record. It is left out for what it ``lacks``, for its ``problem``, or without a caption."""
    if lacks:
        problem = f"has no {' and no '.join(lacks)}"
    if not (caption or "").strip():
        problem = problem or "has no caption"
    return ListedClip(file=name, caption=caption or "", problem=problem)


def cannot_read(file: Path, error: Exception) -> UserError:
    """Return the refusal of a file of a data set that cannot be read."""
    return UserError(f"data.path: {file} cannot be read ({first_line(error)[:200]}); copy it again")


def load_tensors(file: Path | Any) -> Any:
    """Return the tensors, and dictionaries of them, in a ``.pt`` file or stream; no other object is loaded."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # RuntimeError, UnpicklingError, EOFError, KeyError, ...
        raise ClipError(f"cannot be read ({first_line(error)[:200]})") from error


def as_tensor(value: Any, dims: int) -> torch.Tensor:
    """Return a stored tensor of so many dimensions in fp32, or raise ``ClipError``."""
    if not isinstance(value, torch.Tensor) or value.ndim != dims or not value.is_floating_point():
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ClipError(f"holds {shape}, not a tensor of {dims} dimensions")
    return value.float()
