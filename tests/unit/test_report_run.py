"""Facts of the run in a report and on its page: failures, starts, settings and files, all escaped."""

import json
import math
import re
from pathlib import Path

import numpy as np

from distill.data.base import Measure
from distill.report.page import read_starts, start_facts
from distill.report.verdict import ReportRow, troubles
from distill.report.write import write_report
from tests.tiers import parametrize, slow
from tests.unit.test_report import Page

EVIL = "\"><script>alert(1)</script><img src=http://x.example/y onerror=alert(1)> & 'q'"
NORMS = {"student": 10.0, "fake": 10.0}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def rows(better: bool = True, student: str = "student, 1 step") -> tuple[list[ReportRow], ReportRow]:
    def scores(accuracy):  # only one measure, since each draws a chart
        return {"color_accuracy": Measure(accuracy, 0.01, higher_is_better=True)}

    clips = np.random.default_rng(0).integers(0, 255, (1, 3, 8, 8, 3), dtype=np.uint8)
    made = [
        ReportRow("teacher, 50 steps", "teacher", 50, scores(0.98), clips, 100),
        ReportRow("teacher, 1 step", "teacher", 1, scores(0.2), clips, 2),
        ReportRow(student, "student", 1, scores(0.9 if better else 0.1), clips, 1),
    ]
    return made, ReportRow("held-out renders", "heldout", None, scores(1.0), clips, 0)


def write(folder: Path, records=(), *, better=True, caption="a circle", title="t", **arguments) -> Page:
    if records:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made, reference = rows(better)
    arguments = {"config_summary": {"steps": len(records)}} | arguments
    write_report(folder, title=title, rows=made, reference=reference, captions=[caption], **arguments)
    return Page(folder)


def healthy(steps: int = 10) -> list[dict]:
    return [{"step": i, "student/loss": 1 / i, "student/grad_norm": 2.0, "student/skipped": 0.0, "student/lr": 1e-4}
            for i in range(1, steps + 1)]  # fmt: skip


# ---------------------------------------------------------------- what went wrong


def test_a_healthy_run_is_shown_as_a_success(tmp_path):
    page = write(tmp_path, healthy())
    assert "troubles" not in page.classes and {"verdict", "won"} <= page.classes
    assert json.loads((tmp_path / "report.json").read_text())["troubles"] == []


@parametrize("change", [{"student/loss": None}, {"student/skipped": 3.0}, {"student/grad_norm": 1e9}], quick=1)
def test_a_run_that_went_wrong_says_so_above_its_verdict(tmp_path, caplog, change):
    records = healthy()
    records[-1] |= change
    better = "student/loss" not in change
    page = write(tmp_path, records, better=better, updates={"student": 10}, max_norms=NORMS)
    (said,) = json.loads((tmp_path / "report.json").read_text())["troubles"]
    assert said in page.text and said in caplog.text, "who reads only the log sees it too"
    assert "won" not in page.classes and "troubles" in page.classes, "no green above a broken run"
    assert better or "lost" in page.classes


def varied(steps: int = 40) -> list[dict]:
    """Return losses that vary by a factor of ten, as in a healthy run."""
    values = np.exp(np.random.default_rng(0).normal(size=steps))
    return [
        {"step": i + 1, "student/loss": v, "student/grad_norm": 2 * v, "student/skipped": 0.0}
        if i % 5 == 0
        else {"step": i + 1, "fake/loss": v, "fake/grad_norm": v, "fake/skipped": 0.0, "fake/loss/t0.25": None}
        for i, v in enumerate(values)
    ]


def shown(**fills) -> list[ReportRow]:
    noise = np.random.default_rng(1).integers(0, 255, (3, 4, 8, 8, 3), dtype=np.uint8)
    made = []
    for role in ("heldout", "teacher", "student"):
        clips = noise.copy()
        for i in fills.get(role, ()):
            clips[i] = 26
        made.append(ReportRow(f"{role}, 4 steps", role, 4, None, clips, 4))
    return made


def test_a_healthy_run_has_no_troubles():
    assert troubles(varied(), shown(), updates={"student": 8, "fake": 32}, max_norms=NORMS) == []
    # A run that starts near zero (student equals teacher) and settles is healthy too.
    begins = [{"step": i, "student/loss": min(i * 0.1, 0.5) + 1e-9, "student/grad_norm": 1e-8 + i} for i in range(99)]
    assert troubles(begins, max_norms=NORMS) == []
    assert troubles([{"step": 1, "student/loss": 0.5, "student/grad_norm": 3.0}], max_norms=None) == []


def test_skipped_updates_are_counted_against_all_that_were_tried():
    records = varied()
    for record in records[20:]:
        record |= {key: 3.0 for key in record if key == "fake/skipped"}
    (said,) = troubles(records, updates={"student": 8, "fake": 32})
    assert re.findall(r"\d+", said) == ["3", "32"]
    assert troubles(records) == [said], "every step was logged, so the lines can be counted"
    # log.every=10 gives fewer lines than updates. No share is better than a wrong one.
    (said,) = troubles([{"step": 10, "fake/loss": 1.0, "fake/grad_norm": 1.0, "fake/skipped": 7.0}])
    assert re.findall(r"\d+", said) == ["7"]


def test_losses_that_are_not_finite_are_counted():
    records = varied()
    for step, value, count in ((5, None, "1"), (35, math.nan, "2")):
        records[step]["student/loss"] = value
        (said,) = troubles(records)
        assert re.findall(r"\d+", said) == [count, "8"] and "student" in said


