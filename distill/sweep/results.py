"""Table of a sweep, and its picture of measurements and predictions."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill.report.media import atomic_path
from distill.sweep.job import OUT_OF_MEMORY
from distill.sweep.points import short_keys

COLUMNS = (
    *("status", "tokens", "tokens_per_second", "allocated_gib", "predicted_allocated_gib", "mfu", "seconds_per_step"),
    *("measured_steps", "predicted_tokens_per_second", "predicted_mfu", "reason", "plan_reason"),
)
"""Columns after the swept settings; an empty cell is an unknown value."""
_PANELS = {"tokens/s of all ranks": "tokens_per_second", "MFU": "mfu", "peak memory of a rank, GiB": "allocated_gib"}

Row = Mapping[str, Any]


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    """Write one row per point, with unrounded numbers."""
    keys = list(rows[0]["overrides"])
    with atomic_path(file) as temporary, temporary.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*keys, *COLUMNS])
        writer.writerows([*row["overrides"].values(), *map(row.get, COLUMNS)] for row in rows)


def lines_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows into the picture's lines, sorted by tokens. Rows of a line differ only in data settings."""
    short = short_keys(rows[0]["overrides"])
    lines: dict[str, list[Row]] = {}
    for row in sorted((row for row in rows if row["tokens"] is not None), key=lambda row: row["tokens"]):
        values = [f"{short[key]}={value}" for key, value in row["overrides"].items() if not key.startswith("data")]
        lines.setdefault(", ".join(values) or "all points", []).append(row)
    return lines


def write_picture(file: Path, rows: Sequence[Row], *, title: str) -> None:
    """Draw speed, MFU and peak memory against the tokens of a sample as PNG, with dashed predictions.

    A point that ran out of memory is a cross at its predicted value, or on the axis without a prediction.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    for axes, (label, column) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        for number, (name, line) in enumerate(lines_of(rows).items()):
            style = {"color": f"C{number % 10}", "marker": "osD^vP"[number // 10 % 6]}
            tokens = [row["tokens"] for row in line]
            measured, predicted = ([row.get(key) for row in line] for key in (column, f"predicted_{column}"))
            axes.plot(tokens, np.array(measured, float), label=name, **style)
            axes.plot(tokens, np.array(predicted, float), label=f"{name}, predicted", ls="--", mfc="white", **style)
            for row in line:
                if row["status"] == OUT_OF_MEMORY:
                    height = row.get(f"predicted_{column}") or 0
                    axes.plot(row["tokens"], height, "X", color=style["color"], ms=9, clip_on=False)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.tick_params(axis="x", rotation=30)
        axes.grid(lw=0.4)
        axes.set_xlabel("tokens of a sample")
        axes.set_title(label, loc="left", fontweight="bold", fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    with atomic_path(file) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
