"""Writing of an encoded set by all ranks together, so that a kill loses no finished clip and the bytes do not depend on
the ranks.

Shard n of a kind holds the clips (or distinct captions) ``n * per_shard`` to ``(n + 1) * per_shard - 1``. The ranks
write each of them as a file of ``SET/unfinished``, and one rank joins the files of a shard. The index is made of the
finished shards alone. ``set.json`` is written last: a folder with it is complete.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from distill.data.sets.encoded_set import (
    DAMAGED,
    FORMAT,
    INDEX,
    KINDS,
    LEFT_OUT,
    SET,
    EncodedSet,
    read_notes,
    refuse_earlier,
    shard_name,
    tensor_name,
)
from distill.data.sets.files import (
    Damaged,
    Place,
    publish,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from distill.data.shares import Shares
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.runtime.progress import progress

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20
"""Bytes of a shard, about."""
_BEGUN, _UNFINISHED, _LOCK = "encoding.json", "unfinished", ".lock"

Made = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Tensors of a clip or a caption, and notes: ``left_out`` (the reason; then no tensors) or ``cut``."""


class SetWriter:
    """A set that is being written. All methods are collective.

    Args:
        path: the folder.
        where: setting and folder, for messages.
        settings: everything that the content depends on, JSON-serializable; a later start must have the same.
    """

    def __init__(self, path: Path, where: str, settings: Mapping[str, Any]) -> None:
        self.path, self.where, self.settings = path, where, dict(settings)

    @contextmanager
    def begun(self) -> Iterator[bool]:
        """Lock the folder and note what it will hold; yield whether the set is complete and whole already.

        Damaged shards of a complete set are removed, to be written again.

        Raises:
            UserError: a folder that holds something else or a set of other settings, that another process writes, or
                that the ranks do not share.
        """
        from distill.run.folder import held_run_dir

        on_all_ranks(lambda: self._refuse_foreign() if rank() == 0 else None)
        if on_all_ranks(lambda: self._is_whole() if rank() == 0 else None)[0]:
            yield True
            return
        with ExitStack() as stack:
            with written(self.where):
                stack.enter_context(held_run_dir(self.path, self.where.split("=")[0]))
            on_all_ranks(lambda: self._begin() if rank() == 0 else None)
            yield False

    def _refuse_foreign(self) -> None:
        refuse_earlier(self.path, self.where)
        own = {SET, INDEX, DAMAGED, LEFT_OUT, _BEGUN, _UNFINISHED, _LOCK}
        try:
            names = sorted(file.name for file in self.path.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self.where} cannot be used ({error.strerror}); give an empty or a new folder") from error
        foreign = [n for n in names if n not in own and not n.startswith(KINDS) and not n.endswith(".tmp")]
        if foreign:
            raise UserError(f"{self.where} holds {foreign[0]}, which is not of a set; give an empty or a new folder")
        for name, part in ((SET, lambda found: found.get("settings")), (_BEGUN, lambda found: found)):
            try:
                found = part(read_json(self.path / name))
            except FileNotFoundError:
                continue
            except (Damaged, OSError) as error:
                raise UserError(f"{self.where}: {name} cannot be read ({error}); give another folder") from error
            for key, value in self.settings.items():
                if found is None or found.get(key) != value:
                    shown = " ".join(str(None if found is None else found.get(key)).split())[:100]
                    raise UserError(
                        f"{self.where} was made with {key}={shown}, not {' '.join(str(value).split())[:100]}; use that,"
                        " or another folder"
                    )

    def _is_whole(self) -> bool:
        return (self.path / SET).is_file() and not any(EncodedSet(self.path, self.where).damaged())

    def _begin(self) -> None:
        with written(self.where):
            if (self.path / SET).is_file():
                known = EncodedSet(self.path, self.where)
                for kind, numbers in zip(KINDS, known.damaged(), strict=True):
                    for file in known.shards_of(kind, numbers):
                        logger.warning("%s: %s is damaged; encoding it again", self.where, file.name)
                        file.unlink(missing_ok=True)
            write_json(self.path / _BEGUN, self.settings)
            (self.path / _UNFINISHED).mkdir(exist_ok=True)
            for name in (SET, DAMAGED):
                (self.path / name).unlink(missing_ok=True)

    def write(
        self,
        kind: str,
        count: int,
        per_shard: int,
        shares: Shares,
        make: Callable[[Sequence[int]], Iterator[Made]],
        unit: str,
    ) -> None:
        """Write all shards of a kind that are not there yet.

        Args:
            kind: ``clips`` or ``texts``.
            count: number of clips or texts.
            per_shard: number of them in a shard.
            shares: ranks that encode.
            make: yields the tensors and the notes for each of some numbers, which are this rank's.
            unit: singular noun for the progress bar.
        """

        def missing() -> list[int]:
            return [n for n in range(-(-count // per_shard)) if read_notes(self.path / shard_name(kind, n)) is None]

        shards = on_all_ranks(lambda: missing() if rank() == 0 else [])[0]

        def members(shard: int) -> range:
            return range(shard * per_shard, min(count, (shard + 1) * per_shard))

        def join(shard: int) -> None:
            tensors, notes = {}, {"left_out": {}, "cut": {}}
            for number in members(shard):
                made, noted = read_tensors(self._entry(kind, number))
                tensors |= {tensor_name(number, part): tensor for part, tensor in made.items()}
                for key in notes:
                    if key in noted:
                        notes[key][str(number)] = noted[key]
            with written(self.where):
                write_tensors(self.path / shard_name(kind, shard), tensors, notes)
                for number in members(shard):
                    self._entry(kind, number).unlink()

        left = sum(len(members(shard)) for shard in shards)
        with progress(left, f"encoding {kind}", unit) as advance:
            step = len(shares.ranks)
            for group in (shards[first : first + step] for first in range(0, len(shards), step)):
                numbers = [number for shard in group for number in members(shard)]
                mine = [numbers[i] for i in shares.own(len(numbers))]
                todo = [number for number in mine if not self._is_there(kind, number)]
                made = make(todo)
                waiting = set(todo)

                def work(i: int, numbers: list[int] = numbers, waiting: set[int] = waiting, made: Any = made) -> None:
                    if numbers[i] in waiting:
                        tensors, notes = next(made)
                        with written(self.where):
                            write_tensors(self._entry(kind, numbers[i]), tensors, notes)

                try:
                    shares.run(len(numbers), work, advance)
                finally:
                    made.close()
                shares.run(len(group), lambda i, group=group: join(group[i]))

    def _entry(self, kind: str, number: int) -> Path:
        return self.path / _UNFINISHED / f"{kind}-{number:08d}.safetensors"

    def _is_there(self, kind: str, number: int) -> bool:
        try:
            read_tensors(self._entry(kind, number))
        except (OSError, Damaged):
            return False
        return True

    def notes(self, kind: str, note: str) -> dict[int, str]:
        """Return ``left_out`` or ``cut`` of all finished shards of a kind, by number, on every rank."""

        def collect() -> dict[int, str]:
            found: dict[int, str] = {}
            for file in sorted(self.path.glob(f"{kind}-*.safetensors")):
                header = read_notes(file)
                if header is None:
                    raise UserError(f"{self.where}: {file} was damaged while the set was being made; start again")
                found |= {int(number): text for number, text in header[1][note].items()}
            return found

        return on_all_ranks(lambda: collect() if rank() == 0 else {})[0]

    def finish(
        self,
        *,
        rows: Sequence[tuple[int, int]],
        texts: Sequence[str],
        captions: int,
        negative: int,
        empty: int,
        left_out: Sequence[tuple[str, str]],
        about: Mapping[str, Any],
    ) -> None:
        """Write the index, ``left_out.csv`` and ``set.json``, and remove what only an unfinished set needs.

        Args:
            rows: clip (-1: none) and text of each row.
            texts: every text; the first ``captions`` are those of rows.
            captions: number of distinct captions.
            negative, empty: texts of the negative and of the empty caption.
            left_out: name and reason of each clip or caption.
            about: further entries of ``set.json``.
        """

        def work() -> None:
            columns, parts, widths = self._columns(rows, texts)
            content = save(columns, metadata={"set": "{}"})
            table = io.StringIO(newline="")
            csv.writer(table, lineterminator="\n").writerows([("name", "reason"), *left_out])
            counts = {"rows": len(rows), "captions": captions, "left_out": len(left_out)}
            counts |= {kind: columns[f"{kind[:-1]}.shard"].numel() for kind in KINDS}
            description = {
                **about,
                "format": FORMAT,
                "parts": parts,
                "text_parts": sorted(widths),
                "text_widths": widths,
                "negative": negative,
                "empty": empty,
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

        on_all_ranks(lambda: work() if rank() == 0 else None)
        on_all_ranks(lambda: EncodedSet(self.path, self.where).fingerprint())  # every node must see it

    def _columns(
        self, rows: Sequence[tuple[int, int]], texts: Sequence[str]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, int]]:
        """Return the columns of the index, dtype and shape of each part of a clip, and the width of each of a text."""
        encoded = [text.encode() for text in texts]
        columns: dict[str, Any] = {
            "row.clip": [clip for clip, _ in rows],
            "row.text": [text for _, text in rows],
            "caption.end": np.cumsum([len(text) for text in encoded]),
            "caption.order": sorted(range(len(encoded)), key=encoded.__getitem__),
        }
        parts: dict[str, Any] = {}
        widths: dict[str, int] = {}
        for kind, one in zip(KINDS, ("clip", "text"), strict=True):
            sizes, shards, places = [], [], {}
            for number, file in enumerate(sorted(self.path.glob(f"{kind}-*.safetensors"))):
                header = read_notes(file)
                if header is None:
                    raise UserError(f"{self.where}: {file} was damaged while the set was being made; start again")
                sizes.append(file.stat().st_size)
                members: dict[int, dict[str, tuple[Place, int]]] = {}
                for name, place in header[0].items():
                    at, part = name.split(".")
                    members.setdefault(int(at), {})[part] = place, header[1]["crc32"][name]
                for _, found in sorted(members.items()):
                    shards.append(number)
                    for part, (place, crc32) in found.items():
                        entry = places.setdefault(part, {"offset": [], "crc32": [], "tokens": []})
                        entry["offset"].append(place.offset)
                        entry["crc32"].append(crc32)
                        if one == "clip":
                            parts[part] = (place.dtype, list(place.shape))
                        else:
                            entry["tokens"].append(place.shape[0])
                            widths[part] = place.shape[1]
            columns |= {f"{kind}.size": sizes, f"{one}.shard": shards}
            for part, entry in places.items():
                columns |= {f"{one}.{part}.{name}": value for name, value in entry.items() if value}
        tensors = {name: torch.tensor(np.asarray(value, np.int64)) for name, value in columns.items()}
        blob = b"".join(encoded)
        tensors["caption"] = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.zeros(0).byte()
        return tensors, parts, widths


@contextmanager
def written(where: str) -> Iterator[None]:
    """Turn a failure to write into one line.

    Raises:
        UserError: a full disk, or a folder that cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{where} cannot be written ({error.strerror}); give a folder with space for it; finished clips stay, and"
            " the same command continues"
        ) from error


def verify(path: Path, where: str) -> tuple[list[int], list[int]]:
    """Read every shard, shared by all ranks, and note what is damaged for later readers; return it. A collective."""
    encoded = EncodedSet(path, where)
    work = [(kind, shard) for kind in KINDS for shard in range(encoded.shard_count(kind))]
    with progress(len(work), "verifying", "shard") as advance:
        found = Shares.all().run(len(work), lambda i: encoded.verify_shard(*work[i]), advance)
    wrong = {
        kind: [n for (k, _), numbers in zip(work, found, strict=True) if k == kind for n in numbers] for kind in KINDS
    }
    clips, texts = wrong["clips"], wrong["texts"]
    with written(where):
        on_all_ranks(lambda: encoded.write_damaged(clips, texts) if rank() == 0 else None)
    return clips, texts
