"""Files of JSON lines: cut back on resume without losing a readable line."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_cp.files.json_lines import cut_back, finite_number, parse, read_objects
from tests.unit import damaged_lines
from tests.unit.refused import refused
from tests.unit.test_sample_command import full_disk


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def lines(*records):
    return b"".join(json.dumps(r).encode() + b"\n" if isinstance(r, dict) else r + b"\n" for r in records)


def test_lines_that_will_be_written_again_and_torn_ones_are_dropped(path):
    good = [{"step": step, "student/loss": step / 7} for step in range(1, 8)]
    path.write_bytes(lines(*good[:2], b'{"step": 3, "stu', b"[1, 2]", {"loss": 1}, *good[3:]) + b'{"step": 8, "fak')
    cut_back(path, 5)
    assert path.read_bytes() == lines(*good[:2], *good[3:5]), "what is kept is kept byte for byte"
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_leaves_the_file_as_it_was(path):
    before = lines(*({"step": step} for step in range(1, 100)), b"damaged", {"step": 100})
    path.write_bytes(before)
    with full_disk(len(before) // 2), refused("metrics.jsonl"):
        cut_back(path, 1000)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"], "no temporary file stays"


def oracle_step(line: bytes) -> int | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if type(record) is dict else None
    return step if type(step) is int and 0 <= step < 2**53 else None


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(damaged_lines.files, st.integers(0, 12))
def test_whatever_is_in_the_file_nothing_readable_is_lost(content, step):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(content)
        cut_back(path, step)
        given_lines = [line for line in content.split(b"\n") if line.strip()]
        kept = [line for line in given_lines if (at := oracle_step(line)) is not None and at <= step]
        assert path.read_bytes() == b"".join(line + b"\n" for line in kept)
        assert [p.name for p in Path(folder).iterdir()] == ["metrics.jsonl"], "no temporary file stays"


@settings(max_examples=30, derandomize=True, deadline=None, database=None)
@given(damaged_lines.files)
def test_every_object_is_read(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "starts.jsonl")
        path.write_bytes(content)
        found = read_objects(path)
        assert found == [record for line in content.split(b"\n") if (record := parse(line)) is not None]
        assert all(type(record) is dict for record in found)


def test_no_file_and_a_folder_hold_nothing(tmp_path):
    assert read_objects(tmp_path / "none") == read_objects(tmp_path) == []
    cut_back(tmp_path / "none", 3)
    assert not (tmp_path / "none").exists()


@given(damaged_lines.odd)
@settings(max_examples=30, derandomize=True, deadline=None, database=None)
def test_a_number_is_finite_or_nan(value):
    number = finite_number(value)
    assert math.isnan(number) or number == value
    assert not (isinstance(value, bool) and number == value), "a boolean is no number"
    if type(value) is float and math.isfinite(value):
        assert number == value
