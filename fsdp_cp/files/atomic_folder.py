"""Atomic publication of folders, without loss of other files in their place."""

import json
import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from fsdp_cp.errors import UserError

log = logging.getLogger(__name__)

MANIFEST = "fsdp_cp_export.json"
"""File in every such folder that records its maker and its files."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading a damaged manifest."""


def refuse_occupied(folder: Path, setting: str, about: Mapping[str, Any] | None = None) -> None:
    """Refuse a folder that :func:`atomic_folder` could not write without losing other files. Changes nothing.

    That is a file, the working directory, or a folder with anything but an unchanged earlier export of the same kind:
    ``about`` describes the new export, as in the manifest; its ``made by`` tells clips from weights, the default.
    """
    try:
        for parent in (folder, *folder.parents):
            if parent.exists() and not parent.is_dir():
                raise UserError(f"{setting} {folder} cannot be written ({parent} is a file); give another folder")
        real = folder.resolve()
        if real == Path.cwd() or real in Path.cwd().parents:
            raise UserError(f"{setting} {folder} is the working directory or holds it; give a folder of its own")
        foreign = _foreign(real, about or {})
    except OSError as error:  # the name is too long, or the folder is unreadable
        raise UserError(f"{setting} {folder} cannot be used ({error.strerror}); give another folder") from error
    if foreign is not None:
        raise UserError(f"{setting} {folder} is not empty, and {foreign}; nothing was changed, give a new folder")


def refuse_input(folder: Path, setting: str, inputs: Mapping[str, Path]) -> None:
    """Refuse to write over one of ``inputs`` (by the user's name for it): an input can be an earlier export."""
    real = folder.resolve()
    for name, source in inputs.items():
        # Follow links: in a folder of links, such as a snapshot in a hub's cache, the files lie elsewhere.
        links = [path for path in source.iterdir() if path.is_symlink()] if source.is_dir() else []
        read = [path.resolve() for path in (source, *links)]
        if any(real in (path, *path.parents) for path in read):
            raise UserError(f"{setting} {folder} would replace {name} ({source}); give another folder")


def _foreign(folder: Path, about: Mapping[str, Any] | None = None) -> str | None:
    """Describe content of ``folder`` that no earlier export (with ``about``, of its kind) wrote, or that changed."""
    first = next(folder.iterdir(), None) if folder.is_dir() else None
    if first is None:
        return None
    try:
        files, earlier = _manifest(folder)
    except _UNREADABLE:
        return f"it is not an earlier export: it holds {first.name} and no readable {MANIFEST}"
    if about is not None and _maker(earlier).partition(".")[0] != _maker(about).partition(".")[0]:
        return f"it holds files of {_maker(earlier)}"
    changed = next((name for name, state in _states(folder).items() if files.get(name) != state), None)
    return None if changed is None else f"{changed} was added or has changed since the earlier export in it"


def _manifest(folder: Path) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """Return the files that the manifest in ``folder`` names, with their states (:func:`_states`), and ``about``."""
    manifest = json.loads((folder / MANIFEST).read_text())
    return {name: tuple(state) for name, state in manifest["files"].items()}, dict(manifest.get("about") or {})


def description(folder: Path) -> dict[str, Any]:
    """Return what was given as ``about`` for the export in ``folder``; empty without a readable manifest."""
    try:
        return _manifest(folder)[1]
    except _UNREADABLE:
        return {}


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size in bytes and time in ns of each file but the manifest, each link and each empty folder, by name."""
    paths = [path for path in sorted(folder.rglob("*")) if path != folder / MANIFEST]
    # A link to a folder counts as a file: the files in its target are not ours.
    inside = [path for path in paths if path.is_symlink() or not path.is_dir() or not any(path.iterdir())]
    return {str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in inside}


def _maker(about: Mapping[str, Any]) -> str:
    """Return the module that made an export described by ``about``."""
    return str(about.get("made by", "models"))


@contextmanager
def atomic_folder(folder: Path, about: Mapping[str, Any], *, move_aside: bool = False) -> Iterator[Path]:
    """Yield a new folder to write into. On success rename it to ``folder``; on failure change nothing.

    An earlier export stays until the new one is complete. One process writes. ``about`` describes it in the manifest,
    in JSON. ``move_aside`` is only for folders in a run directory that this process has locked: it renames an existing
    folder that is not an export to ``NAME_kept_1`` instead of refusing it, so that a long run does not fail at its end.
    It also removes unfinished exports, since those of a run that is killed repeatedly would fill the disk.
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
        for state in ("unfinished", "removed"):
            for left in folder.parent.glob(f".{folder.name}.{state}_*"):
                log.warning("%s is of an export that was killed or still runs; remove it if none runs", left)
        unfinished = _hidden(folder, "unfinished")
        unfinished.mkdir()
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); give another folder") from error
    try:
        yield unfinished
        for name in _states(unfinished):  # safetensors (0.8) writes files that the group cannot read
            (unfinished / name).chmod(unfinished.stat().st_mode & 0o666)
        files = _states(unfinished)
        (unfinished / MANIFEST).write_text(json.dumps({"about": dict(about), "files": files}, indent=1) + "\n")
        _put_in_place(unfinished, folder, about, move_aside)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        for parent in missing:  # nearest first; keep a folder that is no longer empty
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise UserError(f"{folder} cannot be written ({error.strerror}); nothing in it has changed") from error
        raise


