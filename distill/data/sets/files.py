"""Files of an encoded set: tensors with checksums, and JSON, each published atomically.

A tensor file is safetensors with one metadata entry, ``set``: JSON with each tensor's checksum (``crc32``) and notes.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from fsdp_cp.errors import one_line
from fsdp_cp.files.atomic_file import atomic_path

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}
"""Tensor types of a set, by their names in safetensors."""
_ENTRY = "set"


class Damaged(Exception):
    """A file does not hold what was written. The message is the reason, without the file's name."""


class Place(NamedTuple):
    """Place of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte, counted from the start of the file."""
    size: int


def publish(file: Path, content: bytes) -> None:
    """Write a file so that it appears complete or not at all, also after a power failure."""
    with atomic_path(file, locked=True) as part:  # the set's lock lets one process write it
        part.write_bytes(content)


def write_json(file: Path, value: Any) -> None:
    publish(file, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file, which raises :class:`Damaged` or ``OSError``."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise Damaged("it is not a JSON object")
    return value


def packed(tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any]) -> bytes:
    """Return the content of a file with ``tensors``, their checksums and ``notes``."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # Empty tensors have strides that no view as bytes takes.
    data = {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items() if tensor.numel()}
    crc32 = {name: zlib.crc32(data.get(name, b"")) for name in tensors}
    return save(tensors, metadata={_ENTRY: json.dumps({"crc32": crc32, **notes}, sort_keys=True, ensure_ascii=False)})


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the notes of a file, which raises :class:`Damaged` or ``OSError``."""
    places, notes = read_header(file)
    return {name: read_at(file, place, notes["crc32"][name]) for name, place in places.items()}, notes


def read_header(file: Path) -> tuple[dict[str, Place], dict[str, Any]]:
    """Return the place of each tensor of a file and its notes, or raise :class:`Damaged` or ``OSError``."""
    with file.open("rb") as stream:
        size, length = int.from_bytes(stream.read(8), "little"), file.stat().st_size
        if size > length:
            raise Damaged("its header is cut")
        content = stream.read(size)
    try:
        header = json.loads(content)
        notes = json.loads(header.pop("__metadata__")[_ENTRY])
        places = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            places[name] = Place(entry["dtype"], tuple(entry["shape"]), 8 + size + begin, end - begin)
        known = notes["crc32"].keys() == places.keys()
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(one_line(f"{type(error).__name__} {error}")) from error
    if not known or max((place.offset + place.size for place in places.values()), default=8 + size) != length:
        raise Damaged("its size differs from what its header says")
    return places, notes


def read_at(file: Path, place: Place, crc32: int) -> torch.Tensor:
    """Return one tensor with one read, or raise :class:`Damaged` for missing or other bytes. No file is mapped: one
    that shrinks would end the process by SIGBUS."""
    try:
        with file.open("rb", buffering=0) as stream:
            data = bytearray(os.pread(stream.fileno(), place.size, place.offset))
    except OSError as error:
        raise Damaged(str(error.strerror)) from error
    if len(data) != place.size:
        raise Damaged("it is shorter than it was")
    if zlib.crc32(data) != crc32:
        raise Damaged("a checksum differs")
    if not data:
        return torch.zeros(place.shape, dtype=DTYPES[place.dtype])
    return torch.frombuffer(data, dtype=DTYPES[place.dtype]).view(place.shape)
