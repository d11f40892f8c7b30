"""Tar archives of the package webdataset with a video and a ``.txt`` file with its caption in each sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distill.data.sources.archives import archives, caption_of, samples
from distill.data.sources.outside_set import OutsideSet
from distill.data.videos.table import VIDEO_SUFFIXES
from distill.data.videos.video_folder import ListedClip


def read(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
    files = archives(path)
    if not files:
        return None
    rows, videos = [], {}
    for name, sample in samples(path):
        ending = next((ending for ending in sample if f".{ending}" in VIDEO_SUFFIXES), None)
        caption, problem = caption_of(sample, "txt")
        file = f"{name}.{ending}" if ending else name
        if ending:
            videos[file] = sample[ending]
        rows.append(ListedClip(file=file, caption=caption, problem=problem if ending else "holds no video"))
    return OutsideSet(format="webdataset", rows=rows, files=files, videos=videos)
