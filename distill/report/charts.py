"""SVG charts by matplotlib: training curves from `metrics.jsonl`, and measures by sampling steps."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdp_cp.files.json_lines import finite_number, read_objects, step_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROLE_COLORS = {"heldout": "#7b8591", "teacher": "#2f63b0", "student": "#0c7a56", "fake": "#a8560b"}
_BAD, _MUTED, _LINE = "#c22f3d", "#59626d", "#dde1e6"
_STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": _LINE,
    "legend.fontsize": "small",
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # makes the ids the same in every report
}
_CURVE = re.compile(r"[\w.]+/(loss(/[\w.]+)?|\w+_loss|grad_norm|lr)|perf/tokens_per_second", re.ASCII)
_TIME_BIN = re.compile(r"/t\d\.\d+$", re.ASCII)
_LONGEST_WINDOW = 1000


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one record per step of a `metrics.jsonl`, ordered by step. The later of two records of one step counts."""
    records = {record["step"]: record for record in read_objects(path) if step_of(record) is not None}
    return [records[step] for step in sorted(records)]


def values(records: Sequence[Mapping], key: str) -> list[float]:
    """Return the values of ``key`` in the records that have it; NaN for a value that is not a finite number."""
    return [finite_number(record[key]) for record in records if key in record]


def curves(records: Sequence[Mapping]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return (steps, values) in fp64 of losses, gradient norms, rates and speed, by key ("student/loss"), in order.
    Other non-finite values than the null of a time bin without a sample ("ROLE/loss/t0.25") are NaN."""
    keys = sorted(filter(_CURVE.fullmatch, {key for record in records for key in record}), key=_drawing_order)
    result = {}
    for key in keys:
        shown = [
            record for record in records if key in record and (record[key] is not None or not _TIME_BIN.search(key))
        ]
        if shown:
            steps = np.array([record["step"] for record in shown], dtype=float)
            result[key] = steps, np.array(values(shown, key))
    return result


def _drawing_order(key: str) -> tuple:
    role, quantity = key.split("/", 1)
    group = {"grad_norm": 1, "lr": 2, "tokens_per_second": 3}.get(quantity, 0)
    return group, role != "student", key


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Return at each point the mean of the finite ones among the last `window` points; NaN stays NaN."""
    finite = np.isfinite(values)
    # Differences of cumulative sums would be faster, but are only noise after one loss of 1e20.
    ones, total = np.ones(window), len(values)
    sums = np.convolve(np.where(finite, values, 0.0), ones)[:total]
    counts = np.convolve(finite.astype(float), ones)[:total]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite, sums / counts, np.nan)


def curve_svg(key: str, steps: np.ndarray, values: np.ndarray) -> bytes:
    """Draw one curve as SVG, logarithmic if it spans more than a factor of 30; non-finite values are crosses."""
    role, quantity = key.split("/", 1)
    color = ROLE_COLORS.get(role, _MUTED)
    finite = values[np.isfinite(values)]
    broken = steps[~np.isfinite(values)]
    window = min(max(5, len(values) // 20), _LONGEST_WINDOW)
    is_noisy = quantity != "lr"
    is_averaged = is_noisy and len(finite) >= 10
    is_log = is_noisy and role != "perf" and len(finite) > 0 and 0 < 30 * finite.min() < finite.max()
    words = {"grad_norm": "gradient norm", "lr": "learning rate", "tokens_per_second": "video tokens per second"}
    name = words.get(quantity, re.sub(r"/t(\d)", r", from time \1", quantity).replace("_", " ").replace("/", ", "))

    def draw(axes: Axes) -> None:
        style = {"alpha": 0.35, "lw": 0.9} if is_averaged else {"lw": 1.6}
        marker = "o" if len(values) == 1 else None
        axes.plot(steps, values, color=color, marker=marker, label="each update", **style)
        if is_averaged:
            average = moving_average(values, window)
            axes.plot(steps, average, color=color, lw=2, label=f"mean of the last {window} updates")
        if len(broken):
            at_bottom = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            label = f"not finite ({len(broken)})"
            axes.plot(broken, np.zeros(len(broken)), "x", color=_BAD, ms=6, label=label, **at_bottom)
        axes.set_title(name if role == "perf" else f"{role}: {name}")
        axes.set_xlabel("step of the run (all roles)")
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.set_ylabel(f"{name}, log scale" if is_log else name)
        if is_log:
            axes.set_yscale("log")

    return svg(draw)


def measure_svg(name: str, rows: Sequence[Mapping], *, title: str, hint: str) -> bytes:
    """Draw one measure against the number of sampling steps as SVG, with error bars of one standard error; held-out
    renders are dashed and dotted lines. `hint` is the label of the axis."""
    scale = 100.0 if name.endswith("accuracy") else 1.0

    def draw(axes: Axes) -> None:
        for role, marker in (("teacher", "o"), ("student", "s"), ("heldout", "")):
            measured = [row for row in rows if row["role"] == role and row["measures"]]
            measures = [row["measures"][name] for row in measured]
            # Floats: None becomes NaN, which is not drawn.
            values = scale * np.array([measure["value"] for measure in measures], dtype=float)
            errors = scale * np.array([measure["standard_error"] for measure in measures], dtype=float)
            if role == "heldout":
                for row, value, style in zip(measured, values, ("--", ":"), strict=False):
                    axes.axhline(value, color=_MUTED, lw=1, ls=style, label=row["name"])
            elif measured:
                style = {"color": ROLE_COLORS[role], "marker": marker, "ms": 5, "lw": 1.6, "capsize": 2.5}
                axes.errorbar([row["steps"] for row in measured], values, yerr=errors, label=role, **style)
        ticks = sorted({row["steps"] for row in rows if row["role"] != "heldout"})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("sampling steps")
        axes.set_ylabel(hint)
        axes.set_title(title)

    return svg(draw)


def svg(draw: Callable[[Axes], None], size: tuple[float, float] = (4.8, 2.9)) -> bytes:
    """Return the axes that ``draw`` fills as SVG, with a legend below them."""
    import matplotlib
    from matplotlib.figure import Figure  # pyplot has global state and may open windows

    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        figure.legend(loc="outside lower center", ncols=3, columnspacing=1)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