def test_norms_and_losses_that_exploded_are_told():
    records = varied()
    for record in records[30:]:
        record |= {key: 1e9 for key in record if key.endswith(("/grad_norm", "/loss"))}
    assert len(troubles(records, max_norms=NORMS)) == 4, "loss and norm of both roles"
    # Measured with a rate of 0.3: the norm is large from the second update on.
    wild = [66.0, 8e4, 3e6, 6e6, 1e8, 1e7, 1e8, 4e6, 1e8, 1e7, 3e6, 2e6, 4e6, 1e7, 1e6, 2e6, 4e6, 3e6, 3e6, 2e6, 7e5]
    assert len(
        troubles([{"step": i, "fake/loss": 1.0, "fake/grad_norm": n} for i, n in enumerate(wild)], max_norms=NORMS)
    )
    # A single spike is not a failure.
    records = varied()
    records[20]["student/grad_norm"] = 1e9
    assert troubles(records, max_norms=NORMS) == []


def test_a_run_without_losses_or_a_student_or_a_picture_is_told():
    (student,) = (row for row in shown() if row.role == "student")
    alike = ReportRow(student.name, "student", 4, None, np.stack([student.clips[0]] * 3), 4)
    assert len(troubles([])) == 1
    for clips in (shown(student=(0, 1, 2)), shown(teacher=(1,)), [*shown()[:2], alike], shown()[:2]):
        assert len(troubles(varied(), clips)) == 1
    one = ReportRow(student.name, "student", 4, None, student.clips[:1], 4)
    for clips in (shown(student=(0,), heldout=(0,)), [*shown()[:2], one]):  # the data has flat clips too
        assert troubles(varied(), clips) == []


# ---------------------------------------------------------------- starts, settings, files


def start(step: int, **more) -> str:
    record = {"started": f"2026-11-22T1{step}:00:00+01:00", "from_step": step,
              "command": f"torchrun train.py steps={step}", "directory": "/w", "host": "node7",
              "commit": "0123456789abcdef", "clean": step == 0,
              "versions": {"torch": "2.13.0", "python": "3.11"}, "device": "8 x NVIDIA H20", "world_size": 8,
              "config": {"secret": 1}}  # fmt: skip
    return json.dumps(record | more) + "\n"


def test_the_page_tells_how_the_run_was_started(tmp_path):
    lines = (start(0) + start(3) + start(7)).encode()
    (tmp_path / "starts.jsonl").write_bytes(b'\xff\n[1]\n"x"\n' + lines + b'{"started": "20')
    page = write(tmp_path, healthy(), config_summary={"steps": 10, "minutes of training": 2.5})
    for said in ("torchrun train.py steps=7", "0123456789abcdef", "node7", "8 x NVIDIA H20", "torch 2.13.0"):
        assert said in page.text, said
    data = json.loads((tmp_path / "report.json").read_text())
    assert [s["from_step"] for s in data["starts"]] == [0, 3, 7] and data["starts"][0]["clean"] is True


def test_a_start_reads_as_it_was_written(tmp_path):
    path = tmp_path / "starts.jsonl"
    path.write_text(start(0) + start(3) + "[1]\n")
    first, newest = read_starts(path)
    assert (first["from_step"], newest["from_step"]) == (0, 3)
    facts = start_facts([first, newest])
    assert all(facts[key] == newest[key] for key in ("command", "directory", "started", "host"))
    assert start_facts([first])["commit"] == first["commit"] != facts["commit"], (
        "changes that are not committed are told"
    )
    assert re.findall(r"\d+", facts["starts"]) == ["2", "0", "3"]
    assert read_starts(tmp_path / "none") == [] and start_facts([]) == {}
    path.write_text('{"host": "n"}\n')
    assert start_facts(read_starts(path)) == {"host": "n"}


# ---------------------------------------------------------------- nothing of a stranger's becomes markup


def test_text_from_outside_is_escaped_everywhere(tmp_path):
    (tmp_path / "starts.jsonl").write_text(
        start(0, started=EVIL, command=EVIL, host=EVIL, device=EVIL, commit=EVIL, directory=EVIL, versions={EVIL: EVIL})
        + start(1, command=EVIL, host=EVIL, commit=EVIL, started=EVIL)
    )
    records = healthy()
    records[0] |= {f"student/loss{EVIL}": 1.0, f"{EVIL}/loss": None, "student/loss/<script>": 1.0}
    facts = {EVIL: EVIL, "sample command": f"python -m distill.sample {EVIL}", "nested": {EVIL: EVIL}, "list": [EVIL]}
    page = write(tmp_path, records, caption=EVIL, title=EVIL, config_summary=facts)
    page.check()
    assert page.text.count("<script>alert(1)</script>") > 10, "shown as what it is"
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == POLICY


@slow
def test_half_characters_are_replaced(tmp_path):
    """A path that is not UTF-8 and an escape in a file's JSON give text that cannot be written to a file."""
    (tmp_path / "starts.jsonl").write_text(start(0, command="train.py \\ud800".replace("\\\\", "\\"), host="\udcff"))
    page = write(tmp_path, healthy(), caption="a \ud800 circle", title="\udcff", config_summary={"\ud800": "\udcff"})
    assert "a ? circle" in page.text
    assert "a ? circle" in json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["captions"]
