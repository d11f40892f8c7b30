"""Tar archives, whose members are grouped into samples as the package webdataset does; nothing is unpacked.

rCM's shards (``rcm/datasets/build_synthetic_dataset.py`` of NVlabs/rcm) have ``N.latent.pt`` (C, t, h, w), normalized,
``N.embed.pt`` (512, D), both bf16, and ``N.prompt.txt`` of a clip. Others have a video and a ``.txt`` file.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from distill.data.sources.outside_set import OutsideSet, as_tensor, load_tensors
from distill.data.videos.decode import FilePart
from distill.data.videos.table import VIDEO_SUFFIXES
from distill.data.videos.video_folder import ListedClip, is_outside
from fsdp_cp.errors import UserError

LATENT, EMBEDDING, PROMPT = "latent.pt", "embed.pt", "prompt.txt"


def read(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
    """Read rCM's shards, or archives of videos."""
    files = sorted(path.rglob("*.tar")) if path.is_dir() else [path] if path.suffix == ".tar" else []
    if not files:
        return None
    samples = [*_samples(files, path)]
    rows, videos, places = [], {}, dict(samples)
    if not samples or LATENT not in samples[0][1]:
        for name, sample in samples:
            ending = next((ending for ending in sample if f".{ending}" in VIDEO_SUFFIXES), None)
            caption, problem = _caption_of(sample, "txt")
            file = f"{name}.{ending}" if ending else name
            if ending:
                videos[file] = sample[ending]
            rows.append(ListedClip(file=file, caption=caption, problem=problem if ending else "holds no video"))
        return OutsideSet(format="webdataset", rows=rows, files=files, videos=videos)
    for name, sample in samples:
        caption, problem = _caption_of(sample, PROMPT)
        missing = [ending for ending in (LATENT, EMBEDDING) if ending not in sample]
        problem = f"has no {' and no '.join(missing)}" if missing else problem
        rows.append(ListedClip(file=name, caption=caption, problem=problem))

    def tensor(name: str, ending: str, dims: int) -> torch.Tensor:
        return as_tensor(load_tensors(io.BytesIO(places[name][ending].read())), dims)

    return OutsideSet(
        format="rCM",
        rows=rows,
        files=files,
        latents=lambda name: tensor(name, LATENT, 4),
        text=lambda name: tensor(name, EMBEDDING, 2),
    )


def _samples(files: Sequence[Path], path: Path) -> Iterator[tuple[str, dict[str, FilePart]]]:
    """Yield name (``shard.tar:folder/0001``) and members, by ending (``mp4``, ``latent.pt``), of each sample. They
    share a name up to the first dot, and stand next to each other."""
    for file in files:
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


def _caption_of(sample: Mapping[str, FilePart], ending: str) -> tuple[str, str]:
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
