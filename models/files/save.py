"""Files of exports, with the same bytes for the same contents, so that a hub or a copy finds them unchanged."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diffusers import SchedulerMixin
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_folder import atomic_folder
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_all_ranks


def write_export(
    folder: Path,
    about: Mapping[str, Any],
    files: Iterator[tuple[Path, Mapping[str, Tensor]]],
    texts: Mapping[str, Mapping[str, Any] | None],
    *,
    header: Mapping[str, str],
    schedulers: Mapping[str, SchedulerMixin],
    finish: Callable[[Path], object] = lambda folder: None,
    move_aside: bool = False,
) -> None:
    """Write an export. All ranks must call it; rank 0 writes, and every rank reads all of ``files``.

    Args:
        folder, about, move_aside: as for :func:`fsdp_cp.files.atomic_folder.atomic_folder`.
        files: the path of each file of weights in the export, and its tensors.
        texts: contents of JSON files, by path; ``None`` for a file that this export lacks.
        header: text in the header of each file of weights.
        schedulers: schedulers, by folder.
        finish: adds files to the unfinished folder, as the card does.

    Raises:
        UserError: the folder cannot be written; on every rank, after the last tensor is read.
    """

    def write_parts(unfinished: Path) -> None:
        for file, tensors in files:
            (unfinished / file).parent.mkdir(exist_ok=True)
            save_tensors(tensors, unfinished / file, header)
        for text, contents in texts.items():
            if contents is not None:
                (unfinished / text).write_text(json.dumps(contents, indent=2) + "\n")
        for name, scheduler in schedulers.items():
            scheduler.save_pretrained(unfinished / name)
        finish(unfinished)

    def write() -> None:
        try:
            if rank() == 0:
                with atomic_folder(folder, about, move_aside=move_aside) as unfinished:
                    write_parts(unfinished)
        except SafetensorError as error:  # such as of a full disk
            raise UserError(f"{folder} cannot be written ({error}); nothing in it has changed") from error
        finally:
            for _ in files:  # if this rank left the collectives, the others would block in them
                pass

    on_all_ranks(write)


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
