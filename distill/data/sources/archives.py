"""Members of tar archives, grouped into samples as the package webdataset does; nothing is unpacked."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from distill.data.videos.decode import FilePart
from distill.data.videos.video_folder import is_outside
from fsdp_cp.errors import UserError


def archives(path: Path) -> list[Path]:
    """Return the archives of a folder and its sub-folders, or the archive ``path`` itself."""
    return sorted(path.rglob("*.tar")) if path.is_dir() else [path] if path.suffix == ".tar" else []


def samples(path: Path) -> Iterator[tuple[str, dict[str, FilePart]]]:
    """Yield name (``shard.tar:folder/0001``) and members, by ending (``mp4``, ``latent.pt``), of each sample. They
    share a name up to the first dot, and stand next to each other."""
    for file in archives(path):
        name, sample = "", {}
        for member, part in _members(file):
            folder, _, last = member.rpartition("/")
            stem, _, ending = last.partition(".")
            here = f"{file.relative_to(path) if file != path else file.name}:{folder}{'/' if folder else ''}{stem}"
            if here != name and sample:
                yield name, sample
                sample = {}
            name, sample[ending.lower()] = here, part
        if sample:
            yield name, sample


def caption_of(sample: Mapping[str, FilePart], ending: str) -> tuple[str, str]:
    """Return the caption in a member of a sample, and the reason to leave the sample out, or ``""``."""
    if ending not in sample:
        return "", f"has no .{ending} with its caption"
    try:
        caption = sample[ending].read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return "", "has a caption that is not UTF-8 text"
    return caption, "" if caption else "has an empty caption"


def _members(file: Path) -> Iterator[tuple[str, FilePart]]:
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                name = os.path.normpath(member.name)
                if is_outside(name):
                    raise UserError(f"data.path: {file} has the member {name[:100]!r}, which is outside; pack it again")
                if member.isdir():
                    continue
                if not member.isreg() or member.sparse is not None:
                    raise UserError(f"data.path: {file} has {name[:100]!r}, which is not a plain file; pack it again")
                yield name, FilePart(file, member.offset_data, member.size)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"data.path: {file} cannot be read ({' '.join(str(error).split())}); copy it again") from error
