"""Our tables: a folder of videos with ``metadata.csv``, ``metadata.jsonl`` or ``.txt`` files, a file of captions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from distill.data.base import IMAGES
from distill.data.sources.source import Source
from distill.data.videos.references import problem_of
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
        rows = [_with_images(folder, *row, are_references=image == REFERENCES) for row in table]
    else:
        folder, rows = None, [ListedClip(file="", caption=caption) for caption in read_captions(path, columns)]
    return Source(name=f"data.path={path}", rows=rows, folder=folder, has_latents=has_clips)


def _with_images(folder: Path, files: Sequence[str], caption: str, *, are_references: bool) -> ListedClip:
    if are_references:
        problem = problem_of(files[0], lambda file: (folder / file).is_file())
        return listed_images(files, caption, problem, are_references=True)
    problem = "" if all((folder / file).is_file() for file in files) else "is missing"
    return listed_images(files, caption, problem)
