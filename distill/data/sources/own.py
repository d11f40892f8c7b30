"""Our tables: a folder of videos with ``metadata.csv``, ``metadata.jsonl`` or ``.txt`` files, a file of captions."""

from collections.abc import Mapping
from pathlib import Path

from distill.data.sources.source import Source
from distill.data.videos.table import read_captions, read_images
from distill.data.videos.video_folder import ListedClip, read_metadata


def read(
    path: str | Path, columns: Mapping[str, str] | None = None, *, has_clips: bool, has_images: bool = False
) -> Source:
    """Read a folder of videos, or a file of captions, with images from the file's folder if they condition."""
    path = Path(path).expanduser()
    if has_clips:
        folder, rows = path, read_metadata(path, columns)
    elif has_images:
        folder = path.absolute().parent
        rows = [_with_image(folder, image, caption) for image, caption in read_images(path, columns)]
    else:
        folder, rows = None, [ListedClip(file="", caption=caption) for caption in read_captions(path, columns)]
    return Source(name=f"data.path={path}", rows=rows, folder=folder, has_latents=has_clips)


def _with_image(folder: Path, image: str, caption: str) -> ListedClip:
    problem = "" if (folder / image).is_file() else "is missing"
    return ListedClip(file=image, caption=caption, problem=problem)
