"""Facts of a run for its report: its starts, and medians of its metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill.report.charts import values
from distill.run.json_lines import finite_number, read_objects

_START = ("started", "command", "directory", "host", "device", "world_size", "commit", "clean", "versions", "from_step")
"""Keys of a start that the report has."""
_PHASE = re.compile(r"perf/seconds/\w{1,40}/[\w/]{1,80}", re.ASCII)


def read_starts(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the starts of a run, oldest first, and the number of unreadable lines. A missing value is None."""
    lines = read_objects(path)
    return [{key: record.get(key) for key in _START} for record in lines.records], lines.unreadable


def start_facts(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the newest start as the page shows it, without unknown values."""
    if not starts:
        return {}
    start = starts[-1]
    facts = {key: start[key] for key in ("command", "directory", "commit", "started", "host")}
    if start["commit"] is not None and start["clean"] is False:
        facts["commit"] = f"{start['commit']} with uncommitted changes"
    facts |= {"hardware": start["device"], "processes": start["world_size"], "versions": start["versions"]}
    if len(starts) > 1:
        facts["starts"] = f"{len(starts)}, from steps {', '.join(str(start['from_step']) for start in starts)}"
    return {key: value for key, value in facts.items() if value is not None}


def measured_facts(records: Sequence[Mapping]) -> dict[str, str]:
    """Return speed, peak memory and the phases of each role's step, from the records of `metrics.jsonl`."""
    result = {}
    if speeds := list(filter(math.isfinite, values(records, "perf/tokens_per_second"))):
        result["tokens per second (median)"] = f"{np.median(speeds):,.0f}"
    if memory := list(filter(math.isfinite, values(records, "memory/peak_gib"))):
        result["peak memory in training, any rank (GiB)"] = f"{max(memory):.2f}"
    times: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for key in filter(_PHASE.fullmatch, record):
            role, phase = key.removeprefix("perf/seconds/").split("/", 1)
            if (whole := finite_number(record.get(f"perf/seconds/{role}"))) > 0:
                times.setdefault(role, {}).setdefault(phase, []).append(finite_number(record[key]) / whole)
    for role, phases in times.items():
        shares = {phase: float(np.median(times)) for phase, times in phases.items()}
        longest = sorted((item for item in shares.items() if item[1] >= 0.01), key=lambda item: -item[1])
        if longest:
            result[f"a step of the {role} (median)"] = ", ".join(f"{phase} {share:.0%}" for phase, share in longest)
    return result
