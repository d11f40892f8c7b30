"""Encoders of the procedurally rendered clips: latents are pixels, and a fixed table gives each word a vector.

The table is a file, ``words.safetensors``, in the folder of the teacher that was trained with it. It holds one fp32
tensor ``vectors`` (words, D), mutually orthogonal with entries of root mean square 1. Its metadata hold ``vocabulary``,
a JSON list that names the rows. Row 0 is the pad word, which also stands for "no caption".
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from distill.data.base import to_bytes
from distill.data.encoders.image import ImageInput
from distill.data.encoders.wan import EncoderFolder, TextEncoder, VideoCodec
from fsdp_cp.errors import UserError
from models.files.shipped import find_shipped

FILE_NAME = "words.safetensors"
PAD = "<pad>"
COLORS = ("red", "orange", "yellow", "green", "cyan", "blue", "magenta", "white")
SHAPES = ("circle", "square")
MOTIONS = ("growing", "shrinking", "blinking", "falling")


def table_file(folder: str | Path) -> Path:
    """Return the file of the table in ``folder``; ``folder`` may be the file itself."""
    path = find_shipped(folder)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


class WordTable:
    """Embeds captions word by word. ``folder`` holds ``words.safetensors``, or is that file."""

    def __init__(self, folder: str | Path) -> None:
        path = table_file(folder)
        try:
            with safe_open(str(path), framework="pt") as file:
                self.words = json.loads((file.metadata() or {})["vocabulary"])
                # Not mapped: a file that shrinks would end the process.
                self.vectors = file.get_tensor("vectors").float().clone()
            self._row = {word: i for i, word in enumerate(self.words)}
            if self.words[:1] != [PAD] or len(self._row) != len(self.vectors):
                raise ValueError(f"its words must begin with {PAD!r} and name the rows of its vectors")
            if not self.vectors.isfinite().all():
                raise ValueError("its vectors hold numbers that are not finite")
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"data.encoders: {path} is not a word table ({error})"
            raise UserError(f"{reason}; use assets/quickstart_teacher") from error

    def embed(self, captions: list[str], length: int, name: str = "caption") -> Tensor:
        """Return fp32 (len(captions), length, D); short captions are padded, the empty one is all pad words."""
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


class WordEncoder(TextEncoder):
    """Text encoder of a word table."""

    def __init__(self, folder: EncoderFolder, *, max_tokens: int, **_: Any) -> None:
        self._table, self.max_tokens, self.cuts = WordTable(folder.path), max_tokens, []

    def embeddings(self, caption: str) -> dict[str, Tensor]:
        """Return ``text`` fp32 (``max_tokens``, D), filled up with the pad word; see :meth:`WordTable.embed`."""
        return {"text": self._table.embed([caption], self.max_tokens)[0]}


class PixelCodec(VideoCodec):
    """Pixels as latents."""

    dtype = torch.float32

    def __init__(self, *_: Any, **__: Any) -> None:
        """Load nothing."""

    def encode(self, video: Tensor) -> Tensor:
        return video

    def decode_next(self, latents: Tensor, *, is_first: bool) -> Tensor:
        return self.decode(latents)

    def decode(self, latents: Tensor) -> Tensor:
        return to_bytes(latents.float().cpu()).permute(0, 2, 3, 4, 1).contiguous()


@dataclass(kw_only=True, slots=True, frozen=True)
class WordFolder(EncoderFolder):
    """A word table as a family of encoders, so that an encoded set can hold rendered clips."""

    codec_class = PixelCodec
    text_class = WordEncoder

    def inspect_image(self, where: str) -> ImageInput:
        raise UserError(f"{where} is a word table, which has no image encoder; set data.image=null")

    def files(self, *parts: str) -> list[Path]:
        return [table_file(self.path)]
