"""Writing of an encoded set by all ranks together, so that a kill loses no finished clip and the bytes do not depend on
the ranks.

Shard n of a kind holds the clips (or distinct captions) ``n * per_shard`` to ``(n + 1) * per_shard - 1``. The ranks
write each of them as a file of ``SET/unfinished``, and one rank joins the files of a shard. The index is made of the
finished shards alone. ``set.json`` is written last: a folder with it is complete.
"""

import csv
import hashlib
import io
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from distill.data.sets.encoded_set import (
    ANY,
    DAMAGED,
    FORMATS,
    INDEX,
    KINDS,
    LEFT_OUT,
    REFERRED,
    SET,
    SHOWN,
    EncodedSet,
    shard_name,
)
from distill.data.sets.files import Damaged, Place, packed, publish, read_header, read_tensors, write_json
from distill.data.shares import Shares
from fsdp_cp.checkpoint.lock import LOCK, held_directory
from fsdp_cp.errors import UserError, one_line, paths_of_the_user
from fsdp_cp.files.atomic_file import writing
from fsdp_cp.files.foreign import refuse_foreign
from fsdp_cp.launch import world_size
from fsdp_cp.progress import progress
from fsdp_cp.reduce import on_all_ranks, on_first_rank
from models.condition import REFERENCE_PARTS, REFERENCES
from models.files.shipped import find_shipped, parse_hub_name

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARD_BYTES = 256 << 20
"""Bytes of a shard, about."""
_BEGUN, _UNFINISHED = "encoding.json", "unfinished"

Text = tuple[str, int]
"""Caption, and the number of the clip whose images its embedding shows: -1 for none."""
Row = tuple[int, Text]
"""Number of a clip (-1: none) with its text."""
Save = Callable[[int, Mapping[str, torch.Tensor], Mapping[str, Any]], None]
"""Stores number, tensors by part and notes of a clip or text: ``left_out`` (a reason; then no tensors) or ``cut``."""
Maker = Callable[[Sequence[int], Save, Callable[[int], object]], None]
"""Collective: makes and saves each of the numbers on one rank, and reports how many were done since the last report."""


