"""metrics.jsonl: cut back on resume, and valid JSON whatever the numbers are."""

import json
import math

import pytest

from distill.config import LogSettings
from distill.metrics import MetricsLog, cut_back


def line(step, **metrics):
    return json.dumps({"step": step, **metrics})


def steps(path):
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_lines_after_the_checkpoint_are_dropped(path):
    path.write_text("".join(line(s, loss=s / 3) + "\n" for s in range(1, 8)))
    kept = path.read_text().splitlines()[:4]
    cut_back(path, 4)
    assert path.read_text().splitlines() == kept, "what is kept is kept byte for byte"
    cut_back(path, 100)
    assert steps(path) == [1, 2, 3, 4]
    cut_back(path, 0)
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", ["{", '{"step": 4', '{"step": 4, "student/loss": 0.1', "\x00\x00\x00"])
@pytest.mark.parametrize("newline", ["", "\n"])
def test_a_torn_last_line_is_dropped_and_writing_goes_on_after_it(path, torn, newline):
    path.write_text("".join(line(s) + "\n" for s in (1, 2, 3)) + torn + newline)
    cut_back(path, 10)
    assert steps(path) == [1, 2, 3]
    log = MetricsLog(path.parent, LogSettings(), {})
    log.write(4, {"student/loss": 0.5})
    log.close()
    assert steps(path) == [1, 2, 3, 4]


def test_a_last_line_without_its_newline_is_kept_whole(path):
    path.write_text(line(1) + "\n" + line(2))
    cut_back(path, 10)
    assert path.read_text() == line(1) + "\n" + line(2) + "\n"


def test_no_file_is_no_error(path):
    cut_back(path, 3)
    assert not path.exists()
    path.write_text("")
    cut_back(path, 3)
    assert path.read_text() == ""


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
