"""The sweep's folder: whose it is, ``sweep.json`` with its settings and points, and each point's ``point.json``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.report.media import atomic_path
from distill.run_folder import STARTS
from distill.sweep.check import Checked
from distill.sweep.outcome import INTERRUPTED, REFUSED, RUNNING
from distill.sweep.points import Sweep
from fsdp_cp.errors import UserError

log = logging.getLogger(__name__)

FILE = "sweep.json"
TABLE, PICTURE = "sweep.csv", "sweep.png"
POINT = "point.json"
"""In a point's folder: its row, as far as it is known."""
_MADE_BY = "fsdp_cp sweep"


def swept_before(folder: Path) -> tuple[str, ...]:
    """Keys of the sweep that the folder has; none of a new one.

    Raises:
        UserError: as :func:`read_settings`.
    """
    return tuple(read_settings(folder).get("swept", ()))


def read_settings(folder: Path) -> dict[str, Any]:
    """What ``sweep.json`` holds; empty for a folder in which no sweep has been.

    Raises:
        UserError: a folder that is a run's, or in which a file of another's has a name that a sweep would write.
    """
    file = folder / FILE
    if folder.exists() and not folder.is_dir():
        raise UserError(f"sweep_dir={folder} is a file; give a folder")
    if (folder / STARTS).exists():
        raise UserError(f"sweep_dir={folder} is a run's folder; give a new one")
    if not file.exists():
        for name in (TABLE, PICTURE):
            if (folder / name).exists():
                raise UserError(f"sweep_dir={folder} has a {name} that no sweep wrote; give a new folder")
        return {}
    try:
        found = json.loads(file.read_text())
        ours = found["made_by"] == _MADE_BY and isinstance(found["points"], dict) and isinstance(found["swept"], dict)
    except (OSError, ValueError, LookupError, TypeError):
        ours = False
    if not ours:
        raise UserError(f"{file} was written by no sweep, or is damaged; give another sweep_dir")
    return found


def refuse_another(settings: Mapping[str, Any], sweep: Sweep, torchrun: Sequence[str], folder: Path) -> None:
    """Refuse to mix two configurations in one table.

    Raises:
        UserError: naming the first word that differs.
    """
    if not settings:
        return
    for what, before, now in (
        ("settings", _last_of_each(settings["fixed"]), _last_of_each(sweep.fixed)),
        ("swept settings", dict.fromkeys(settings["swept"]), dict.fromkeys(sweep.keys)),
        ("options of torchrun", {" ".join(settings["torchrun"]): None}, {" ".join(torchrun): None}),
    ):
        if before != now:
            changed = sorted(
                f"{key}={value}" if value is not None else key for key, value in {*before.items()} ^ {*now.items()}
            )
            raise UserError(
                f"sweep_dir={folder} has a sweep of other {what} ({', '.join(changed[:3])}); give the same, or another"
                " sweep_dir"
            )


def refuse_foreign_points(folder: Path, settings: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse points whose folders hold what no sweep wrote.

    Args:
        folder: the sweep's.
        settings: as of :func:`read_settings`; the points in it have folders of its own.
        names: of all points of this start.

    Raises:
        UserError: naming the folder.
    """
    for name in names:
        place = folder / name
        if name in settings.get("points", {}) or not (place.exists() or place.is_symlink()):
            continue
        if not place.is_dir() or any(place.iterdir()):
            raise UserError(f"sweep_dir={folder} has a {name} that no sweep wrote; give a new folder")


def _sorted(values: Sequence[str]) -> list[str]:
    """Numbers by size, since later starts may add some in between; others as they came."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return list(values)


def _last_of_each(words: Iterable[str]) -> dict[str, str]:
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def write_settings(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    sweep: Sweep,
    torchrun: Sequence[str],
    prefix: Sequence[str],
    world: int,
    points: Sequence[Checked],
    start: Mapping[str, Any],
) -> dict[str, Any]:
    """Add this start's points to those of earlier ones; returns what ``sweep.json`` then holds, but for the rows."""
    swept = {
        key: list(dict.fromkeys([*settings.get("swept", {}).get(key, ()), *sweep.values[key]])) for key in sweep.keys
    }
    known = dict(settings.get("points", {}))
    for checked in points:
        about = {key: value for key, value in asdict(checked).items() if key not in ("point", "words")}
        known[checked.point.name] = {
            "overrides": dict(checked.point.overrides),
            "words": [*(checked.words or (*sweep.fixed, *checked.point.words))],
            **about,
        }
    found = {
        "made_by": _MADE_BY,
        "fixed": list(sweep.fixed),
        "swept": swept,
        "torchrun": list(torchrun),
        "prefix": list(prefix),
        "world": world,
        "starts": [*settings.get("starts", ()), dict(start)],
        "points": known,
    }
    write_json(folder / FILE, found)
    return found


def read_point(folder: Path, name: str) -> dict[str, Any]:
    """A point's row as far as it is known; empty for one that has not begun, or whose file is damaged."""
    try:
        found = json.loads((folder / name / POINT).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(file: Path, value: Any) -> None:
    """Whole or not at all."""
    with atomic_path(file) as part:
        part.write_text(json.dumps(value, indent=1) + "\n")


def rows(folder: Path, settings: Mapping[str, Any], *, ended: bool = True) -> list[dict[str, Any]]:
    """A row a point, in the order of the swept values; one that has not begun has no status.

    Args:
        folder: the sweep's.
        settings: as :func:`write_settings` returned them.
        ended: no point runs: one that its file says is running was interrupted by a kill.
    """
    order = {key: {value: i for i, value in enumerate(_sorted(values))} for key, values in settings["swept"].items()}
    points = sorted(
        settings["points"].items(), key=lambda item: [order[key][value] for key, value in item[1]["overrides"].items()]
    )
    found = []
    for name, about in points:
        row = read_point(folder, name)
        if about["refusal"] is not None and row.get("status") is None:
            row |= {"status": REFUSED, "reason": about["refusal"]}
        elif ended and row.get("status") == RUNNING:
            row |= {"status": INTERRUPTED}
        shared = {key: about[key] for key in ("tokens", "batch_size")}
        found.append({"name": name, "overrides": about["overrides"], **shared, **row})
    return found
