"""LightX2V's caches: ``metadata.jsonl``, or ``metadata_rankNN.jsonl``, that name ``.pt`` files by row.

See ``lightx2v_train/data_process/wan/build_latent_dataset.py``: ``video_latent_path`` holds normalized latents
(C, t, h, w) with their frame rate, ``condition_path`` the embedding of the caption. Either may be left out. Of
MiniMax-H3 (``minimax_h3/build_minimax_h3_prompt_latents.py``) rows have a ``task``, and only embeddings are read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distill.data.sources.outside_set import OutsideSet, as_tensor, load_tensors
from distill.data.videos.colors import ClipError
from distill.data.videos.table import read_text, require_utf8
from distill.data.videos.video_folder import ListedClip, is_outside
from fsdp_cp.errors import UserError
from fsdp_cp.files.json_lines import parse

LATENT, CONDITION, SOUND = "video_latent_path", "condition_path", "audio_latent_path"


def read(path: Path, columns: Mapping[str, str] | None = None) -> OutsideSet | None:
    found: dict[str, dict[str, Any] | None] = {}
    for file in sorted([*path.glob("metadata.jsonl"), *path.glob("metadata_rank*.jsonl")]):
        for number, line in enumerate(read_text(file, f"data.path: {file}").split("\n"), start=1):
            if line.strip():
                found[f"{file.name}:{number}"] = parse(line.encode())
    named = sorted({key for record in found.values() for key in (LATENT, CONDITION, SOUND) if (record or {}).get(key)})
    if not named:
        return None
    of_h3 = any("task" in (record or {}) for record in found.values())
    if SOUND in named or (of_h3 and LATENT in named):
        raise UserError(f"data.path={path} is a cache with sound; give one of Wan's, or of MiniMax-H3's captions alone")
    rows = []
    for name, record in found.items():
        if record is None:
            raise UserError(f"data.path: {path}: {name} is not a JSON object; write one object per line")
        for key in named:
            value = record.get(key)
            require_utf8(value if isinstance(value, str) else None, f"data.path: {path}: {name}")
            if value and (not isinstance(value, str) or is_outside(value)):
                raise UserError(f"data.path: {path}: {name} has {key}={value!r}; give a path inside the folder")
        caption = record.get("caption")
        require_utf8(caption if isinstance(caption, str) else None, f"data.path: {path}: {name}")
        missing = [key for key in named if not record.get(key)]
        problem = f"has no {' and no '.join(missing)}" if missing else ""
        if of_h3 and record.get("task") != "t2av":
            problem = f"has task={record.get('task')!r}, not t2av: it may have keyframes"
        if not isinstance(caption, str) or not caption.strip():
            caption, problem = "", problem or "has no caption"
        rows.append(ListedClip(file=name, caption=caption, problem=problem))

    def latents(name: str) -> torch.Tensor:
        return as_tensor(entry(name, LATENT, "latents"), 4)

    def text(name: str) -> torch.Tensor:
        if of_h3:
            return as_tensor(entry(name, CONDITION, "conditioning", "positive", "prompt_embeds"), 3)[0]
        return as_tensor(entry(name, CONDITION, "conditions", "prompt_embed"), 2)

    def entry(name: str, column: str, *keys: str) -> Any:
        value = load_tensors(path / found[name][column])
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise ClipError(f"has no {key} in {found[name][column]}")
            value = value[key]
        return value

    used = [row.file for row in rows if not row.problem]
    files = [path / found[name][key] for name in used for key in named]
    return OutsideSet(
        format="LightX2V",
        rows=rows,
        files=files,
        latents=latents if LATENT in named else None,
        text=text if CONDITION in named else None,
        vae_class="AutoencoderKLMiniMaxH3" if of_h3 else OutsideSet.vae_class,
        fps=lambda name: entry(name, LATENT, "fps"),
    )
