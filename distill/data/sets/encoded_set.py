"""An encoded set: a folder of latents, text embeddings and captions, read at random by every rank.

``SET/set.json`` says how the set was made. ``SET/index.safetensors`` has the captions and the place and the checksum of
every tensor. ``SET/clips-00000000.safetensors`` and ``SET/texts-00000000.safetensors`` are the shards of clips and of
distinct captions. ``SET/left_out.csv`` names the clips that are left out, and the captions that are cut.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load

from distill.data.sets.files import DTYPES, Damaged, Place, read_at, read_json
from fsdp_cp.errors import UserError

FORMATS = (1, 2, 3, 4)
"""Format of a set whose clips have one size, of one whose clips have several, and of one whose texts show the images of
their rows: they have no negative and no empty text, and a caption has a text for each of its images; and of one whose
texts show references, parts of clips with any number of rows."""
SHOWN, REFERRED = 3, 4
ANY = -1
"""Number of rows in the shape of a part of clips that differ in it; the column ``clip.PART.rows`` has those."""
SET, INDEX, DAMAGED, LEFT_OUT = "set.json", "index.safetensors", "damaged.json", "left_out.csv"
KINDS = ("clips", "texts")
COMMAND = "python -m distill.encode"


def shard_name(kind: str, number: int) -> str:
    """Return the file name of a shard of ``clips`` or ``texts``."""
    return f"{kind}-{number:08d}.safetensors"


class DamagedShard(UserError):
    """A shard does not hold what was written."""


class Captions(Sequence[str]):
    """Captions of some texts of a set, read on demand."""

    def __init__(self, encoded: EncodedSet, texts: Sequence[int]) -> None:
        self._set, self._texts = encoded, texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._set.caption(int(text)) for text in self._texts[index]]
        return self._set.caption(int(self._texts[index]))


class EncodedSet:
    """Reader of a set. A row is a clip with a caption; rows can share clips and captions."""

    def __init__(self, path: str | Path, where: str) -> None:
        self.path, self.where = Path(path), where
        try:
            self.about = read_json(self.path / SET)
            if self.about.get("format") not in FORMATS:
                made = f"format {self.about.get('format')}, not {' or '.join(map(str, FORMATS))}"
                raise UserError(f"{where} has {made}; make it with {COMMAND}")
            self._index = (self.path / INDEX).open("rb", buffering=0)  # stays the same file if another replaces it
        except OSError as error:
            reason = f"{where} is not a complete encoded set ({error.strerror})"
            raise UserError(f"{reason}; make it with {COMMAND} SOURCE {path}") from error
        except Damaged as error:
            raise UserError(f"{where}: {SET} is damaged ({error}); encode the set again") from error
        self.negative, self.empty = self.about["negative"], self.about["empty"]
        self.parts: dict[str, tuple[str, list[list[int]]]] = {
            name: (dtype, shapes) for name, (dtype, *shapes) in self.about["parts"].items()
        }
        """Type of each part of a clip, and its shape in each bucket."""
        self.text_widths: dict[str, int] = self.about["text_widths"]

    def __len__(self) -> int:
        return self.about["counts"]["rows"]

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        """Columns of the index, of integers or bytes, read whole at the first use."""
        content = self._index.read()
        if hashlib.sha256(content).hexdigest() != self.about["index"]:
            raise UserError(f"{self.where}: {self.path / INDEX} is damaged; encode the set again")
        columns = load(content)
        # One bucket, of captions alone too, whose clip is -1.
        columns.setdefault("clip.bucket", np.zeros(len(columns["clip.shard"]) + 1, np.int64))
        return columns

    @property
    def captions(self) -> Captions:
        """Distinct captions of the rows, in the order of their first rows."""
        return Captions(self, range(self.about["counts"]["captions"]))

    def fingerprint(self) -> str:
        """Return a hash of all content, which does not depend on where the set and its encoders are."""
        decides = {name: value for name, value in self.about.items() if name not in ("encoders", "settings", "counts")}
        free = {"rows"} if self.parts else {"rows", "fps", "vae_precision", "vae_tiling", "latents", "decoder"}
        decides["settings"] = {k: v for k, v in self.about["settings"].items() if k not in free}
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    def caption(self, text: int) -> str:
        ends = self._columns["caption.end"]
        return self._columns["caption"][ends[text - 1] if text else 0 : ends[text]].tobytes().decode()

    def find(self, caption: str) -> int | None:
        """Return the first text with this caption, or ``None``."""
        return next(iter(self._texts_with(caption)), None)

    def _texts_with(self, caption: str) -> list[int]:
        order = self._columns["caption.order"]
        first = last = bisect_left(order, caption.encode(), key=lambda text: self.caption(text).encode())
        while last < len(order) and self.caption(order[last]) == caption:
            last += 1
        return order[first:last].tolist()

    def clip_of(self, row: int) -> int:
        return int(self._columns["row.clip"][row])

    def text_of(self, row: int) -> int:
        return int(self._columns["row.text"][row])

    def first_row(self, caption: str, bucket: int = 0, among: Sequence[int] | None = None) -> int | None:
        """Return the first row, ``among`` these if given, with this caption and a clip of this bucket, or ``None``."""
        rows = np.flatnonzero(np.isin(self.row_texts(), self._texts_with(caption)))
        rows = rows if among is None else np.intersect1d(rows, among)
        return next((int(row) for row in rows if self.bucket_of(self.clip_of(row)) == bucket), None)

    def row_texts(self) -> np.ndarray:
        """Return the text of each row."""
        return self._columns["row.text"]

    def row_buckets(self) -> np.ndarray:
        """Return the bucket of the clip of each row."""
        return self._columns["clip.bucket"][self._columns["row.clip"]]

    def bucket_with(self, shape: Sequence[int]) -> int | None:
        """Return the bucket of the clips whose video has latents of this shape, or ``None``."""
        _, shapes = self.parts.get("latents", ("", []))
        return shapes.index(list(shape)) if list(shape) in shapes else None

    def bucket_of(self, clip: int) -> int:
        """Return the bucket of a clip, in the order of :attr:`parts`."""
        return int(self._columns["clip.bucket"][clip])

    def clip(self, clip: int, *, leave: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Return the tensors of a clip by part, fp32, except the parts to ``leave``; a damaged shard is refused."""
        bucket, tensors = self.bucket_of(clip), {}
        for part, (dtype, shapes) in self.parts.items():
            if part not in leave:
                rows, *others = shapes[bucket]
                rows = int(self._columns[f"clip.{part}.rows"][clip]) if rows == ANY else rows
                tensors[part] = self._tensor("clip", clip, part, dtype, (rows, *others)).float()
        return tensors

    def text(self, text: int) -> dict[str, torch.Tensor]:
        """Return the embeddings ``(tokens, D)`` of a text by part as stored, without the zeros that fill them up."""
        dtype = self.about["settings"].get("text", {}).get("dtype", "F32")
        tokens = {part: int(self._columns[f"text.{part}.tokens"][text]) for part in self.text_widths}
        shapes = {part: (tokens[part], width) for part, width in self.text_widths.items()}
        return {part: self._tensor("text", text, part, dtype, shape) for part, shape in shapes.items()}

    def _tensor(self, kind: str, number: int, part: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        shard, offset, crc32 = (
            int(self._columns[f"{kind}.{column}"][number]) for column in ("shard", f"{part}.offset", f"{part}.crc32")
        )
        file = self.path / shard_name(f"{kind}s", shard)
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        try:
            return read_at(file, Place(dtype, shape, offset, size), crc32)
        except Damaged as error:
            hint = f"run {COMMAND} --verify {self.path}, then encode it again or set data.damaged=skip"
            raise DamagedShard(f"{self.where}: {file} is damaged ({error}); {hint}") from error

    # Damage

    def damaged(self) -> dict[str, list[int]]:
        """Return by kind the clips and texts in shards of another size, or found damaged by a verification."""
        noted: dict[str, Any] = {}
        with suppress(OSError, Damaged):
            noted = read_json(self.path / DAMAGED)
        damaged = {}
        there = {file.name: file.stat().st_size for file in self.path.iterdir() if file.is_file()}
        for kind in KINDS:
            sizes = enumerate(self._columns[f"{kind}.size"])
            wrong = [shard for shard, size in sizes if there.get(shard_name(kind, shard)) != size]
            known = noted.get(kind, ()) if noted.get("index") == self.about["index"] else ()
            damaged[kind] = sorted({*known, *self._members(kind, wrong)})
        return damaged

    def _members(self, kind: str, shards: Sequence[int]) -> list[int]:
        return np.flatnonzero(np.isin(self._columns[f"{kind[:-1]}.shard"], shards)).tolist()

    def shards_of(self, damaged: Mapping[str, Sequence[int]]) -> list[Path]:
        shards = {(kind, self._columns[f"{kind[:-1]}.shard"][n]) for kind in KINDS for n in damaged[kind]}
        return [self.path / shard_name(kind, number) for kind, number in sorted(shards)]

    def rows_without(self, damaged: Mapping[str, Sequence[int]]) -> list[int]:
        bad = [np.isin(self._columns[f"row.{kind[:-1]}"], list(damaged[kind])) for kind in KINDS]
        return np.flatnonzero(~(bad[0] | bad[1])).tolist()

    def shards(self) -> list[tuple[str, int]]:
        """Return kind and number of each shard, from the index."""
        return [(kind, shard) for kind in KINDS for shard in range(len(self._columns[f"{kind}.size"]))]

    def verify_shard(self, kind: str, shard: int) -> list[int]:
        """Read a shard and return the numbers of its clips or texts whose checksum differs."""
        wrong = []
        for number in self._members(kind, [shard]):
            try:
                (self.clip if kind == "clips" else self.text)(number)
            except DamagedShard:
                wrong.append(number)
        return wrong
