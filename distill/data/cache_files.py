"""Files of a cache: one fp32 tensor each, with notes and a checksum, whole or not there."""

from __future__ import annotations

import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save


class Damaged(Exception):
    """This file does not hold what was written; the message is the reason."""


def read_tensor(file: Path, name: str, fits: Callable[[Sequence[int]], bool]) -> torch.Tensor:
    """The fp32 tensor ``name`` of ``file``. Raises ``Damaged`` unless it is the one that was written."""
    try:
        # Not safe_open: its tensors are mapped from the file, and die with a bus error if somebody shortens it.
        content = file.read_bytes()
        tensor = load(content)[name]
    except OSError as error:
        raise Damaged(str(error.strerror)) from error
    except (SafetensorError, KeyError) as error:
        raise Damaged(" ".join(str(error).split())[:200]) from error
    if tensor.dtype != torch.float32 or not fits(tensor.shape):
        raise Damaged(f"it holds {tensor.dtype} of shape {tuple(tensor.shape)}")
    if not tensor.isfinite().all():
        raise Damaged("it holds numbers that are not finite")
    size = int.from_bytes(content[:8], "little")  # of the header, which load() has read
    known = (json.loads(content[8 : 8 + size]).get("__metadata__") or {}).get("crc32")
    if known is not None and known != _checksum(tensor):  # files of earlier versions have none
        raise Damaged("its checksum is another")
    return tensor


def _checksum(tensor: torch.Tensor) -> str:
    return f"{zlib.crc32(tensor.numpy()):08x}"


def is_unfinished(file: Path) -> bool:
    """Is it one that :func:`write_tensor` writes to, of whichever process, or a file of somebody else's?"""
    return re.fullmatch(r"\.[0-9a-f]{32}\..+\.\d+\.tmp", file.name) is not None


def write_tensor(file: Path, name: str, tensor: torch.Tensor, about: dict[str, Any]) -> None:
    """Write under a name of this process's own, then rename: a reader never sees part of a file.

    Args:
        file: its folder is created where the folder above is there.
        name: of the tensor.
        tensor: is written as fp32.
        about: JSON-serialisable: what made it.

    Raises:
        OSError: a full disk, or a folder that can only be read.
    """
    part = file.with_name(f".{file.stem}.{socket.gethostname()}.{os.getpid()}.tmp")
    tensor = tensor.float().contiguous()
    notes = {"about": json.dumps(about, sort_keys=True), "crc32": _checksum(tensor)}
    try:
        file.parent.mkdir(exist_ok=True)
        part.write_bytes(save({name: tensor}, metadata=notes))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
