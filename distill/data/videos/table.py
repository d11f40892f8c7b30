"""Tables of captions: a strict reader of comma-separated files and of JSON lines.

A row that would damage a caption is refused by its line. Python's own reader takes whatever comes: a comma too many
cuts a caption, a quote that nothing closes swallows the rows after it, and both train on.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from distill.run.json_lines import parse
from fsdp_cp.errors import UserError

VIDEO_SUFFIXES = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts"}
_QUOTES = 'put captions with commas in double quotes, and write a quote inside them twice ("")'
_FIELD_LIMIT = 1 << 20  # characters; the longest captions have a few thousand


Row = tuple[int, tuple[str | None, ...]]
"""Line where a row of a table begins, counted from 1, and its values: one for each wanted column, ``None`` where the
row ends before it."""


def read_text(file: Path, where: str) -> str:
    """The text of a UTF-8 file, without a byte order mark; line ends as they are.

    Raises: ``UserError`` for a file that cannot be read, is in another encoding, or holds NUL bytes.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{where} cannot be read ({error.strerror}); give a readable file") from error
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{where} is not UTF-8 text but UTF-16; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")  # spreadsheets put a byte order mark first
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{where} is not UTF-8 text (line {line}); save it as UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"{where} is not UTF-8 text (a NUL byte in line {line}); save it as UTF-8")
    return text


def column_names(columns: Sequence[str], renamed: object) -> tuple[str, ...]:
    """Return the names that a user's table has for ``columns``, by ``data.columns``.

    Raises:
        UserError: ``renamed`` is not a mapping of some of ``columns`` to texts.
    """
    renamed = {} if renamed is None else renamed
    if not isinstance(renamed, dict) or not all(
        key in columns and isinstance(name, str) and name for key, name in renamed.items()
    ):
        example = ", ".join(f"{column}: NAME" for column in columns)
        raise UserError(f"data.columns={renamed} must name columns of the table, as {{{example}}}")
    return tuple(renamed.get(column, column) for column in columns)


def read_table(file: Path, columns: Sequence[str], where: str) -> list[Row]:
    """Return the rows of a table in its order; empty lines are not rows.

    Args:
        file: UTF-8. ``.jsonl``: a JSON object per line; else comma-separated with a header, byte order mark and line
            ends as spreadsheets write them. A first column of row numbers without a name, as pandas writes, is skipped.
        columns: names of the wanted columns, the captions' last.
        where: the setting and the file, for messages.

    Raises: ``UserError`` by line for a row with more fields than the header has, a quote that is not closed or that
        swallowed rows, a line that is not a JSON object; and for a header without one of ``columns``, with a name
        twice, or with other separators.
    """
    text = read_text(file, where)
    lines = io.StringIO(text, newline="").readlines()  # as the csv module counts them
    if file.suffix.lower() == ".jsonl":
        return _json_rows(lines, columns, where)
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        parts = [part.strip().strip('"') for part in (lines or [""])[0].split(separator)]
        if "," not in (lines or [""])[0] and len(parts) > 1 and set(parts) >= set(columns):
            raise UserError(f"{where} separates its columns with {name}; save it with commas")
    records = _records(lines, where)
    (_, header), *body = records or [(1, [])]
    header = [name.strip() for name in header]
    for column in columns:
        if header.count(column) != 1:
            raise UserError(f"{where} must have the column {column} once (found {_found(header)}); {_hint(columns)}")
    wanted = [header.index(column) for column in columns]
    if not header[0]:  # pandas' row numbers
        for line, fields in body:
            if fields[0].strip() and not fields[0].strip().isdecimal() and len(fields) <= len(header):
                raise UserError(
                    f"{where}: line {line} has {fields[0][:60]!r} in the first column, which has no name; name it, or"
                    " remove the column"
                )
        header[0] = "index"
    rows: list[Row] = []
    ends = [line for line, _ in records[2:]] + [len(lines) + 1]
    for (line, fields), end in zip(body, ends, strict=False):
        # A field without a name can only come from a comma too many: spreadsheets fill the header up with such names.
        extra = [value for i, value in enumerate(fields) if (i >= len(header) or not header[i]) and value.strip()]
        if extra or len(fields) > len(header):
            raise UserError(
                f"{where}: line {line} has {len(fields)} fields for {len([n for n in header if n])} columns; {_QUOTES}"
            )
        if any("\n" in value or "\r" in value for value in fields):
            _check_swallowed(lines[line : end - 1], line, header, columns, file, where)
        rows.append((line, tuple(fields[i] if i < len(fields) else None for i in wanted)))
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
            try:
                (value or "").encode()
            except UnicodeEncodeError as error:  # half of a pair of \\u escapes
                raise UserError(f"{where}: {column} in line {number} is not UTF-8 text; write it again") from error
        rows.append((number, values))
    if not rows:
        raise UserError(f"{where} has no rows; write one JSON object per line")
    return rows


def _found(names: Iterable[str]) -> str:
    return " ".join(",".join(names).split())[:100] or "nothing"


def _hint(columns: Sequence[str]) -> str:
    return f"use {','.join(columns)}, or name the table's columns with data.columns"


def _records(lines: list[str], where: str) -> list[tuple[int, list[str]]]:
    """(line where it begins, fields) of every record that is not an empty line."""
    records: list[tuple[int, list[str]]] = []
    before = csv.field_size_limit(_FIELD_LIMIT)
    # A blank before a quote would make the quote a part of the caption, and the comma in it a separator.
    reader = csv.reader(lines, strict=True, skipinitialspace=True)
    begins = 1
    try:
        for fields in reader:
            if fields:
                records.append((begins, fields))
            begins = reader.line_num + 1
    except csv.Error as error:
        what = str(error)
        if "unexpected end of data" in what or "field larger" in what:
            problem = f"has a double quote in line {begins} that nothing closes"
        elif reader.line_num > begins:
            problem = f"has a double quote in line {begins} that is not closed before line {reader.line_num}"
        else:
            problem = f"has text after a closing double quote in line {begins}"
        raise UserError(f"{where} {problem}; {_QUOTES}") from error
    finally:
        csv.field_size_limit(before)
    return records


def _check_swallowed(
    inner: list[str], line: int, header: list[str], columns: Sequence[str], file: Path, where: str
) -> None:
    """Refuse a quoted field whose later lines look like rows of the table: its quote was closed by another's.

    Args:
        inner: the record's lines after the first.
        line: where the record begins.
    """
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
            raise UserError(
                f"{where} has a double quote that opens in line {line} and holds line {number}, which looks"
                f" like a row of its own; close the quote in line {line}, or write that caption on one line"
            )
