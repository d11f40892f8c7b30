"""Tables of captions: a strict reader of comma-separated files, JSON lines, and files of captions alone.

Rows that would damage a caption are refused by line: to Python's reader, a comma too many cuts a caption, and a quote
that nothing closes swallows rows.
"""

import csv
import io
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fsdp_cp.errors import UserError, one_line
from fsdp_cp.files.json_lines import parse
from fsdp_cp.launch import rank

logger = logging.getLogger(__name__)

VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts"}
_QUOTES = 'put captions with commas in double quotes, and write a quote inside them twice ("")'
_NO_TEXT = {".tsv", ".json", ".parquet", ".xlsx", ".ods", ".yaml", ".yml"}  # their lines are no captions


Row = tuple[int, tuple[Any, ...]]
"""Line where a row of a table begins, counted from 1, and its values: one for each wanted column, ``None`` where the
row ends before it. They are texts, except for optional ones in JSON."""


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


def column_names(
    columns: Sequence[str], renamed: Mapping[str, str] | None, optional: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names that a user's table has for ``columns`` and ``optional`` ones, by ``data.columns``. An empty
    name ignores an optional column."""
    renamed = renamed or {}
    known = (*columns, *optional)
    if not all(key in known and (name or key in optional) for key, name in renamed.items()):
        example = ", ".join(f"{column}: NAME" for column in columns)
        raise UserError(f"data.columns={renamed} must name columns of the table, as {{{example}}}")
    return tuple(renamed.get(column, column) for column in known)


def read_table(file: Path, columns: Sequence[str], where: str, optional: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of a UTF-8 table in its order, without empty lines: ``.jsonl``, a JSON object per line;
    ``.json``, an array of objects, whose captions may be lists; or comma-separated with a header, as spreadsheets and
    pandas (with a nameless first column) write it. Of the wanted ``columns``, the captions' comes last; ``where`` is
    setting and file. ``optional`` has the names of further columns, of any type, by their own; a table may lack those
    that were not renamed."""
    lines = io.StringIO(read_text(file, where), newline="").readlines()  # as the csv module counts them
    optional = optional or {}
    required = [*columns, *(name for own, name in optional.items() if name not in ("", own))]
    wanted = [*columns, *optional.values()]
    if file.suffix.lower() == ".jsonl":
        records = _json_records(lines, where)
    elif file.suffix.lower() == ".json":
        records = _array_records("".join(lines), columns[-1], where)
    else:
        records = _csv_records(lines, columns, required, wanted, file, where)
    for line, record in records:
        _check_columns([*record], required, f"{where}: line {line}")
        for column in columns:
            if not isinstance(record[column], str | None):
                raise UserError(f"{where}: {column} in line {line} must be a text or null")
            require_utf8(record[column], f"{where}: {column} in line {line}")
    return [(line, tuple(record.get(column or None) for column in wanted)) for line, record in records]


def _check_columns(names: Sequence[str], required: Sequence[str], where: str) -> None:
    for column in required:
        if names.count(column) != 1:
            found = one_line(",".join(names), 100) or "nothing"
            hint = f"use {','.join(required)}, or name the table's columns with data.columns"
            raise UserError(
                f"{where} must have the column {column} once, between commas in a .csv file (found {found}); {hint}"
            )


def _csv_records(
    lines: list[str], columns: Sequence[str], required: Sequence[str], wanted: Sequence[str], file: Path, where: str
) -> list[tuple[int, dict[str, Any]]]:
    (_, header), *body = _fields(lines, where) or [(1, [])]
    header = [name.strip() for name in header]
    _check_columns(header, [*required, *sorted({*wanted} & {*header} - {""})], where)
    if header[:1] == [""] and all((fields[0].strip() or "0").isdecimal() for _, fields in body):  # pandas' row numbers
        header[0] = "index"
    ends = [line for line, _ in body[1:]] + [len(lines) + 1]
    for (line, fields), end in zip(body, ends, strict=False):
        _check_fields(fields, header, line, where)
        if any("\n" in value or "\r" in value for value in fields):
            _check_swallowed(lines[line : end - 1], line, header, columns, file, where)
    return [(line, dict(zip_longest(header, fields))) for line, fields in body]


def _check_fields(fields: Sequence[str], header: Sequence[str], line: int, where: str) -> None:
    """Refuse a value in a field without a name, which can only come from a comma too many: spreadsheets fill the header
    up with such names."""
    named = [i for i, name in enumerate(header) if name]
    extra = [value for i, value in enumerate(fields) if i not in named and value.strip()]
    if extra or len(fields) > len(header):
        raise UserError(f"{where}: line {line} has {len(fields)} fields for {len(named)} named columns; {_QUOTES}")


def read_captions(path: Path, columns: Mapping[str, str] | None = None, *, setting: str = "data.path=") -> list[str]:
    """Return the captions of ``path``: the column ``caption`` of a ``.csv`` or ``.jsonl`` file (or as ``data.columns``
    names it), the lines of others. White space around them is dropped; empty ones are left out, and that is logged.
    Messages name the path by ``setting``."""
    names = column_names(("caption",), columns)
    kinds = "a text file with a caption per line, or a .csv or .jsonl file"
    where, suffix = f"{setting}{path}", path.suffix.lower()
    if not path.is_file():
        raise UserError(f"{where} is not a file; give {kinds}")
    if suffix in _NO_TEXT:
        raise UserError(f"{where} ends in {suffix}; give {kinds}")
    if suffix in (".csv", ".jsonl"):
        texts = [caption or "" for _, (caption,) in read_table(path, names, where)]
    else:
        texts = _lines(path, names[0], where)
    captions = [caption.strip() for caption in texts if caption.strip()]
    if not captions:
        raise UserError(f"{where} has no caption; add one per line")
    if len(captions) < len(texts) and rank() == 0:
        logger.warning("%d empty captions of %s left out", len(texts) - len(captions), path)
    return captions


def _lines(path: Path, column: str, where: str) -> list[str]:
    """Return the lines of a text file, which must not be those of a table."""
    lines = io.StringIO(read_text(path, where), newline="").readlines()
    first = lines[0] if lines else ""
    header = [part.strip().strip('"') for part in re.split("[,;\t|]", first)]
    if column in header or parse(first.encode()) is not None:
        raise UserError(f"{where} begins like a table; name it .csv or .jsonl, or remove its first line")
    return lines


def read_images(
    path: Path, columns: Mapping[str, str] | None = None, *, images: Sequence[str], setting: str = "data.path="
) -> list[tuple[list[str], str]]:
    """Return the images of each caption: the columns ``images`` and ``caption`` of a ``.csv`` or ``.jsonl`` file.
    Messages name the path by ``setting``."""
    where = f"{setting}{path}"
    names = column_names((*images, "caption"), columns)
    if path.suffix.lower() not in (".csv", ".jsonl") or not path.is_file():
        kind = f"a .csv or .jsonl file with the columns {','.join(names)}"
        raise UserError(f"{where} must be {kind}, since images condition (data.image)")
    rows = []
    for line, values in read_table(path, names, where):
        *files, caption = ((value or "").strip() for value in values)
        if not (all(files) and caption):
            lacks = f"lacks {' or '.join(names)} in line {line}"
            raise UserError(f"{where} {lacks}; fill them in, or remove the line")
        rows.append((files, caption))
    if not rows:
        raise UserError(f"{where} has no rows; write an image and a caption in each")
    return rows


def _json_records(lines: list[str], where: str) -> list[tuple[int, dict[str, Any]]]:
    records = [(number, parse(line.encode())) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, record in records:
        if record is None:
            raise UserError(f"{where}: line {number} is not a JSON object; write one object per line")
    return records


def _array_records(text: str, caption: str, where: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the number of each object of an array and, for each of its captions, its values."""
    try:
        entries = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); write it again") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{where} is not a JSON array of objects; write one object for each video")
    records = []
    for number, entry in enumerate(entries, start=1):
        texts = entry.get(caption)
        texts = texts if isinstance(texts, list) and texts else [texts]
        records += [(number, {**entry, caption: text}) for text in texts]
    return records


def require_utf8(text: str | None, what: str) -> None:
    """Refuse a text that nothing can write, as with half of a pair of ``\\u`` escapes in JSON."""
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not UTF-8 text; write it again in UTF-8") from error


def _fields(lines: list[str], where: str) -> list[tuple[int, list[str]]]:
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
