"""HTML page of a report, by Jinja2. It has no scripts, loads nothing, and supports light mode, dark mode and print."""

import base64
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from distill.report import charts
from distill.report.charts import values
from distill.report.media import fitted_size, pick_frames, picture_bytes, resize, strip, write_mp4
from distill.report.verdict import ReportRow, label
from fsdp_cp.files.json_lines import finite_number, read_objects


def page(data: Mapping[str, Any], *, rows: Sequence[ReportRow], records: Sequence[Mapping], fps: float) -> str:
    """Return the page of `report.json` and `metrics.jsonl` as text; `rows` are those of `data`, with their clips."""
    names = list(dict.fromkeys(name for row in data["rows"] for name in row["measures"] or ()))
    curves, count = charts.curves(records), len(data["captions"])
    made = {
        "result": _result(data),
        "fps": fps,
        "films": [_films(row, fps, count, target=104 if count > 4 else 192) for row in rows],
        "has_sound": any(row.sounds for row in rows),
        "measures": [_measure(name, data["rows"]) for name in names],
        "cells": [[_cell(row, name, data) for name in names] for row in data["rows"]],
        "curves": [_chart(f"{key} by step", charts.curve_svg(key, *points)) for key, points in curves.items()],
        "has_losses": any("/loss" in key for key in curves),
        "facts": _facts(data, measured_facts(records)),
    }
    return render("report.html.j2", **dict(data) | made)


def _result(data: Mapping[str, Any]) -> str:
    """Return ``won`` or ``lost``, or nothing where no measure counts or something went wrong."""
    counting = [c["student_better"] for c in data["comparisons"] if c["counts"]]
    if not all(counting):
        return "lost"
    # Never green if something went wrong: the numbers then describe a broken run.
    return "won" if counting and not data["troubles"] else ""


def evaluation_page(data: Mapping[str, Any], *, rows: Sequence[ReportRow], fps: float, **context: Any) -> str:
    """Return the page of ``evaluation.json``; `rows` have the clips of the first prompts, `context` all else."""
    count = len(rows[0].clips)
    shown = {"captions": data["prompts"][:count], "films": [_films(row, fps, count, target=104) for row in rows]}
    has_sound = any(row.sounds for row in rows)
    title = f"Evaluation of {len(rows)} networks"
    return render("evaluation.html.j2", **data | shown | context, title=title, rows=rows, fps=fps, has_sound=has_sound)


def render(template: str, **context: Any) -> str:
    return _templates().get_template(template).render(context)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("distill.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"date": _date, "number": number}
    return environment


def _films(row: ReportRow, fps: float, count: int, *, target: int) -> list[dict[str, Any]]:
    """Return the looping clips of a row. Those with sound are videos, since pictures could not stay in step with it."""
    films = [_film(clip, fps, target=target) for clip in row.clips[:count]]
    for film, clip, sound in zip(films, row.clips, row.sounds or (), strict=False):
        with tempfile.TemporaryDirectory() as folder:
            write_mp4(file := Path(folder) / "clip.mp4", clip, fps, sound)
            film["video"] = f"data:video/mp4;base64,{base64.b64encode(file.read_bytes()).decode()}"
    return films


def _film(clip: np.ndarray, fps: float, *, target: int) -> dict[str, Any]:
    """Return a looping clip: one picture of its frames side by side, which moves through a window. Animated PNG and GIF
    files start at different times."""
    height, width = fitted_size(*clip.shape[1:3], target=target)
    frames = clip[pick_frames(len(clip), 60_000 // width)]  # a JPEG has at most 65,535 pixels per side
    # Use JPEG for large clips: as PNG, a page of photographic clips would have tens of MB.
    format = "JPEG" if clip.shape[2] > 96 else "PNG"
    source = data_uri(picture_bytes(strip(resize(frames, height, width)), format), format.lower())
    return {"source": source, "height": height, "width": width, "frames": len(frames), "seconds": len(clip) / fps}


def _chart(title: str, svg: bytes) -> dict[str, str]:
    return {"title": title, "source": data_uri(svg, "svg+xml")}


def data_uri(content: bytes, format: str) -> str:
    """Return content of a MIME type ``image/FORMAT`` as the source of an ``<img>``."""
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
    title = label(name).capitalize()
    units = {"distance": "SD, ", "lateness": "frames, "}
    unit = "%, " if name.endswith("accuracy") else units.get(name.partition("/")[0], "")
    is_higher = any(row["measures"][name]["higher_is_better"] for row in rows if row["measures"])
    hint = f"{unit}{'higher' if is_higher else 'lower'} is better"
    return _chart(title, charts.measure_svg(name, rows, title=title, hint=hint)) | {"hint": hint}


def _cell(row: Mapping[str, Any], name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    measure, is_network = (row["measures"] or {}).get(name), row["role"] != "heldout"
    is_best = measure is not None and is_network and _is_best(measure, name, data["rows"])
    pairs = {("student", c["steps"], c["measure"]): (c["student_better"], c["counts"]) for c in data["comparisons"]}
    wins, counts = pairs.get((row["role"], row["steps"], name), (False, False))
    classes = ["value", *["best"] * is_best, *["wins"] * (wins and counts)]
    mark = {(True, True): "▲", (True, False): "△", (False, True): "▼"}.get((wins, counts), "")
    return {"name": name, "measure": measure, "classes": " ".join(classes), "mark": mark}


def _is_best(measure: Mapping[str, Any], name: str, rows: Sequence[Mapping]) -> bool:
    """Return whether no network has a better value."""
    networks = [row["measures"][name]["value"] for row in rows if row["measures"] and row["role"] != "heldout"]
    values = [value for value in networks if value is not None]
    best = max if measure["higher_is_better"] else min
    return bool(values) and measure["value"] == best(values)


def _facts(data: Mapping[str, Any], measured: Mapping[str, str]) -> dict[str, str]:
    shown = start_facts(data["starts"])
    if "started" in shown:
        shown["started"] = _date(shown["started"])
    shown["report written"] = _date(data["written"])
    shown |= data["run"] | measured
    return {key: _text(value) for key, value in shown.items()}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _date(time: Any) -> str:
    return str(time).replace("T", " ", 1)


_START = ("started", "command", "directory", "host", "device", "world_size", "commit", "clean", "versions", "from_step")
"""Keys of a start that the report has."""
_PHASE = re.compile(r"perf/seconds/\w+/[\w/]+", re.ASCII)


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first. A missing value is None."""
    return [{key: record.get(key) for key in _START} for record in read_objects(path)]


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
