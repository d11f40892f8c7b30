"""rCM's tar shards: ``N.latent.pt`` (C, t, h, w), normalized, ``N.embed.pt`` (512, D), and ``N.prompt.txt`` of a clip.

See ``rcm/datasets/build_synthetic_dataset.py`` of NVlabs/rcm. Both tensors are bf16.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch

from distill.data.sources.archives import archives, caption_of, samples
from distill.data.sources.outside_set import OutsideSet, as_tensor, load_tensors
from distill.data.videos.video_folder import ListedClip

LATENT, EMBEDDING, PROMPT = "latent.pt", "embed.pt", "prompt.txt"


def read(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
    _, first = next(samples(path), ("", {}))
    if LATENT not in first:
        return None
    rows, places = [], {}
    for name, sample in samples(path):
        caption, problem = caption_of(sample, PROMPT)
        missing = [ending for ending in (LATENT, EMBEDDING) if ending not in sample]
        problem = f"has no {' and no '.join(missing)}" if missing else problem
        rows.append(ListedClip(file=name, caption=caption, problem=problem))
        places[name] = sample

    def tensor(name: str, ending: str, dims: int) -> torch.Tensor:
        return as_tensor(load_tensors(io.BytesIO(places[name][ending].read())), dims)

    return OutsideSet(
        format="rCM",
        rows=rows,
        files=archives(path),
        latents=lambda name: tensor(name, LATENT, 4),
        text=lambda name: tensor(name, EMBEDDING, 2),
    )
