"""Training curves from `metrics.jsonl` and measures by sampling steps, as inline SVG in the page's colours."""

from __future__ import annotations

import html
import io
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

# Stand-ins that matplotlib writes into the SVG and that become the page's CSS variables.
_INK, _MUTED, _LINE, _BAD, _TEACHER, _STUDENT, _FAKE = (f"#01020{i}" for i in range(1, 8))
_VARIABLES = dict(
    zip(
        (_INK, _MUTED, _LINE, _BAD, _TEACHER, _STUDENT, _FAKE),
        ("ink", "muted", "line", "bad", "teacher", "student", "fake"),
        strict=True,
    )
)
_COLOURS = {"teacher": _TEACHER, "student": _STUDENT, "fake": _FAKE}
_CURVE = re.compile(r"^(?P<role>\w+)/(?P<what>loss.*|\w+_loss|grad_norm)$")


def read_metrics(path: str | os.PathLike[str]) -> tuple[list[dict], int]:
    """The records of a `metrics.jsonl`, ordered by step, and how many lines could not be read.

    A run that was killed may leave a torn line; it is left out, counted and logged.  Of two records of one step the
    later stands.  A file that is not there gives no records."""
    path = Path(path)
    if not path.is_file():
        return [], 0
    records: dict[int, dict] = {}
    unreadable = 0
    for line in path.read_bytes().splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            records[int(record["step"])] = record
        except (ValueError, KeyError, TypeError):  # ValueError: no JSON or no UTF-8; the others: JSON, but no record
            unreadable += 1
    if unreadable:
        log.warning("%s: left out %d line(s) that are no records", path, unreadable)
    return [records[step] for step in sorted(records)], unreadable


def curves(records: Sequence[Mapping]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Losses and gradient norms by key ("student/loss"): (steps, values), both fp64, in the order to draw them.

    A step without the key (another role trained) is no point of the curve; a null or infinite value is NaN, a gap."""
    keys = sorted({key for record in records for key in record if _CURVE.match(key)}, key=_drawing_order)
    found = {}
    for key in keys:
        points = [(record["step"], record[key]) for record in records if key in record]
        values = [float(v) if isinstance(v, int | float) and math.isfinite(v) else math.nan for _, v in points]
        found[key] = (np.array([step for step, _ in points], dtype=float), np.array(values))
    return found


def _drawing_order(key: str) -> tuple:
    role, what = key.split("/", 1)
    return (what == "grad_norm", ("student", "fake").index(role) if role in ("student", "fake") else 2, key)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` finite points at each point (fewer at the start); NaN where the point itself is NaN."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    before = np.maximum(np.arange(len(values)) - window, -1)
    sums = sums - np.where(before >= 0, sums[before], 0.0)
    counts = counts - np.where(before >= 0, counts[before], 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite, sums / counts, np.nan)


def curve_svg(key: str, steps: np.ndarray, values: np.ndarray) -> str:
    """One curve with its moving average as an `<svg>` element without links to anything outside.

    `steps`, `values`: (n,); NaN breaks the line and is marked on the axis.  Logarithmic when all values are positive
    and span more than a factor of 30."""
    from matplotlib.ticker import MaxNLocator

    role, what = key.split("/", 1)
    colour = _COLOURS.get(role, _TEACHER)
    finite = values[np.isfinite(values)]
    window = max(5, len(values) // 20)
    figure, axes = _axes()
    alone = len(values) == 1
    axes.plot(steps, values, color=colour, alpha=0.35, lw=0.9, marker="o" if alone else None, label="each update")
    if len(finite) >= 10:
        axes.plot(steps, moving_average(values, window), color=colour, lw=2, label=f"mean of the last {window} updates")
    if len(finite) and finite.min() > 0 and finite.max() > 30 * finite.min():
        axes.set_yscale("log")
    broken = steps[~np.isfinite(values)]
    if len(broken):
        where = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(broken, np.zeros(len(broken)), "x", color=_BAD, ms=6, label=f"not finite ({len(broken)})", **where)
    quantity = "gradient norm" if what == "grad_norm" else what.replace("_", " ").replace("/", ", ")
    axes.set_xlabel("step of the run (every role's steps counted)", color=_MUTED)
    axes.set_ylabel(quantity + (", log scale" if axes.get_yscale() == "log" else ""), color=_MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title(f"{role}: {quantity}", color=_INK, loc="left", fontweight="bold", fontsize=11)
    figure.legend(frameon=False, fontsize=8.5, labelcolor=_MUTED, loc="outside lower center", ncols=3, columnspacing=1)
    return _inline(figure, f"{key} by step")


Points = Sequence[tuple[int, float, float]]
"""(steps, value, standard error) of one measure, by increasing steps."""


def measure_svg(label: str, teacher: Points, student: Points, floor: float | None, *, hint: str) -> str:
    """One measure against the number of sampling steps as an `<svg>` element.

    `floor`: what held-out renders score (a dashed line), None for none.  Bars: one standard error to either side."""
    figure, axes = _axes(size=(3.9, 2.9))
    for name, points, marker in (("teacher", teacher, "o"), ("student", student, "s")):
        points = [p for p in points if math.isfinite(p[1])]
        if points:
            steps, values, errors = zip(*points, strict=True)
            errors = [e if math.isfinite(e) else 0.0 for e in errors]
            style = {"color": _COLOURS[name], "marker": marker, "ms": 5, "lw": 1.6, "capsize": 2.5}
            axes.errorbar(steps, values, yerr=errors, label=name, **style)
    if floor is not None and math.isfinite(floor):
        axes.axhline(floor, color=_MUTED, lw=1, ls=(0, (4, 3)), label="held-out renders")
    ticks = sorted({p[0] for p in (*teacher, *student)})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("sampling steps", color=_MUTED)
    axes.set_title(label, color=_INK, loc="left", fontweight="bold", fontsize=11)
    axes.set_ylabel(hint, color=_MUTED)
    figure.legend(frameon=False, fontsize=8.5, labelcolor=_MUTED, loc="outside lower center", ncols=3, columnspacing=1)
    return _inline(figure, f"{label} by steps")


def _axes(size: tuple[float, float] = (5.6, 2.9)):
    """A figure of its own (no pyplot: no global state, no window system) and its axes, in the page's colours."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.tick_params(which="both", colors=_MUTED)
    axes.grid(color=_LINE, lw=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(color=_LINE, visible=side in ("left", "bottom"))
    return figure, axes


def _inline(figure, title: str) -> str:
    """The figure as an SVG element for an HTML page: the page's colours and fonts, ids unique to the figure."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)  # that style is for `*`, the whole page
    opening, rest = svg.split(">", 1)
    opening = re.sub(r' (width|height|version|xmlns|xmlns:xlink)="[^"]*"', "", opening)  # sized by the page
    svg = f'{opening} role="img" aria-label="{html.escape(title)}">{rest}'
    prefix = re.sub(r"\W+", "-", title)  # matplotlib numbers its ids anew in every figure
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    return svg
