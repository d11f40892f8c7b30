"""Files of weights with the same bytes for the same contents, so that a hub or a copy finds them unchanged."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fsdp_cp.errors import UserError


@contextmanager
def refuse_unwritten(folder: Path) -> Iterator[None]:
    """Turn an error of safetensors, such as a full disk, into a ``UserError`` about the unchanged ``folder``."""
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{folder} cannot be written ({error}); nothing in it has changed") from error


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. Its library (0.8) writes ``metadata`` in a random order; they are sorted here."""
    save_file(dict(tensors), file, metadata={"format": "pt", **metadata})
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            opened.seek(8)
            opened.write(text.ljust(size))
