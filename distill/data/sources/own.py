"""Our tables: a folder of videos with ``metadata.csv``, ``metadata.jsonl`` or ``.txt`` files, a file of captions."""

from collections.abc import Mapping
from pathlib import Path

from distill.data.base import IMAGES
from distill.data.sources.source import Source
from distill.data.videos.table import read_captions, read_images
from distill.data.videos.video_folder import ListedClip, listed_images, read_metadata
from models.condition import REFERENCES


def read(
    path: str | Path, columns: Mapping[str, str] | None = None, *, has_clips: bool, image: str | None = None
) -> Source:
    """Read a folder of videos, or a file of captions, with the images of ``data.image`` from the file's folder."""
    path = Path(path).expanduser()
    if has_clips:
        folder, rows = path, read_metadata(path, columns, have_references=image == REFERENCES)
    elif image is not None:
        folder = path.absolute().parent
        table = read_images(path, columns, images=[*IMAGES[image]])
        rows = [listed_images(*row, are_references=image == REFERENCES, folder=folder) for row in table]
    else:
        folder, rows = None, [ListedClip(file="", caption=caption) for caption in read_captions(path, columns)]
    return Source(name=f"data.path={path}", rows=rows, folder=folder, has_latents=has_clips)
