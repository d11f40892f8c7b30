"""`data=video_folder`: a folder of video files with captions, seen as cached latents.

The folder holds ``metadata.csv`` or ``metadata.jsonl`` with columns ``file_name,caption`` (the layout that Hugging Face
``datasets`` calls a video folder), or a ``.txt`` file next to each clip; ``file_name`` is relative to the folder. Shape
legend: C t h w latents, L tokens, D width of an embedding.
"""

from __future__ import annotations

import functools
import logging
import os
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distill.data.encoded import EncodedData
from distill.data.table import VIDEO_SUFFIXES, column_names, read_table, read_text
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank

logger = logging.getLogger(__name__)

TABLES = ("metadata.csv", "metadata.jsonl")
COLUMNS = ("file_name", "caption")


@dataclass(kw_only=True, slots=True, frozen=True)
class ListedClip:
    """A row of the table."""

    file: str
    """The file's name in the folder; the table's own name where no file has it."""
    caption: str
    """The caption, or ``""``."""
    problem: str = ""
    """Reason to leave the clip out before it is read."""


class VideoFolder(EncodedData):
    """Data set of the clips of a folder, encoded on first use and cached.

    Videos are sampled at ``fps``. Clips that are broken, missing or too short are named in the log and left out.
    """

    def _read(self) -> list[ListedClip]:
        return read_metadata(self.path, self.columns)

    @property
    def table(self) -> Path:
        return table_of(self.path) or self.path

    def _usable(self, rows: list[ListedClip]) -> list[tuple[str, str]]:
        """(cache key, caption) of the usable clips, the same on every rank; rank 0's log names the others."""
        results = iter(self.cache.write_clips([self.path / row.file for row in rows if not row.problem]))
        items, files, left_out = [], [], []
        for row in rows:
            what, value = ("error", row.problem) if row.problem else next(results)
            if what == "error":
                left_out.append((row.file, value))
            else:
                items.append((value, row.caption))
                files.append(self.path / row.file)
        if rank() == 0:
            for name, reason in left_out:
                logger.warning("clip left out: %s %s", name, reason)
            if left_out:
                logger.warning("%d of %d clips left out", len(left_out), len(rows))
            # realpath, not Path.resolve: that raises RuntimeError for a link to itself.
            listed = {os.path.realpath(self.path / row.file) for row in rows}
            extra = sorted(
                file.name
                for file in self.path.iterdir()
                if file.suffix.lower() in VIDEO_SUFFIXES and os.path.realpath(file) not in listed
            )
            if extra:
                names = ", ".join(extra[:5])
                logger.warning("%d videos are not in %s and not used: %s", len(extra), self.table.name, names)
        if not items:
            name, reason = left_out[0]
            raise UserError(
                f"data.path={self.path} has no usable clip ({len(left_out)} left out, first: {name} {reason}); give "
                "longer videos, or set data.num_frames lower or data.fps higher"
            )
        self._images = self._encoded_images(files)
        return items

    def _decides(self) -> tuple[Any, ...]:
        return (self._images,) if self._images else ()  # fingerprints of text alone are those of before

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"latents": fp32 (C, t, h, w), "caption": str} and the condition's tensors by name, read from the cache."""
        key, caption = self._items[index]
        image = self._image_tensors(self._images[index]) if self._images else {}
        condition = self._text_tensors(caption) | self.clip_tensors | image
        return {"latents": self.cache.latents(key), "caption": caption, **condition}

    def _item_image(self, index: int) -> str:
        return self._images[index]

    def _image_key(self, caption: str) -> str:
        if caption in self._given_images:
            return self._given_images[caption]
        index = next((i for i, (_, known) in enumerate(self._items) if known == caption), None)
        if index is None:
            raise UserError(
                f"the caption '{caption}' is of no clip of {self.table}; give it an image (sample.images, or --image)"
            )
        return self._images[index]

    def captions(self) -> list[str]:
        return list(dict.fromkeys(caption for _, caption in self._items))


