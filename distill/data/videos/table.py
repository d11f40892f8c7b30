"""Tables of captions: a strict reader of comma-separated files, JSON lines, and files of captions alone.

Rows that would damage a caption are refused by line: to Python's reader, a comma too many cuts a caption, and a quote
that nothing closes swallows rows.
"""

import csv
import io
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fsdp_cp.errors import UserError
from fsdp_cp.files.json_lines import parse
from fsdp_cp.launch import rank

logger = logging.getLogger(__name__)

VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts"}
_QUOTES = 'put captions with commas in double quotes, and write a quote inside them twice ("")'
_NO_TEXT = {".tsv", ".json", ".parquet", ".xlsx", ".ods", ".yaml", ".yml"}  # their lines are no captions


Row = tuple[int, tuple[str | None, ...]]
"""Line where a row of a table begins, counted from 1, and its values: one for each wanted column, ``None`` where the
row ends before it."""


def read_text(file: Path, where: str) -> str:
    """The text of a UTF-8 file, without a byte order mark; line ends as they are."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror}); give a readable file") from error
    wrong = data.find(b"\0")
    try:
        text = data.decode("utf-8-sig")  # spreadsheets put a byte order mark first
    except UnicodeDecodeError as error:
        text, wrong = "", error.start
    if wrong >= 0:
        line = data.count(b"\n", 0, wrong) + 1
        raise UserError(f"{where} is not UTF-8 text (line {line}); save it as UTF-8")
    return text


def column_names(columns: Sequence[str], renamed: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return the names that a user's table has for ``columns``, by ``data.columns``."""
    renamed = renamed or {}
    if not all(key in columns and name for key, name in renamed.items()):
        example = ", ".join(f"{column}: NAME" for column in columns)
        raise UserError(f"data.columns={renamed} must name columns of the table, as {{{example}}}")
    return tuple(renamed.get(column, column) for column in columns)


def read_table(file: Path, columns: Sequence[str], where: str) -> list[Row]:
    """Return the rows of a UTF-8 table in its order, without empty lines: ``.jsonl``, a JSON object per line, or
    comma-separated with a header, as spreadsheets and pandas (with a nameless first column) write it. Of the wanted
    ``columns``, the captions' comes last; ``where`` is setting and file."""
    text = read_text(file, where)
    lines = io.StringIO(text, newline="").readlines()  # as the csv module counts them
    if file.suffix.lower() == ".jsonl":
        return _json_rows(lines, columns, where)
    records = _records(lines, where)
    (_, header), *body = records or [(1, [])]
    header = [name.strip() for name in header]
    for column in columns:
        if header.count(column) != 1:
            found = f"{where} must have the column {column} once, between commas (found {_found(header)})"
            raise UserError(f"{found}; {_hint(columns)}")
    wanted = [header.index(column) for column in columns]
    if not header[0] and all((fields[0].strip() or "0").isdecimal() for _, fields in body):  # pandas' row numbers
        header[0] = "index"
    rows: list[Row] = []
    ends = [line for line, _ in records[2:]] + [len(lines) + 1]
    for (line, fields), end in zip(body, ends, strict=False):
        # A field without a name can only come from a comma too many: spreadsheets fill the header up with such names.
        extra = [value for i, value in enumerate(fields) if (i >= len(header) or not header[i]) and value.strip()]
        if extra or len(fields) > len(header):
            named = len([name for name in header if name])
            raise UserError(f"{where}: line {line} has {len(fields)} fields for {named} named columns; {_QUOTES}")
        if any("\n" in value or "\r" in value for value in fields):
            _check_swallowed(lines[line : end - 1], line, header, columns, file, where)
        rows.append((line, tuple(fields[i] if i < len(fields) else None for i in wanted)))
    return rows


def read_captions(path: Path, columns: Mapping[str, str] | None = None) -> list[str]:
    """Return the captions of ``path``: the column ``caption`` of a ``.csv`` or ``.jsonl`` file (or as ``data.columns``
    names it), the lines of others. White space around them is dropped; empty ones are left out, and that is logged."""
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
        if names[0] in header or (texts and parse(texts[0].encode()) is not None):
            raise UserError(f"data.path={path} begins like a table; name it .csv or .jsonl, or remove its first line")
    captions = [caption.strip() for caption in texts if caption.strip()]
    if not captions:
        raise UserError(f"data.path={path} has no caption; add one per line")
    if len(captions) < len(texts) and rank() == 0:
        logger.warning("%d empty captions of %s left out", len(texts) - len(captions), path)
    return captions


