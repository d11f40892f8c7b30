"""Files of weights with the same bytes for the same contents, so that a hub or a copy finds them unchanged."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


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
