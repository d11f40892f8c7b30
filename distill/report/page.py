"""The HTML of a report: one page without scripts that loads nothing, readable in light and dark and on paper."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from distill.json_lines import finite_number
from distill.report import charts
from distill.report import run as report_run
from distill.report.media import pick_frames, picture_bytes, resize, strip
from distill.report.row import ReportRow, label

_CAPTIONS_IN_GRID = 8
_CAPTIONS_IN_STRIPS = 4
_FRAMES_IN_STRIP = 8

_CSS = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f5f6f8; --ink: #16191d; --muted: #59626d; --line: #dde1e6;
  --teacher: #2f63b0; --student: #0c7a56; --fake: #a8560b; --heldout: #7b8591; --bad: #c22f3d; --win: #dcf3e8; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #e9ecef; --muted: #a3adb8;
  --line: #343b44; --teacher: #7eaaf0; --student: #4cc796; --fake: #eda45c; --heldout: #98a3ae; --bad: #ff7b86;
  --win: #17392c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 62rem; }
.note { color: var(--muted); font-size: .9rem; }
.verdict { padding: 1rem 1.25rem; border-left: 5px solid var(--muted); border-radius: 4px; background: var(--card);
  font-size: 1.08rem; }
.verdict.won { border-color: var(--student); } .verdict.lost { border-color: var(--bad); }
.troubles { padding: 1rem 1.25rem; margin: 1rem 0; border: 2px solid var(--bad); border-radius: 4px;
  background: var(--card); max-width: 62rem; } .troubles strong { color: var(--bad); }
.troubles ul { margin: .5rem 0 0; padding-left: 1.25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; text-align: left; vertical-align: middle; }
.numbers td, .numbers th { border-bottom: 1px solid var(--line); white-space: nowrap; }
.numbers thead th { vertical-align: bottom; white-space: normal; min-width: 6.5rem; }
.numbers thead small, .model small { display: block; font-weight: 400; color: var(--muted); }
.numbers td.value { text-align: right; }
.model { border-left: 4px solid var(--line); white-space: nowrap; font-weight: 600; }
.model.teacher { border-left-color: var(--teacher); } .model.student { border-left-color: var(--student); }
.model.heldout { border-left-color: var(--heldout); }
.se { color: var(--muted); font-weight: 400; }
.best { font-weight: 700; }
.wins { background: var(--win); }
.mark { display: inline-block; width: 1.1em; color: var(--student); } .mark.loses { color: var(--bad); }
.clips th, .clips td { padding: .2rem .45rem; }
.clips thead th { width: 1px; font-weight: 400; color: var(--muted); vertical-align: bottom;
  font-size: .85rem; line-height: 1.3; }
.clips .model { position: sticky; left: 0; background: var(--page); padding-right: 1rem; z-index: 1; }
img { display: block; }
.strip img { background: var(--line); outline: 1px solid var(--line); } /* seen between dark frames on a dark page */
.film { overflow: hidden; outline: 1px solid var(--line); } .film img { max-width: none; }
@keyframes film { to { transform: translateX(-100%); } }
@media (prefers-reduced-motion: reduce) { .film img { animation: none !important; } }
.tiny { image-rendering: pixelated; }
.charts { display: grid; margin-top: 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.charts.small { grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
.charts > div { background: var(--card); border-radius: 6px; padding: .5rem; }
.charts svg { display: block; width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .3rem 1.5rem; font-size: .92rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: .5rem; } }
.settings th, .settings td { border-bottom: 1px solid var(--line); overflow-wrap: anywhere; padding: .2rem .7rem; }
.settings tbody th { font-weight: 400; color: var(--muted); white-space: nowrap; }
.settings .differs th { font-weight: 700; color: var(--ink); border-left: 4px solid var(--teacher); }
a { color: var(--teacher); }
code { font: .87rem/1.5 ui-monospace, SFMono-Regular, Consolas, monospace; }
pre { margin: 0; padding: .5rem .75rem; background: var(--card); border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--muted); margin: .75rem 0; }
@media print { body { max-width: none; } .charts > div, tr { break-inside: avoid; } }
"""


