"""Folders of videos with ``metadata.csv`` or ``metadata.jsonl`` (``file_name,caption``), or ``.txt`` files."""

import functools
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from distill.data.videos.references import COLUMN, parse, problem_of
from distill.data.videos.span import SPAN_COLUMNS, Span, read_span
from distill.data.videos.table import VIDEO_SUFFIXES, Row, column_names, read_table, read_text
from fsdp_cp.errors import UserError

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
    span: Span | None = None
    """Part of the file that is the clip; ``None`` for its beginning."""
    last: str = ""
    """File of the last image, where ``file`` is the first of two."""
    references: str = ""
    """References, as the column of a table has them; ``file`` is empty where these are all files."""

    @property
    def files(self) -> list[str]:
        given = [reference.file for reference in parse(self.references)] if not self.problem else []
        files = [self.file, self.last] if self.last else [self.file]
        return [*(files if self.file or not given else ()), *given]

    @property
    def name(self) -> str:
        """Files and part: rows with the same name have the same clip."""
        name = " and ".join(filter(None, (self.file, self.last, self.references)))
        return name if self.span is None else f"{name} ({self.span})"


def listed_images(
    files: Sequence[str], caption: str, *, are_references: bool = False, folder: Path | None = None
) -> ListedClip:
    """Return the row of a caption with one image or two, in the order of their frames, or with references. It has a
    problem if a file is not in the ``folder``, where one is given."""

    def exists(file: str) -> bool:
        return folder is None or (folder / file).is_file()

    if are_references:
        return ListedClip(file="", caption=caption, problem=problem_of(files[0], exists), references=files[0])
    problem = "" if all(map(exists, files)) else "is missing"
    return ListedClip(file=files[0], caption=caption, problem=problem, last="".join(files[1:]))


def table_of(path: Path) -> Path | None:
    """Return the table of the folder ``path``, or ``None`` if each clip has a ``.txt`` file next to it."""
    if not path.is_dir():
        raise UserError(f"data.path={path} is not a folder; give a folder with videos and {TABLES[0]}")
    tables = [path / name for name in TABLES if (path / name).is_file()]
    if len(tables) > 1:
        raise UserError(f"data.path={path} has {' and '.join(TABLES)}; keep one of them there")
    if not tables and not has_text_files(path):
        add = f"add one with the columns {','.join(COLUMNS)}, or a .txt file with the caption next to each video"
        raise UserError(f"data.path={path} has no {' or '.join(TABLES)}; {add}")
    return tables[0] if tables else None


def has_text_files(path: Path) -> bool:
    """Return whether a video of the folder has a ``.txt`` file with its caption next to it."""
    return any(file.with_suffix(".txt").is_file() for file in _videos(path))


def _videos(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix.lower() in VIDEO_SUFFIXES)


def not_listed(path: Path, rows: Sequence[ListedClip]) -> list[str]:
    """Return the names of the folder's videos and archives that no row lists."""
    # realpath, not Path.resolve: that raises RuntimeError for a link to itself.
    listed = {os.path.realpath(path / row.file) for row in rows}
    archives = [file for file in sorted(path.iterdir()) if ".tar" in file.suffixes]
    return [file.name for file in (*_videos(path), *archives) if os.path.realpath(file) not in listed]


def read_metadata(
    path: Path, columns: Mapping[str, str] | None = None, *, have_references: bool = False
) -> list[ListedClip]:
    """Return the rows of the folder's table (``data.columns`` may rename its columns), or its videos and texts."""
    optional = (*SPAN_COLUMNS, COLUMN) if have_references else SPAN_COLUMNS
    names = column_names(COLUMNS, columns, optional)
    file = table_of(path)
    if file is None:
        if have_references:
            raise UserError(f"data.path={path} has no table with a column {COLUMN}; write {TABLES[0]}")
        return [_beside(video) for video in _videos(path)]
    spans = dict(zip(optional, names[2:], strict=True))
    return listed(path, file, names[0], read_table(file, names[:2], f"data.path: {file}", spans))


def listed(path: Path, file: Path, column: str, table: Iterable[Row], *, also_in: str = "") -> list[ListedClip]:
    """Return the clips of ``table``: line of each row in ``file``, its file name (of the ``column``), caption, part of
    the video and perhaps references. Names are relative to ``path``, perhaps to ``also_in`` in it, as ``videos/``."""
    find, rows = _finder(path), []
    for line, (name, caption, *more) in table:
        span, given = more[: len(SPAN_COLUMNS)], more[len(SPAN_COLUMNS) :]
        _check_name(name, column, path, file, line)
        clip = find(name)
        if clip.problem and also_in:
            inside = find(also_in + name)
            clip = clip if inside.problem else inside
        if caption is None or not caption.strip():  # an empty one would train the student to do without
            clip = replace(clip, problem=clip.problem or f"has no caption in {file.name}")
        part = read_span(*span, where=f"data.path: {file}: line {line}") if span else None
        if given:
            problem = clip.problem or problem_of(
                given[0], lambda file: not is_outside(file) and (path / file).is_file()
            )
            clip = replace(clip, problem=problem, references=str(given[0] or ""))
        rows.append(replace(clip, caption=caption or "", span=part))
    if not rows:
        raise UserError(f"data.path: {file} has no rows; add one per video")
    return rows


def _check_name(name: str | None, column: str, path: Path, file: Path, line: int) -> None:
    """Refuse a row without the name of a file in the folder ``path``."""
    if not name or not name.strip():
        raise UserError(f"data.path: {file} has no {column} in line {line}; fill it in or remove the line")
    if "\n" in name or "\r" in name:
        raise UserError(f"data.path: {file} has a line break in the {column} of line {line}; write it on one")
    # A table that came with a data set must not reach other files; and the folder can be moved as a whole.
    if is_outside(name):
        named = f"{file} line {line} names {name[:100]!r}, which is outside the folder"
        raise UserError(f"data.path: {named}; use a path relative to {path}, or link the file into it")


def is_outside(name: str) -> bool:
    """Return whether a path relative to a folder leaves it."""
    return os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir


def _beside(video: Path) -> ListedClip:
    text = video.with_suffix(".txt")
    caption = read_text(text, f"data.path: {text}").strip() if text.is_file() else ""
    return ListedClip(file=video.name, caption=caption, problem="" if caption else f"has no caption in {text.name}")


def _finder(folder: Path) -> Callable[[str], ListedClip]:
    """Return a search for the files of a folder by the names that a table has for them: as it is, or without regard to
    accents (composed or not), blanks at the ends and backslashes, which change between systems."""

    @functools.cache  # one listing of each folder, not a call for each clip
    def names_in(inside: str) -> dict[str, list[str]]:
        names: dict[str, list[str]] = {}
        with suppress(OSError, ValueError):  # not a folder, not there, or not a name
            for name in sorted(os.listdir(folder / inside)):
                names.setdefault(_plain(name), []).append(name)
        return names

    def find(name: str) -> ListedClip:
        parent, _, last = name.rpartition("/")
        if last in names_in(parent).get(_plain(last), ()):
            return ListedClip(file=name, caption="")
        matches = [""]
        for part in os.path.normpath(name.replace("\\", "/")).split("/"):
            matches = [
                os.path.join(above, entry) for above in matches for entry in names_in(above).get(_plain(part), ())
            ]
        if len(matches) == 1:
            return ListedClip(file=matches[0], caption="")
        problem = f"could be {' or '.join(map(repr, matches[:3]))}; rename one" if matches else "is missing"
        return ListedClip(file=name, caption="", problem=problem)

    return find


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip()
