"""What a diffusers transformer folder holds, read from ``config.json`` and the safetensors headers alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

from fsdp_cp.errors import UserError

ADDITIONS = "additions.safetensors"
"""Beside the network's own files: the tensors of its additions (models/additions.py), which diffusers does not read."""


@dataclass(frozen=True, kw_only=True)
class TransformerFolder:
    """A diffusers transformer folder: its config and the shape of every tensor. No weights are read."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    additions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of ``additions.safetensors``."""


def inspect_transformer(checkpoint: str, setting: str) -> TransformerFolder:
    """Find and describe the transformer in ``checkpoint``.

    Args:
        checkpoint: a diffusers pipeline folder (its ``transformer/`` is read) or a transformer folder.
        setting: the setting it came from, for messages ("teacher.checkpoint").

    Raises:
        UserError: no such folder, no ``config.json``, no or broken safetensors files.
    """
    root = Path(checkpoint)
    if not root.is_dir():
        raise UserError(f"{setting}={checkpoint} is not a folder; give a diffusers pipeline or transformer folder")
    path = root / "transformer" if (root / "transformer" / "config.json").is_file() else root
    if not (path / "config.json").is_file():
        raise UserError(f"{setting}={checkpoint} has neither transformer/config.json nor config.json")
    try:
        config = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"{setting}={checkpoint}: {path / 'config.json'} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{setting}={checkpoint}: {path / 'config.json'} is not a JSON object")
    index = path / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{setting}={checkpoint}: {index.name} is not an index of safetensors files") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise UserError(f"{setting}={checkpoint} lacks {missing[0]}, which {index.name} names")
        files = [path / name for name in names]
        stray = sorted({p.name for p in path.glob("*.safetensors")} - {*names, ADDITIONS})
        if stray:
            raise UserError(f"{setting}={checkpoint} holds {stray[0]}, which {index.name} does not name; remove it")
    else:
        files = sorted(set(path.glob("*.safetensors")) - {path / ADDITIONS})
        if not files:
            raise UserError(f"{setting}={checkpoint} has no .safetensors file in {path}")
        if len(files) > 1:
            # The reader takes every file of the folder: a variant's tensors would be mixed into the network's.
            stray = next((f.name for f in files if f.name != "diffusion_pytorch_model.safetensors"), files[-1].name)
            raise UserError(f"{setting}={checkpoint} holds {stray} besides, and no {index.name}; keep one file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes |= _read_shapes(file, f"{setting}={checkpoint}")
    extra = path / ADDITIONS
    additions = _read_shapes(extra, f"{setting}={checkpoint}") if extra.is_file() else {}
    return TransformerFolder(path=path, config=config, shapes=shapes, additions=additions)


def _read_shapes(file: Path, where: str) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except Exception as error:  # safetensors raises its own SafetensorError, which is not public everywhere
        raise UserError(f"{where}: {file.name} is not a readable safetensors file ({error})") from error


def check_tensors(folder: TransformerFolder, expected: dict[str, tuple[int, ...]], setting: str) -> None:
    """Compare the files with what the network needs.

    Args:
        folder: what the files hold.
        expected: name and shape of every tensor of the network.
        setting: the setting it came from, for messages.

    Raises:
        UserError: missing tensors, unexpected ones, or other shapes, by name.
    """
    found = folder.shapes
    other = [name for name in sorted(expected.keys() & found.keys()) if expected[name] != found[name]]
    if other:
        raise UserError(
            f"{setting}={folder.path}: {other[0]} has shape {found[other[0]]}, but the network of its config.json"
            f" needs {expected[other[0]]}" + (f" ({len(other)} tensors differ)" if len(other) > 1 else "")
        )
    for what, names in (
        ("lacks", sorted(expected.keys() - found.keys())),
        ("has the unexpected", sorted(found.keys() - expected.keys())),
    ):
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UserError(f"{setting}={folder.path} {what} {listed}; is it a checkpoint of another model?")
