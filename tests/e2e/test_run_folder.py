"""The run directory: a run loses no file in it, and its records are true."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from distill.config import load_config
from tests.e2e.families import weights
from tests.e2e.launch import QUICK, ROOT, TINY, environment, losses
from tests.e2e.mistakes import hashes
from tests.tiers import long, slow
from train import main

NOTHING = ("checkpoint.at_end=false", "checkpoint.every=0", "export.at_end=false")


def run(run_dir, *overrides):
    return main([*QUICK, *TINY, "device=cpu", "mesh.cp=1", f"run_dir={run_dir}", *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished run of two steps. Tests that change a run directory work on a copy."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert run(run_dir, "steps=2") == 0
    return run_dir


def test_files_of_others_and_of_earlier_runs_are_kept(tmp_path, capsys):
    for name in ("config.yaml", "report.html", "checkpoints"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).mkdir() if "." not in name else (folder / name).write_text("mine: 1\n")
        before = hashes(folder)
        assert run(folder, "steps=1") == 2 and name in capsys.readouterr().err
        assert hashes(folder) == before
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert run(folder, "steps=2", *NOTHING) == 0
    assert not any((folder / name).exists() for name in ("checkpoints", "export", "samples"))
    first = losses(folder)
    assert run(folder, "steps=1", "seed=5", *NOTHING) == 0
    assert (folder / "notes.txt").read_text() == "mine"
    assert losses(folder / "previous" / "1") == first and len(losses(folder)) == 1
    assert load_config(folder / "previous" / "1" / "config.yaml").seed == 0


@slow
def test_a_start_is_recorded_and_a_finished_run_can_be_exported_again(finished, tmp_path):
    (record,) = [json.loads(line) for line in (finished / "starts.jsonl").read_text().splitlines()]
    assert record["config"]["steps"] == 2 and record["from_step"] == 0 and record["world_size"] == 1
    assert "steps=2" in record["command"].split() and record["directory"] and record["host"]
    assert record["versions"]["torch"] == torch.__version__
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    again = ("export.dtype=bf16", "export.weights=raw", "student.activation_checkpointing=full")
    samples = ("sample.at_end=true", "sample.student_steps=[1]", "sample.teacher_steps=[]", "sample.report_clips=0")
    assert run(run_dir, "steps=2", *again, *samples) == 0
    assert not (run_dir / "export" / "student" / "samples").exists(), "they are of the average"
    assert {weight.dtype for weight in weights(run_dir / "export" / "student").values()} == {torch.bfloat16}
    more = ("steps=4", "optim.student.lr=0.0005", "log.every=2", "sample.every=2", "sample.student_steps=[1]")
    (sheet := run_dir / "samples" / "step_00000002.png").unlink()  # as if killed between the checkpoint and its samples
    assert run(run_dir, *more) == 0, "with more steps there is something to train"
    assert sheet.is_file()
    assert load_config(run_dir / "config.yaml").optim.student.lr == 0.0005
    lines = losses(run_dir)
    assert [r["step"] for r in lines] == [1, 2, 4]
    assert {"student/loss", "fake/loss"} <= lines[-1].keys(), "the line is of both steps since the one before it"
    assert len((run_dir / "starts.jsonl").read_text().splitlines()) == 3
    # From scratch: the earlier run moves aside with all its files.
    before = hashes(run_dir)
    assert run(run_dir, "steps=1", "checkpoint.resume=never") == 0
    assert [r["step"] for r in losses(run_dir)] == [1]
    assert hashes(run_dir / "previous" / "1").items() <= before.items()
    assert (run_dir / "previous" / "1" / "checkpoints" / "step_00000003").is_dir()


@slow
def test_a_branch_leaves_its_source_alone(finished, tmp_path):
    """A run that starts from another run's checkpoint resumes from its own checkpoints."""
    branch, theirs = tmp_path / "branch", hashes(finished)
    again = (f"checkpoint.resume={finished}/checkpoints/step_00000002", "checkpoint.keep=0")
    for steps in (3, 4):
        assert run(branch, f"steps={steps}", *again) == 0
    assert [r["step"] for r in losses(branch)] == [3, 4] and hashes(finished) == theirs
    assert {p.name for p in (branch / "checkpoints").iterdir()} == {"step_00000003", "step_00000004"}
    assert run(branch, "steps=5") == 0, "auto continues, and remembers where the run began"
    assert run(branch, "steps=6", *again) == 0
    assert [r["step"] for r in losses(branch)] == [3, 4, 5, 6]

    # Steps later than the one that a run returns to are renamed, each time.
    own = tmp_path / "own"
    assert run(own, "steps=2", "checkpoint.keep=0") == 0
    first, state = (own / "checkpoints" / name for name in ("step_00000001", "step_00000002/state.json"))
    for _ in range(2):
        assert run(own, "steps=2", f"checkpoint.resume={first}") == 0
        saved = json.loads(state.read_text())
        assert saved["branch_of"] == str(first.resolve())
        state.write_text(json.dumps(saved | {"branch_of": None}))  # as if the user had started elsewhere in between
    names = {p.name for p in (own / "checkpoints").iterdir()}
    assert names == {"step_00000001", "step_00000002", "left_step_00000002", "left_step_00000002_2"}


@slow
@pytest.mark.parametrize("settings", [("steps=3", "optim.clip=null"), ("steps=9", "optim.max_skipped=2")])
def test_a_run_that_ends_broken_exports_nothing(tmp_path, capsys, settings):
    for _ in range(2):  # the second start resumes the checkpoint of a run whose loss is not finite
        assert run(tmp_path / "run", "optim.student.lr=1e10", *settings) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
        assert not (tmp_path / "run" / "export").exists()
    assert "error: " in (tmp_path / "run" / "log.txt").read_text()


@long
def test_an_architecture_resumes_under_another_hash_seed(tmp_path):
    """diffusers makes its list of defaults from a set, whose order depends on the hash seed."""
    words = ["experiment=quickstart_teacher", "device=cpu", "batch_size=2", "sample.at_end=false"]
    for steps, seed in ((1, "1"), (2, "2")):
        done = subprocess.run(
            [sys.executable, "train.py", *words, f"steps={steps}", f"run_dir={tmp_path}/run"],
            cwd=ROOT, env=environment() | {"PYTHONHASHSEED": seed}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    assert [r["step"] for r in losses(tmp_path / "run")] == [1, 2]


@slow
def test_a_run_with_unusual_paths(tmp_path, monkeypatch):
    """The command starts in another folder, with ``~`` and unusual characters in paths, and writes nowhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "ho me"))
    name = """it's (1) [2] {3} a=b, c "d" größe 数 #5 $x; \\ end"""
    shutil.copytree(ROOT / "assets" / "quickstart_teacher", tmp_path / "ho me" / name)
    words = ("steps=1", "export.at_end=false", f"student.checkpoint=~/{name}", "data.fps=4")
    assert main([*QUICK, "device=cpu", "mesh.cp=1", f"run_dir=runs/{name}", *words]) == 0
    config = load_config(tmp_path / "runs" / name / "config.yaml")
    assert config.run_dir == f"runs/{name}" and config.student.checkpoint == f"{tmp_path}/ho me/{name}"
    assert config.teacher.checkpoint == "assets/quickstart_teacher"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ho me", "runs"]
