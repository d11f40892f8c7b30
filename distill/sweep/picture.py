"""The sweep's picture: speed, MFU and peak memory over the tokens of a sample, predictions beside measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distill.report.media import atomic_path
from distill.sweep.outcome import OUT_OF_MEMORY
from distill.sweep.points import plain, short_keys

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#6a3d9a", "#7f7f7f")
"""Told apart by the colour-blind too (Okabe and Ito); each comes again with another marker."""
_MARKERS = "osD^vP"
_INK, _MUTED, _LINE = "#16191d", "#5b646e", "#d9dde2"
_MOST_TICKS = 8
_PANELS = (
    ("tokens/s of all ranks", "tokens_per_second", "predicted_tokens_per_second"),
    ("MFU", "mfu", "predicted_mfu"),
    ("peak memory of a rank, GiB", "allocated_gib", "predicted_allocated_gib"),
)


class Line(NamedTuple):
    """Points that differ in their length alone."""

    label: str
    rows: list[Mapping[str, Any]]
    """By tokens."""


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """One line a combination of the settings that do not change the number of tokens; rows without tokens are left out.

    A setting changes it where two points that differ in it alone have different tokens.
    """
    rows = [row for row in rows if row.get("tokens") is not None]
    keys = list(rows[0]["overrides"]) if rows else []
    by_rest: dict[tuple, set[int]] = {}
    for key in keys:
        for row in rows:
            rest = tuple(value for name, value in row["overrides"].items() if name != key)
            by_rest.setdefault((key, rest), set()).add(row["tokens"])
    lengths = {key for (key, _), tokens in by_rest.items() if len(tokens) > 1}
    others = [key for key in keys if key not in lengths]
    short = short_keys(keys)
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        label = ", ".join(f"{short[key]}={plain(row['overrides'][key])}" for key in others) or "all points"
        found.setdefault(label, []).append(row)
    return [Line(label, sorted(group, key=lambda row: row["tokens"])) for label, group in found.items()]


def write_picture(file: Path, rows: Sequence[Mapping[str, Any]], *, title: str) -> bool:
    """Write the picture as PNG; ``False``, and nothing written, where there is nothing to draw.

    Panels of which nothing is known are left out, with a note. What ran out of memory is a cross at the panel's edge,
    or at its predicted memory.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    lines = lines_of(rows)
    known = [panel for panel in _PANELS if any(row.get(name) is not None for row in rows for name in panel[1:])]
    if not known:
        return False
    figure = Figure(figsize=(4.9 * len(known) + 0.4, 4.9), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    absent = [name for name, *_ in _PANELS if name not in {panel[0] for panel in known}]
    unknown = f" (not known here: {', '.join(absent)})" if absent else ""
    figure.suptitle(f"{title}{unknown}", color=_INK, fontsize=12, x=0.01, ha="left")
    tokens = sorted({row["tokens"] for line in lines for row in line.rows})
    for axes, (label, measured, predicted) in zip(figure.subplots(1, len(known), squeeze=False)[0], known, strict=True):
        axes.tick_params(which="both", colors=_MUTED)
        axes.grid(color=_LINE, lw=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set(color=_LINE, visible=side in ("left", "bottom"))
        for number, line in enumerate(lines):
            _draw(axes, number, line, measured, predicted, at_top=measured == "allocated_gib")
        if tokens[-1] >= 4 * tokens[0]:
            axes.set_xscale("log")
        axes.set_xticks(shown := _ticks(tokens), [f"{each:,}" for each in shown], rotation=30 if len(shown) > 4 else 0)
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_xlabel("tokens of a sample", color=_MUTED)
        axes.set_title(label, color=_INK, loc="left", fontweight="bold", fontsize=11)
    handles = [
        Line2D([], [], color=_colour(i), marker=_marker(i), lw=1.8, ms=5, label=line.label)
        for i, line in enumerate(lines)
    ]
    style = {"color": _MUTED, "lw": 1.4}
    if any(row.get(panel[1]) is not None for row in rows for panel in known):
        handles.append(Line2D([], [], **style, label="measured"))
    if any(row.get(panel[2]) is not None for row in rows for panel in known):
        handles.append(Line2D([], [], **style, ls=(0, (4, 3)), marker="o", mfc="white", ms=5, label="predicted"))
    if any(row.get("status") == OUT_OF_MEMORY for row in rows):
        handles.append(Line2D([], [], color=_MUTED, marker="X", ms=8, ls="none", label="out of memory"))
    figure.legend(
        handles=handles,
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        loc="outside lower center",
        ncols=min(8, len(handles)),
    )
    with atomic_path(file) as part:
        figure.savefig(part, format="png", metadata={"Software": None})
    return True


def _draw(axes: Any, number: int, line: Line, measured: str, predicted: str, *, at_top: bool) -> None:
    colour = _colour(number)
    for name, style in (
        (measured, {"lw": 1.8, "marker": _marker(number), "ms": 5}),
        (predicted, {"lw": 1.4, "marker": _marker(number), "ms": 5, "ls": (0, (4, 3)), "mfc": "white"}),
    ):
        points = [(row["tokens"], row[name]) for row in line.rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, **style)
    for row in line.rows:
        if row.get("status") != OUT_OF_MEMORY:
            continue
        cross = {"color": colour, "marker": "X", "ms": 9, "mec": "white", "ls": "none", "clip_on": False, "zorder": 5}
        if at_top and row.get(predicted) is not None:
            axes.plot([row["tokens"]], [row[predicted]], **cross)
        else:  # one above the other, where several lines end at one length
            height = 0.97 - 0.05 * number if at_top else 0.02 + 0.05 * number
            axes.plot([row["tokens"]], [height], transform=axes.get_xaxis_transform(), **cross)


def _ticks(tokens: Sequence[int]) -> list[int]:
    step = -(-len(tokens) // _MOST_TICKS)
    return list(tokens[::step])


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _marker(number: int) -> str:
    return _MARKERS[number // len(_COLOURS) % len(_MARKERS)]
