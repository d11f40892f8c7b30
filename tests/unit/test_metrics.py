"""metrics.jsonl: cut back on resume, and valid JSON for any numbers. A failing service ends no run."""

import json
import math
import os

import pytest
from PIL import Image

from distill.config.schema import LogSettings
from distill.train.metrics import MEASURES, MetricsLog
from fsdp_cp.files.json_lines import cut_back
from tests.unit.refused import refused


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


@pytest.mark.parametrize("torn", ["{", '{"step": 4, "student/loss": 0.1\n', "\x00\x00\x00"])
def test_a_torn_last_line_is_dropped_and_writing_goes_on_after_it(path, torn):
    path.write_text("".join(line(s) + "\n" for s in (1, 2, 3)) + torn)
    cut_back(path, 10)
    assert steps(path) == [1, 2, 3]
    log = MetricsLog(path.parent, LogSettings(), {})
    log.write(4, {"student/loss": 0.5})
    log.close()
    assert steps(path) == [1, 2, 3, 4]


def test_a_last_line_without_its_newline_is_kept_whole(path):
    cut_back(path, 3)
    assert not path.exists(), "no file is no error"
    path.write_text(line(1) + "\n" + line(2))
    cut_back(path, 10)
    assert path.read_text() == line(1) + "\n" + line(2) + "\n"


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


# ---------------------------------------------------------------- disks


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


# ---------------------------------------------------------------- Weights & Biases


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    yield wandb
    wandb.teardown()


def test_a_service_that_fails_on_the_way_is_left_out_and_said_once(wandb, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = MetricsLog(tmp_path, LogSettings(wandb=True), {})
    log.write(1, {"student/loss": 0.5})
    wandb.run.finish()  # as if its process died: later calls raise
    for step in (2, 3):
        log.write(step, {"student/loss": 0.5})
    log.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
