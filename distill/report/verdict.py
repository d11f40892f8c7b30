"""Judgement of a run: rows of its report, student and teacher at the same number of steps, and what went wrong."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from distill.data.base import Measure
from distill.report.charts import values
from distill.report.media import Sound
from fsdp_cp.errors import counted

COUNTS_FROM = 3.0
"""Number of standard errors by which the teacher at n steps must be worse than at full steps for a measure to count."""


@dataclass(frozen=True, slots=True, eq=False)
class ReportRow:
    """One row of the report: a role and a number of steps, with its clips and their measures."""

    name: str
    """Name on the page, for example "teacher, 50 steps"."""
    role: Literal["teacher", "student", "heldout"]
    steps: int | None
    """Sampling steps; None for held-out renders."""
    measures: Mapping[str, Measure] | None
    """Measures by name; None for data sets without measures."""
    clips: np.ndarray
    """uint8 (n, T, H, W, 3); clip i belongs to caption i and noise i, in every row."""
    evaluations: int
    """Network evaluations per clip (guidance evaluates twice a step); 0 for held-out renders."""
    sounds: Sequence[Sound] | None = None
    """Sound of the first clips; None for data without sound."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of student and teacher on one measure, at one number of steps."""

    steps: int
    measure: str
    full_steps: int
    teacher_full: Measure
    teacher: Measure
    student: Measure
    standard_errors_worse: float
    """Loss of the teacher by taking n instead of full steps, in standard errors of the difference; negative: a gain."""
    counts: bool
    """Whether that loss is at least `COUNTS_FROM`, so that a student can win something."""
    student_better: bool
    """Whether the student's value is strictly better than the teacher's at the same number of steps."""
    student_margin: float
    """Lead of the student over the teacher at the same steps, in standard errors of the difference."""
    student_reaches_full: bool
    """Whether the student is better than the teacher at full steps, or less than `COUNTS_FROM` errors worse."""


def student_beats_teacher(rows: Sequence[ReportRow]) -> list[Comparison]:
    """Compare each student row with the teacher row of the same number of steps, measure by measure, in that order. The
    full-step teacher has the most steps. A value that is not finite never counts and never wins."""
    teachers = {row.steps: row for row in rows if row.role == "teacher"}
    students = {row.steps: row for row in rows if row.role == "student"}
    full_steps = max(teachers, default=0)
    comparisons = []
    for steps in sorted(students.keys() & teachers.keys() - {full_steps}):
        full, teacher, student = (
            row.measures or {} for row in (teachers[full_steps], teachers[steps], students[steps])
        )
        for name in full:
            worse, margin = teacher[name].worse_by(full[name]), -student[name].worse_by(teacher[name])
            comparison = Comparison(
                steps=steps,
                measure=name,
                full_steps=full_steps,
                teacher_full=full[name],
                teacher=teacher[name],
                student=student[name],
                standard_errors_worse=worse,
                counts=worse >= COUNTS_FROM,
                student_better=margin > 0,
                student_margin=margin,
                student_reaches_full=student[name].worse_by(full[name]) < COUNTS_FROM,
            )
            comparisons.append(comparison)
    return comparisons


def label(measure: str) -> str:
    """Return a measure's name in words: "edge sharpness distance" for "distance/edge_sharpness"."""
    group, _, name = measure.rpartition("/")
    return f"{name} {group}".strip().replace("_", " ")


def verdict(rows: Sequence[ReportRow], comparisons: Sequence[Comparison]) -> str:
    """Return the first paragraph of the report, which says whether the student beats the teacher."""
    if all(row.measures is None for row in rows):
        return "This data set has no measures: judge the clips below by eye."
    if not comparisons:
        return "Nothing to compare: it takes student and teacher at the same number of steps, and the teacher at more."
    return " ".join([*_at_equal_steps(comparisons), _at_most_steps(rows, comparisons)])


def _at_equal_steps(comparisons: Sequence[Comparison]) -> list[str]:
    """Say on which measures the student beats the teacher at the same number of steps."""
    full_steps = comparisons[0].full_steps
    counting = [c for c in comparisons if c.counts]
    if not counting:
        tried = ", ".join(map(str, sorted({c.steps for c in comparisons})))
        return [
            f"Nothing to win here: on no measure is the teacher at fewer steps ({tried}) at least {COUNTS_FROM:g}"
            f" standard errors worse than at {full_steps}."
        ]
    won = [c for c in counting if c.student_better]
    clear = sum(c.student_margin >= COUNTS_FROM for c in won)
    sentences = [
        f"At the same number of steps the student beats the teacher on {len(won)} of the {len(counting)} measures"
        f" that count, on {clear} of them by {COUNTS_FROM:g} standard errors or more.",
        f"A measure counts where the teacher with so few steps is at least {COUNTS_FROM:g} standard errors worse"
        f" than with {full_steps}.",
    ]
    lost = [f"{label(c.measure)} at {counted(c.steps, 'step')}" for c in counting if not c.student_better]
    return sentences + ([f"The student does not beat it on {', '.join(lost)}."] if lost else [])


