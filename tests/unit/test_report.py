"""Report of a run: its page, numbers, verdict and training curves."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from distill.data.base import Measure
from distill.data.shape_measures import MEASURES
from distill.report import charts
from distill.report.page import number
from distill.report.verdict import ReportRow, student_beats_teacher, verdict
from distill.report.write import write_report
from tests.tiers import parametrize

CAPTIONS = ["a red circle growing", 'a <script>alert(1)</script> & "quoted" square']


def clips(seed: int, frames: int = 6, side: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (2, frames, side, side, 3), dtype=np.uint8)


def scores(accuracy: float, distance: float, error: float = 0.01) -> dict[str, Measure]:
    accuracies = {name: Measure(accuracy, error, higher_is_better=True) for name in MEASURES[:2]}
    return accuracies | {name: Measure(distance, error, higher_is_better=False) for name in MEASURES[2:]}


def make_rows() -> tuple[list[ReportRow], ReportRow]:
    def row(role, steps, accuracy, distance):
        evaluations = steps * (2 if role == "teacher" else 1)
        return ReportRow(f"{role}, {steps} steps", role, steps, scores(accuracy, distance), clips(steps), evaluations)

    rows = [
        row("student", 1, 0.80, 0.30),
        row("student", 2, 0.90, 0.20),
        row("student", 4, 0.95, 0.12),
        row("teacher", 1, 0.20, 2.00),
        row("teacher", 2, 0.60, 0.90),
        row("teacher", 4, 0.97, 0.11),
        row("teacher", 50, 0.98, 0.10),
    ]
    return rows, ReportRow("held-out renders", "heldout", None, scores(1.0, 0.05), clips(99), 0)


class Page(HTMLParser):
    """Parser that collects tags with their attributes, the text, and the cells that carry a measure."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.cells: dict[tuple[str, str], dict] = {}
        self.text = ""
        self._cell: dict = {"text": ""}
        self.source = (folder / "report.html").read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "td":
            self._cell = attributes | {"text": ""}
            if "data-measure" in attributes:
                self.cells[attributes["data-row"], attributes["data-measure"]] = self._cell

    def handle_endtag(self, tag):
        if tag == "td":
            self._cell = {"text": ""}

    def handle_data(self, data):
        self.text += data
        self._cell["text"] += data

    def check(self) -> None:
        """Require that the page loads and runs nothing."""
        for tag, attributes in self.tags:
            assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
            assert not any(name.startswith("on") for name in attributes)
            for name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert attributes.get(name, "#").startswith(("#", "data:image/")), (tag, attributes)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def classes(self) -> set[str]:
        return {word for _, attributes in self.tags for word in (attributes.get("class") or "").split()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    records = []
    for step in range(1, 61):
        role = "student" if step % 5 == 0 else "fake"
        loss = math.nan if step in (20, 21) else 1 / step
        record = {"step": step, f"{role}/loss": loss, f"{role}/grad_norm": 2.0, "memory/peak_gib": 0.5}
        times = {f"perf/seconds/{role}": 2.0 * step, f"perf/seconds/{role}/data": 0.5 * step}
        times |= {f"perf/seconds/{role}/a_loss/backward": 1.48 * step, f"perf/seconds/{role}/other": 0.01 * step}
        records.append(record | times)
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 61, "fake/lo')
    rows, reference = make_rows()
    facts = {"mesh": {"dp_shard": 1, "cp": 2}, "resume command": "torchrun train.py 'a=<b>'", "seconds": 12.5}
    write_report(folder, title="A & B", rows=rows, reference=reference, captions=CAPTIONS, config_summary=facts)
    page = Page(folder)
    return folder, page.source, page, json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_page_loads_nothing_and_runs_nothing(run):
    _, text, page, _ = run
    assert "http://" not in text and "https://" not in text and "@import" not in text
    page.check()
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_page_has_every_row_with_its_pictures(run):
    _, text, page, data = run
    alts = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert len(data["rows"]) == 8
    for row in data["rows"]:
        assert row["name"] in text
        for caption in CAPTIONS:  # the parser unescapes
            assert f"{row['name']}: {caption}" in alts


def test_numbers_of_page_and_json_agree(run):
    _, text, page, data = run
    rows, reference = make_rows()
    given = {row.name: row for row in [*rows, reference]}
    seen = 0
    for row in data["rows"]:
        for name, measure in row["measures"].items():
            cell = page.cells[row["name"], name]
            assert float(cell["data-value"]) == measure["value"] == given[row["name"]].measures[name].value
            assert measure["standard_error"] == given[row["name"]].measures[name].standard_error
            assert cell["text"].lstrip("▲△▼") == " ± ".join(number(measure, name))
            seen += 1
    assert seen == len(page.cells) == 8 * len(MEASURES)
    assert data["verdict"] in text


def test_comparisons_count_where_the_teacher_loses_something():
    rows, _ = make_rows()
    found = student_beats_teacher(rows)
    assert [c.steps for c in found] == [n for n in (1, 2, 4) for _ in MEASURES]
    assert [c.measure for c in found[:6]] == list(MEASURES)
    assert {c.full_steps for c in found} == {50}
    assert all(c.counts and c.student_better for c in found if c.steps < 4)
    assert not any(c.counts or c.student_better for c in found if c.steps == 4)
    area = next(c for c in found if c.measure == "distance/area")
    assert area.standard_errors_worse == pytest.approx((2.0 - 0.1) / math.hypot(0.01, 0.01))
    assert area.student_margin == pytest.approx((2.0 - 0.3) / math.hypot(0.01, 0.01))
    assert not area.student_reaches_full and area.student_better, "between the two teachers"
    student = next(row for row in rows if (row.role, row.steps) == ("student", 1))
    student.measures["distance/area"] = Measure(0.12, 0.01, False)
    assert next(c for c in student_beats_teacher(rows) if c.measure == "distance/area").student_reaches_full
    assert "12 of the 12" in verdict(rows, found)


def test_a_tie_or_a_missing_value_is_no_win():
    rows, _ = make_rows()
    by_name = {(row.role, row.steps): row for row in rows}
    by_name["student", 1].measures["distance/area"] = Measure(2.0, 0.01, False)  # a tie
    by_name["student", 1].measures["color_accuracy"] = Measure(math.nan, math.nan, True)
    by_name["teacher", 2].measures["distance/area"] = Measure(math.inf, 0.0, False)
    found = {(c.steps, c.measure): c for c in student_beats_teacher(rows)}
    assert found[1, "distance/area"].counts and not found[1, "distance/area"].student_better
    assert found[1, "color_accuracy"].counts and not found[1, "color_accuracy"].student_better
    assert not found[1, "color_accuracy"].student_reaches_full
    assert not found[2, "distance/area"].counts and not found[2, "distance/area"].student_better
    assert "12 of the 12" not in verdict(rows, list(found.values()))


def test_verdict_when_there_is_nothing_to_say():
    rows, _ = make_rows()
    for chosen in (
        [r for r in rows if r.steps in (4, 50)],
        [r for r in rows if r.role == "teacher"],
        [r for r in rows if r.steps == 4],  # without the teacher at 50 steps, its loss at 4 is unknown
    ):
        assert not any(c.counts for c in student_beats_teacher(chosen)) and verdict(chosen, [])


def test_without_measures_there_are_curves_and_frames(tmp_path):
    rows = [ReportRow("teacher, 50 steps", "teacher", 50, None, clips(0, 9, 120), 100)]
    rows.append(ReportRow("student, 4 steps", "student", 4, None, clips(1, 9, 120), 4))
    reference = ReportRow("clips of the folder", "heldout", None, None, clips(2, 9, 120), 0)
    write_report(tmp_path, title="t", rows=rows, reference=reference, captions=CAPTIONS, config_summary={}, fps=16)
    page = Page(tmp_path)
    assert not page.cells and "data:image/jpeg;base64," in page.source
    assert json.loads((tmp_path / "report.json").read_text())["rows"][1]["measures"] is None


def test_read_metrics_leaves_out_what_is_no_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [b'{"step": 2, "fake/loss": NaN}', b'{"step": 1, "student/loss": 0.5}', b'{"step": 2, "fake/loss": 0.25}']
    bad = [b"[1, 2]", b'{"loss": 1}', b"\xff\xfe", b"7", b'{"step": null}', b'{"step": 3, "fake']
    path.write_bytes(b"\n".join([*good[:2], b"", *bad[:-1], good[2], bad[-1]]))
    records = charts.read_metrics(path)
    assert [r["step"] for r in records] == [1, 2] and records[1]["fake/loss"] == 0.25, "of step 2 the later line stands"
    assert charts.read_metrics(tmp_path / "none.jsonl") == []


def test_curves_have_gaps_where_values_are_not_finite():
    records = [{"step": i, "fake/loss": v} for i, v in enumerate([1.0, math.nan, 3.0, None, math.inf, 5], start=1)]
    records += [{"step": 7, "student/loss": 1.0, "student/grad_norm": 2.0, "perf/mfu": None, "student/lr": 1e-4}]
    found = charts.curves(records)
    assert list(found) == ["student/loss", "fake/loss", "student/grad_norm", "student/lr"]
    steps, values = found["fake/loss"]
    np.testing.assert_array_equal(steps, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(values, [1, math.nan, 3, math.nan, math.nan, 5])
    average = charts.moving_average(values, 3)
    np.testing.assert_allclose(average, [1, math.nan, 2, math.nan, math.nan, 5])
    for part in (slice(0, 6), slice(0, 0), slice(1, 2)):
        assert charts.curve_svg("fake/loss", steps[part], values[part]).startswith(b"<?xml")


def test_an_empty_time_bin_is_no_point():
    records = [
        {"step": 1, "fake/loss": 0.5, "fake/loss/t0.25": 0.4, "fake/loss/t0.9375": None, "fake/grad_norm": None},
        {"step": 2, "fake/loss": 0.5, "fake/loss/t0.25": None, "fake/loss/t0.9375": None},
        {"step": 3, "fake/loss": None, "fake/loss/t0.25": None},
        {"step": 4, "fake/loss": 0.5, "fake/loss/t0.25": math.inf},
        {"step": 7, "fake/loss": 0.5, "fake/loss/t0.25": 0.3},
    ]
    found = charts.curves(records)
    steps, values = found["fake/loss/t0.25"]
    np.testing.assert_array_equal(steps, [1, 4, 7])
    np.testing.assert_array_equal(values, [0.4, math.nan, 0.3])
    assert "fake/loss/t0.9375" not in found, "a curve without a point is not drawn"
    np.testing.assert_array_equal(found["fake/grad_norm"][1], [math.nan])  # a null elsewhere is a broken value
    healthy = charts.curves(records[:2] + records[-1:])
    assert len(healthy["fake/loss/t0.25"][0]) == 2


@parametrize("values", [[3e38, -3e38, 3e38], [1e-45, 3e38], [-1e-45, 1.0]], quick=1)
def test_values_at_the_ends_of_what_fp32_holds_are_drawn(values):
    assert charts.curve_svg("student/loss", np.arange(1.0, len(values) + 1) * 2.0**49, np.array(values))
