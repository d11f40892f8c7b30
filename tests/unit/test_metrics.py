"""metrics.jsonl: valid JSON for any numbers, and one line where it cannot be written."""

import json
import math
import os

import pytest
from PIL import Image

from distill.config.schema import LogSettings
from distill.run.loggers import Shown
from distill.train.metrics import MEASURES, MetricsLog, StepLine
from tests.unit.refused import refused


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_numbers_keep_all_digits_and_non_finite_ones_become_null(path):
    log = MetricsLog(path.parent, LogSettings(), {})
    loss = 1 / 3 + 1e-16
    log.write(1, {"student/loss": loss, "a": math.nan, "b": math.inf, "c": -math.inf, "perf/mfu": None})
    assert path.read_text().endswith("}\n"), "a line is on disk as soon as it is written"
    log.close()
    MetricsLog(path.parent, LogSettings(), {}).close()  # opens for appending

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {"step": 1, "student/loss": loss, "a": None, "b": None, "c": None, "perf/mfu": None}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_line(tmp_path):
    for name in ("metrics.jsonl", "norms.jsonl", MEASURES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to("/dev/full")
    log = MetricsLog(tmp_path, LogSettings(), {})
    sheet = Image.new("RGB", (4, 4))
    for name, write in (
        ("metrics", lambda: log.write(1, {"student/loss": 1.0})),
        ("norms", lambda: log.write_norms(1, "student", {"weight": (1.0, None)})),
        ("measures", lambda: log.show(1, Shown(sheet, {}, {"accuracy": 1.0}))),
    ):
        with refused(f"{name}.jsonl"):
            write()
    log.close()  # lines that could not be written do not appear again


def test_a_folder_in_the_place_of_the_file_is_one_line(path):
    path.mkdir()
    with refused("metrics.jsonl"):
        MetricsLog(path.parent, LogSettings(), {})


@pytest.mark.parametrize(
    ("steps", "every", "logged", "printed"),
    [
        (100, None, 1, [*range(1, 101)]),
        (101, None, 1, [*range(10, 101, 10), 101]),
        (40, 10, 4, [12, 24, 36, 40]),  # the first logged step on which ten have passed
    ],
)
def test_a_line_comes_at_the_first_logged_step_after_enough(steps, every, logged, printed):
    line, found = StepLine({}, step=0, steps=steps, every=every), []
    for step in range(1, steps + 1):
        line.add({"perf/seconds_per_step": 1.0})
        if step % logged == 0 and line.is_due(step):
            line.text(step, 1.0)
            found.append(step)
    assert found == printed


def test_a_line_has_means_since_the_last_and_the_latest_values_of_both_roles():
    line = StepLine({"student": ["student"], "fake": ["fake"]}, step=0, steps=9, every=3)

    def text(last, *steps):
        for role, loss, seconds, tokens in steps:
            speed = {"perf/seconds_per_step": seconds, "perf/tokens_per_second": tokens, "perf/mfu": None}
            line.add({f"{role}/loss": loss, f"{role}/grad_norm": 10 * loss, f"{role}/lr": loss / 100, **speed})
        return " ".join(line.text(last, 0.5).split())

    first = text(3, ("student", 1.0, 1.0, 300.0), ("student", 2.0, 3.0, 100.0), ("student", 6.0, 2.0, 150.0))
    assert "student loss 3 norm 60 lr 6.00e-02 fake loss - norm - lr - 2 s 150 tokens/s 0.50 GiB" in first
    second = text(6, ("fake", 4.0, 1.0, 10.0))
    assert "student loss 3 norm 60 lr 6.00e-02 fake loss 4 norm 40 lr 4.00e-02 1 s 10 tokens/s" in second
    assert "student loss 5 norm 50" in text(9, ("student", 5.0, 1.0, 10.0)), "the mean is of the new steps alone"
