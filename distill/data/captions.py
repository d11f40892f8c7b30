"""`data=captions`: captions without clips, for methods that train on the student's own samples alone.

The text encoder embeds the captions; of the VAE the settings alone count, until samples are decoded. Shape legend: L
tokens, D width of an embedding.
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


class Captions(EncodedData):
    """Data set of the captions of a file (:func:`read_captions`); sizes are those of the student's clips."""

    def _read(self) -> list[str]:
        return read_captions(self.path)

    def _decides(self) -> tuple[Any, ...]:
        return (self.latent_shape,)  # no key of a clip tells it

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"text": fp32 (L, D), "caption": str}, read from the cache."""
        return {"text": self._text(self._items[index]), "caption": self._items[index]}

    def captions(self) -> list[str]:
        return list(dict.fromkeys(self._items))


def read_captions(path: Path) -> list[str]:
    """The captions of ``path``: its column ``caption`` if it ends in ``.csv``, its lines otherwise.

    White space around a caption is dropped; empty ones are left out, and that is logged.

    Raises: ``UserError`` if the file, the column or every caption is missing, or if it is not UTF-8.
    """
    if not path.is_file():
        raise UserError(f"data.path={path} is not a file; give a text file with a caption per line, or a .csv file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:  # spreadsheets put a byte order mark first
            found = _column(path, csv.DictReader(stream)) if path.suffix.lower() == ".csv" else list(stream)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.path={path} is not UTF-8 text ({error}); save it as UTF-8") from error
    captions = [caption.strip() for caption in found if caption.strip()]
    if not captions:
        raise UserError(f"data.path={path} has no caption; add one per line")
    if len(captions) < len(found) and rank() == 0:
        logger.warning("%d empty captions of %s left out", len(found) - len(captions), path)
    return captions


def _column(path: Path, reader: csv.DictReader) -> list[str]:
    if "caption" not in (reader.fieldnames or []):
        found = ",".join(reader.fieldnames or []) or "nothing"
        raise UserError(f"data.path={path} has no column caption (found {found}); add one")
    return [row["caption"] or "" for row in reader]
