"""Lists of videos and captions: a JSON array, or two text files."""

from collections.abc import Mapping
from pathlib import Path

from distill.data.sources.source import Source
from distill.data.videos.span import SPAN_COLUMNS
from distill.data.videos.table import column_names, read_table, read_text
from distill.data.videos.video_folder import COLUMNS, listed
from fsdp_cp.errors import UserError

ARRAYS = ("metadata.json", "videos2caption.json")
"""Names of the file; FastVideo documents the second (``docs/training/data_preprocess.md``)."""
FIELDS = {"file_name": "path", "caption": "cap"}


def read_array(path: Path, columns: Mapping[str, str] | None = None) -> Source | None:
    """Read ``[{"path": "a.mp4", "cap": "a caption", "cut": [30, 60]}, ...]``; captions may be lists, ``videos/`` and
    the part of the video be left out."""
    file = next((path / name for name in ARRAYS if (path / name).is_file()), None)
    if file is None:
        return None
    names = column_names(COLUMNS, {**FIELDS, **(columns or {})}, SPAN_COLUMNS)
    spans = dict(zip(SPAN_COLUMNS, names[2:], strict=True))
    table = read_table(file, names[:2], f"data.path: {file}", spans)
    rows = listed(path, file, names[0], table, also_in="videos/")
    return Source(name=f"data.path={path}", folder=path, format=file.name, rows=rows)


def read_lines(path: Path, columns: Mapping[str, str] | None = None) -> Source | None:
    """Read ``videos.txt`` with a path per line, and ``prompts.txt`` or ``prompt.txt``, as for diffusers' trainers."""
    videos = path / "videos.txt"
    prompts = next((path / name for name in ("prompts.txt", "prompt.txt") if (path / name).is_file()), None)
    if not videos.is_file() or prompts is None:
        return None
    lines = [_lines(file) for file in (videos, prompts)]
    if len(lines[0]) != len(lines[1]):
        found = f"{videos} has {len(lines[0])} lines and {prompts.name} {len(lines[1])}"
        raise UserError(f"data.path: {found}; give each video one caption on one line")
    table = enumerate(zip(*lines, strict=True), start=1)
    rows = listed(path, videos, "path", table, also_in="videos/")
    return Source(name=f"data.path={path}", folder=path, format=videos.name, rows=rows)


def _lines(file: Path) -> list[str]:
    # Blank lines inside count: without them, captions would go with other videos.
    text = read_text(file, f"data.path: {file}").replace("\r\n", "\n").rstrip()
    return [line.strip() for line in text.split("\n")]
