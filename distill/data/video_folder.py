"""`data=video_folder`: a folder of video files with captions, seen as cached latents.

The folder holds ``metadata.csv`` with columns ``file_name,caption`` (the layout that Hugging Face ``datasets`` calls a
video folder); ``file_name`` is relative to it. Shape legend: C t h w latents, L tokens, D width of an embedding.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from distill.data.encoded import EncodedData
from distill.data.table import VIDEO_SUFFIXES, read_table
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank

logger = logging.getLogger(__name__)

TABLE = "metadata.csv"
COLUMNS = ("file_name", "caption")


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
        # Without a caption nothing is encoded; an empty one would train the student to do without.
        results = iter(self.cache.write_clips([self.path / name for name, caption in rows if caption is not None]))
        items, files, left_out = [], [], []
        for name, caption in rows:
            what, value = ("error", f"has no caption in {TABLE}") if caption is None else next(results)
            if what == "error":
                left_out.append((name, value))
            else:
                items.append((value, caption))
                files.append(self.path / name)
        if rank() == 0:
            for name, reason in left_out:
                logger.warning("clip left out: %s %s", name, reason)
            if left_out:
                logger.warning("%d of %d clips left out", len(left_out), len(rows))
            # realpath, not Path.resolve: that raises RuntimeError for a link to itself.
            listed = {os.path.realpath(self.path / name) for name, _ in rows}
            extra = sorted(
                file.name
                for file in self.path.iterdir()
                if file.suffix.lower() in VIDEO_SUFFIXES and os.path.realpath(file) not in listed
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


def read_metadata(path: Path) -> list[tuple[str, str | None]]:
    """(file name, caption) of every row of ``path``/metadata.csv; the caption is None where there is none.

    Raises: ``UserError`` if the folder, the file, a column, a file name or every row is missing; by line where the
        table would damage a caption (:func:`distill.data.table.read_table`), and for a file outside the folder.
    """
    if not path.is_dir():
        raise UserError(f"data.path={path} is not a folder; give a folder with videos and {TABLE}")
    file = path / TABLE
    if not file.is_file():
        raise UserError(f"data.path={path} has no {TABLE}; add one with the columns {','.join(COLUMNS)}")
    rows = []
    for row in read_table(file, COLUMNS, f"data.path: {file}"):
        name, caption = row.values
        if not name or not name.strip():
            raise UserError(f"data.path: {file} has no file_name in line {row.line}; fill it in or remove the line")
        if "\n" in name or "\r" in name:
            raise UserError(f"data.path: {file} has a line break in the file_name of line {row.line}; write it on one")
        # A table that came with a data set must not reach other files; and the folder can be moved as a whole.
        if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir:
            raise UserError(
                f"data.path: {file} line {row.line} names {name[:100]!r}, which is outside the folder; use a path"
                f" relative to {path}, or link the file into it"
            )
        rows.append((name, caption if caption and caption.strip() else None))
    if not rows:
        raise UserError(f"data.path: {file} has no rows; add one per video")
    return rows
