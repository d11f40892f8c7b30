"""A model family and a method of another package: verified, trained, exported and sampled, without touching this
project."""

import os

import pytest

from distill.data import settings as data
from tests.e2e.launch import ROOT, forked, losses, run_command, train
from tests.outside.data import OutsideShapes
from tests.tiers import long, slow
from tests.unit.refused import check_command
from train import main

ENTRY_POINTS = """
[fsdp_cp.families]
outside = tests.outside.family:OutsideFamily
broken = tests.outside.family:Nothing
[fsdp_cp.data_sets]
outside_shapes = tests.outside.data:OutsideShapes
broken = tests.outside.data:Nothing
[fsdp_cp.methods]
halving = tests.outside.method:METHOD
broken = tests.outside.method:Nothing
"""
WORDS = [
    "experiment=quickstart_teacher", "student.family=outside", "steps=2", "batch_size=4", "sample.report_clips=0",
    "student.checkpoint=null", "student.architecture={channels: 3, text_dim: 32, patch: 2}", "sample.student_steps=[2]",
    "student.ema.enabled=false", "optim.student.lr=1e-3", "sample.prompts=2",
]  # fmt: skip


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put the metadata of an installed package on the path."""
    about = tmp_path / "site" / "outside-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(about.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(about.parent)
    return tmp_path


def test_its_data_set_is_found(installed, monkeypatch):
    monkeypatch.setattr(data, "DATA", dict(data.DATA))
    monkeypatch.setattr(data, "BROKEN", {})
    data._add_installed()
    assert data.DATA["outside_shapes"] is OutsideShapes and "Nothing" in str(data.BROKEN["broken"])


@long
def test_it_is_verified_on_every_mesh(installed):
    done = forked(0, "models.verify", "outside", "--ranks", "2").wait()
    assert done.returncode == 0, done
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ") and " x " in line.split("|")[1][:6]]
    assert len(rows) == 2 * 3 * 2 * 2, "two examples"


@long
def test_it_trains_alike_on_two_meshes_and_is_exported(installed):
    whole, split = installed / "whole", installed / "split"
    train(0, *WORDS, "mesh.cp=1", f"run_dir={whole}")
    train(2, *WORDS, "mesh.cp=2", f"run_dir={split}")
    for one, two in zip(losses(whole), losses(split), strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    student, out = split / "export" / "student", installed / "out"
    assert '"_class_name": "Tower"' in (student / "config.json").read_text()
    for module, *words in (
        ("models.verify", str(student), "--ranks", "1"),  # the family is known by the network's class
        ("distill.sample", str(split), "--steps", "2", "--count", "1", "--out", str(out)),
    ):
        done = forked(0, module, *words).wait()
        assert done.returncode == 0, done
    assert (out / "0.mp4").exists()


@slow
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (["student.family=broken"], "broken"),
        (["student.architecture={channels: 3, text_dim: 32, patches: 2}"], "student.architecture.patches"),
        (["student.checkpoint=assets/quickstart_teacher", "student.architecture=null"], "student.checkpoint"),
        (["method.guidance_scale=-2"], "method.guidance_scale"),
    ],
)
def test_its_own_mistakes_are_one_line(installed, monkeypatch, capsys, changes, name):
    monkeypatch.chdir(ROOT)
    check_command(main, capsys, name, *WORDS, *changes, "mesh.cp=1", "device=cpu", f"run_dir={installed}/run")
    assert not (installed / "run").exists()


@long
def test_its_method_trains_by_the_words_of_the_documents(installed):
    """The test uses the method, its settings and its three YAML files, as docs/extending.md names them."""
    run_dir = installed / "run"
    words = ["experiment=quickstart_halving", "steps=3", "batch_size=2", "log.every=1", f"run_dir={run_dir}"]
    words += ["sample.report_clips=0", "sample.prompts=2", "sample.teacher_steps=[1]"]
    # Methods are found when they are imported, so forked ranks would not know this one.
    done = run_command(2, *words, "mesh.cp=2", "method.interval=0.4", "sample.student_steps=[2]")
    assert done.returncode == 0, done.stderr
    found = [line["student/loss"] for line in losses(run_dir)]
    assert len(found) == 3 and 0 < found[-1] < 1
    config = (run_dir / "config.yaml").read_text()
    assert "name: halving" in config and "interval: 0.4" in config and "lr: 0.0001" in config
    assert (run_dir / "export" / "student" / "config.json").is_file()
    for words, name in (
        ("method=broken", "method=broken"),
        ("experiment=quickstart_halving method.interval=2", "interval"),
    ):
        refused = run_command(0, *words.split(), f"run_dir={installed}/refused")
        assert refused.returncode == 2 and name in refused.stderr.splitlines()[-1], refused.stderr
    assert not (installed / "refused").exists()
