"""Training curves from `metrics.jsonl` and measures by sampling steps, as inline SVG in the page's colours."""

from __future__ import annotations

import html
import io
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distill.json_lines import finite_number, read_objects, step_of

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
# Closed sets of letters and lengths: whatever else a damaged file has for keys would end up in the page as a title.
_CURVE = re.compile(r"[\w.]{1,40}/(loss(/[\w.]{1,40})?|\w{1,40}_loss|grad_norm|lr)|perf/tokens_per_second", re.ASCII)
_TIME_BIN = re.compile(r"(?P<role>\w+)/\w+/t\d\.\d+", re.ASCII)
_LARGEST = 1e100
"""Larger values are drawn as this: matplotlib's margins around 1e308 overflow."""


class Metrics(NamedTuple):
    """What a `metrics.jsonl` holds."""

    records: list[dict[str, Any]]
    """By step, one for each."""
    unreadable: int
    """Lines that are no records: no JSON object, or without a step."""
    repeated: int
    """Records of a step that a later line has too."""


def read_metrics(path: str | os.PathLike[str]) -> Metrics:
    """The records of a `metrics.jsonl`, ordered by step; what is left out is counted and logged.

    A run that was killed may leave a torn line.  Of two records of one step the later stands.  A file that is not there
    gives no records."""
    lines = read_objects(path)
    with_step = [record for record in lines.records if step_of(record) is not None]
    unreadable = lines.unreadable + len(lines.records) - len(with_step)
    records = {record["step"]: record for record in with_step}
    repeated = len(with_step) - len(records)
    if unreadable or repeated:
        log.warning("%s: left out %d line(s) that are no records and %d repeated step(s)", path, unreadable, repeated)
    return Metrics([records[step] for step in sorted(records)], unreadable, repeated)


def curves(records: Sequence[Mapping]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Losses, gradient norms, rates and speed by key ("student/loss"): (steps, values), fp64, in the order drawn.

    A step without the key (another role trained) is no point of the curve, and neither is an empty time bin: a null of
    "ROLE/loss/t0.25" at a step whose "ROLE/loss" is finite.  Any other null, and what is no finite number, is NaN."""
    keys = sorted(filter(_CURVE.fullmatch, {key for record in records for key in record}), key=_drawing_order)
    found = {}
    for key in keys:
        points = [
            (record["step"], finite_number(record[key]))
            for record in records
            if key in record and not _is_empty_bin(record, key)
        ]
        if points:
            steps, values = zip(*points, strict=True)
            found[key] = (np.array(steps, dtype=float), np.array(values))
    return found


def _is_empty_bin(record: Mapping, key: str) -> bool:
    """No sample of the step fell into the bin.  The total has a value then; where it has none, the bin's may be NaN."""
    if record[key] is not None:
        return False
    time_bin = _TIME_BIN.fullmatch(key)
    return time_bin is not None and math.isfinite(finite_number(record.get(f"{time_bin['role']}/loss")))


def _drawing_order(key: str) -> tuple:
    role, what = key.split("/", 1)
    group = {"grad_norm": 1, "lr": 2, "tokens_per_second": 3}.get(what, 0)
    return (group, ("student", "fake").index(role) if role in ("student", "fake") else 2, key)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` finite points at each point (fewer at the start); NaN where the point itself is NaN."""
    finite = np.isfinite(values)
    sums = _window_sums(np.where(finite, values, 0.0), window)
    counts = _window_sums(finite.astype(float), window)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(finite, sums / counts, np.nan)


def _window_sums(values: np.ndarray, window: int) -> np.ndarray:
    """Sum of the last `window` values at each: of blocks' tails and heads, for after a loss of 1e20 the difference of
    two cumulative sums would be noise to the end of the curve."""
    padded = np.concatenate([np.zeros(window), values, np.zeros(-len(values) % window)]).reshape(-1, window)
    heads = padded.cumsum(axis=1)
    tails = padded[:, ::-1].cumsum(axis=1)[:, ::-1]
    before = np.concatenate([tails[:-1, 1:], np.zeros((len(tails) - 1, 1))], axis=1)  # of the block before
    return (heads[1:] + before).ravel()[: len(values)]


def curve_svg(key: str, steps: np.ndarray, values: np.ndarray) -> str:
    """One curve as an `<svg>` element; points that are not finite are crosses on the axis.

    The axis is logarithmic where losses or norms are positive and span more than a factor of 30."""
    from matplotlib.ticker import MaxNLocator

    role, what = key.split("/", 1)
    colour = _COLOURS.get(role, _MUTED)
    values = np.clip(values, -_LARGEST, _LARGEST)
    finite = values[np.isfinite(values)]
    window = max(5, len(values) // 20)
    figure, axes = _axes()
    alone = len(values) == 1
    noisy = what != "lr"
    averaged = noisy and len(finite) >= 10
    axes.plot(steps, values, color=colour, alpha=0.35 if averaged else 1, lw=0.9 if averaged else 1.6,
              marker="o" if alone else None, label="each update")  # fmt: skip
    if averaged:
        axes.plot(steps, moving_average(values, window), color=colour, lw=2, label=f"mean of the last {window} updates")
    if noisy and role != "perf" and len(finite) and finite.min() > 0 and finite.max() > 30 * finite.min():
        axes.set_yscale("log")
    broken = steps[~np.isfinite(values)]
    if len(broken):
        where = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(broken, np.zeros(len(broken)), "x", color=_BAD, ms=6, label=f"not finite ({len(broken)})", **where)
    words = {"grad_norm": "gradient norm", "lr": "learning rate"}
    quantity = words.get(what, re.sub(r"/t(\d)", r", from time \1", what).replace("_", " ").replace("/", ", "))
    axes.set_xlabel("step of the run (every role's steps counted)", color=_MUTED)
    axes.set_ylabel(quantity + (", log scale" if axes.get_yscale() == "log" else ""), color=_MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    title = "video tokens per second" if role == "perf" else f"{role}: {quantity}"
    axes.set_title(title, color=_INK, loc="left", fontweight="bold", fontsize=11)
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
