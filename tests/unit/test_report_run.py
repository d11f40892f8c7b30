"""Facts of the run on a report's page: failures, starts, settings and files, all escaped."""

import json
from pathlib import Path

import numpy as np
import pytest

from distill.data.base import Measure
from distill.report.verdict import ReportRow
from distill.report.write import write_report
from tests.unit.test_report import Page

EVIL = "\"><script>alert(1)</script><img src=http://x.example/y onerror=alert(1)> & 'q'"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def rows(better: bool = True, student: str = "student, 1 step") -> tuple[list[ReportRow], ReportRow]:
    def scores(accuracy):  # only one measure, since each draws a chart
        return {"colour_accuracy": Measure(accuracy, 0.01, higher_is_better=True)}

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


@pytest.mark.parametrize("change", [{"student/loss": None}, {"student/skipped": 3.0}, {"student/grad_norm": 1e9}])
def test_a_run_that_went_wrong_says_so_above_its_verdict(tmp_path, caplog, change):
    records = healthy()
    records[-1] |= change
    better = "student/loss" not in change
    page = write(tmp_path, records, better=better, updates={"student": 10}, clip=10.0)
    (said,) = json.loads((tmp_path / "report.json").read_text())["troubles"]
    assert said in page.text and said in caplog.text, "who reads only the log sees it too"
    assert "won" not in page.classes and "troubles" in page.classes, "no green above a broken run"
    assert better or "lost" in page.classes


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
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "link", "base", "form"} == set()
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert not attributes.get(name, "").startswith(("http", "//", "javascript"))
    assert page.text.count("<script>alert(1)</script>") > 10, "shown as what it is"
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == POLICY


def test_half_characters_are_replaced(tmp_path):
    """A path that is not UTF-8 and an escape in a file's JSON give text that cannot be written to a file."""
    (tmp_path / "starts.jsonl").write_text(start(0, command="train.py \\ud800".replace("\\\\", "\\"), host="\udcff"))
    page = write(tmp_path, healthy(), caption="a \ud800 circle", title="\udcff", config_summary={"\ud800": "\udcff"})
    assert "a ? circle" in page.text
    assert "a ? circle" in json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["captions"]