def _at_most_steps(rows: Sequence[ReportRow], comparisons: Sequence[Comparison]) -> str:
    """Compare the student with the most steps with the full teacher, in cost and quality."""
    steps, full_steps = max(c.steps for c in comparisons), comparisons[0].full_steps
    evaluations = {(row.role, row.steps): row.evaluations for row in rows}
    reached = [c.student_reaches_full for c in comparisons if c.steps == steps]
    return (
        f"With {counted(steps, 'step')} the student takes"
        f" {counted(evaluations['student', steps], 'network evaluation')} a clip where the teacher with {full_steps}"
        f" takes {evaluations['teacher', full_steps]}, and on {sum(reached)} of {len(reached)} measures it is better"
        f" than that teacher or less than {COUNTS_FROM:g} standard errors worse."
    )


HUGE = 1000.0
"""Factor by which a gradient norm or loss must end above its beginning, and above the clip norm or 1, to be told."""

Records = Sequence[Mapping]


def troubles(
    records: Records,
    rows: Sequence[ReportRow] = (),
    *,
    updates: Mapping[str, int] | None = None,
    max_norms: Mapping[str, float | None] | None = None,
) -> list[str]:
    """Return one sentence per problem that the numbers show. `updates` are the tried updates of each role; by default,
    the logged ones. `max_norms` are the norms to which gradients are clipped, by role."""
    roles = sorted({key.split("/")[0] for record in records for key in record if key.endswith("/loss")})
    sentences = [] if roles else ["No loss is logged in metrics.jsonl, so the training cannot be judged."]
    for role in sorted(roles, key=lambda role: role != "student"):
        name = "the fake score" if role == "fake" else f"the {role}"
        sentences += _losses(name, values(records, f"{role}/loss"))
        sentences += _skipped(name, role, records, updates or {})
        sentences += _exploded(f"loss of {name}", values(records, f"{role}/loss"), 1.0, "")
        clip = (max_norms or {}).get(role)
        note = f", and it is clipped to {clip:g}" if clip else ""
        sentences += _exploded(f"gradient norm of {name}", values(records, f"{role}/grad_norm"), clip or 1.0, note)
    return sentences + _clips(rows)


def _losses(name: str, losses: Sequence[float]) -> list[str]:
    broken = sum(map(math.isnan, losses))
    if not broken:
        return []
    subject = f"The last loss of {name} is" if math.isnan(losses[-1]) else f"Some losses of {name} were"
    return [f"{subject} not finite ({broken} of {len(losses)} logged losses)."]


def _skipped(name: str, role: str, records: Records, updates: Mapping[str, int]) -> list[str]:
    norms = values(records, f"{role}/grad_norm")
    counts = [count for count in values(records, f"{role}/skipped") if not math.isnan(count)]
    skipped, broken = int(counts[-1]) if counts else 0, sum(map(math.isnan, norms))
    if skipped < 1:
        return [f"Not finite: {broken} of {len(norms)} logged gradient norms of {name}."] if broken else []
    tried = updates.get(role, len(norms))
    share = f"{skipped} of {tried} updates" if tried >= skipped else counted(skipped, "update")
    return [f"Skipped because the gradient norm was not finite: {share} of {name}."]


def _exploded(name: str, series: Sequence[float], floor: float, note: str) -> list[str]:
    finite = np.abs([value for value in series if not math.isnan(value)])
    if len(finite) < 2:
        return []
    few = max(1, len(finite) // 10)
    # Compare with the smallest early value: a learning rate that is far too high already spoils the second update.
    first, last = float(finite[:few].min()), float(np.median(finite[-few:]))
    if last <= HUGE * max(first, floor):
        return []
    return [f"The {name} ended at {last:.3g}; it began at {first:.3g}{note}."]


def _clips(rows: Sequence[ReportRow]) -> list[str]:
    """Report a missing student, and rows with flat or identical clips unless the real clips are like that too."""
    if not rows:
        return []
    real = [row for row in rows if row.role == "heldout"]
    networks = [row for row in rows if row.role != "heldout"]
    sentences = [] if any(row.role == "student" for row in networks) else ["There are no clips of the student."]
    for row in networks:
        flat = _flat_clips(row)
        if flat and not any(map(_flat_clips, real)):
            sentences.append(f"{flat} of {len(row.clips)} clips of {row.name} are one flat color throughout.")
        elif _all_alike(row) and not any(map(_all_alike, real)):
            sentences.append(f"All {len(row.clips)} clips of {row.name} are the same.")
    return sentences


def _flat_clips(row: ReportRow) -> int:
    return sum(int((np.ptp(clip, axis=(0, 1, 2)) <= 1).all()) for clip in row.clips)


def _all_alike(row: ReportRow) -> bool:
    """Return whether several clips are all equal up to rounding, so that the network ignores captions and noise."""
    first = row.clips[0].astype(np.int16)
    return len(row.clips) > 1 and all((abs(clip - first) <= 1).all() for clip in row.clips[1:])