def read_images(path: Path, columns: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Return images and captions: the columns ``image`` and ``caption`` of a ``.csv`` or ``.jsonl`` file."""
    names = column_names(("image", "caption"), columns)
    if path.suffix.lower() not in (".csv", ".jsonl") or not path.is_file():
        kind = f"a .csv or .jsonl file with the columns {','.join(names)}"
        raise UserError(f"data.path={path} must be {kind}, since images condition (data.image)")
    rows = []
    for line, values in read_table(path, names, f"data.path={path}"):
        image, caption = ((value or "").strip() for value in values)
        if not (image and caption):
            raise UserError(
                f"data.path={path} has no image or no caption in line {line}; give both, or remove the line"
            )
        rows.append((image, caption))
    if not rows:
        raise UserError(f"data.path={path} has no rows; write an image and a caption in each")
    return rows


def _json_rows(lines: list[str], columns: Sequence[str], where: str) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = parse(line.encode())
        if record is None:
            raise UserError(f"{where}: line {number} is not a JSON object; write one object per line")
        values = tuple(record.get(column) for column in columns)
        for column, value in zip(columns, values, strict=True):
            if column not in record:
                raise UserError(f"{where} has no {column} in line {number} (found {_found(record)}); {_hint(columns)}")
            if not isinstance(value, str | None):
                raise UserError(f"{where}: {column} in line {number} must be a text or null")
            require_utf8(value, f"{where}: {column} in line {number}")
        rows.append((number, values))
    if not rows:
        raise UserError(f"{where} has no rows; write one JSON object per line")
    return rows


def require_utf8(text: str | None, what: str) -> None:
    """Refuse a text of JSON with half of a pair of ``\\u`` escapes, which nothing can write."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not UTF-8 text; write it again") from error


def _found(names: Iterable[str]) -> str:
    return " ".join(",".join(names).split())[:100] or "nothing"


def _hint(columns: Sequence[str]) -> str:
    return f"use {','.join(columns)}, or name the table's columns with data.columns"


def _records(lines: list[str], where: str) -> list[tuple[int, list[str]]]:
    """(line where it begins, fields) of every record that is not an empty line."""
    records: list[tuple[int, list[str]]] = []
    # A blank before a quote would make the quote a part of the caption, and the comma in it a separator.
    reader = csv.reader(lines, strict=True, skipinitialspace=True)
    begins = 1
    try:
        for fields in reader:
            if fields:
                records.append((begins, fields))
            begins = reader.line_num + 1
    except csv.Error as error:
        wrong = f"a double quote in line {begins} that nothing closes, or text after a closing one"
        raise UserError(f"{where} has {wrong}; {_QUOTES}") from error
    return records


def _check_swallowed(
    inner: list[str], line: int, header: list[str], columns: Sequence[str], file: Path, where: str
) -> None:
    """Refuse a quoted field, begun at ``line``, whose ``inner`` lines look like rows: another's quote closed it."""
    names = columns[0] if len(columns) > 1 else "file_name"
    for number, text in enumerate(inner, start=line + 1):
        # Only text before the closing quote was swallowed; the record's own fields may follow it.
        parts = [part.strip() for part in text.replace('""', "").partition('"')[0].split(",")]
        if names in header:
            at = header.index(names)
            name = parts[at] if len(parts) == len(header) or len(parts) > at + 1 else ""
            row = Path(name).suffix.lower() in VIDEO_SUFFIXES or (bool(name) and os.path.isfile(file.parent / name))
        else:
            # Prose has commas too, but rarely exactly as many, with as little room: numbers and names are short.
            at = header.index(columns[-1])
            others = parts[:at] + parts[at + 1 :]
            row = len(parts) == len(header) > 1 and all(re.fullmatch(r"\S{0,40}", part) for part in others)
        if row:
            opens = f"a double quote that opens in line {line} and holds line {number}, which looks like a row"
            raise UserError(f"{where} has {opens}; close it in line {line}, or write that caption on one line")
