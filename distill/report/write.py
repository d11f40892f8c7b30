"""The report of a distillation run: `report.html` and `report.json` in its folder, and a picture for a README.

The page says first, in plain words computed from the numbers, whether the student beats the teacher at the same number
of steps; then come the clips, the measures, the training curves and the facts of the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from distill import run_facts
from distill.report import charts
from distill.report.measures import HIGHER_IS_BETTER, Measure, worse_by
from distill.report.media import atomic_path, contact_sheet
from distill.report.row import ReportRow, label

log = logging.getLogger(__name__)

ROLE_COLOURS = {"heldout": "#8a94a0", "teacher": "#3f6fb5", "student": "#12805c"}

COUNTS_FROM = 3.0
"""A measure counts at n steps where the teacher there is worse than at its full steps by so many standard errors."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Student against teacher, at one number of steps and on one measure."""

    steps: int
    measure: str
    full_steps: int
    teacher_full: Measure
    teacher: Measure
    student: Measure
    standard_errors_worse: float
    """(teacher at n, worse than at full steps) / (standard error of that difference); negative where it is better."""
    counts: bool
    """The teacher loses something by taking so few steps, so there is something to win: at least `COUNTS_FROM`."""
    student_better: bool
    """The student's value is strictly better than the teacher's at the same number of steps."""
    student_margin: float
    """(student better than teacher at the same steps) / (standard error of that difference)."""
    student_reaches_full: bool
    """The student is better than the teacher at full steps, or less than `COUNTS_FROM` standard errors worse."""


def student_beats_teacher(rows: Sequence[ReportRow]) -> list[Comparison]:
    """Compares each student row with the teacher row of the same number of steps, measure by measure.

    The full-step teacher is the teacher row with the most steps.  Ordered by steps, then by measure as the rows have
    them.  Empty without measures or without such pairs.  A value that is not finite never counts and never wins."""
    teachers = {r.steps: r for r in rows if r.role == "teacher" and r.steps is not None}
    students = {r.steps: r for r in rows if r.role == "student" and r.steps is not None}
    full_steps = max(teachers, default=0)
    found = []
    for steps in sorted(students.keys() & teachers.keys() - {full_steps}):
        columns = [teachers[full_steps].measures, teachers[steps].measures, students[steps].measures]
        if None not in columns:
            for measure in columns[0]:
                if all(measure in column for column in columns):
                    found.append(_compare(measure, steps, full_steps, *(column[measure] for column in columns)))
    return found


def _compare(name: str, steps: int, full_steps: int, full: Measure, teacher: Measure, student: Measure) -> Comparison:
    worse = _worse_by(teacher, full, name)
    margin = -_worse_by(student, teacher, name)
    return Comparison(
        steps=steps,
        measure=name,
        full_steps=full_steps,
        teacher_full=full,
        teacher=teacher,
        student=student,
        standard_errors_worse=worse,
        counts=worse >= COUNTS_FROM,
        student_better=margin > 0,
        student_margin=margin,
        student_reaches_full=_worse_by(student, full, name) < COUNTS_FROM,
    )


def _worse_by(a: Measure, b: Measure, name: str) -> float:
    # An infinite or missing value would otherwise count as infinitely many standard errors.
    return worse_by(a, b, name) if math.isfinite(a.value) and math.isfinite(b.value) else math.nan


