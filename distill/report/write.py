"""Files of a run's report: `report.html` and `report.json`. The verdict comes first."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from distill.report.charts import ROLE_COLORS, read_metrics
from distill.report.page import page, read_starts
from distill.report.verdict import ReportRow, student_beats_teacher, troubles, verdict
from distill.run.folder import STARTS
from fsdp_cp.files.atomic_file import write_text

log = logging.getLogger(__name__)


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    title: str,
    rows: Sequence[ReportRow],
    reference: ReportRow,
    captions: Sequence[str],
    config_summary: Mapping[str, Any],
    fps: float = 8.0,
    max_norms: Mapping[str, float | None] | None = None,
    updates: Mapping[str, int] | None = None,
) -> None:
    """Write `report.html` (one file that loads nothing) and `report.json` from teacher and student rows, held-out clips
    of the same captions (`reference`, the noise floor), `metrics.jsonl` and `starts.jsonl`. Problems come first, and
    are logged. `config_summary` are facts of the run in order; a key that ends in "command" is shown as code. For
    `max_norms` and `updates` see :func:`distill.report.verdict.troubles`."""
    run_dir, roles = Path(run_dir), list(ROLE_COLORS)  # held-out renders first; each role from many steps to few
    ordered = sorted([reference, *rows], key=lambda row: (roles.index(row.role), -(row.steps or 0)))
    comparisons = student_beats_teacher(ordered)
    records = read_metrics(run_dir / "metrics.jsonl")
    wrong = troubles(records, ordered, updates=updates, max_norms=max_norms)
    for trouble in wrong:
        log.warning("%s", trouble)
    data = {
        "version": 1,
        "title": title,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "troubles": wrong,
        "verdict": verdict(ordered, comparisons),
        "rows": [
            {name: getattr(row, name) for name in ("name", "role", "steps", "evaluations")}
            | {"measures": row.measures and {name: asdict(measure) for name, measure in row.measures.items()}}
            for row in ordered
        ],
        "comparisons": [asdict(c) for c in comparisons],
        "captions": list(captions),
        "run": dict(config_summary),
        "starts": read_starts(run_dir / STARTS),
    }
    text = json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"
    write_text(run_dir / "report.json", text)
    # Make the page from the written JSON, so that the two cannot differ.
    write_text(run_dir / "report.html", page(json.loads(text), rows=ordered, records=records, fps=fps))
    log.info("wrote the report to %s", run_dir / "report.html")


def finite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON does not have, by null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
