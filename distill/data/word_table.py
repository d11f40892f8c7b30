"""A fixed table word -> vector: the text encoder of the procedurally rendered clips.

The table is a file, ``words.safetensors``: one fp32 tensor ``vectors`` of shape (words, D), and in the file's metadata
``vocabulary``, a JSON list that names its rows. Row 0 is the pad word, which also stands for "no caption".

``python -m distill.data.word_table OUT.safetensors`` writes it.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from fsdp_cp.errors import UserError
from fsdp_cp.paths import user_path
from models.shipped import find_shipped

FILE_NAME = "words.safetensors"
PAD = "<pad>"
ARTICLES = ("a", "an")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "magenta", "white")
SHAPES = ("circle", "square")
MOTIONS = ("growing", "shrinking", "blinking", "falling")
VOCABULARY = (PAD, *ARTICLES, *COLOURS, *SHAPES, *MOTIONS)
DIM = 32
_SEED = 20250607


def make_vectors(num_words: int = len(VOCABULARY), dim: int = DIM, seed: int = _SEED) -> Tensor:
    """Vectors (num_words, dim), fp32: mutually orthogonal, each entry of root mean square 1.

    Orthogonal, so that no two words start out alike; unit-scale entries, as a text encoder's are after its final norm.
    Raises UserError if ``num_words`` exceeds ``dim``.
    """
    if num_words > dim:
        raise UserError(f"dim={dim} is too small for {num_words} orthogonal words; use {num_words} or more")
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(dim, num_words, generator=generator, dtype=torch.float64)
    orthogonal, _ = torch.linalg.qr(gaussian)
    return (orthogonal.T * dim**0.5).float().contiguous()


def table_file(folder: str | Path) -> Path:
    """Return the file of the table in ``folder``; ``folder`` may be the file itself."""
    path = find_shipped(folder)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


class WordTable:
    """Embeds captions word by word.

    Args:
        words: the vocabulary; the first is the pad word.
        vectors: fp32 (len(words), D).
    """

    def __init__(self, words: list[str], vectors: Tensor) -> None:
        if vectors.ndim != 2 or len(words) != vectors.shape[0] or len(set(words)) != len(words):
            raise UserError(
                f"{FILE_NAME}: {len(words)} words ({len(set(words))} distinct) do not name the rows of "
                f"vectors of shape {tuple(vectors.shape)}; write it again with python -m distill.data.word_table"
            )
        if not words or words[0] != PAD:
            raise UserError(f"{FILE_NAME}: the first word must be {PAD!r}; use python -m distill.data.word_table")
        self.words = list(words)
        self.vectors = vectors.float()
        self._row = {word: i for i, word in enumerate(words)}

    @classmethod
    def load(cls, folder: str | Path) -> "WordTable":
        """The table in ``folder/words.safetensors`` (or the file itself). Raises UserError if there is none."""
        path = table_file(folder)
        if not path.is_file():
            raise UserError(
                f"data.encoders={folder} holds no {FILE_NAME}; name the folder of the shipped teacher "
                "(assets/quickstart_teacher) or write one with python -m distill.data.word_table"
            )
        try:
            words, vectors = _read(path)
        except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
            raise UserError(
                f"data.encoders: {path} is not a word table ({type(error).__name__}); "
                "write one with python -m distill.data.word_table"
            ) from error
        if not vectors.isfinite().all():
            raise UserError(
                f"data.encoders: {path} is damaged (a vector is not finite); write one with python -m"
                " distill.data.word_table"
            )
        return cls(words, vectors)

    @property
    def dim(self) -> int:
        """Entries of a word's vector."""
        return self.vectors.shape[1]

    def embed(self, captions: list[str], length: int) -> Tensor:
        """fp32 (len(captions), length, D); short captions are padded, the empty one is all pad words.

        Raises UserError for an unknown word or a caption of more than ``length`` words.
        """
        rows = torch.zeros(len(captions), length, dtype=torch.long)
        for i, caption in enumerate(captions):
            words = caption.lower().split()
            if len(words) > length:
                raise UserError(f"caption {caption!r} has {len(words)} words; use at most {length}")
            for j, word in enumerate(words):
                if word not in self._row:
                    raise UserError(f"caption {caption!r}: unknown word {word!r}; use {', '.join(self.words[1:])}")
                rows[i, j] = self._row[word]
        return self.vectors[rows]


def _read(path: Path) -> tuple[list[str], Tensor]:
    """Words and vectors; ValueError, KeyError or SafetensorError for another file."""
    content = path.read_bytes()  # not mapped: a file that shrinks would end the process
    vectors = load(content)["vectors"]
    with safe_open(str(path), framework="pt") as file:
        words = json.loads((file.metadata() or {})["vocabulary"])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("the vocabulary is not a list of words")
    if not vectors.is_floating_point():
        raise ValueError(f"vectors of {vectors.dtype}")
    return words, vectors


def write(path: str | Path) -> None:
    """Writes the table of ``VOCABULARY`` to ``path`` (its folder is made).

    Raises:
        UserError: a file there that is not a word table, or a folder that cannot be written.
    """
    path = Path(path)
    if path.exists() or path.is_symlink():
        try:
            _read(path)
        except (SafetensorError, OSError, KeyError, ValueError, RecursionError):
            raise UserError(f"{path} is there and is not a word table; remove it, or name another file") from None
    part = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(save({"vectors": make_vectors()}, metadata={"vocabulary": json.dumps(VOCABULARY)}))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name another file") from error


def main(arguments: list[str]) -> int:
    """Command line: one argument, the file to write. Returns the exit code (0, or 2 for a wrong call)."""
    if len(arguments) != 1 or not arguments[0].endswith(".safetensors"):
        print("usage: python -m distill.data.word_table OUT.safetensors", file=sys.stderr)
        return 2
    try:
        write(user_path(arguments[0], "OUT"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {len(VOCABULARY)} words of {DIM} entries to {arguments[0]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
