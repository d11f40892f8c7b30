"""A run's folder: nothing in it is lost, and what it says of itself is true."""

import fcntl
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distill.config import load_config
from tests.e2e.launch import ROOT, environment, losses
from train import main

QUICK = (
    "experiment=quickstart", "device=cpu", "mesh.cp=1", "batch_size=2", "sample.at_end=false", "checkpoint.every=1",
    "method.fake_updates_per_student_update=1",
)  # fmt: skip


def contents(folder: Path) -> dict[str, str]:
    """Every file under ``folder`` with a hash of its bytes."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def run(run_dir: Path, *overrides: str) -> int:
    return main([*QUICK, f"run_dir={run_dir}", *overrides])


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and not any("Traceback" in other for other in before), (before, line)
    return line


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps. Tests that change a run's folder work on a copy."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert run(run_dir, "steps=2") == 0
    return run_dir


def copy(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "-rp", str(source), str(target)], check=True)
    return target


def test_a_start_is_recorded_with_what_it_takes_to_repeat_it(finished):
    (record,) = [json.loads(line) for line in (finished / "starts.jsonl").read_text().splitlines()]
    assert record["config"]["steps"] == 2 and record["from_step"] == 0 and record["world_size"] == 1
    assert "steps=2" in record["command"].split() and record["directory"] and record["host"]
    assert record["versions"]["torch"] == torch.__version__
    kind = subprocess.run(["git", "cat-file", "-t", str(record["commit"])], cwd=ROOT, capture_output=True, text=True)
    assert kind.stdout.strip() == "commit" or record["commit"] is None
    log = (finished / "log.txt").read_text().splitlines()
    assert any("2 steps" in line for line in log) and all(line[:2] == "20" for line in log), "time stamps"


def test_a_changed_setting_in_a_finished_run_is_refused_and_changes_nothing(capsys, finished, tmp_path):
    run_dir = copy(finished, tmp_path / "run")
    before = contents(run_dir)
    message = refused(capsys, *QUICK, f"run_dir={run_dir}", "steps=2", "optim.student.lr=0.5")
    assert "optim.student.lr=0.5" in message and "nothing would be trained" in message and "another run_dir" in message
    assert contents(run_dir) == before
    # What does not change the weights may change: the run's end is made again, with the configuration of the weights.
    assert run(run_dir, "steps=2", "export.dtype=bf16", "student.activation_checkpointing=full") == 0
    assert (
        load_config(run_dir / "config.yaml").optim.student.lr == load_config(finished / "config.yaml").optim.student.lr
    )
    exported = load_file(run_dir / "export" / "student" / "diffusion_pytorch_model.safetensors")
    assert {weight.dtype for weight in exported.values()} == {torch.bfloat16}
    assert len((run_dir / "starts.jsonl").read_text().splitlines()) == 2
    # With more steps there is something to train, and the log names what has changed.
    assert run(run_dir, "steps=3", "optim.student.lr=0.0005") == 0
    assert "resumed with optim.student.lr=0.0005, which was" in (run_dir / "log.txt").read_text()
    assert [r["step"] for r in losses(run_dir)] == [1, 2, 3]


@pytest.mark.slow
def test_resuming_from_another_run_leaves_own_checkpoints_alone(capsys, finished, tmp_path):
    own = tmp_path / "own"
    assert run(own, "steps=3", "seed=1") == 0
    before = contents(own)
    source = finished / "checkpoints" / "step_00000002"
    message = refused(capsys, *QUICK, f"run_dir={own}", "steps=4", f"checkpoint.resume={source}")
    assert "has checkpoints of its own" in message and "use another run_dir" in message
    assert contents(own) == before

    # In a folder of its own it begins there; the same command again goes on instead of beginning again.
    branch, theirs = tmp_path / "branch", contents(finished)
    again = (f"checkpoint.resume={source}", "checkpoint.keep=0")
    assert run(branch, "steps=3", *again) == 0
    assert run(branch, "steps=4", *again) == 0
    assert "goes on from its own newest checkpoint" in (branch / "log.txt").read_text()
    assert [r["step"] for r in losses(branch)] == [3, 4]
    assert {p.name for p in (branch / "checkpoints").iterdir()} == {"step_00000003", "step_00000004"}
    assert contents(finished) == theirs
    assert run(branch, "steps=5") == 0, "auto goes on, and remembers where the run began"
    assert run(branch, "steps=6", *again) == 0
    assert [r["step"] for r in losses(branch)] == [3, 4, 5, 6]


@pytest.mark.slow
def test_an_earlier_step_that_is_left_twice_is_kept_twice(finished, tmp_path):
    run_dir = tmp_path / "run"
    assert run(run_dir, "steps=2", "checkpoint.keep=0") == 0
    for _ in range(2):
        first = run_dir / "checkpoints" / "step_00000001"
        state = first / "state.json"
        assert run(run_dir, "steps=2", f"checkpoint.resume={first}") == 0
        newest = json.loads((run_dir / "checkpoints" / "step_00000002" / "state.json").read_text())
        assert newest["branch_of"] == str(first.resolve()) and state.is_file()
        # As if the user had begun from elsewhere since: the branch is left once more.
        newest["branch_of"] = None
        (run_dir / "checkpoints" / "step_00000002" / "state.json").write_text(json.dumps(newest))
    names = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert names == {"step_00000001", "step_00000002", "left_step_00000002", "left_step_00000002_2"}


def test_files_of_somebody_else_are_not_overwritten(capsys, tmp_path):
    for name in ("config.yaml", "report.html", "checkpoints"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).mkdir() if "." not in name else (folder / name).write_text("mine: 1\n")
        before = contents(folder)
        message = refused(capsys, *QUICK, f"run_dir={folder}", "steps=1")
        assert f"would overwrite its {name}" in message
        assert contents(folder) == before
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    assert run(notes, "steps=1", "checkpoint.at_end=false", "checkpoint.every=0", "export.at_end=false") == 0
    assert (notes / "notes.txt").read_text() == "mine"
    assert not (notes / "checkpoints").exists() and not (notes / "export").exists() and not (notes / "samples").exists()


def test_an_earlier_run_without_a_checkpoint_is_kept(tmp_path):
    quick = ("checkpoint.at_end=false", "checkpoint.every=0", "export.at_end=false")
    assert run(tmp_path, "steps=2", *quick) == 0
    first = losses(tmp_path)
    assert run(tmp_path, "steps=1", "seed=5", *quick) == 0
    assert losses(tmp_path / "previous" / "1") == first and len(losses(tmp_path)) == 1
    assert load_config(tmp_path / "previous" / "1" / "config.yaml").seed == 0


def test_one_run_at_a_time(capsys, finished, tmp_path):
    run_dir = copy(finished, tmp_path / "run")
    before = contents(run_dir)
    with (run_dir / ".lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        message = refused(capsys, *QUICK, f"run_dir={run_dir}", "steps=3")
    assert "is in use by process" in message and "use another run_dir" in message
    assert contents(run_dir) == before
    assert run(run_dir, "steps=3") == 0, "the lock went with its holder"


@pytest.mark.slow
def test_a_run_that_ends_broken_says_so(capsys, tmp_path):
    message = refused(capsys, *QUICK, f"run_dir={tmp_path}/run", "steps=3", "optim.student.lr=1e10", "optim.clip=null")
    assert "not finite" in message and "optim." in message and "Traceback" not in message
    assert not (tmp_path / "run" / "export").exists()
    assert "error: " in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_many_skipped_updates_end_in_one_line(capsys, tmp_path):
    settings = ("steps=9", "optim.student.lr=1e10", "optim.max_skipped=2", "checkpoint.every=0")
    message = refused(capsys, *QUICK, f"run_dir={tmp_path}/run", *settings)
    assert "not finite" in message or "non-finite" in message


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [False, True])
def test_runs_with_an_architecture_resume_under_another_hash_seed(tmp_path, teacher):
    """diffusers' list of defaults comes out of a set: its order, which a checkpoint held, is the hash seed's."""
    settings = ["experiment=quickstart_teacher", "device=cpu", "batch_size=2", "sample.at_end=false"]
    if teacher:
        shape = (
            "{patch_size: [1,4,4], num_attention_heads: 4, attention_head_dim: 8, in_channels: 3, out_channels: 3,"
            " text_dim: 32, freq_dim: 16, ffn_dim: 32, num_layers: 1}"
        )
        settings = [*QUICK, *(f"{role}.architecture={shape}" for role in ("teacher", "student", "fake"))]
        settings += [f"{role}.checkpoint=null" for role in ("teacher", "student", "fake")]
    for steps, seed in ((1, "1"), (2, "2"), (3, "3")):
        done = subprocess.run(
            [sys.executable, "train.py", *settings, f"steps={steps}", f"run_dir={tmp_path}/run"],
            cwd=ROOT,
            env=environment() | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step 2" in done.stdout
