"""Files of captions, for methods that train without clips."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

from distill.data.videos.table import column_names, read_table, read_text
from distill.run.json_lines import parse
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank

logger = logging.getLogger(__name__)

_NO_TEXT = {".tsv", ".json", ".parquet", ".xlsx", ".ods", ".yaml", ".yml"}  # their lines are no captions


def read_captions(path: Path, columns: object = None) -> list[str]:
    """Return the captions of ``path``: the column ``caption`` of a ``.csv`` or ``.jsonl`` file, the lines of others.

    White space around a caption is dropped; empty ones are left out, and that is logged.

    Args:
        path: the file.
        columns: the table's name of ``caption`` (``data.columns``).

    Raises: ``UserError`` if the file, the column or every caption is missing, if it is not UTF-8, or by line where a
        table would damage a caption (:func:`distill.data.videos.table.read_table`).
    """
    names = column_names(("caption",), columns)
    kinds = "a text file with a caption per line, or a .csv or .jsonl file"
    if not path.is_file():
        raise UserError(f"data.path={path} is not a file; give {kinds}")
    where, suffix = f"data.path={path}", path.suffix.lower()
    if suffix in _NO_TEXT:
        raise UserError(f"data.path={path} ends in {suffix}; give {kinds}")
    if suffix in (".csv", ".jsonl"):
        texts = [caption or "" for _, (caption,) in read_table(path, names, where)]
    else:
        texts = io.StringIO(read_text(path, where), newline="").readlines()
        header = [part.strip().strip('"') for part in re.split("[,;\t|]", texts[0])] if texts else []
        if names[0] in header:
            raise UserError(f"data.path={path} begins with the header of a table; name it .csv, or remove that line")
        if texts and parse(texts[0].encode()) is not None:
            raise UserError(f"data.path={path} holds JSON lines; name it .jsonl")
    captions = [caption.strip() for caption in texts if caption.strip()]
    if not captions:
        raise UserError(f"data.path={path} has no caption; add one per line")
    if len(captions) < len(texts) and rank() == 0:
        logger.warning("%d empty captions of %s left out", len(texts) - len(captions), path)
    return captions
