"""A run's own plan: what its line says, and for which settings a plan that is there stands."""

import json

import pytest

from distill.config import compose_config
from distill.planning.files import read_plan, settings_digest
from distill.planning.own import plan_line

PLAN = {"allocated_gib": 60.0, "device_gib": 64.5, "peak_phase": "student/dmd/backward"}
WORDS = ("experiment=quickstart", "world=2", "plan=true")


@pytest.mark.parametrize(
    ("memory", "fits", "words"),
    [(95.6, True, "; it has 95.6"), (None, True, "student/dmd/backward"), (64.0, False, "the run will not fit")],
)
def test_the_line_says_whether_it_fits(memory, fits, words):
    line, found = plan_line(PLAN, memory)
    assert found is fits and line.startswith("plan: 60.00 GiB of tensors on a rank, 64.50 GiB") and words in line


@pytest.mark.parametrize(
    ("word", "same"),
    [("run_dir=elsewhere", True), ("seed=3", True), ("log.every=7", True), ("checkpoint.resume=never", True),
     ("world=4", False), ("mesh.cp=1", False), ("student.activation_checkpointing=full", False), ("steps=9", False)],
)  # fmt: skip
def test_a_plan_stands_for_the_settings_that_it_depends_on(tmp_path, word, same):
    digest = settings_digest(compose_config(list(WORDS)))
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "made_by": "fsdp_cp plan", "settings": digest}))
    changed = [each for each in WORDS if each.split("=")[0] != word.split("=")[0]] + [word]
    assert (read_plan(compose_config(changed), tmp_path) is not None) is same


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"made_by": "fsdp_cp plan"}', '{"made_by": "me", "settings": 1}'])
def test_what_is_no_plan_is_none(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    assert read_plan(compose_config(list(WORDS)), tmp_path) is None
