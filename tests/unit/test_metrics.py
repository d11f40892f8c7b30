"""metrics.jsonl: valid JSON for any numbers, and one line where it cannot be written."""

import json
import math
import os

import pytest
from PIL import Image

from distill.config.schema import LogSettings
from distill.train.metrics import MEASURES, MetricsLog
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
        ("measures", lambda: log.show(1, sheet, {}, {"accuracy": 1.0})),
    ):
        with refused(f"{name}.jsonl"):
            write()
    log.close()  # lines that could not be written do not appear again


def test_a_folder_in_the_place_of_the_file_is_one_line(path):
    path.mkdir()
    with refused("metrics.jsonl"):
        MetricsLog(path.parent, LogSettings(), {})
