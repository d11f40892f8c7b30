"""A run that plans itself before it begins, and says at its end what became of it."""

import pytest

from tests.e2e.launch import train

pytestmark = pytest.mark.slow


def test_a_run_says_its_plan_and_what_it_took(tmp_path):
    words = ("experiment=quickstart", "planning.before_run=true", "sample.at_end=false",
             "sample.report_clips=0", "export.at_end=false", "data.num_clips=64", "steps=2",
             f"run_dir={tmp_path / 'run'}")  # fmt: skip
    first = train(2, *words)
    lines = first.stdout.splitlines()
    planned = next(i for i, line in enumerate(lines) if line.startswith("plan: "))
    assert lines[planned - 1].startswith("planning the run") and "GiB of tensors on a rank" in lines[planned]
    assert planned < next(i for i, line in enumerate(lines) if line.startswith("teacher: ")), "before anything is there"
    assert any(line.startswith("memory of a rank: planned ") for line in lines)
