"""Folders that appear whole or not at all, and in whose place nothing else is ever lost."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsdp_cp.errors import UserError

log = logging.getLogger(__name__)

MANIFEST = "fsdp_cp_export.json"
"""In every published folder: what made it, and which files are its own."""


def refuse_occupied(folder: Path, setting: str, about: Mapping[str, Any] | None = None) -> None:
    """Refuse a folder that :func:`published` could not write without losing somebody's files; changes nothing.

    Args:
        folder: the folder to be written.
        setting: what the user calls it, for messages.
        about: of what is to be written, for the manifest: ``made by`` tells clips from weights, the default.

    Raises:
        UserError: a file, the working directory, a folder that holds anything but an unchanged earlier export, or an
            export of another package: weights where clips are to be.
    """
    try:
        if (file := file_above(folder / MANIFEST)) is not None:
            raise UserError(f"{setting} {folder} cannot be written ({file} is a file); give another folder")
        real = folder.resolve()
        if real == Path.cwd() or real in Path.cwd().parents:
            raise UserError(f"{setting} {folder} is the working directory or holds it; give a folder of its own")
        foreign = _foreign(real, about or {})
    except OSError as error:  # a name that is too long, a folder that only others can read
        raise UserError(f"{setting} {folder} cannot be used ({error.strerror}); give another folder") from error
    if foreign is not None:
        raise UserError(
            f"{setting} {folder} is not empty, and {foreign}; nothing was changed, give an empty or a new folder"
        )


def refuse_input(folder: Path, setting: str, inputs: Mapping[str, Path]) -> None:
    """Refuse to write where something is read from: an earlier export, which would be replaced, may be an input.

    Args:
        folder: the folder to be written.
        setting: what the user calls it, for messages.
        inputs: the folders that are read, by what the user calls them.

    Raises:
        UserError: a folder that is one of them, or holds one, or a file to which a link in one leads.
    """
    real = folder.resolve()
    for name, each in inputs.items():
        # Of a folder of links (a snapshot of a hub's cache, say) it is the files that are read which lie elsewhere.
        links = [path for path in each.iterdir() if path.is_symlink()] if each.is_dir() else []
        read = [path.resolve() for path in (each, *links)]
        if any(real in (path, *path.parents) for path in read):
            raise UserError(f"{setting} {folder} would replace {name} ({each}); give another folder")


def file_above(folder: Path) -> Path | None:
    """The parent of ``folder`` that is no folder, so that it cannot be made; ``None`` where there is none."""
    return next((parent for parent in folder.parents if parent.exists() and not parent.is_dir()), None)


def _foreign(folder: Path, about: Mapping[str, Any] | None = None) -> str | None:
    """What in ``folder`` is no part of an earlier export, or has changed since, in words; ``None`` if nothing is.

    With ``about`` of what is to take its place, an export of another kind is foreign, too.
    """
    if not folder.is_dir():
        return None
    found = list(_entries(folder))
    if not found:
        return None
    try:
        own, maker = _read_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"no earlier export: it holds {found[0]} and no readable {MANIFEST}"
    if not all(map(_is_inside, own)):  # what it names would be deleted
        return f"its {MANIFEST} names files of other folders"
    if about is not None and maker.partition(".")[0] != _maker(about).partition(".")[0]:
        return f"it holds what {maker} wrote"
    for name in found:
        if name != MANIFEST and name not in own:
            return f"{name} is not of the earlier export in it"
        if name != MANIFEST and (not (folder / name).is_file() or _state(folder / name) != own[name]):
            return f"{name} has changed since it was exported"
    return None


def _read_manifest(folder: Path) -> tuple[dict[str, tuple[int, int]], str]:
    """The files that the manifest in ``folder`` names, each with its state, and what made them."""
    manifest = json.loads((folder / MANIFEST).read_text())
    own = {str(name): (int(size), int(time)) for name, (size, time) in manifest["files"].items()}
    return own, _maker(manifest.get("about") or {})


def _entries(folder: Path) -> Iterator[str]:
    """Names of what lies in ``folder`` and in its folders, one below it; of a folder without anything its own.

    A link to a folder is none: what lies behind it is not ours to name.
    """
    for path in sorted(folder.iterdir()):
        inside = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []
        yield from [f"{path.name}/{each.name}" for each in inside] or [path.name]


def _is_inside(name: str) -> bool:
    """Could :func:`_entries` have given ``name``?"""
    parts = name.split("/")
    return len(parts) <= 2 and not {"", ".", ".."} & set(parts)


def _maker(about: Mapping[str, Any]) -> str:
    """The module that made what a manifest is ``about``."""
    return str(about.get("made by", "models.export"))


def _state(file: Path) -> tuple[int, int]:
    """Size in bytes and time of the last change in ns: what tells a file of ours from another in its place."""
    about = file.stat()
    return about.st_size, about.st_mtime_ns


@contextmanager
def published(folder: Path, about: Mapping[str, Any], *, move_aside: bool = False) -> Iterator[Path]:
    """A new folder to write files into, or folders of files; on success it becomes ``folder``, on failure nothing has
    changed.

    An earlier export stays until the new one is whole. One process writes.

    Args:
        folder: where it is to appear.
        about: JSON-serialisable: what made it, for the manifest.
        move_aside: for folders in a run directory that this process has locked. A folder that is in the way and not an
            export is renamed to ``NAME_kept_1`` instead of refused: at the end of a long run nobody can be asked.
            Unfinished exports are removed: those of a run that is killed again and again would fill the disk.

    Raises:
        UserError: see :func:`refuse_occupied`; a folder that cannot be written.
    """
    if not move_aside:
        refuse_occupied(folder, "the folder", about)
    folder = folder.resolve()
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _bring_back(folder)
        if move_aside:
            _sweep(folder)
        for left in folder.parent.glob(f".{folder.name}.unfinished_*"):
            log.warning("%s is of an export that was killed, or is still being written; remove it if not", left)
        # A name that nobody else has: OUT.tmp could be a folder of the user's, or another export's at this moment.
        unfinished = folder.with_name(f".{folder.name}.unfinished_{uuid.uuid4().hex}")
        unfinished.mkdir()
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); give another folder") from error
    try:
        yield unfinished
        for name in _entries(unfinished):  # safetensors (0.8) writes files that a group could not read
            (unfinished / name).chmod(unfinished.stat().st_mode & 0o666)
        files = {name: _state(unfinished / name) for name in _entries(unfinished)}
        (unfinished / MANIFEST).write_text(json.dumps({"about": dict(about), "files": files}, indent=1) + "\n")
        _put_in_place(unfinished, folder, about, move_aside)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        for parent in missing:  # nearest first; none that something else is in by now
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{folder} cannot be written ({error.strerror}); nothing in it has changed") from error
        raise


def withdraw(folder: Path) -> None:
    """Remove an earlier export; anything else in its place stays, and the log says so."""
    if not folder.is_dir():
        return
    foreign = _foreign(folder)
    if foreign is not None:
        log.warning("%s is out of date and stays, since %s", folder, foreign)
    elif any(folder.iterdir()):
        _remove_export(folder)


def _put_in_place(unfinished: Path, folder: Path, about: Mapping[str, Any], move_aside: bool) -> None:
    if move_aside and (foreign := _foreign(folder, about)) is not None:
        number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}_kept_{n}").exists())
        kept = folder.with_name(f"{folder.name}_kept_{number}")
        folder.rename(kept)
        log.warning("%s was not empty, and %s; it is kept as %s", folder, foreign, kept)
    refuse_occupied(folder, "the folder", about)  # which may have been filled since
    if not folder.exists() or not any(folder.iterdir()):
        unfinished.rename(folder)  # takes the place of an empty folder
        return
    earlier = folder.with_name(unfinished.name.replace(".unfinished_", ".replaced_"))
    folder.rename(earlier)
    unfinished.rename(folder)
    _remove_export(earlier)


def _bring_back(folder: Path) -> None:
    """Undo the first of the two renames by which an export takes another's place, if it was killed between them."""
    if not folder.exists():
        for earlier in sorted(folder.parent.glob(f".{folder.name}.replaced_*"))[-1:]:
            earlier.rename(folder)
            log.warning("%s was left half replaced by a killed export; the earlier one is back", folder)


def _sweep(folder: Path) -> None:
    """Remove the files of exports that were killed while they wrote, or while they removed an earlier export.

    Nobody else writes there: the folder is in a run directory, which the run has locked.
    """
    for unfinished in folder.parent.glob(f".{folder.name}.unfinished_*"):
        shutil.rmtree(unfinished)
    for earlier in folder.parent.glob(f".{folder.name}.replaced_*"):
        if (earlier / MANIFEST).is_file():  # else what is left in it is not ours
            _remove_export(earlier)


def _remove_export(folder: Path) -> None:
    """Delete the files that the manifest names, and the folder if that leaves it empty."""
    own = [name for name in _read_manifest(folder)[0] if _is_inside(name)]
    folders = {folder / name.split("/")[0] for name in own if "/" in name}
    links = {path for path in folders if path.is_symlink()}
    for name in [*own, MANIFEST]:
        if (folder / name).parent not in links:
            (folder / name).unlink(missing_ok=True)
    for path in folders - links:
        with suppress(OSError):
            path.rmdir()
    try:
        folder.rmdir()
    except OSError:
        log.warning("%s holds files that appeared while it was being replaced; they are kept there", folder)
