"""A provoked collapse under the guard: the alarm, what follows it, and the same verdict on every mesh."""

import json

import pytest

from fsdp_cp.checkpoint.folder import saved_steps
from fsdp_cp.files.atomic_folder import description
from models import export
from tests.e2e.launch import forked, losses, train
from tests.tiers import long_case, slow

STEPS = 12
COLLAPSE = (
    "experiment=quickstart", "batch_size=2", "sample.at_end=false", "export.at_end=false", "log.every=1",
    "method.fake_updates_per_student_update=1", "student.ema.enabled=false", "optim.student.lr=0.006",
    "optim.student.schedule=constant", "sample.teacher_steps=[4]", "checkpoint.every=2", f"steps={STEPS}",
)  # fmt: skip
GUARD = ("guard.every=1", "guard.captions=4")
pytestmark = slow


def looks(run_dir):
    """Return the guard's numbers by step."""
    lines = {line["step"]: {k: v for k, v in line.items() if "guard" in k} for line in losses(run_dir)}
    return {step: look for step, look in lines.items() if look}


def alarms(run_dir):
    return [step for step, look in looks(run_dir).items() if look.get("guard/alarm")]


def without_guard(run_dir):
    return [{k: v for k, v in line.items() if not k.startswith("guard")} for line in losses(run_dir)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the directory of a run that collapses with ``guard.action=keep``."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    train(0, *COLLAPSE, *GUARD, "guard.action=keep", "checkpoint.keep=1", "mesh.cp=1", f"run_dir={run_dir}")
    return run_dir


def test_an_alarm_changes_no_loss_and_the_best_checkpoint_stays(kept, tmp_path):
    train(0, *COLLAPSE, "checkpoint.keep=1", "mesh.cp=1", f"run_dir={tmp_path / 'plain'}")
    assert without_guard(kept) == losses(tmp_path / "plain"), "to the last digit"
    assert alarms(kept) and "at two looks in a row" in (kept / "log.txt").read_text()
    excesses = {step + 1: look["guard/excess"] for step, look in looks(kept).items()}  # by checkpoint
    best = min(excesses, key=lambda step: (excesses[step], -step))
    assert saved_steps(kept / "checkpoints") == sorted({best, STEPS})
    assert saved_steps(tmp_path / "plain" / "checkpoints") == [STEPS]
    assert export.main([str(kept), str(tmp_path / "best"), "--checkpoint", "best"]) == 0
    assert description(tmp_path / "best")["step"] == best


def test_a_stopped_run_keeps_what_was_before_the_alarm_and_resumes_with_the_guards_memory(kept, tmp_path):
    words = (*COLLAPSE, *GUARD, "checkpoint.keep=0", "mesh.cp=1", f"run_dir={tmp_path}", "device=cpu")
    stopped = forked(0, "train", *words, "guard.action=stop").wait()
    assert stopped.returncode == 2 and "Traceback" not in stopped.stderr, stopped
    first = alarms(kept)[0]
    assert alarms(tmp_path) == [first] and max(saved_steps(tmp_path / "checkpoints")) < first
    assert json.loads((tmp_path / "status.json").read_text())["exit_code"] == 2
    train(0, *words, "guard.action=warn")
    assert losses(tmp_path) == losses(kept), "to the last digit"


@pytest.mark.parametrize("ranks", [2, long_case(4)])
def test_every_mesh_gives_the_same_verdict(kept, tmp_path, ranks):
    train(ranks, *COLLAPSE, *GUARD, "mesh.cp=2", f"run_dir={tmp_path}")
    ours, theirs = looks(tmp_path), looks(kept)
    assert alarms(tmp_path) == alarms(kept)
    for name in ("guard/saturation", "guard/diversity", "guard/fake_error"):
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4)