@contextmanager
def amended_folder(folder: Path) -> Iterator[Path]:
    """Yield a copy of the export in ``folder``, which replaces it on success; :func:`atomic_folder` in a locked run
    directory. Files of the copy are links: remove a file before writing it again."""
    files, about = _manifest(folder)
    with atomic_folder(folder, about, move_aside=True) as unfinished:
        for name in files:
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                (unfinished / name).hardlink_to(folder.resolve() / name)
            except OSError:  # a file system without links
                shutil.copy2(folder / name, unfinished / name)
        yield unfinished


def withdraw(folder: Path) -> None:
    """Remove an earlier export. Keep and log anything else in its place."""
    if folder.is_dir() and any(folder.iterdir()):
        _remove(folder, folder)


def _hidden(folder: Path, state: str) -> Path:
    """Return a unique path next to ``folder``: OUT.tmp could be a folder of the user or of another running export."""
    return folder.with_name(f".{folder.name}.{state}_{uuid.uuid4().hex}")


def _remove(export: Path, folder: Path) -> None:
    """Delete ``export``, which is or was ``folder``, unless it holds files that appeared since."""
    if (foreign := _foreign(export)) is not None:
        log.warning("kept %s, which is out of date: %s", export, foreign)
        return
    removed = _hidden(folder, "removed")
    export.rename(removed)  # a kill must leave no part of it in its place; a later export of the run removes the rest
    _delete(removed)


def _delete(removed: Path) -> None:
    """Delete the files that the manifest names, folders that are then empty, and the manifest. Keep all other files."""
    if (removed / MANIFEST).is_file():
        files = _manifest(removed)[0]
        for name, state in _states(removed).items():
            if files.get(name) == state and ((removed / name).is_symlink() or not (removed / name).is_dir()):
                (removed / name).unlink()
        folders = [path for path in removed.rglob("*") if path.is_dir() and not path.is_symlink()]
        for path in sorted(folders, reverse=True):
            with suppress(OSError):  # not empty
                path.rmdir()
        (removed / MANIFEST).unlink()
    with suppress(OSError):
        removed.rmdir()
    if removed.exists():
        log.warning("kept files in %s that appeared in an export while it was being removed", removed)


def _put_in_place(unfinished: Path, folder: Path, about: Mapping[str, Any], move_aside: bool) -> None:
    if move_aside and (foreign := _foreign(folder, about)) is not None:
        names = (folder.with_name(f"{folder.name}_kept_{number}") for number in count(1))
        folder.rename(kept := next(path for path in names if not path.exists()))
        log.warning("%s was not empty, and %s; moved it to %s", folder, foreign, kept)
    refuse_occupied(folder, "the folder", about)  # files may have been added since
    if not folder.exists() or not any(folder.iterdir()):
        unfinished.rename(folder)  # replaces an empty folder
        return
    earlier = _hidden(folder, "replaced")
    folder.rename(earlier)
    unfinished.rename(folder)
    _remove(earlier, folder)


def _bring_back(folder: Path) -> None:
    """Undo the first of the two renames that replace an export, if the process was killed between them."""
    if not folder.exists():
        for earlier in sorted(folder.parent.glob(f".{folder.name}.replaced_*"))[-1:]:
            earlier.rename(folder)
            log.warning("restored the earlier export %s, which a killed export had half replaced", folder)


def _sweep(folder: Path) -> None:
    """Remove the files of killed exports. No other process writes there: the folder is in a locked run directory."""
    for unfinished in folder.parent.glob(f".{folder.name}.unfinished_*"):
        shutil.rmtree(unfinished)
    for earlier in folder.parent.glob(f".{folder.name}.replaced_*"):
        _remove(earlier, folder)
    for removed in folder.parent.glob(f".{folder.name}.removed_*"):
        _delete(removed)
