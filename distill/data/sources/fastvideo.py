"""FastVideo's parquet files, by the schemas ``t2v`` and ``text_only`` of ``fastvideo/dataset/dataloader/schema.py``.

A tensor is three columns, ``*_bytes``, ``*_shape`` and ``*_dtype``; FastVideo reads all as float32. Latents are the
mean of the VAE's posterior: its trainers normalize them (``normalize_dit_input``). The other columns are not read:
``num_frames`` counts latent frames, one of its writers exchanges ``width`` and ``height``, and ``fps`` is the rate of
the video file, from which frames were picked at another rate.
"""

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from distill.data.sources.source import Source, as_tensor, cannot_read, files_ending, place_in, stored_row
from distill.data.videos.container import ClipError
from fsdp_cp.errors import UserError, first_line
from fsdp_cp.runtime.packages import optional_package

OTHER_SCHEMAS = {
    "audio_latent_bytes": "t2va",
    "mouse_cond_bytes": "matrixgame2",
    "trajectory_latents_bytes": "ode_trajectory",
    "first_frame_latent_bytes": "i2v",
}
"""A column that only this other schema has."""
_LATENT, _TEXT = ([f"{name}_{key}" for key in ("bytes", "shape", "dtype")] for name in ("vae_latent", "text_embedding"))

Place = tuple[Path, int, int]
"""File, group in it, and row in that."""


def read(path: Path, columns: Mapping[str, str] | None = None) -> Source | None:
    """Read the captions of all files in the folder and its sub-folders (``rank_*/worker_*/``), or of one file."""
    files = files_ending(path, ".parquet")
    if not files:
        return None
    parquet: Any = optional_package("pyarrow.parquet", "pip install 'fsdp-cp[parquet]'")
    if isinstance(parquet, str):
        raise UserError(f"data.path={path} holds parquet files; the package pyarrow {parquet}")
    rows, places, kinds = [], dict[str, Place](), set()
    for file in files:
        has_latents, groups = _captions(parquet, file)
        kinds.add(has_latents)
        for group, captions in enumerate(groups):
            for i, caption in enumerate(captions):
                name = place_in(file, path, f"{group}.{i}")
                places[name] = file, group, i
                rows.append(stored_row(name, caption))
    if len(kinds) > 1:
        raise UserError(f"data.path={path} has files with and without latents; give a folder of one schema")
    stored = _Stored(parquet, places)
    return Source(
        name=f"data.path={path}",
        folder=path,
        has_latents=True in kinds,
        format="FastVideo",
        rows=rows,
        files=files,
        latents=(lambda name: stored.tensor(name, _LATENT, 4)) if True in kinds else None,
        text=lambda name: stored.tensor(name, _TEXT, 2),
        is_normalized=False,
    )


class _Stored:
    """Tensors of the rows, which threads read."""

    def __init__(self, parquet: Any, places: Mapping[str, Place]) -> None:
        self._parquet, self._places, self._lock = parquet, places, threading.Lock()
        # Rows come in their order, and a group is read as a whole.
        self._group = functools.lru_cache(maxsize=2)(self._read_group)

    def _read_group(self, file: Path, group: int, wanted: tuple[str, ...]) -> Any:
        return self._parquet.ParquetFile(file).read_row_group(group, columns=list(wanted))

    def tensor(self, name: str, wanted: Sequence[str], dims: int) -> torch.Tensor:
        """Return the tensor of a row in three columns: bytes, shape and type."""
        file, group, i = self._places[name]
        try:
            with self._lock:
                table = self._group(file, group, tuple(wanted))
        except (OSError, ValueError) as error:
            raise ClipError(f"cannot be read ({first_line(error)[:200]})") from error
        data, shape, dtype = (table[column][i].as_py() for column in wanted)
        is_whole = dtype == "float32" and shape and min(shape) >= 1
        if not is_whole or len(data or b"") != 4 * math.prod(shape):
            raise ClipError(f"holds {len(data or b'')} bytes of {dtype} for {wanted[1]}={shape}; it must be float32")
        return as_tensor(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape), dims)


def _captions(parquet: Any, file: Path) -> tuple[bool, list[list[str | None]]]:
    """Return whether a file has latents, and the captions of each of its groups."""
    try:
        opened = parquet.ParquetFile(file)
        has_latents = _has_latents(file, opened.schema_arrow.names)
        groups = [opened.read_row_group(n, columns=["caption"]) for n in range(opened.num_row_groups)]
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise cannot_read(file, error) from error
    return has_latents, [table["caption"].to_pylist() for table in groups]


def _has_latents(file: Path, names: list[str]) -> bool:
    for column, schema in OTHER_SCHEMAS.items():
        if column in names:
            raise UserError(f"data.path: {file} has FastVideo's schema {schema}; give its schemas t2v or text_only")
    has_latents = any(name in names for name in _LATENT)
    missing = [name for name in ("caption", *_TEXT, *(_LATENT if has_latents else ())) if name not in names]
    if missing:
        lacks = f"lacks {', '.join(missing)}, columns of FastVideo's schemas t2v and text_only"
        raise UserError(f"data.path: {file} {lacks}; give one of these")
    return has_latents
