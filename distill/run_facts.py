"""What is known of a run beside its curves: how it was started, its settings, its files, and what went wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.json_lines import finite_number, read_objects
from distill.run_folder import LOG, STARTS

if TYPE_CHECKING:
    from distill.config import Config
    from distill.report.row import ReportRow

log = logging.getLogger(__name__)

FILES = (
    "export/",
    "samples/",
    "checkpoints/",
    "metrics.jsonl",
    "norms.jsonl",
    "config.yaml",
    STARTS,
    LOG,
    "report.json",
    "report.png",
    "tensorboard/",
    "previous/",
)
"""Of a run's folder, in the order in which a page links them."""

HUGE = 1000.0
"""A gradient norm or loss is called out when it ends so many times above its beginning and above `optim.clip` or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run, as its line says; what a damaged or older line does not say is None."""

    started: str | None = None
    from_step: int | None = None
    command: str | None = None
    directory: str | None = None
    host: str | None = None
    device: str | None = None
    world_size: int | None = None
    commit: str | None = None
    clean: bool | None = None
    versions: str | None = None


def read_starts(path: Path) -> tuple[list[Start], int]:
    """The starts of a run, oldest first, and how many lines could not be read; a run of an older version has none."""
    lines = read_objects(path)
    starts = [_start(record) for record in lines.records]
    found = [start for start in starts if start != Start()]
    unreadable = lines.unreadable + len(starts) - len(found)
    if unreadable:
        log.warning("%s: left out %d line(s) that tell of no start", path, unreadable)
    return found, unreadable


def _start(record: Mapping[str, Any]) -> Start:
    def of(key: str, kind: type) -> Any:
        value = record.get(key)
        return value if type(value) is kind else None  # not isinstance: True is an int

    versions = of("versions", dict)
    return Start(
        **{key: of(key, str) for key in ("started", "command", "directory", "host", "device", "commit")},
        **{key: of(key, int) for key in ("from_step", "world_size")},
        clean=of("clean", bool),
        versions=None if not versions else ", ".join(f"{name} {version}" for name, version in versions.items()),
    )


def start_facts(start: Start) -> dict[str, Any]:
    """A start as the page shows it; what it does not say is left out."""
    commit = start.commit
    if commit is not None and start.clean is not None:
        commit += "" if start.clean else " with uncommitted changes"
    hardware = start.device
    if start.world_size is not None:
        hardware = f"{hardware or 'unknown'}, {start.world_size} process{'es' * (start.world_size != 1)}"
    facts = {
        "command": start.command,
        "directory": start.directory,
        "commit": commit,
        "started": start.started,
        "host": start.host,
        "hardware": hardware,
        "versions": start.versions,
    }
    return {key: value for key, value in facts.items() if value is not None}


def default_settings(config: Config) -> dict[str, Any]:
    """What every setting is where neither recipe nor command line sets it, nested as `asdict(config)` is.

    For the method and data that were chosen; a setting without a default has the text "???"."""
    defaults = asdict(type(config)(method=type(config.method)(), data=type(config.data)()))
    for role in ("teacher", "student", "fake"):
        defaults[role]["precision"] = config.precision  # the run's, by interpolation
    return defaults


