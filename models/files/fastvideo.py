"""FastVideo's folder of a student: ``transformer/`` in diffusers' names, and ``fastvideo_inference.json`` next to it.

That file, which FastVideo writes for MiniMax-H3 alone, lists the trained times and the sparse attention. FastVideo,
sglang and vLLM sample by it, and refuse one that disagrees with the schedulers in the same folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_cp.errors import UserError, one_line, shown
from models.files.scheduler import TOLERANCE
from models.sample import shift_time
from models.sparse import SparseSettings

KIND = "fastvideo"
"""Name in ``models.export --format``."""
FAMILIES = ("wan", "minimax_h3")
FILE = "fastvideo_inference.json"
_SCHEMA = "fasth3-inference-contract-v1"
_TILES = {64: [4, 4, 4], 128: [4, 4, 8], 256: [4, 8, 8]}
"""Tiles of FastVideo's kernels by their numbers of tokens."""
NOTE = (
    "FastVideo reads this folder next to the other folders of the base's pipeline: copy them here. For a sparse Wan,"
    " give it the attention backend VIDEO_SPARSE_ATTN and the sparsity in sparse.json."
)


def contract(
    times: Sequence[float], *, video_shift: float, audio_shift: float, sparse: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the contents of ``fastvideo_inference.json``.

    Args:
        times: times of the video's steps, falling from 1, above 0. They need not be even.
        video_shift, audio_shift: shifts of ``scheduler/`` and ``audio_scheduler/``.
        sparse: contents of ``sparse.json``; ``None`` for dense attention.

    Raises:
        UserError: the file cannot hold the times, which it has before the shift in thousandths, or the tile.
    """
    steps = [round(1000 * t / (video_shift - (video_shift - 1) * t)) for t in times]
    off = max(abs(shift_time(step / 1000, video_shift) - t) for step, t in zip(steps, times, strict=True))
    if off > TOLERANCE or steps[-1] < 1 or any(a <= b for a, b in pairwise(steps)):
        listed = ", ".join(f"{t:.6g}" for t in times)
        raise UserError(
            f"{FILE} has thousandths before a shift of {video_shift:g}, which the times {listed} are not (off by"
            f" {off:.2g}); use --format wan-lora"
        )
    contents: dict[str, Any] = {
        "schema_version": _SCHEMA,
        "task": "t2av",
        "guidance_scale": 1.0,
        "dmd_denoising_steps": steps,
        "num_inference_steps": len(steps) + 1,  # with the final 0
        "transformer_forwards": len(steps),
        "video_scheduler_shift": video_shift,
        "audio_scheduler_shift": audio_shift,
    }
    if sparse is None:
        return contents
    size = next((size for size, tile in _TILES.items() if tile == list(sparse["tile"])), None)
    if size is None:
        raise UserError(
            f"{FILE} has no tile={shown(sparse['tile'])}; FastVideo has {', '.join(map(str, _TILES.values()))}"
        )
    backend = {"attention_backend": "VIDEO_SPARSE_ATTN_H3", "vsa_sparsity": sparse["sparsity"], "vsa_tile_size": size}
    return contents | backend


def read_sparse_contract(folder: Path, where: str) -> SparseSettings | None:
    """Return the sparse attention in the ``fastvideo_inference.json`` of a ``folder``; ``None`` without it."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
        if "vsa_sparsity" not in contents:
            return None
        return SparseSettings(sparsity=contents["vsa_sparsity"], tile=_TILES[contents["vsa_tile_size"]])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{where}: {file} is damaged ({one_line(error)}); copy it again") from error
