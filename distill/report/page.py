"""HTML page of a report, by Jinja2. It has no scripts, loads nothing, and supports light mode, dark mode and print."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from distill.report import charts
from distill.report.facts import measured_facts, start_facts
from distill.report.measures import HIGHER_IS_BETTER
from distill.report.media import fitted_size, pick_frames, picture_bytes, resize, strip
from distill.report.verdict import ReportRow, label

_CAPTIONS_IN_GRID = 8
_CAPTIONS_IN_STRIPS = 4
_FRAMES_IN_STRIP = 8


def page(
    data: Mapping[str, Any],
    *,
    rows: Sequence[ReportRow],
    records: Sequence[Mapping],
    fps: float,
    files: Sequence[str] = (),
) -> str:
    """Return the page as text.

    Args:
        data: content of `report.json`.
        rows: rows of `data` in the same order, with their clips.
        records: records of `metrics.jsonl`.
        fps: frame rate of the looping clips.
        files: files next to the page that it links to.
    """
    captions = data["captions"]
    counting = [c["student_better"] for c in data["comparisons"] if c["counts"]]
    # Never green if something went wrong: the numbers then describe a broken run.
    result = ("lost" if not all(counting) else "" if data["troubles"] else "won") if counting else ""
    names = list(dict.fromkeys(name for row in data["rows"] for name in row["measures"] or ()))
    curves = charts.curves(records)
    in_grid, in_strips = captions[:_CAPTIONS_IN_GRID], captions[:_CAPTIONS_IN_STRIPS]
    width = 104 if len(in_grid) > 4 else 192
    context = dict(data) | {
        "result": result,
        "fps": fps,
        "grid_captions": in_grid,
        "films": [[_film(clip, fps, target=width) for clip in row.clips[: len(in_grid)]] for row in rows],
        "measures": [_measure(name, data["rows"]) for name in names],
        "cells": [[_cell(row, name, data) for name in names] for row in data["rows"]],
        "curves": [_chart(f"{key} by step", charts.curve_svg(key, *points)) for key, points in curves.items()],
        "has_losses": any("/loss" in key for key in curves),
        "facts": _facts(data, measured_facts(records)),
        "files": files,
        "most_frames": _FRAMES_IN_STRIP,
        "strips": [(text, [_still(row.clips[i]) for row in rows]) for i, text in enumerate(in_strips)],
    }
    return _templates().get_template("report.html.j2").render(context)


def document(title: str, parts: Sequence[str]) -> str:
    """Return an HTML page in the style of reports. ``parts`` are HTML."""
    return _templates().get_template("base.html.j2").render(title=title, parts=parts)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("distill.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"date": _date, "json": _setting, "number": number}
    return environment


def _film(clip: np.ndarray, fps: float, *, target: int) -> dict[str, Any]:
    """Return a looping clip: one picture of its frames side by side, which moves through a window.

    Browsers start animated PNG and GIF files at different times, which would make clips hard to compare.
    """
    height, width = fitted_size(*clip.shape[1:3], target=target)
    frames = clip[pick_frames(len(clip), 60_000 // width)]  # a JPEG has at most 65,535 pixels per side
    # Use JPEG for large clips: as PNG, a page of photographic clips would have tens of MB.
    source = _picture(resize(frames, height, width), format="JPEG" if clip.shape[2] > 96 else "PNG")
    return {"source": source, "height": height, "width": width, "frames": len(frames), "seconds": len(clip) / fps}


def _still(clip: np.ndarray) -> str:
    """Return a picture of some frames of the clip, side by side."""
    frames = clip[pick_frames(len(clip), _FRAMES_IN_STRIP)]
    height, width = fitted_size(*frames.shape[1:3], target=680 // len(frames))
    return _picture(resize(frames, height, width), gap=4)


def _picture(frames: np.ndarray, *, gap: int = 0, format: str = "PNG") -> str:
    return _data_uri(picture_bytes(strip(frames, gap=gap), format), format.lower())


def _chart(title: str, svg: bytes) -> dict[str, str]:
    return {"title": title, "source": _data_uri(svg, "svg+xml")}


def _data_uri(content: bytes, format: str) -> str:
    return f"data:image/{format};base64,{base64.b64encode(content).decode()}"


def number(measure: Mapping[str, float | None], name: str) -> tuple[str, str]:
    """Format (value, standard error): accuracies in percent, others to two digits of the standard error."""
    value, error = measure["value"], measure["standard_error"]
    if value is None:
        return "not measurable", ""
    if name.endswith("accuracy"):
        return f"{100 * value:.1f}", "" if error is None else f"{100 * error:.1f}"
    digits = 3 if not error or error < 5e-7 else min(6, max(1, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f}", "" if error is None else f"{error:.{digits}f}"


def _measure(name: str, rows: Sequence[Mapping]) -> dict[str, str]:
    """Return a measure's name in words, its unit and direction, and its chart."""
    title = label(name).capitalize()
    unit = "%, " if name.endswith("accuracy") else "SD, " if name.startswith("distance/") else ""
    hint = f"{unit}{'higher' if HIGHER_IS_BETTER[name] else 'lower'} is better"
    return _chart(title, charts.measure_svg(name, rows, title=title, hint=hint)) | {"hint": hint}


def _cell(row: Mapping[str, Any], name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table cell of a row's measure: the measure, its CSS classes and its mark."""
    networks = [other["measures"] for other in data["rows"] if other["measures"] and other["role"] != "heldout"]
    values = [measures[name]["value"] for measures in networks if measures[name]["value"] is not None]
    best = (max if HIGHER_IS_BETTER[name] else min)(values, default=None)
    measure = (row["measures"] or {}).get(name)
    is_best = measure and row["role"] != "heldout" and measure["value"] == best is not None
    pairs = {("student", c["steps"], c["measure"]): (c["student_better"], c["counts"]) for c in data["comparisons"]}
    wins, counts = pairs.get((row["role"], row["steps"], name), (False, False))
    classes = ["value", *["best"] * bool(is_best), *["wins"] * (wins and counts)]
    mark = ("▲" if counts else "△") if wins else "▼" if counts else ""
    return {"name": name, "measure": measure, "classes": " ".join(classes), "mark": mark}


def _facts(data: Mapping[str, Any], measured: Mapping[str, str]) -> dict[str, str]:
    """Return facts of the newest start and of the run, as text."""
    starts = data["starts"]
    shown = start_facts(starts[-1]) if starts else {}
    if "started" in shown:
        shown["started"] = _date(shown["started"])
    if len(starts) > 1:
        shown["starts"] = f"{len(starts)}, from steps {', '.join(str(start['from_step']) for start in starts)}"
    shown["report written"] = _date(data["written"])
    shown |= {key: value for key, value in data["run"].items() if key != "versions" or "versions" not in shown}
    for key, value in measured.items():
        shown.setdefault(key, value)
    return {key: _text(value) for key, value in shown.items()}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _date(text: str) -> str:
    """Return an ISO time with a space instead of the T."""
    return text.replace("T", " ", 1)[:40]


def _setting(value: Any) -> str:
    if value == "???":
        return "none; must be given"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
