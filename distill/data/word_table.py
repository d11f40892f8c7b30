"""A fixed table word -> vector: the text encoder of the procedurally rendered clips.

The table is a file, ``words.safetensors``, in the folder of the teacher that was trained with it. It holds one fp32
tensor ``vectors`` (words, D), mutually orthogonal with entries of root mean square 1. Its metadata hold ``vocabulary``,
a JSON list that names the rows. Row 0 is the pad word, which also stands for "no caption".
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from fsdp_cp.errors import UserError
from models.files.shipped import find_shipped

FILE_NAME = "words.safetensors"
PAD = "<pad>"
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "magenta", "white")
SHAPES = ("circle", "square")
MOTIONS = ("growing", "shrinking", "blinking", "falling")


def table_file(folder: str | Path) -> Path:
    """Return the file of the table in ``folder``; ``folder`` may be the file itself."""
    path = find_shipped(folder)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


class WordTable:
    """Embeds captions word by word.

    Args:
        folder: holds ``words.safetensors``, or is that file.

    Raises:
        UserError: a file that is missing or is not a word table.
    """

    def __init__(self, folder: str | Path) -> None:
        path = table_file(folder)
        try:
            self.words, self.vectors = _read(path)
        except FileNotFoundError as error:
            raise UserError(f"data.encoders={folder} has no {FILE_NAME}; use assets/quickstart_teacher") from error
        except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
            raise UserError(
                f"data.encoders: {path} is not a word table ({error}); use assets/quickstart_teacher"
            ) from error
        self._row = {word: i for i, word in enumerate(self.words)}

    @property
    def dim(self) -> int:
        """Entries of a word's vector."""
        return self.vectors.shape[1]

    def embed(self, captions: list[str], length: int, name: str = "caption") -> Tensor:
        """Return fp32 (len(captions), length, D); short captions are padded, the empty one is all pad words.

        Raises:
            UserError: an unknown word, or more than ``length`` words. The message begins with ``name``.
        """
        rows = torch.zeros(len(captions), length, dtype=torch.long)
        for i, caption in enumerate(captions):
            words = caption.lower().split()
            if len(words) > length:
                raise UserError(f"{name} {caption!r} has {len(words)} words; use at most {length}")
            for j, word in enumerate(words):
                if word not in self._row:
                    raise UserError(f"{name} {caption!r}: unknown word {word!r}; use {', '.join(self.words[1:])}")
                rows[i, j] = self._row[word]
        return self.vectors[rows]


def _read(path: Path) -> tuple[list[str], Tensor]:
    """Return words and vectors; raise OSError, ValueError, KeyError or SafetensorError for another file."""
    content = path.read_bytes()  # not mapped: a file that shrinks would end the process
    vectors = load(content)["vectors"].float()
    with safe_open(str(path), framework="pt") as file:
        words = json.loads((file.metadata() or {})["vocabulary"])
    if not isinstance(words, list) or not words or words[0] != PAD or not all(isinstance(w, str) for w in words):
        raise ValueError(f"the vocabulary is not a list of words that begins with {PAD!r}")
    if vectors.ndim != 2 or len(words) != len(vectors) or len(set(words)) != len(words):
        raise ValueError(f"{len(words)} words do not name the rows of vectors of shape {tuple(vectors.shape)}")
    if not vectors.isfinite().all():
        raise ValueError("a vector is not finite")
    return words, vectors
