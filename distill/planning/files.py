"""The files of a plan in a run's folder."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.report.media import atomic_path
from fsdp_cp.errors import UserError
from fsdp_cp.launch import world_size

FILE = "plan.json"
PAGE = "plan.html"
PICTURE = "plan.png"
SUGGESTIONS = "suggestions.json"
MADE_BY = "fsdp_cp plan"
"""What ``made_by`` of these JSON files says."""


_NOT_PLANNED = ("plan", "dry_run", "world", "run_dir", "device", "seed", "log", "timeout", "planning")
"""Settings that change nothing of a plan; what ``planning`` names comes into the settings of roles and hardware."""


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder in which a plan would overwrite what no plan wrote.

    Raises:
        UserError: naming the file.
    """
    others = [folder / name for name in (PAGE, PICTURE) if (folder / name).exists()]
    if not (folder / FILE).exists() and others:
        raise _foreign(others[0])
    _refuse_others(folder / FILE)


def refuse_foreign_suggestions(folder: Path) -> None:
    """As :func:`refuse_foreign`, of what ``plan=suggest`` writes."""
    _refuse_others(folder / SUGGESTIONS)


def _refuse_others(file: Path) -> None:
    with suppress(FileNotFoundError, ValueError, AttributeError):
        if not file.exists() or json.loads(file.read_text()).get("made_by") == MADE_BY:
            return
    raise _foreign(file)


def _foreign(file: Path) -> UserError:
    return UserError(f"{file} was written by no plan, and this one would replace it; give another run_dir")


def make_writable(folder: Path) -> None:
    """Make the folder, and try whether it can be written, before minutes are spent.

    Raises:
        UserError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # without a name: nothing of anybody's is touched
    except OSError as error:
        raise UserError(f"run_dir={folder} cannot be written ({error.strerror}); give another folder") from error


def write(folder: Path, contents: Mapping[str, Callable[[], bytes]]) -> None:
    """Write files by name, ``plan.json`` first, for it says that the others are a plan's; the folder is made.

    Raises:
        UserError: a folder that cannot be written.
    """
    make_writable(folder)
    for name in sorted(contents, key=lambda name: name != FILE):
        with atomic_path(folder / name) as part:
            part.write_bytes(contents[name]())


def settings_digest(config: Config) -> str:
    """Of all settings that a plan depends on, and of the number of ranks."""
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_PLANNED}
    settings["checkpoint"] = {**settings["checkpoint"], "resume": None}
    world = config.world if config.world is not None else world_size()
    return hashlib.sha256(json.dumps([settings, world], sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_plan(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """``plan.json`` of the run's folder, if it is of these settings."""
    try:
        plan = json.loads((run_dir / FILE).read_text())
        return plan if plan["made_by"] == MADE_BY and plan["settings"] == settings_digest(config) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
