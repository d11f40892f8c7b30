"""A disk that fills up, and what is left of a run then. A limit on the size of files stands for the disk."""

import resource
import subprocess
import sys

import pytest

from tests.e2e.launch import ROOT, environment, losses, run_command, train

QUICK = (
    "experiment=quickstart", "mesh.cp=1", "batch_size=2", "checkpoint.every=1", "sample.at_end=false", "device=cpu",
    "method.fake_updates_per_student_update=1",
)  # fmt: skip


def limited(kilobytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 * kilobytes, 1000 * kilobytes))

    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment(), capture_output=True, text=True, preexec_fn=limit
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ") and "cannot be written" in line, line
    return line


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_leaves_the_earlier_one(tmp_path):
    run_dir = tmp_path / "run"
    train(0, *QUICK, "steps=1", f"run_dir={run_dir}")
    done = limited(5_000, "train.py", *QUICK, "steps=3", f"run_dir={run_dir}")
    line = one_line(done)
    assert "the checkpoint of step 2 cannot be written" in line and "the newest complete one is of step 1" in line
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_00000001"], "no part of one fills the disk"
    train(0, *QUICK, "steps=3", f"run_dir={run_dir}")
    assert [r["step"] for r in losses(run_dir)] == [1, 2, 3]

    # An export, by the run and by its command; the earlier one stays.
    out = tmp_path / "out"
    export = ("-m", "models.export", str(run_dir), str(out))
    subprocess.run([sys.executable, *export], cwd=ROOT, env=environment(), check=True)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    one_line(limited(1_000, *export, "--weights", "ema"))
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
    one_line(limited(3_000, "train.py", *QUICK, "steps=3", f"run_dir={run_dir}"))
    assert sorted(p.name for p in (run_dir / "export").iterdir()) == ["scheduler", "student"]


@pytest.mark.slow
def test_under_torchrun_the_line_comes_last(tmp_path):
    """On two ranks; torchrun's own summary is some forty lines, and ends with its root cause."""
    done = run_command(2, *QUICK, "steps=1", "mesh.cp=3", f"run_dir={tmp_path}/run")
    assert done.returncode == 1
    summary = done.stderr[done.stderr.rindex("Root Cause") :]
    assert "error: mesh.dp_replicate=1 x mesh.cp=3 does not divide the world of 2 ranks" in summary
    assert len(summary.splitlines()) < 12 and done.stderr.count("Traceback") <= 1, "torchrun's own"
