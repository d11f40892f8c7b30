"""The format of a data set of another project, recognized by its files. Our own formats are in ``own.py``."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from distill.data.sources import archives, fastvideo, lightx2v, lists
from distill.data.sources.source import Source, files_ending
from distill.data.videos.video_folder import TABLES, has_text_files, read_metadata
from fsdp_cp.errors import UserError

log = logging.getLogger(__name__)
READERS = (lists.read_array, lists.read_lines, fastvideo.read, archives.read)
"""Readers of a format of another project each, in their order."""


def read_outside(path: Path, columns: Mapping[str, str] | None = None) -> Source | None:
    """Read the rows of a folder, or of one parquet file or archive; ``None`` for our own formats, which come first,
    except that LightX2V's table has the name of ours, and that archives may stand next to clips with ``.txt`` files."""
    made = lightx2v.read(path) if path.is_dir() else None
    if made is None and path.is_dir():
        if any((path / name).is_file() for name in TABLES):
            return None
        if has_text_files(path):
            return _clips_and_archives(path)
    for read in () if made else READERS:
        made = made or read(path, columns)
    if made is not None and columns and made.files:
        raise UserError(f"data.columns={columns} names columns of a table, which {made.format} has not; leave it out")
    return made


def _clips_and_archives(path: Path) -> Source | None:
    """Read archives of videos together with the clips next to them; ``None`` if there are no archives."""
    if not files_ending(path, ".tar"):
        for file in files_ending(path, *archives.COMPRESSED):
            log.warning("%s is compressed and was not read; unpack it to .tar if it holds clips", file)
        return None
    archived = archives.read(path)
    assert archived is not None
    if archived.latents is not None:
        raise UserError(f"data.path={path} has clips, and archives of latents; give a folder of one kind")
    clips = read_metadata(path)
    packed = {name.partition(":")[2]: name for name in archived.videos}
    for clip in clips:
        if clip.file in packed:
            both = f"{clip.file} and {packed[clip.file]}, as if the archive was unpacked"
            raise UserError(f"data.path={path} has {both}; remove one of them")
    files = [*archived.files, *(path / clip.file for clip in clips)]
    return replace(archived, rows=[*clips, *archived.rows], files=files)
