"""Lists of videos and captions: a JSON array, or two text files."""

import json
from collections.abc import Mapping
from pathlib import Path

from distill.data.sources.outside_set import OutsideSet
from distill.data.videos.table import column_names, read_text, require_utf8
from distill.data.videos.video_folder import COLUMNS, listed
from fsdp_cp.errors import UserError

ARRAYS = ("metadata.json", "videos2caption.json")
"""Names of the file; FastVideo documents the second (``docs/training/data_preprocess.md``)."""
FIELDS = {"file_name": "path", "caption": "cap"}


def read_array(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
    """Read ``[{"path": "a.mp4", "cap": "a caption"}, ...]``, or lists of captions; ``videos/`` may be left out."""
    file = next((path / name for name in ARRAYS if (path / name).is_file()), None)
    if file is None:
        return None
    column_names(COLUMNS, columns)
    video, caption = ({**FIELDS, **(columns or {})}[name] for name in COLUMNS)
    try:
        records = json.loads(read_text(file, f"data.path: {file}"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"data.path: {file} is not JSON ({error}); write it again") from error
    if not isinstance(records, list):
        raise UserError(f"data.path: {file} is not a JSON array; write one object for each video")
    table: list[tuple[int, tuple[str, str | None]]] = []
    for number, record in enumerate(records, start=1):
        name, texts = (record.get(key) if isinstance(record, dict) else None for key in (video, caption))
        texts = texts if isinstance(texts, list) and texts else [texts]
        if not isinstance(name, str) or not all(isinstance(text, str | None) for text in texts):
            wanted = f"{video}, a text, and {caption}, a text or a list of them"
            raise UserError(f"data.path: {file}: entry {number} must have {wanted}, or name the keys with data.columns")
        for text in (name, *texts):
            require_utf8(text, f"data.path: {file}: entry {number}")
        table += [(number, (name, text)) for text in texts]
    return OutsideSet(format=file.name, rows=listed(path, file, video, table, also_in="videos/"))


def read_lines(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
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
    return OutsideSet(format=videos.name, rows=listed(path, videos, "path", table, also_in="videos/"))


def _lines(file: Path) -> list[str]:
    # Blank lines inside count: without them, captions would go with other videos.
    text = read_text(file, f"data.path: {file}").replace("\r\n", "\n").rstrip()
    return [line.strip() for line in text.split("\n")]
