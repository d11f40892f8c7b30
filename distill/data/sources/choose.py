"""The format of a data set of another project, recognized by its files."""

from collections.abc import Mapping
from pathlib import Path

from distill.data.sources import archives, fastvideo, lightx2v, lists
from distill.data.sources.outside_set import OutsideSet
from distill.data.videos.video_folder import TABLES, has_text_files
from fsdp_cp.errors import UserError

READERS = (lists.read_array, lists.read_lines, fastvideo.read, archives.read)


def read_outside(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
    """Read the rows of a folder, or of one parquet file or archive; ``None`` for our own formats, which come first,
    except that LightX2V's table has the name of ours."""
    made = lightx2v.read(path) if path.is_dir() else None
    if made is None and path.is_dir() and (has_text_files(path) or any((path / name).is_file() for name in TABLES)):
        return None
    for read in () if made else READERS:
        made = made or read(path, columns)
    if made is not None and columns and made.files:
        raise UserError(f"data.columns={columns} names columns of a table, which {made.format} has not; leave it out")
    return made