def table_of(path: Path) -> Path | None:
    """Return the table of the folder ``path``, or ``None`` if each clip has a ``.txt`` file next to it.

    Raises: ``UserError`` for two tables, and for a folder with neither.
    """
    if not path.is_dir():
        raise UserError(f"data.path={path} is not a folder; give a folder with videos and {TABLES[0]}")
    tables = [path / name for name in TABLES if (path / name).is_file()]
    if len(tables) > 1:
        raise UserError(f"data.path={path} has {' and '.join(TABLES)}; keep one of them there")
    if not tables and not any(file.with_suffix(".txt").is_file() for file in _videos(path)):
        raise UserError(
            f"data.path={path} has no {' or '.join(TABLES)}; add one with the columns {','.join(COLUMNS)}, or a .txt"
            " file with the caption next to each video"
        )
    return tables[0] if tables else None


def _videos(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in VIDEO_SUFFIXES)


def read_metadata(path: Path, columns: object = None) -> list[ListedClip]:
    """Return every row of the folder's table, or every video and the text next to it.

    Args:
        path: the folder.
        columns: the table's names of ``COLUMNS`` (``data.columns``).

    Raises: ``UserError`` if the folder, the file, a column, a file name or every row is missing; by line where the
        table would damage a caption (:func:`distill.data.table.read_table`), and for a file outside the folder.
    """
    names = column_names(COLUMNS, columns)
    file = table_of(path)
    if file is None:
        return [_beside(video) for video in _videos(path)]
    find, rows = _Finder(path), []
    for line, (name, caption) in read_table(file, names, f"data.path: {file}"):
        if not name or not name.strip():
            raise UserError(f"data.path: {file} has no {names[0]} in line {line}; fill it in or remove the line")
        if "\n" in name or "\r" in name:
            raise UserError(f"data.path: {file} has a line break in the {names[0]} of line {line}; write it on one")
        # A table that came with a data set must not reach other files; and the folder can be moved as a whole.
        if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir:
            raise UserError(
                f"data.path: {file} line {line} names {name[:100]!r}, which is outside the folder; use a path"
                f" relative to {path}, or link the file into it"
            )
        clip = find(name)
        if caption is None or not caption.strip():  # an empty one would train the student to do without
            clip = replace(clip, problem=clip.problem or f"has no caption in {file.name}")
        rows.append(replace(clip, caption=caption or ""))
    if not rows:
        raise UserError(f"data.path: {file} has no rows; add one per video")
    return rows


def _beside(video: Path) -> ListedClip:
    text = video.with_suffix(".txt")
    caption = read_text(text, f"data.path: {text}").strip() if text.is_file() else ""
    return ListedClip(file=video.name, caption=caption, problem="" if caption else f"has no caption in {text.name}")


class _Finder:
    """Search for the files of a folder by the names that a table has for them.

    A name that a file has is taken as it is. Else names are compared without regard to what changes when tables and
    files move between systems: composed or decomposed accents, blanks at the ends, backslashes between folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = functools.cache(self._names_in)  # one listing of each folder, not a call for each clip

    def __call__(self, name: str) -> ListedClip:
        parent, _, last = name.rpartition("/")
        if last in self._names(parent).get(_plain(last), ()):
            return ListedClip(file=name, caption="")
        found = [""]
        for part in os.path.normpath(name.replace("\\", "/")).split("/"):
            found = [os.path.join(above, each) for above in found for each in self._names(above).get(_plain(part), ())]
        if len(found) == 1:
            return ListedClip(file=found[0], caption="")
        problem = f"could be {' or '.join(map(repr, found[:3]))}; rename one" if found else "is missing"
        return ListedClip(file=name, caption="", problem=problem)

    def _names_in(self, folder: str) -> dict[str, list[str]]:
        """Names in a sub-folder by their plain form."""
        names: dict[str, list[str]] = {}
        try:
            for name in sorted(os.listdir(self._folder / folder)):
                names.setdefault(_plain(name), []).append(name)
        except OSError:  # not a folder, or not there
            return {}
        return names


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip()
