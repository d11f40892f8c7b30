"""Facts of a run for its report: its starts, settings and files, and medians of its metrics."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.report.charts import values
from distill.run.folder import LOG, STARTS
from distill.run.json_lines import finite_number, read_objects
from fsdp_cp.words import counted

if TYPE_CHECKING:
    from distill.config import Config

log = logging.getLogger(__name__)

FILES = ("export/", "samples/", "checkpoints/", "metrics.jsonl", "norms.jsonl", "config.yaml", STARTS, LOG)
FILES += ("report.json", "report.png", "tensorboard/", "previous/")
"""Files and folders of a run directory that a page links to, in order."""

_START = dict.fromkeys(("started", "command", "directory", "host", "device", "commit"), str)
_START |= {"from_step": int, "world_size": int, "clean": bool, "versions": dict}
_PHASE = re.compile(r"perf/seconds/\w{1,40}/[\w/]{1,80}", re.ASCII)


def read_starts(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the starts of a run, oldest first, and the number of unreadable lines.

    A start has all keys of the report. A value is None if its line lacks it or has another type.
    """
    lines = read_objects(path)
    starts = []
    for record in lines.records:
        # Compare the exact type: isinstance takes True for an int.
        start = {key: record[key] if type(record.get(key)) is kind else None for key, kind in _START.items()}
        versions = (start["versions"] or {}).items()
        start["versions"] = ", ".join(f"{name} {version}" for name, version in versions) or None
        if any(value is not None for value in start.values()):
            starts.append(start)
    unreadable = lines.unreadable + len(lines.records) - len(starts)
    if unreadable:
        log.warning("%s: left out %d unreadable line(s)", path, unreadable)
    return starts, unreadable


def start_facts(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return a start as the page shows it, without unknown values."""
    commit, hardware = start["commit"], start["device"]
    if commit is not None and start["clean"] is False:
        commit += " with uncommitted changes"
    if start["world_size"] is not None:
        hardware = f"{hardware or 'unknown'}, {counted(start['world_size'], 'process', 'processes')}"
    shown = {
        "command": start["command"],
        "directory": start["directory"],
        "commit": commit,
        "started": start["started"],
        "host": start["host"],
        "hardware": hardware,
        "versions": start["versions"],
    }
    return {key: value for key, value in shown.items() if value is not None}


def default_settings(config: Config) -> dict[str, Any]:
    """Return the default of every setting, nested as `asdict(config)`, for the chosen method and data.

    A setting without a default has the text "???".
    """
    defaults = asdict(type(config)(method=type(config.method)(), data=type(config.data)()))
    for role in ("teacher", "student", "fake"):
        defaults[role]["precision"] = config.precision  # the default interpolates the run's precision
    return defaults


def compared_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the dotted key, value and default of every setting, and whether they differ; differing ones come first."""
    values, before = flat(settings), flat(defaults)
    rows = [
        {"key": key, "value": value, "default": before.get(key), "differs": key not in before or before[key] != value}
        for key, value in values.items()
    ]
    return sorted(rows, key=lambda row: not row["differs"])


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys; an empty mapping is a value."""
    leaves: dict[str, Any] = {}
    for key, value in settings.items():
        is_group = isinstance(value, Mapping) and value
        leaves |= flat(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return leaves


def run_files(run_dir: Path) -> list[str]:
    """Return the entries of `FILES` that exist, without empty folders."""
    paths = {name: run_dir / name for name in FILES}
    return [name for name, path in paths.items() if (any(path.iterdir()) if path.is_dir() else path.is_file())]


def measured_facts(records: Sequence[Mapping]) -> dict[str, str]:
    """Return speed, peak memory and the phases of each role's step, from the records of `metrics.jsonl`."""
    result = {}
    if speeds := _finite(values(records, "perf/tokens_per_second")):
        result["tokens per second (median)"] = f"{np.median(speeds):,.0f}"
    if memory := _finite(values(records, "memory/peak_gib")):
        result["peak memory in training, any rank (GiB)"] = f"{max(memory):.2f}"
    times: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for key in filter(_PHASE.fullmatch, record):
            role, phase = key.removeprefix("perf/seconds/").split("/", 1)
            if (whole := finite_number(record.get(f"perf/seconds/{role}"))) > 0:
                times.setdefault(role, {}).setdefault(phase, []).append(finite_number(record[key]) / whole)
    for role, phases in times.items():
        shares = {phase: float(np.median(parts)) for phase, parts in phases.items()}
        longest = sorted((item for item in shares.items() if item[1] >= 0.01), key=lambda item: -item[1])
        if longest:
            result[f"a step of the {role} (median)"] = ", ".join(f"{phase} {share:.0%}" for phase, share in longest)
    return result


def _finite(series: Sequence[float]) -> list[float]:
    return [value for value in series if not math.isnan(value)]
