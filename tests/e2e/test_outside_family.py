"""A model family of another package: proved, trained at two ranks, exported and sampled, without touching this one."""

import os
import subprocess
import sys

import pytest

from tests.e2e.launch import ROOT, losses, train
from train import main

ENTRY_POINTS = (
    "[fsdp_cp.families]\noutside = tests.outside.family:OutsideFamily\nbroken = tests.outside.family:Nothing\n"
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """What ``pip install`` of such a package leaves: its metadata on the path."""
    about = tmp_path / "site" / "outside-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(about.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def run(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
def test_it_is_verified_on_every_mesh_as_our_own_are(installed):
    code, out, err = run("-m", "models.verify", "outside", "--ranks", "2")
    assert code == 0, out + err
    rows = [line for line in out.splitlines() if line.startswith("| ") and " x " in line.split("|")[1][:6]]
    assert len(rows) == 2 * 3 * 2 * 2 and out.strip().endswith("all within 1e-05"), out
    code, out, err = run("-m", "models.verify", "nobody")
    names = "wan or ltx or hunyuan15 or broken or outside"
    assert code == 2 and err == f"error: nobody is neither a folder nor a family; use a folder, or {names}\n"


WORDS = [
    "experiment=quickstart_teacher", "student.family=outside", "steps=2", "batch_size=4", "sample.report_clips=0",
    "student.checkpoint=null", "student.architecture={channels: 3, text_dim: 32, patch: 2}", "sample.student_steps=[2]",
    "student.ema.enabled=false", "optim.student.lr=1e-3", "sample.prompts=2",
]  # fmt: skip


@pytest.mark.slow
def test_it_trains_alike_on_two_meshes_and_is_exported(installed):
    whole, split = installed / "whole", installed / "split"
    train(0, *WORDS, "mesh.cp=1", f"run_dir={whole}")
    train(2, *WORDS, "mesh.cp=2", f"run_dir={split}")
    for one, two in zip(losses(whole), losses(split), strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    config = (split / "export" / "student" / "config.json").read_text()
    assert '"_class_name": "Tower"' in config and '"text_dim": 32' in config
    code, out, err = run("-m", "models.verify", str(split / "export" / "student"), "--ranks", "1")  # by its class
    assert code == 0, out + err
    code, out, err = run(
        "-m", "distill.sample", str(split), "--steps", "2", "--count", "1", "--out", str(installed / "out")
    )
    assert code == 0 and (installed / "out" / "0.mp4").exists(), out + err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["student.family=broken"], "broken: tests.outside.family:Nothing cannot be loaded (AttributeError"),
        (["student.family=nobody"], "nobody is unknown; use wan or ltx or hunyuan15 or broken or outside"),
        (["student.architecture={channels: 3, text_dim: 32, patches: 2}"], "no setting student.architecture.patches"),
        (["student.architecture={channels: 5, text_dim: 32}"], "student.architecture takes 5 channels"),
        (["student.checkpoint=assets/quickstart_teacher", "student.architecture=null"], "needs a Tower"),
    ],
)  # fmt: skip
def test_its_own_mistakes_are_one_line(installed, monkeypatch, capsys, changes, message):
    monkeypatch.syspath_prepend(installed / "site")
    assert main([*WORDS, *changes, "mesh.cp=1", "device=cpu", f"run_dir={installed}/run"]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