def page(
    data: Mapping[str, Any],
    *,
    rows: Sequence[ReportRow],
    records: Sequence[Mapping],
    fps: float,
    files: Sequence[str] = (),
) -> str:
    """The page as text.  `data`: what `report.json` holds; `rows`: the same rows, in the same order, with their clips;
    `records`: of `metrics.jsonl`; `fps`: of the looping clips; `files`: what to link beside the page."""
    captions = data["captions"]
    parts = [f"<h1>{escape(data['title'])}</h1>", report_run.subtitle(data)]
    parts += [report_run.troubles(data["troubles"]), _verdict(data)]
    parts += ["<h2>Clips</h2>", _grid(rows, captions, fps)]
    if any(row["measures"] for row in data["rows"]):
        parts += ["<h2>Measures</h2>", _measures(data), _measure_charts(data), _comparisons(data)]
    parts += ["<h2>Training</h2>", _training(records, data["metrics"])]
    parts += ["<h2>The run</h2>", report_run.facts(data, _measured(records))]
    parts += [report_run.settings(data["settings"]), report_run.files(files)]
    parts += ["<h2>Frame by frame</h2>", _strips(rows, captions)]
    return document(data["title"], parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole HTML page of ``parts``, in the reports' style."""
    # The policy makes a browser refuse whatever would be loaded from elsewhere, and any script.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _verdict(data: Mapping[str, Any]) -> str:
    counted = [c for c in data["comparisons"] if c["counts"]]
    won = all(c["student_better"] for c in counted)
    # No green beside what went wrong: the numbers below are of whatever came out of it.
    kind = ("lost" if not won else "" if data["troubles"] else "won") if counted else ""
    return f'<p class="verdict {kind}">{escape(data["verdict"])}</p>'


def _model(row: ReportRow | Mapping[str, Any]) -> str:
    get = row.get if isinstance(row, Mapping) else lambda key: getattr(row, key)
    count = get("evaluations")
    small = f"<small>{count} network evaluation{'s' * (count != 1)}</small>" if count else ""
    return f'<th scope="row" class="model {get("role")}">{escape(get("name"))}{small}</th>'


def _shown_size(height: int, width: int, target: int) -> tuple[int, int]:
    """(height, width) on the page, about `target` wide; whole multiples for tiny clips, or pixels come out uneven."""
    factor = target / width if width > target else max(1, target // width)
    return max(1, round(height * factor)), max(1, round(width * factor))


def _image(picture: np.ndarray, *, alt: str, factor: int = 1, style: str = "", jpeg: bool = False) -> str:
    """An `<img>` that holds the picture, enlarged without smoothing by a whole factor."""
    data = base64.b64encode(picture_bytes(picture, "JPEG" if jpeg else "PNG")).decode()
    height, width = picture.shape[0] * factor, picture.shape[1] * factor
    kind = ' class="tiny"' if factor > 1 else ""
    source = f'src="data:image/{"jpeg" if jpeg else "png"};base64,{data}"'
    return f'<img{kind} {source} width="{width}" height="{height}" alt="{escape(alt)}"{style}>'


def _film(clip: np.ndarray, fps: float, *, target: int, alt: str) -> str:
    """A looping clip: its frames side by side in one picture, moved along behind a window.

    Not an animated PNG or GIF: a browser starts each of those when it likes, and models cannot be compared."""
    seconds, width, shown = len(clip) / fps, clip.shape[2], _shown_size(*clip.shape[1:3], target)
    clip = clip[pick_frames(len(clip), 60_000 // shown[1])]  # a JPEG ends at 65,535 pixels
    small = shown[1] < width
    picture = strip(resize(clip, *shown) if small else clip)
    style = f' style="animation: film {seconds:.3f}s steps({len(clip)}) infinite"' if len(clip) > 1 else ""
    # As PNG a page of photographic clips would weigh tens of MB.
    image = _image(picture, alt=alt, factor=1 if small else shown[1] // width, style=style, jpeg=width > 96)
    return f'<div class="film" style="width: {shown[1]}px; height: {shown[0]}px">{image}</div>'


def _grid(rows: Sequence[ReportRow], captions: Sequence[str], fps: float) -> str:
    """Looping clips: a row per model, a column per caption."""
    shown = captions[:_CAPTIONS_IN_GRID]
    target = 104 if len(shown) > 4 else 192
    head = "".join(f'<th scope="col">{escape(caption)}</th>' for caption in shown)
    lines = []
    for row in rows:
        pairs = list(zip(shown, row.clips, strict=False))
        films = [_film(clip, fps, target=target, alt=f"{row.name}: {caption}") for caption, clip in pairs]
        lines.append(f"<tr>{_model(row)}" + "".join(f"<td>{film}</td>" for film in films) + "</tr>")
    note = f"Looping at {fps:g} frames a second. Within a column every network has the same caption and the same noise."
    table = f'<table class="clips"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<p class="note">{note}</p><div class="scroll">{table}</div>'


def _strips(rows: Sequence[ReportRow], captions: Sequence[str]) -> str:
    """Still frames in time order: a block per caption, in it a row per model."""
    blocks = []
    for i, caption in enumerate(captions[:_CAPTIONS_IN_STRIPS]):
        lines = []
        for row in rows:
            clip = row.clips[i][pick_frames(row.clips.shape[1], _FRAMES_IN_STRIP)]
            height, width = _shown_size(*clip.shape[1:3], 680 // len(clip))
            small = width < clip.shape[2]
            picture = strip(resize(clip, height, width), gap=4) if small else strip(clip, gap=1)
            factor = 1 if small else max(1, width // clip.shape[2])
            image = _image(picture, alt=f"frames of {row.name}: {caption}", factor=factor)
            lines.append(f"<tr>{_model(row)}<td>{image}</td></tr>")
        table = f'<table class="clips strip"><tbody>{"".join(lines)}</tbody></table>'
        blocks.append(f'<h3>{escape(caption)}</h3><div class="scroll">{table}</div>')
    total = max(row.clips.shape[1] for row in rows)
    picked = len(pick_frames(total, _FRAMES_IN_STRIP))
    note = f"{picked} of {total} frames, evenly spaced" if picked < total else f"All {total} frames"
    return f'<p class="note">{note}, in time order.</p>' + "".join(blocks)


def number(measure: str, value: Mapping[str, float | None]) -> tuple[str, str]:
    """(value, standard error) as shown: accuracies in percent, others with two digits of their standard error."""
    shown, error = value["value"], value["standard_error"]
    if shown is None:
        return "not measurable", ""
    if measure.endswith("accuracy"):
        return f"{100 * shown:.1f}", "" if error is None else f"{100 * error:.1f}"
    digits = 3 if not error or error < 5e-7 else min(6, max(1, 1 - math.floor(math.log10(error))))
    return f"{shown:.{digits}f}", "" if error is None else f"{error:.{digits}f}"


def _label(measure: str) -> str:
    text = label(measure)
    return text[0].upper() + text[1:]


def _hint(measure: str, higher: bool) -> str:
    unit = "%, " if measure.endswith("accuracy") else "SD, " if measure.startswith("distance/") else ""
    return f"{unit}{'higher' if higher else 'lower'} is better"


def _directions(data: Mapping[str, Any]) -> dict[str, bool]:
    """Measure -> whether higher is better, over all rows, in the order in which they come."""
    return {name: m["higher_is_better"] for row in data["rows"] for name, m in (row["measures"] or {}).items()}


def _best(data: Mapping[str, Any], measure: str, higher: bool) -> float | None:
    """The best value that a network has; held-out renders are no competitors."""
    values = [(row["measures"] or {}).get(measure, {}).get("value") for row in data["rows"] if row["role"] != "heldout"]
    values = [v for v in values if v is not None]
    return (max if higher else min)(values) if values else None


def _measures(data: Mapping[str, Any]) -> str:
    directions = _directions(data)
    pairs = {(c["steps"], c["measure"]): c for c in data["comparisons"]}
    head = "".join(
        f'<th scope="col">{escape(_label(name))}<small>{_hint(name, higher)}</small></th>'
        for name, higher in directions.items()
    )
    lines = []
    for row in data["rows"]:
        cells = []
        for name, higher in directions.items():
            found = (row["measures"] or {}).get(name)
            pair = pairs.get((row["steps"], name)) if row["role"] == "student" else None
            cells.append(_cell(row, name, found, pair, best=_best(data, name, higher)))
        lines.append(f"<tr>{_model(row)}{''.join(cells)}</tr>")
    legend = (
        '<p class="note">Value &plusmn; one standard error; the best network of each column is <b>bold</b>. '
        '<span class="mark">&#9650;</span>the student beats the teacher at the same number of steps on a measure that '
        'counts; <span class="mark">&#9651;</span>it does, but the measure does not count there; '
        '<span class="mark loses">&#9660;</span>it does not, on a measure that counts. Held-out renders, measured '
        "against other renders, show the noise floor. Distances are between distributions over clips and over renders, "
        "in standard deviations (SD) of the renders.</p>"
    )
    table = f"<thead><tr><td></td>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'{legend}<div class="scroll"><table class="numbers" id="measures">{table}</table></div>'


def _cell(row: Mapping, name: str, found: Mapping | None, pair: Mapping | None, *, best: float | None) -> str:
    if found is None:
        return '<td class="value"></td>'
    value, error = number(name, found)
    mark = ""
    if pair and (pair["student_better"] or pair["counts"]):
        sign = ("&#9650;" if pair["counts"] else "&#9651;") if pair["student_better"] else "&#9660;"
        mark = f'<span class="mark{"" if pair["student_better"] else " loses"}">{sign}</span>'
    is_best = row["role"] != "heldout" and found["value"] is not None and found["value"] == best
    kinds = "value" + " best" * is_best + " wins" * bool(pair and pair["student_better"] and pair["counts"])
    # Full digits for whoever reads the page with a program.
    exact = "" if found["value"] is None else f' data-value="{found["value"]!r}"'
    shown = f'{value} <span class="se">&plusmn; {error}</span>' if error else value
    names = f'data-row="{escape(row["name"])}" data-measure="{escape(name)}"'
    return f'<td class="{kinds}" {names}{exact}>{mark}{shown}</td>'


def _measure_charts(data: Mapping[str, Any]) -> str:
    """Each measure against the number of steps, teacher and student."""
    parts = []
    for name, higher in _directions(data).items():
        factor = 100.0 if name.endswith("accuracy") else 1.0
        points: dict[str, list] = {"teacher": [], "student": [], "heldout": []}
        for row in reversed(data["rows"]):
            found = (row["measures"] or {}).get(name)
            if found and found["value"] is not None:
                error = found["standard_error"]
                points[row["role"]].append((row["steps"], factor * found["value"], factor * (error or 0.0)))
        floor = points["heldout"][0][1] if points["heldout"] else None
        if points["teacher"] or points["student"]:
            svg = charts.measure_svg(
                _label(name), points["teacher"], points["student"], floor, hint=_hint(name, higher)
            )
            parts.append(f"<div>{svg}</div>")
    return f'<div class="charts small">{"".join(parts)}</div>'


def _comparisons(data: Mapping[str, Any]) -> str:
    if not data["comparisons"]:
        return ""
    full_steps = data["comparisons"][0]["full_steps"]
    head = ["Steps", "Measure", f"Teacher, {full_steps} steps", "Teacher, so few", "Worse by (SE)", "Counts", "Student",
            "Better by (SE)", "Student beats teacher"]  # fmt: skip
    lines = []
    for c in data["comparisons"]:
        full, teacher, student = (
            " ± ".join(filter(None, number(c["measure"], c[k]))) for k in ("teacher_full", "teacher", "student")
        )
        worse, better = ("" if c[k] is None else f"{c[k]:.1f}" for k in ("standard_errors_worse", "student_margin"))
        counts, beats = ("yes" if c[key] else "no" for key in ("counts", "student_better"))
        cells = [c["steps"], _label(c["measure"]), full, teacher, worse, counts, student, better, beats]
        lines.append("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + "</tr>")
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    table = f'<table class="numbers"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<details><summary>All comparisons</summary><div class="scroll">{table}</div></details>'


def _training(records: Sequence[Mapping], metrics: Mapping[str, int]) -> str:
    found = charts.curves(records)
    unreadable, repeated = metrics["unreadable_lines"], metrics["repeated_steps"]
    notes = []
    if unreadable:
        notes.append(f"Left out: {unreadable} line{'s' * (unreadable != 1)} of metrics.jsonl that could not be read.")
    if repeated:
        notes.append(f"Left out: {repeated} line{'s' * (repeated != 1)} of metrics.jsonl whose step comes again later.")
    if not any("/loss" in key for key in found):
        notes.append("There are no losses in metrics.jsonl.")
    note = f'<p class="note">{" ".join(notes)}</p>' if notes else ""
    return note + '<div class="charts">' + "".join(
        f"<div>{charts.curve_svg(key, steps, values)}</div>" for key, (steps, values) in found.items()
    ) + "</div>"  # fmt: skip


def _measured(records: Sequence[Mapping]) -> dict[str, str]:
    """Facts that the metrics tell."""
    found = {}
    speeds = _finite(records, "perf/tokens_per_second")
    memory = _finite(records, "memory/peak_gib")
    if speeds:
        found["tokens per second (median)"] = f"{np.median(speeds):,.0f}"
    if memory:
        found["peak memory in training, any rank (GiB)"] = f"{max(memory):.2f}"
    return found | _phases(records)


_PHASE = re.compile(r"perf/seconds/\w{1,40}/[\w/]{1,80}", re.ASCII)


def _phases(records: Sequence[Mapping]) -> dict[str, str]:
    """Where a step's time goes, by role: the phases of at least a hundredth, the longest first."""
    times: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for key in filter(_PHASE.fullmatch, record):
            role, phase = key.removeprefix("perf/seconds/").split("/", 1)
            if (whole := finite_number(record.get(f"perf/seconds/{role}"))) > 0:
                times.setdefault(role, {}).setdefault(phase, []).append(finite_number(record[key]) / whole)
    found = {}
    for role, phases in times.items():
        shares = {phase: float(np.median(values)) for phase, values in phases.items()}
        longest = sorted((item for item in shares.items() if item[1] >= 0.01), key=lambda item: -item[1])
        found[f"a step of the {role} (median)"] = ", ".join(f"{phase} {share:.0%}" for phase, share in longest)
    return {key: text for key, text in found.items() if text}


def _finite(records: Sequence[Mapping], key: str) -> list[float]:
    values = [finite_number(record.get(key)) for record in records]
    return [value for value in values if not math.isnan(value)]