def compared_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every setting with its dotted key, value, default and whether they differ; those that do come first."""
    values, before = flat(settings), flat(defaults)
    rows = [
        {"key": key, "value": value, "default": before.get(key), "differs": key not in before or before[key] != value}
        for key, value in values.items()
    ]
    return sorted(rows, key=lambda row: not row["differs"])


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def run_files(run_dir: Path) -> list[str]:
    """Which of `FILES` are there; a folder counts when something is in it."""
    found = []
    for name in FILES:
        path = run_dir / name
        if path.is_dir() and any(path.iterdir()) if name.endswith("/") else path.is_file():
            found.append(name)
    return found


def troubles(
    records: Sequence[Mapping[str, Any]],
    rows: Sequence[ReportRow] = (),
    *,
    updates: Mapping[str, int] | None = None,
    clip: float | None = None,
) -> list[str]:
    """What went wrong, a sentence each, computed from the numbers; empty for a run that shows nothing wrong.

    `records`: of `metrics.jsonl`, by step.  `rows`: the report's, with their clips.  `updates`: how many each role
    tried, where it is known; otherwise those that were logged.  `clip`: the setting `optim.clip`."""
    roles = sorted({key.split("/")[0] for record in records for key in record if key.endswith("/loss")})
    found = [] if roles else ["No loss is logged in metrics.jsonl, so the training cannot be judged."]
    for role in sorted(roles, key=lambda role: role != "student"):
        found += _losses(role, records) + _skipped(role, records, updates or {}) + _exploded(role, records, clip)
    return found + _clips(rows)


def _values(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [finite_number(record[key]) for record in records if key in record]


def _losses(role: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    losses = _values(records, f"{role}/loss")
    broken = sum(math.isnan(value) for value in losses)
    if not broken:
        return []
    counted = f"{broken} of its {len(losses)} logged losses {'are' if broken > 1 else 'is'} not"
    if math.isnan(losses[-1]):
        return [f"The last loss of {_named(role)} is not finite ({counted})."]
    return [f"The loss of {_named(role)} was not finite on the way ({counted})."]


def _skipped(role: str, records: Sequence[Mapping[str, Any]], updates: Mapping[str, int]) -> list[str]:
    norms = _values(records, f"{role}/grad_norm")
    logged = [n for n in _values(records, f"{role}/skipped") if not math.isnan(n)]
    count = int(logged[-1]) if logged else 0
    if count < 1:
        broken = sum(math.isnan(norm) for norm in norms)
        of = f"{broken} of the {len(norms)} logged gradient norms of {_named(role)}"
        return [f"{of} {'are' if broken > 1 else 'is'} not finite."] if broken else []
    tried = updates.get(role, len(norms))
    share = f"{count} of {tried} updates" if tried >= count else f"{count} update{'s' * (count > 1)}"
    were = "were" if count > 1 else "was"
    return [f"{share} of {_named(role)} {were} skipped because its gradient norm was not finite."]


def _exploded(role: str, records: Sequence[Mapping[str, Any]], clip: float | None) -> list[str]:
    found = []
    for what, key, floor in (("gradient norm", "grad_norm", clip or 1.0), ("loss", "loss", 1.0)):
        values = np.abs([v for v in _values(records, f"{role}/{key}") if not math.isnan(v)])
        if len(values) < 2:
            continue
        few = max(1, len(values) // 10)
        # The smallest at the beginning: a rate that is far too high spoils the second update.
        first, last = float(values[:few].min()), float(np.median(values[-few:]))
        if last > HUGE * max(first, floor):
            beside = f", and optim.clip is {clip:g}" if key == "grad_norm" and clip else ""
            found.append(f"The {what} of {_named(role)} ended at {last:.3g}; it began at {first:.3g}{beside}.")
    return found


def _clips(rows: Sequence[ReportRow]) -> list[str]:
    """Rows whose clips show nothing, where real ones do; and a student that is not shown."""
    if not rows:
        return []
    networks = [row for row in rows if row.role != "heldout"]
    real = sum(_flat_clips(row) for row in rows if row.role == "heldout")
    found = [] if any(row.role == "student" for row in networks) else ["There are no clips of the student."]
    for row in networks:
        flat_ones = _flat_clips(row)
        if flat_ones and not real:
            found.append(f"{flat_ones} of {len(row.clips)} clips of {row.name} are one flat colour throughout.")
        elif _all_alike(row) and not any(_all_alike(real_row) for real_row in rows if real_row.role == "heldout"):
            found.append(f"All {len(row.clips)} clips of {row.name} are the same picture for picture.")
    return found


def _flat_clips(row: ReportRow) -> int:
    """How many of the row's clips are of one colour, to a rounding, in all their frames."""
    return sum(int((np.ptp(clip, axis=(0, 1, 2)) <= 1).all()) for clip in row.clips)


def _all_alike(row: ReportRow) -> bool:
    """Whether every clip of several is the first, to a rounding: the network no longer hears captions and noise."""
    first = row.clips[0].astype(np.int16)
    return len(row.clips) > 1 and all((abs(clip - first) <= 1).all() for clip in row.clips[1:])


def _named(role: str) -> str:
    return "the fake score" if role == "fake" else f"the {role}"
