"""LightX2V's caches: ``metadata.jsonl``, or ``metadata_rankNN.jsonl``, that name ``.pt`` files by row.

See ``lightx2v_train/data_process/wan/build_latent_dataset.py``: ``video_latent_path`` holds normalized latents
(C, t, h, w) with their frame rate, ``condition_path`` the embedding of the caption. Either may be left out. Of
MiniMax-H3 (``minimax_h3/build_minimax_h3_prompt_latents.py``) rows have a ``task``, and only embeddings are read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distill.data.sources.source import Source, as_tensor, load_tensors, stored_row
from distill.data.videos.container import ClipError
from distill.data.videos.table import read_text, require_utf8
from distill.data.videos.video_folder import ListedClip, is_outside
from fsdp_cp.errors import UserError
from fsdp_cp.files.json_lines import parse

LATENT, CONDITION, SOUND = "video_latent_path", "condition_path", "audio_latent_path"

Record = dict[str, Any]


def read(path: Path) -> Source | None:
    """Read the tables of a cache; ``None`` if none of their rows names a file of one."""
    found = _records(path)
    named, of_h3 = _kind([record for record in found.values() if record is not None], path)
    if not named:
        return None
    rows = [_row(name, record, named, of_h3, f"data.path: {path}: {name}") for name, record in found.items()]
    _check_tables(found, named, path)
    cache = _Cache(path, found)
    used = [found[row.file] for row in rows if not row.problem]
    return Source(
        name=f"data.path={path}",
        folder=path,
        has_latents=LATENT in named,
        format="LightX2V",
        rows=rows,
        files=[path / record[key] for record in used for key in named],
        latents=cache.latents if LATENT in named else None,
        text=(cache.text_of_h3 if of_h3 else cache.text) if CONDITION in named else None,
        fps=cache.fps,
        vae_class="AutoencoderKLMiniMaxH3" if of_h3 else Source.vae_class,
    )


class _Cache(NamedTuple):
    """Files of a cache, and the records that name them."""

    path: Path
    records: Mapping[str, Record | None]

    def _entry(self, name: str, column: str, *keys: str) -> Any:
        file = self.records[name][column]
        value = load_tensors(self.path / file)
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise ClipError(f"has no {key} in {file}")
            value = value[key]
        return value

    def latents(self, name: str) -> torch.Tensor:
        return as_tensor(self._entry(name, LATENT, "latents"), 4)

    def fps(self, name: str) -> Any:
        return self._entry(name, LATENT, "fps")

    def text(self, name: str) -> torch.Tensor:
        return as_tensor(self._entry(name, CONDITION, "conditions", "prompt_embed"), 2)

    def text_of_h3(self, name: str) -> torch.Tensor:
        return as_tensor(self._entry(name, CONDITION, "conditioning", "positive", "prompt_embeds"), 3)[0]


def _records(path: Path) -> dict[str, Record | None]:
    """Return the JSON object, or ``None``, of each line of all tables, by table and line."""
    found: dict[str, Record | None] = {}
    for file in sorted([*path.glob("metadata.jsonl"), *path.glob("metadata_rank*.jsonl")]):
        for number, line in enumerate(read_text(file, f"data.path: {file}").split("\n"), start=1):
            if line.strip():
                found[f"{file.name}:{number}"] = parse(line.encode())
    return found


def _kind(records: Sequence[Record], path: Path) -> tuple[list[str], bool]:
    """Return the columns in which records name files, and whether the cache is MiniMax-H3's. Refuse one with sound."""
    named = [key for key in (SOUND, CONDITION, LATENT) if any(record.get(key) for record in records)]
    of_h3 = any("task" in record for record in records)
    if SOUND in named or (of_h3 and LATENT in named):
        raise UserError(f"data.path={path} is a cache with sound; give one of Wan's, or of MiniMax-H3's captions alone")
    return named, of_h3


def _row(name: str, record: Record | None, named: Sequence[str], of_h3: bool, where: str) -> ListedClip:
    """Return the row of a record, whose files must be inside the folder."""
    if record is None:
        raise UserError(f"{where} is not a JSON object; write one object per line")
    caption, files = record.get("caption"), {key: record.get(key) for key in named}
    for text in (caption, *files.values()):
        require_utf8(text if isinstance(text, str) else None, where)
    for key, file in files.items():
        if file and (not isinstance(file, str) or is_outside(file)):
            raise UserError(f"{where} has {key}={file!r}; give a path inside the folder")
    caption = caption if isinstance(caption, str) and caption.strip() else ""
    if of_h3 and record.get("task") != "t2av":
        return stored_row(name, caption, problem=f"has task={record.get('task')!r}, not t2av: it may have keyframes")
    return stored_row(name, caption, lacks=[key for key in named if not files[key]])


def _check_tables(found: Mapping[str, Record | None], named: Sequence[str], path: Path) -> None:
    """Refuse two tables with the same clips, such as those of all ranks and one of them joined."""
    tables: dict[str, str] = {}
    for name, record in found.items():
        table = name.partition(":")[0]
        for file in (record[key] for key in named if record and record.get(key)):
            if tables.setdefault(file, table) != table:
                both = f"{tables[file]} and {table} name {file}"
                raise UserError(f"data.path={path}: {both}, so clips would come twice; keep one of the tables")
