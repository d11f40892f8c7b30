"""Tar archives, whose members are grouped into samples as the package webdataset does; nothing is unpacked.

rCM's shards (``rcm/datasets/build_synthetic_dataset.py`` of NVlabs/rcm) have ``N.latent.pt`` (C, t, h, w), normalized,
``N.embed.pt`` (512, D), both bf16, and ``N.prompt.txt`` of a clip. Others have a video and a ``.txt`` file.
Hidden members (``._0.mp4`` of macOS) are no samples. Damage that Python's tarfile takes for the end is refused.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.data.sources.source import (
    Source,
    as_tensor,
    cannot_read,
    files_ending,
    load_tensors,
    place_in,
    stored_row,
)
from distill.data.videos.container import FilePart
from distill.data.videos.table import VIDEO_SUFFIXES
from distill.data.videos.video_folder import is_outside
from fsdp_cp.errors import UserError

LATENT, EMBEDDING, PROMPT = "latent.pt", "embed.pt", "prompt.txt"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_BLOCK = tarfile.BLOCKSIZE
_PIECE = 1 << 20

Sample = Mapping[str, FilePart]
"""Members of a sample by their endings: ``mp4``, ``latent.pt``."""


def read(path: Path, columns: Mapping[str, str] | None = None) -> Source | None:
    """Read rCM's shards, or archives of videos."""
    if compressed := files_ending(path, *COMPRESSED):
        raise UserError(f"data.path: {compressed[0]} is compressed, so no clip in it can be found; unpack it to .tar")
    files = files_ending(path, ".tar")
    if not files:
        return None
    samples, shared = [*_samples(files, path)], {"name": f"data.path={path}", "folder": path, "files": files}
    if samples and LATENT in samples[0][1]:
        return _latents(samples, shared)
    rows, videos = [], {}
    for place, sample in samples:
        ending = next((ending for ending in sample if f".{ending}" in VIDEO_SUFFIXES), None)
        caption, problem = _caption_of(sample, "txt")
        file = f"{place}.{ending}" if ending else place
        if ending:
            videos[file] = sample[ending]
        rows.append(stored_row(file, caption, problem=problem if ending else "holds no video"))
    return Source(format="webdataset", rows=rows, videos=videos, **shared)


def _latents(samples: Sequence[tuple[str, Sample]], shared: Mapping[str, Any]) -> Source:
    places, rows = dict(samples), []
    for place, sample in samples:
        caption, problem = _caption_of(sample, PROMPT)
        lacks = [ending for ending in (LATENT, EMBEDDING) if ending not in sample]
        rows.append(stored_row(place, caption, lacks=lacks, problem=problem))

    def tensor(place: str, ending: str, dims: int) -> torch.Tensor:
        return as_tensor(load_tensors(io.BytesIO(places[place][ending].read())), dims)

    latents, text = (lambda place: tensor(place, LATENT, 4)), (lambda place: tensor(place, EMBEDDING, 2))
    return Source(format="rCM", rows=rows, latents=latents, text=text, **shared)


def _caption_of(sample: Sample, ending: str) -> tuple[str, str]:
    """Return the caption in a member of a sample, and the reason to leave the sample out, or ``""``."""
    if ending not in sample:
        return "", f"has no .{ending} with its caption"
    try:
        caption = sample[ending].read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return "", "has a caption that is not UTF-8 text"
    return caption, "" if caption else "has an empty caption"


def _samples(files: Sequence[Path], path: Path) -> Iterator[tuple[str, Sample]]:
    """Yield name (``shard.tar:folder/0001``) and members of each sample. They share a name up to the first dot, and
    stand next to each other."""
    for file in files:
        name, sample, known = "", {}, set[str]()
        for member, part in _members(file):
            folder, _, last = member.rpartition("/")
            stem, _, ending = last.partition(".")
            if not stem:
                continue
            here, ending = place_in(file, path, f"{folder}{'/' if folder else ''}{stem}"), ending.lower()
            if f"{here}.{ending}" in known:
                raise UserError(f"data.path: {file} has {member[:100]!r} twice; pack it again with one name for each")
            known.add(f"{here}.{ending}")
            if here != name and sample:
                yield name, sample
                sample = {}
            name, sample[ending] = here, part
        if sample:
            yield name, sample


def _members(file: Path) -> Iterator[tuple[str, FilePart]]:
    end = 0
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                name = os.path.normpath(member.name)
                _check_member(member, name, file)
                end = member.offset_data
                if not member.isdir():
                    end += -(-member.size // _BLOCK) * _BLOCK
                    yield name, FilePart(file, member.offset_data, member.size)
        _check_end(file, end)
    except UserError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise cannot_read(file, error) from error


def _check_member(member: tarfile.TarInfo, name: str, file: Path) -> None:
    if is_outside(name):
        raise UserError(f"data.path: {file} has the member {name[:100]!r}, which is outside; pack it again")
    is_plain = member.isreg() and member.sparse is None
    if not (is_plain or member.isdir()):
        raise UserError(f"data.path: {file} has {name[:100]!r}, which is not a plain file; pack it again")


def _check_end(file: Path, end: int) -> None:
    """Refuse an archive in which anything but zeros, a block of them at least, comes after the last member: tarfile
    takes a damaged header, or a cut between members, for the end (https://github.com/python/cpython/issues/120740)."""
    with file.open("rb") as stream:
        stream.seek(end)
        size, is_zero = 0, True
        while is_zero and (piece := stream.read(_PIECE)):
            size, is_zero = size + len(piece), not any(piece)
    if not is_zero:
        found = f"data after its last member that can be read (byte {end}): it is damaged, or archives were joined"
        raise UserError(f"data.path: {file} has {found}; copy it again, or give each archive as a file of its own")
    if size < _BLOCK:
        raise UserError(f"data.path: {file} has no end (byte {end}): it was cut; copy it again")
