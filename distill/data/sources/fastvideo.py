"""FastVideo's parquet files, by the schemas ``t2v`` and ``text_only`` of ``fastvideo/dataset/dataloader/schema.py``.

A tensor is three columns, ``*_bytes``, ``*_shape`` and ``*_dtype``; FastVideo reads all as float32. Latents are the
mean of the VAE's posterior: its trainers normalize them (``normalize_dit_input``). The other columns are not read:
``num_frames`` counts latent frames, one of its writers exchanges ``width`` and ``height``, and ``fps`` is the rate of
the video file, from which frames were picked at another rate.
"""

import functools
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distill.data.sources.outside_set import OutsideSet, as_tensor
from distill.data.videos.colors import ClipError
from distill.data.videos.video_folder import ListedClip
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


def read(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
    """Read the captions of all files in the folder and its sub-folders (``rank_*/worker_*/``), or of one file."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path] if path.suffix == ".parquet" else []
    if not files:
        return None
    parquet: Any = optional_package("pyarrow.parquet", "pip install 'fsdp-cp[parquet]'")
    if isinstance(parquet, str):
        raise UserError(f"data.path={path} holds parquet files; the package pyarrow {parquet}")
    places: dict[str, tuple[Path, int, int]] = {}
    rows, kinds = [], set()
    for file in files:
        try:
            opened = parquet.ParquetFile(file)
            kinds.add(_has_latents(file, opened.schema_arrow.names))
            groups = [opened.read_row_group(n, columns=["caption"]) for n in range(opened.num_row_groups)]
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            if isinstance(error, UserError):
                raise
            raise UserError(f"data.path: {file} cannot be read ({first_line(error)[:200]}); copy it again") from error
        for group, table in enumerate(groups):
            for i, caption in enumerate(table["caption"].to_pylist()):
                name = f"{file.relative_to(path) if file != path else file.name}:{group}.{i}"
                places[name] = file, group, i
                problem = "" if (caption or "").strip() else "has no caption"
                rows.append(ListedClip(file=name, caption=caption or "", problem=problem))
    if len(kinds) > 1:
        raise UserError(f"data.path={path} has files with and without latents; give a folder of one schema")

    @functools.lru_cache(maxsize=2)  # rows come in their order, and a group is read as a whole
    def read_group(file: Path, group: int, wanted: tuple[str, ...]) -> Any:
        return parquet.ParquetFile(file).read_row_group(group, columns=list(wanted))

    lock = threading.Lock()

    def tensor(name: str, wanted: list[str], dims: int) -> torch.Tensor:
        file, group, i = places[name]
        try:
            with lock:
                table = read_group(file, group, tuple(wanted))
        except (OSError, ValueError) as error:
            raise ClipError(f"cannot be read ({first_line(error)[:200]})") from error
        data, shape, dtype = (table[column][i].as_py() for column in wanted)
        if dtype != "float32" or not shape or min(shape) < 1 or len(data or b"") != 4 * math.prod(shape):
            raise ClipError(f"holds {len(data or b'')} bytes of {dtype} for {wanted[1]}={shape}; it must be float32")
        return as_tensor(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape), dims)

    latents, text = (functools.partial(tensor, wanted=names, dims=dims) for names, dims in ((_LATENT, 4), (_TEXT, 2)))
    stored = {"latents": latents, "text": text} if True in kinds else {"text": text}
    return OutsideSet(format="FastVideo", rows=rows, files=files, is_normalized=False, **stored)


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
