"""A run whose updates all changed nothing is no result."""

import pytest

from fsdp_cp.checkpoint.folder import read_state, saved_steps, step_folder
from tests.e2e.launch import QUICK, TINY
from tests.tiers import slow_case
from train import main

WORDS = (*QUICK, *TINY, "device=cpu", "mesh.cp=1", "method.guidance_scale=1e38", "optim.max_skipped=100")


@pytest.mark.parametrize(
    ("steps", "words", "code"),
    [
        (20, (), 2),
        slow_case(18, (), 0),  # nine updates of the student: too few to judge
        slow_case(20, ("optim.student.lr=0",), 0),
    ],
)
def test_a_student_that_never_moved_ends_the_run_without_an_export(tmp_path, capsys, steps, words, code):
    run_dir = tmp_path / "run"
    words = [*WORDS, "checkpoint.every=0", f"steps={steps}", f"run_dir={run_dir}", *words]
    assert main(words) == code
    assert (run_dir / "export").exists() == (code == 0)
    assert saved_steps(run_dir / "checkpoints") == [steps]
    state = read_state(step_folder(run_dir / "checkpoints", steps))
    assert state["moved"]["student"] == 0 < state["moved"]["fake"] and state["tried"]["student"] == steps // 2
    if code:
        assert "student never moved" in capsys.readouterr().err.splitlines()[-1]
        assert "student has not moved" in (run_dir / "log.txt").read_text()
        assert main(words) == 2, "a resumed run knows it"