def verdict(rows: Sequence[ReportRow], comparisons: Sequence[Comparison]) -> str:
    """The first paragraph of the report: whether the student beats the teacher, in words, computed from the numbers."""
    if all(row.measures is None for row in rows):
        return "This data set has no measures of its own, so nothing is scored here: judge the clips below by eye."
    if not comparisons:
        return "Nothing to compare: it takes student and teacher at the same number of steps, and the teacher at more."
    full = f"{comparisons[0].full_steps}"
    tried = sorted({c.steps for c in comparisons})
    counted = [c for c in comparisons if c.counts]
    if not counted:
        head = f"Nothing to win here: at {_listed(tried)} step{'s' * (tried != [1])} the teacher is on no measure"
        return f"{head} {COUNTS_FROM:g} standard errors worse than at {full}. {_cost(rows, comparisons)}".strip()
    won = [c for c in counted if c.student_better]
    clear = sum(c.student_margin >= COUNTS_FROM for c in won)
    shares = []
    for steps in tried:
        here = [c for c in counted if c.steps == steps]
        wins = f"{sum(c.student_better for c in here)} of {len(here)}" if here else "none counts"
        shares.append(f"{wins} at {_steps(steps)}")
    sentences = [
        f"At the same number of steps the student beats the teacher on {len(won)} of the {len(counted)} measures that"
        f" count ({_listed(shares)}), on {clear} of them by {COUNTS_FROM:g} standard errors or more.",
        f"A measure counts where the teacher with so few steps is at least {COUNTS_FROM:g} standard errors worse than"
        f" with {full}.",
    ]
    lost = [f"{label(c.measure)} at {_steps(c.steps)}" for c in counted if not c.student_better]
    sentences += [f"The student does not beat it on {_listed(lost)}."] if lost else []
    return " ".join([*sentences, _cost(rows, comparisons)]).strip()


def _cost(rows: Sequence[ReportRow], comparisons: Sequence[Comparison]) -> str:
    """What the best student costs next to the full teacher, and how close it comes."""
    steps = max(c.steps for c in comparisons)
    full_steps = comparisons[0].full_steps
    student = next(r for r in rows if r.role == "student" and r.steps == steps)
    teacher = next(r for r in rows if r.role == "teacher" and r.steps == full_steps)
    here = [c for c in comparisons if c.steps == steps]
    near = sum(c.student_reaches_full for c in here)
    return (
        f"With {_steps(steps)} the student takes {_evaluations(student.evaluations)} a clip where the teacher with"
        f" {full_steps} takes {teacher.evaluations}, and on {near} of {len(here)} measures it is better than that"
        f" teacher or less than {COUNTS_FROM:g} standard errors worse."
    )


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    title: str,
    rows: Sequence[ReportRow],
    reference: ReportRow,
    captions: Sequence[str],
    config_summary: Mapping[str, Any],
    fps: float = 8.0,
    settings: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    updates: Mapping[str, int] | None = None,
) -> None:
    """Writes `report.html` and `report.json` into `run_dir`, from the rows and the run's own `metrics.jsonl`.

    What went wrong in the run comes first, computed from the numbers; each of it is also a warning in the log.
    How the run was started comes from its `starts.jsonl`, where there is one.

    `rows`: teacher and student rows, in any order.  `reference`: held-out clips (role "heldout") of the same captions;
    its measures are the noise floor.  `captions`: of the clips, in their order.  `config_summary`: the facts of the run
    (mesh, steps, seconds, versions, peak memory), shown in their order; a value whose key ends in "command" is shown as
    code, a nested mapping as a list.  `fps`: of the looping clips.  `settings` and `defaults`: all settings and what
    they would be unset, nested alike.  `updates`: how many updates each role tried.
    The page is one file that loads nothing from elsewhere.  Raises ValueError for rows that do not fit together."""
    from distill.report.page import page  # lazily: it loads matplotlib

    _check([reference, *rows], captions)
    ordered = in_order([reference, *rows])
    run_dir = Path(run_dir)
    comparisons = student_beats_teacher(ordered)
    metrics = charts.read_metrics(run_dir / "metrics.jsonl")
    starts, unreadable_starts = run_facts.read_starts(run_dir / run_facts.STARTS)
    clip = (settings or {}).get("optim", {}).get("clip")
    wrong = run_facts.troubles(metrics.records, ordered, updates=updates, clip=clip)
    for trouble in wrong:
        log.warning("%s", trouble)
    data = {
        "version": 1,
        "title": title,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "troubles": wrong,
        "verdict": verdict(ordered, comparisons),
        "rows": [_row_json(row) for row in ordered],
        "comparisons": [asdict(c) for c in comparisons],
        "captions": list(captions),
        "run": dict(config_summary),
        "starts": [asdict(start) for start in starts],
        "unreadable_starts": unreadable_starts,
        "settings": run_facts.compared_settings(settings or {}, defaults or {}),
        "metrics": {
            "records": len(metrics.records),
            "unreadable_lines": metrics.unreadable,
            "repeated_steps": metrics.repeated,
        },
    }
    text = json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_path(run_dir / "report.json") as temporary:
        temporary.write_text(text, encoding="utf-8")
    # The page is made from what was written, so that the two cannot differ.
    html = page(json.loads(text), rows=ordered, records=metrics.records, fps=fps, files=run_facts.run_files(run_dir))
    with atomic_path(run_dir / "report.html") as temporary:
        temporary.write_text(html, encoding="utf-8")
    log.info("report: %s", run_dir / "report.html")