class SetWriter:
    """A set that is being written by all ranks together. All that decides its content is in ``settings``."""

    def __init__(self, path: Path, where: str, settings: Mapping[str, Any]) -> None:
        self.path, self.where, self.settings = path, where, dict(settings)

    @contextmanager
    def begun(self) -> Iterator[bool]:
        """Lock the folder and note what it will hold; yield whether the set is complete and whole already. Damaged
        shards are removed, to be written again. A folder of another set or process is refused."""
        on_first_rank(lambda: refuse_other_set(self.path, self.where, self.settings))
        if on_first_rank(self._damaged) == []:
            yield True
            return
        with ExitStack() as stack:
            with written(self.where):  # closing the lock of a full disk fails too
                stack.enter_context(held_directory(self.path, self.where.split("=")[0]))
            on_first_rank(self._begin)
            yield False

    def is_finished(self) -> bool:
        """Whether the folder holds a complete and whole set of these settings."""
        return self._damaged() == [] and EncodedSet(self.path, self.where).about["settings"] == self.settings

    def _damaged(self) -> list[Path] | None:
        """Return the damaged shards of a complete set; ``None`` if it is not complete."""
        if not (self.path / SET).is_file():
            return None
        known = EncodedSet(self.path, self.where)
        return known.shards_of(known.damaged())

    def _begin(self) -> None:
        with written(self.where):
            for file in self._damaged() or ():
                logger.warning("%s: %s is damaged; encoding it again", self.where, file.name)
                file.unlink(missing_ok=True)
            write_json(self.path / _BEGUN, self.settings)
            (self.path / _UNFINISHED).mkdir(exist_ok=True)
            for name in (SET, DAMAGED):
                (self.path / name).unlink(missing_ok=True)

    def write(self, kind: str, count: int, size: int, unit: str, make: Maker) -> None:
        """Write all missing shards of ``count`` clips or texts of about ``size`` bytes, each a ``unit``."""
        per_shard = max(1, SHARD_BYTES // max(1, size))
        shards = [range(first, min(count, first + per_shard)) for first in range(0, count, per_shard)]
        names = self._names(self.path)
        missing = [n for n in range(len(shards)) if shard_name(kind, n) not in names]
        with progress(sum(len(shards[n]) for n in missing), f"making {kind}", unit) as advance:
            ranks, unfinished = world_size(), self._names(self.path / _UNFINISHED)
            for group in (missing[first : first + ranks] for first in range(0, len(missing), ranks)):
                numbers = [number for shard in group for number in shards[shard]]
                done = {number for number in numbers if self._entry(kind, number).name in unfinished}
                advance(len(done))
                make([number for number in numbers if number not in done], partial(self._save, kind), advance)
                Shares().run(group, lambda shard: self._join(kind, shard, shards[shard]))

    def _names(self, folder: Path) -> set[str]:
        """Return the names of a folder's files, on every rank."""
        # Listed, not looked up: a network file system may remember for a while that a file was missing.
        return on_first_rank(lambda: {file.name for file in folder.iterdir()})

    def _whole(self, read: Callable[[Path], T], file: Path) -> T:
        """Return ``read(file)``; remove a file that was damaged after it was written."""
        try:
            return read(file)
        except Damaged as error:
            file.unlink()
            raise UserError(f"{self.where}: {file} was damaged ({error}) and is removed; start again") from error

    def _save(self, kind: str, number: int, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any]) -> None:
        with written(self.where):
            publish(self._entry(kind, number), packed(tensors, notes))

    def _join(self, kind: str, shard: int, numbers: Sequence[int]) -> None:
        """Write a shard of the files of its members, and remove these."""
        tensors, notes = {}, {"left_out": {}, "cut": {}}
        for number in numbers:
            made, noted = self._whole(read_tensors, self._entry(kind, number))
            tensors |= {f"{number:08d}.{part}": tensor for part, tensor in made.items()}
            for key in notes.keys() & noted.keys():
                notes[key][str(number)] = noted[key]
        with written(self.where):
            publish(self.path / shard_name(kind, shard), packed(tensors, notes))
            for number in numbers:
                self._entry(kind, number).unlink()

    def _entry(self, kind: str, number: int) -> Path:
        return self.path / _UNFINISHED / shard_name(kind, number)

    def _files(self, kind: str) -> list[Path]:
        return sorted(self.path.glob(f"{kind}-*.safetensors"))

    def _headers(self, kind: str) -> Iterator[tuple[dict[str, Place], dict[str, Any]]]:
        return (self._whole(read_header, file) for file in self._files(kind))

    def _members(self, kind: str) -> Iterator[tuple[int, dict[str, Place], dict[str, int]]]:
        """Yield shard, and the place and the checksum of each part, of every clip or text that is not left out."""
        for shard, (header, notes) in enumerate(self._headers(kind)):
            for _, names in groupby(sorted(header), key=lambda name: name.split(".")[0]):
                parts = {name.split(".")[1]: name for name in names}
                places = {part: header[name] for part, name in parts.items()}
                yield shard, places, {part: notes["crc32"][name] for part, name in parts.items()}

    def notes(self, kind: str, note: str) -> dict[int, str]:
        """Return ``left_out`` or ``cut`` of all finished shards of a kind, by number, on every rank."""
        return on_first_rank(
            lambda: {int(n): text for _, notes in self._headers(kind) for n, text in notes[note].items()}
        )

    def finish(
        self,
        rows: Sequence[Row],
        negative: str,
        *,
        encoders: str | Path,
        left_out: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Write the index, ``left_out.csv`` (names and reasons) and ``set.json``, and remove what only an unfinished
        set needs."""
        texts = texts_of(rows, negative)
        known = {text: number for number, text in enumerate(texts)}

        def work() -> None:
            captions = [caption for caption, _ in texts]
            columns, clip_parts, text_widths = self._columns([(clip, known[text]) for clip, text in rows], captions)
            content = packed(columns, {})
            table = io.StringIO(newline="")
            csv.writer(table, lineterminator="\n").writerows([("name", "reason"), *left_out])
            distinct = {caption for _, (caption, _) in rows}
            counts = {"rows": len(rows), "captions": len(distinct), "left_out": len(left_out)}
            has_shown = any(clip >= 0 for _, clip in texts)
            counts |= {kind: columns[f"{kind[:-1]}.shard"].numel() for kind in KINDS}
            description = {
                "encoders": encoders if parse_hub_name(encoders) else str(find_shipped(encoders).absolute()),
                "format": REFERRED
                if REFERENCES in clip_parts
                else SHOWN
                if has_shown
                else FORMATS["clip.bucket" in columns],
                "parts": {part: [places[0].dtype, *(p.shape for p in places)] for part, places in clip_parts.items()},
                "text_widths": text_widths,
                "negative": known.get((negative, -1)),
                "empty": known.get(("", -1)),
                "counts": counts,
                "index": hashlib.sha256(content).hexdigest(),
                "settings": self.settings,
            }
            with written(self.where):
                publish(self.path / INDEX, content)
                publish(self.path / LEFT_OUT, table.getvalue().encode())
                write_json(self.path / SET, description)
                (self.path / _BEGUN).unlink()
                shutil.rmtree(self.path / _UNFINISHED)

        on_first_rank(work)
        on_all_ranks(lambda: EncodedSet(self.path, self.where).fingerprint())  # every node must see it

    def _columns(
        self, rows: Sequence[tuple[int, int]], texts: Sequence[str]
    ) -> tuple[dict[str, torch.Tensor], dict[str, list[Place]], dict[str, int]]:
        """Return the columns of the index, a place of each part of a clip in each bucket, and the widths of texts."""
        encoded = [text.encode() for text in texts]
        columns: dict[str, Any] = defaultdict(list)
        columns["row.clip"], columns["row.text"] = zip(*rows, strict=True)
        columns["caption.end"] = np.cumsum([len(text) for text in encoded])
        columns["caption.order"] = sorted(range(len(encoded)), key=encoded.__getitem__)
        buckets: dict[tuple, int] = {}
        clip_parts: dict[str, list[Place]] = defaultdict(list)
        text_widths: dict[str, int] = {}
        for kind in KINDS:
            one = kind[:-1]
            columns[f"{kind}.size"] = [file.stat().st_size for file in self._files(kind)]
            for shard, places, crc32 in self._members(kind):
                columns[f"{one}.shard"].append(shard)
                for part, place in places.items():
                    columns[f"{one}.{part}.offset"].append(place.offset)
                    columns[f"{one}.{part}.crc32"].append(crc32[part])
                if kind == "texts":
                    for part, place in places.items():
                        columns[f"text.{part}.tokens"].append(place.shape[0])
                        text_widths[part] = place.shape[1]
                    continue
                for part in places.keys() & {*REFERENCE_PARTS}:
                    rows, *others = places[part].shape
                    columns[f"clip.{part}.rows"].append(rows)
                    places[part] = places[part]._replace(shape=(ANY, *others))
                shapes = tuple((part, place.shape) for part, place in places.items())
                if shapes not in buckets:
                    buckets[shapes] = len(buckets)
                    for part, place in places.items():
                        clip_parts[part].append(place)
                columns["clip.bucket"].append(buckets[shapes])
            columns[f"{one}.shard"] += []  # there may be no shard
        if len(buckets) < 2:  # not always: sets of before must stay
            columns.pop("clip.bucket", None)
        made = {name: torch.tensor(np.asarray(value, np.int64)) for name, value in columns.items()}
        made["caption"] = torch.tensor(np.frombuffer(b"".join(encoded), np.uint8).copy())
        return made, clip_parts, text_widths


_LEFT_BEHIND = (".encoding.tmp.json", ".encoding.json.tmp")
"""Names of the unfinished record that a kill can leave, of this version and of earlier ones."""


@paths_of_the_user()
def refuse_other_set(path: Path, where: str, settings: Mapping[str, Any] | None = None) -> None:
    """Refuse a folder that holds something else than a set, finished or not, of these settings (any, if ``None``)."""
    # Where no encoding began, all files are the user's, files with a set's names too.
    names = sorted({*os.listdir(path)} - {LOCK, *_LEFT_BEHIND}) if path.is_dir() else []

    def recorded(value: Any) -> dict[str, Any]:
        return dict((value["settings"] if SET in names else value).items())

    record, setting = SET if SET in names else _BEGUN, where.split("=")[0]
    made = refuse_foreign(
        path, setting, names, record=record, is_ours=recorded, maker="an encoding", is_read=SET in names
    )
    for key, now in (settings or {}).items() if made else ():
        was = recorded(made).get(key)
        while was != now and isinstance(was, dict) and isinstance(now, dict):  # name the entry that differs
            inner = next(name for name in {**was, **now} if was.get(name) != now.get(name))
            key, was, now = f"{key}.{inner}", was.get(inner), now.get(inner)
        if was != now:
            before, after = (one_line(value, 100) for value in (was, now))
            raise UserError(f"{where} was made with {key}={before}, not {after}; use that, or another folder")


def texts_of(rows: Sequence[Row], negative: str) -> list[Text]:
    """Return the distinct texts of a set: captions in the order of their first rows, the negative, the empty one. Of
    texts that show images, those whose caption another one has come last, and there is no negative or empty one."""
    texts = list(dict.fromkeys(text for _, text in rows))
    if all(clip < 0 for _, clip in texts):
        return list(dict.fromkeys([*texts, (negative, -1), ("", -1)]))
    first: dict[str, Text] = {}
    for text in texts:
        first.setdefault(text[0], text)
    return list(dict.fromkeys([*first.values(), *texts]))


def written(where: str) -> AbstractContextManager[None]:
    """Turn a failure to write into one line."""
    return writing(where, "make room, or give another folder; finished clips stay, and the same command continues")


def verify(path: Path, where: str) -> dict[str, list[int]]:
    """Read the index, and every shard, shared by all ranks. Note what is damaged for later readers; return it. A
    collective."""
    encoded = EncodedSet(path, where)
    work = on_all_ranks(encoded.shards)[0]
    with progress(len(work), "verifying", "shard") as advance:
        wrong = Shares().run(work, lambda shard: encoded.verify_shard(*shard), advance)
    damaged: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for (kind, _), numbers in zip(work, wrong, strict=True):
        damaged[kind] += numbers
    with written(where):
        on_first_rank(lambda: write_json(path / DAMAGED, {"index": encoded.about["index"], **damaged}))
    return damaged
