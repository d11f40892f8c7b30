"""Problems of a run, in sentences, computed from its metrics and clips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from distill.report.charts import values
from distill.report.verdict import ReportRow
from fsdp_cp.errors import counted

HUGE = 1000.0
"""Factor by which a gradient norm or loss must end above its beginning, and above `optim.clip` or 1, to be reported."""

Records = Sequence[Mapping]


def troubles(
    records: Records,
    rows: Sequence[ReportRow] = (),
    *,
    updates: Mapping[str, int] | None = None,
    clip: float | None = None,
) -> list[str]:
    """Return one sentence per problem that the numbers show; empty without problems.

    Args:
        records: records of `metrics.jsonl`, by step.
        rows: rows of the report, with their clips.
        updates: number of updates that each role attempted; by default, the number of logged ones.
        clip: value of `optim.clip`.
    """
    roles = sorted({key.split("/")[0] for record in records for key in record if key.endswith("/loss")})
    sentences = [] if roles else ["No loss is logged in metrics.jsonl, so the training cannot be judged."]
    for role in sorted(roles, key=lambda role: role != "student"):
        name = "the fake score" if role == "fake" else f"the {role}"
        sentences += _losses(name, values(records, f"{role}/loss"))
        sentences += _skipped(name, role, records, updates or {})
        sentences += _exploded(f"loss of {name}", values(records, f"{role}/loss"), 1.0, "")
        note = f", and optim.clip is {clip:g}" if clip else ""
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
    """Return the number of clips with a single color, up to rounding, in all frames."""
    return sum(int((np.ptp(clip, axis=(0, 1, 2)) <= 1).all()) for clip in row.clips)


def _all_alike(row: ReportRow) -> bool:
    """Return whether several clips are all equal up to rounding, so that the network ignores captions and noise."""
    first = row.clips[0].astype(np.int16)
    return len(row.clips) > 1 and all((abs(clip - first) <= 1).all() for clip in row.clips[1:])