def report_picture(
    path: str | os.PathLike[str],
    rows: Sequence[ReportRow],
    captions: Sequence[str],
    *,
    title: str = "",
    clips: int = 3,
    frames: int = 6,
    width: int = 1500,
) -> Image.Image:
    """A PNG for a README: one labelled row per model (full teacher first, student last), one column per caption.

    Shows the first `clips` captions and at most `frames` frames of each clip; `width` in pixels, about."""
    _check(rows, captions)
    ordered = in_order(rows)
    return contact_sheet(
        path,
        [(row.name, row.clips[:clips]) for row in ordered],
        captions=captions[:clips],
        notes=[_evaluations(row.evaluations) if row.evaluations else "" for row in ordered],
        colours=[ROLE_COLOURS[row.role] for row in ordered],
        title=title,
        frames=frames,
        width=width,
    )


def in_order(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Held-out renders, then the teacher, then the student, each from many steps to few."""
    roles = list(ROLE_COLOURS)
    return sorted(rows, key=lambda row: (roles.index(row.role), -(row.steps or 0)))


def _check(rows: Sequence[ReportRow], captions: Sequence[str]) -> None:
    if not captions:
        raise ValueError("a report needs at least one caption")
    for row in rows:
        if row.role not in ROLE_COLOURS:
            raise ValueError(f"row {row.name!r}: role={row.role!r}; use one of {', '.join(ROLE_COLOURS)}")
        if len(row.clips) < len(captions):
            raise ValueError(f"row {row.name!r} has {len(row.clips)} clips for {len(captions)} captions")
        unknown = set(row.measures or ()) - set(HIGHER_IS_BETTER)
        if unknown:
            raise ValueError(f"row {row.name!r} has measures without a direction: {', '.join(sorted(unknown))}")


def _row_json(row: ReportRow) -> dict[str, Any]:
    measures = None if row.measures is None else {
        name: {**asdict(m), "higher_is_better": HIGHER_IS_BETTER[name]} for name, m in row.measures.items()
    }  # fmt: skip
    return {
        "name": row.name,
        "role": row.role,
        "steps": row.steps,
        "evaluations": row.evaluations,
        "measures": measures,
    }


def _plain(value: Any) -> Any:
    """As JSON can say it: what is not finite becomes null, what is no number, text, list or mapping becomes text."""
    if isinstance(value, Mapping):
        return {_plain(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    # A path of other bytes than UTF-8 and "\\ud800" in a file's JSON are half characters, which no file takes.
    return str(value).encode("utf-8", "replace").decode()


def _listed(items: Sequence[object]) -> str:
    """As in a sentence: "a", "a and b", "a, b and c"."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _evaluations(count: int) -> str:
    return f"{count} network evaluation{'s' * (count != 1)}"
