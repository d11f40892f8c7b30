"""A run's own plan: what its line says, and for which settings a plan that is there stands."""

import json

import pytest

from distill.config import compose_config
from distill.planning.files import read_plan, settings_digest
from distill.planning.own import plan_line

PLAN = {"allocated_gib": 60.0, "device_gib": 64.5, "peak_phase": "student/dmd/backward"}
WORDS = ("experiment=quickstart", "world=2", "plan=true")


@pytest.mark.parametrize(("memory", "fits"), [(95.6, True), (None, True), (64.0, False)])
def test_the_line_says_whether_it_fits(memory, fits):
    line, found = plan_line(PLAN, memory)
    assert found is fits and "\n" not in line


def test_a_plan_stands_for_the_settings_that_it_depends_on(tmp_path):
    digest = settings_digest(compose_config(list(WORDS)))
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "made_by": "fsdp_cp plan", "settings": digest}))
    for word, same in (
        ("run_dir=elsewhere", True),
        ("checkpoint.resume=never", True),
        ("world=4", False),
        ("student.activation_checkpointing=full", False),
    ):
        changed = [each for each in WORDS if each.split("=")[0] != word.split("=")[0]] + [word]
        assert (read_plan(compose_config(changed), tmp_path) is not None) is same, word


def test_what_is_no_plan_is_none(tmp_path):
    config = compose_config(list(WORDS))
    for text in ("", "[]", '{"made_by": "fsdp_cp plan"}', '{"made_by": "me", "settings": 1}'):
        (tmp_path / "plan.json").write_text(text)
        assert read_plan(config, tmp_path) is None, text
