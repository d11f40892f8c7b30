"""The sweep's table: ``sweep.csv``, the same as JSON in ``sweep.json``, and as Markdown on the terminal."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.report.media import atomic_path
from distill.sweep.outcome import DONE, PLANNED
from distill.sweep.points import plain, short_keys

COLUMNS = (
    "status",
    "tokens",
    "tokens_per_second",
    "allocated_gib",
    "predicted_allocated_gib",
    "mfu",
    "seconds_per_step",
    "measured_steps",
    "predicted_tokens_per_second",
    "predicted_mfu",
    "reason",
    "plan_reason",
)
"""Behind the swept settings, which have a column each; an empty cell is what is not known."""
_SHOWN = {
    "tokens": ("tokens", ",.0f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "predicted_tokens_per_second": ("predicted tokens/s", ",.0f"),
    "allocated_gib": ("GiB", ".3f"),
    "predicted_allocated_gib": ("predicted GiB", ".3f"),
    "mfu": ("MFU", ".3f"),
    "predicted_mfu": ("predicted MFU", ".3f"),
}


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row a point; numbers in full."""
    keys = list(rows[0]["overrides"])
    with atomic_path(file) as part, part.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*keys, *COLUMNS])
        for row in rows:
            cells = [row.get(name) for name in COLUMNS]
            writer.writerow([*map(plain, row["overrides"].values()), *("" if cell is None else cell for cell in cells)])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a point, rounded; columns in which nothing is known are left out, and so is a reason that all share."""
    keys = list(rows[0]["overrides"])
    short = short_keys(keys)
    known = [name for name in _SHOWN if any(row.get(name) is not None for row in rows)]
    with_reason = any(row.get("reason") for row in rows)
    head = [*(short[key] for key in keys), "status", *(_SHOWN[name][0] for name in known)]
    head += ["reason"] if with_reason else []
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [*(plain(row["overrides"][key]) for key in keys), row.get("status") or ""]
        cells += [_number(row.get(name), _SHOWN[name][1]) for name in known]
        cells += [str(row.get("reason") or "")] if with_reason else []
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    notes = dict.fromkeys(row["plan_reason"] for row in rows if row.get("plan_reason"))
    return "\n".join([*lines, *(f"\nNot predicted: {note}" for note in notes)])


def in_a_line(row: Mapping[str, Any]) -> str:
    """What became of a point, for the terminal."""
    told = [row["status"]]
    names = ("tokens_per_second", "allocated_gib", "predicted_allocated_gib", "mfu")
    if row["status"] == PLANNED:
        names = ("predicted_tokens_per_second", "predicted_allocated_gib", "predicted_mfu")
    for name in names:
        if row["status"] in (DONE, PLANNED) and row.get(name) is not None:
            label, form = _SHOWN[name]
            told.append(f"{row[name]:{form}} {label}")
    line = ", ".join(told)
    return f"{line}: {row['reason']}" if row.get("reason") else line


def _number(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
