"""Facts of a report in addition to the curves: starts, settings, files, and failures of the run."""

import json
import math
import re

import numpy as np

from distill.report.page import read_starts, start_facts
from distill.report.verdict import ReportRow, troubles

START = {"started": "2026-11-22T10:00:00+01:00", "from_step": 30, "command": "train.py 'a=<b>'", "directory": "/w",
         "host": "node7", "commit": "abc", "clean": False, "versions": {"torch": "2.13.0"}, "device": "8 x NVIDIA H20",
         "world_size": 8, "config": {"steps": 3}}  # fmt: skip


def healthy(steps: int = 40) -> list[dict]:
    """Return losses that vary by a factor of ten, as in a healthy run."""
    values = np.exp(np.random.default_rng(0).normal(size=steps))
    return [
        {"step": i + 1, "student/loss": v, "student/grad_norm": 2 * v, "student/skipped": 0.0}
        if i % 5 == 0
        else {"step": i + 1, "fake/loss": v, "fake/grad_norm": v, "fake/skipped": 0.0, "fake/loss/t0.25": None}
        for i, v in enumerate(values)
    ]


def rows(**fills) -> list[ReportRow]:
    noise = np.random.default_rng(1).integers(0, 255, (3, 4, 8, 8, 3), dtype=np.uint8)
    made = []
    for role in ("heldout", "teacher", "student"):
        clips = noise.copy()
        for i in fills.get(role, ()):
            clips[i] = 26
        made.append(ReportRow(f"{role}, 4 steps", role, 4, None, clips, 4))
    return made


def test_a_healthy_run_has_no_troubles():
    assert troubles(healthy(), rows(), updates={"student": 8, "fake": 32}, clip=10.0) == []
    # A run that starts near zero (student equals teacher) and settles is healthy too.
    begins = [{"step": i, "student/loss": min(i * 0.1, 0.5) + 1e-9, "student/grad_norm": 1e-8 + i} for i in range(99)]
    assert troubles(begins, clip=10.0) == []
    assert troubles([{"step": 1, "student/loss": 0.5, "student/grad_norm": 3.0}], clip=None) == []


def test_skipped_updates_are_counted_against_all_that_were_tried():
    records = healthy()
    for record in records[20:]:
        record |= {key: 3.0 for key in record if key == "fake/skipped"}
    (said,) = troubles(records, updates={"student": 8, "fake": 32})
    assert re.findall(r"\d+", said) == ["3", "32"]
    assert troubles(records) == [said], "every step was logged, so the lines can be counted"
    # log.every=10 gives fewer lines than updates. No share is better than a wrong one.
    (said,) = troubles([{"step": 10, "fake/loss": 1.0, "fake/grad_norm": 1.0, "fake/skipped": 7.0}])
    assert re.findall(r"\d+", said) == ["7"]


def test_losses_that_are_not_finite_are_counted():
    records = healthy()
    for step, value, count in ((5, None, "1"), (35, math.nan, "2")):
        records[step]["student/loss"] = value
        (said,) = troubles(records)
        assert re.findall(r"\d+", said) == [count, "8"] and "student" in said


def test_norms_and_losses_that_exploded_are_told():
    records = healthy()
    for record in records[30:]:
        record |= {key: 1e9 for key in record if key.endswith(("/grad_norm", "/loss"))}
    assert len(troubles(records, clip=10.0)) == 4, "loss and norm of both roles"
    # Measured with a rate of 0.3: the norm is large from the second update on.
    wild = [66.0, 8e4, 3e6, 6e6, 1e8, 1e7, 1e8, 4e6, 1e8, 1e7, 3e6, 2e6, 4e6, 1e7, 1e6, 2e6, 4e6, 3e6, 3e6, 2e6, 7e5]
    assert len(troubles([{"step": i, "fake/loss": 1.0, "fake/grad_norm": n} for i, n in enumerate(wild)], clip=10.0))
    # A single spike is not a failure.
    records = healthy()
    records[20]["student/grad_norm"] = 1e9
    assert troubles(records, clip=10.0) == []


def test_a_run_without_losses_or_a_student_or_a_picture_is_told():
    (shown,) = (row for row in rows() if row.role == "student")
    alike = ReportRow(shown.name, "student", 4, None, np.stack([shown.clips[0]] * 3), 4)
    assert len(troubles([])) == 1
    for clips in (rows(student=(0, 1, 2)), rows(teacher=(1,)), [*rows()[:2], alike], rows()[:2]):
        assert len(troubles(healthy(), clips)) == 1
    one = ReportRow(shown.name, "student", 4, None, shown.clips[:1], 4)
    for clips in (rows(student=(0,), heldout=(0,)), [*rows()[:2], one]):  # the data has flat clips too
        assert troubles(healthy(), clips) == []


# ---------------------------------------------------------------- starts, settings, files


def test_a_start_reads_as_it_was_written(tmp_path):
    path = tmp_path / "starts.jsonl"
    path.write_text(json.dumps(START | {"from_step": 0, "clean": True}) + "\n" + json.dumps(START) + "\n[1]\n")
    first, newest = read_starts(path)
    assert (first["from_step"], newest["from_step"]) == (0, 30)
    facts = start_facts([first, newest])
    assert all(facts[key] == START[key] for key in ("command", "directory", "started", "host"))
    assert start_facts([first])["commit"] == "abc" != facts["commit"], "changes that are not committed are told"
    assert re.findall(r"\d+", facts["starts"]) == ["2", "0", "30"]
    assert read_starts(tmp_path / "none") == [] and start_facts([]) == {}
    path.write_text('{"host": "n"}\n')
    assert start_facts(read_starts(path)) == {"host": "n"}
