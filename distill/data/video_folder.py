"""`data=video_folder`: a folder of video files with captions, seen as cached latents.

The folder holds ``metadata.csv`` with columns ``file_name,caption`` (the layout that Hugging Face ``datasets`` calls a
video folder); ``file_name`` is relative to it. Shape legend: C t h w latents, L tokens, D width of an embedding.
"""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

from distill.data.encoded import EncodedData
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank

logger = logging.getLogger(__name__)

TABLE = "metadata.csv"
COLUMNS = ("file_name", "caption")
_VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi"}


class VideoFolder(EncodedData):
    """Data set of the clips of a folder, encoded on first use and cached.

    Videos are sampled at ``fps``. Clips that are broken, missing or too short are named in the log and left out.
    """

    def _read(self) -> list[tuple[str, str | None]]:
        return read_metadata(self.path)

    @property
    def table(self) -> Path:
        return self.path / TABLE

    def _usable(self, rows: list[tuple[str, str | None]]) -> list[tuple[str, str]]:
        """(cache key, caption) of the usable clips, the same on every rank; rank 0's log names the others."""
        results = self.cache.write_clips([self.path / name for name, _ in rows])
        items, left_out = [], []
        for (name, caption), (what, value) in zip(rows, results, strict=True):
            if what == "error":
                left_out.append((name, value))
            elif caption is None:
                left_out.append((name, f"has no caption in {TABLE}"))
            else:
                items.append((value, caption))
        if rank() == 0:
            for name, reason in left_out:
                logger.warning("clip left out: %s %s", name, reason)
            if left_out:
                logger.warning("%d of %d clips left out", len(left_out), len(rows))
            listed = {(self.path / name).resolve() for name, _ in rows}
            extra = sorted(
                file.name
                for file in self.path.iterdir()
                if file.suffix.lower() in _VIDEO_SUFFIXES and file.resolve() not in listed
            )
            if extra:
                names = ", ".join(extra[:5])
                logger.warning("%d videos are not in %s and not used: %s", len(extra), TABLE, names)
        if not items:
            name, reason = left_out[0]
            raise UserError(
                f"data.path={self.path} has no usable clip ({len(left_out)} left out, first: {name} {reason}); give "
                "longer videos, or set data.num_frames lower or data.fps higher"
            )
        return items

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"latents": fp32 (C, t, h, w), "text": fp32 (L, D), "caption": str}, read from the cache."""
        key, caption = self._items[index]
        return {"latents": self.cache.latents(key), "text": self._text(caption), "caption": caption}

    def captions(self) -> list[str]:
        return list(dict.fromkeys(caption for _, caption in self._items))


def read_metadata(path: Path) -> list[tuple[str, str | None]]:
    """(file name, caption) of every row of ``path``/metadata.csv; the caption is None where the row ends before it.

    Raises: ``UserError`` if the folder, the file, a column, a file name or every row is missing.
    """
    if not path.is_dir():
        raise UserError(f"data.path={path} is not a folder; give a folder with videos and {TABLE}")
    file = path / TABLE
    if not file.is_file():
        raise UserError(f"data.path={path} has no {TABLE}; add one with the columns {','.join(COLUMNS)}")
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:  # spreadsheets put a byte order mark first
            reader = csv.DictReader(stream)
            absent = [column for column in COLUMNS if column not in (reader.fieldnames or [])]
            if absent:
                found = ",".join(reader.fieldnames or []) or "nothing"
                raise UserError(f"data.path: {file} has no column {absent[0]} (found {found}); use {','.join(COLUMNS)}")
            rows = [(row["file_name"] or "", row["caption"]) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.path: {file} is not a UTF-8 table ({error}); save it as UTF-8 csv") from error
    if not rows:
        raise UserError(f"data.path: {file} has no rows; add one per video")
    for number, (name, _) in enumerate(rows, start=1):
        if not name.strip():
            raise UserError(f"data.path: {file} has no file_name in row {number}; fill it in or remove the row")
    return rows
