"""The program that kills runs: it detects a lost step, and finds none."""

import json
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks import chaos

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the test needs one process


def finished(folder, *, bits=0.0, losses=(1.0, 2.0, 3.0), export=0.0, seed=0):
    """Write the files of a run of three steps that the comparison reads."""
    checkpoint = folder / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    dcp.save({"student.weights.a": torch.tensor([bits, 1.0])}, checkpoint_id=str(checkpoint), no_dist=True)
    state = {"step": 3, "seconds": random.random(), "settings": {"seed": seed, "run_dir": str(folder)}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    student = folder / "export" / "student"
    student.mkdir(parents=True)
    save_file({"a": torch.tensor([export])}, student / "diffusion_pytorch_model.safetensors")
    lines = [{"step": n, "student/loss": loss, "perf/mfu": random.random()} for n, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_that_came_out_otherwise_is_seen(tmp_path):
    truth = finished(tmp_path / "truth")
    same = finished(tmp_path / "same")
    assert chaos.differences(same, truth) == []
    for name, change in (
        ("sign", {"bits": -0.0}),
        ("export", {"export": 1e-30}),
        ("seed", {"seed": 1}),
        ("losses", {"losses": (1.0, 2.0, 3.5)}),
        ("twice", {"losses": (1.0, 2.0, 3.0, 3.0)}),
    ):
        assert chaos.differences(finished(tmp_path / name, **change), truth), name
    shutil.rmtree(same / "export")
    (same / "checkpoints" / "step_00000003").rename(same / "checkpoints" / "step_00000002")
    assert chaos.differences(same, truth)


def test_what_is_left_behind_is_seen(tmp_path):
    run = finished(tmp_path / "run")
    assert chaos.leftovers(run) == []
    names = ("checkpoints/step_00000003.tmp", "checkpoints/step_00000001", "export/.student.unfinished_x")
    for name in names:
        (run / name).mkdir()
    assert sorted(chaos.leftovers(run)) == sorted(names), "a step's folder without its state is one half deleted"


def test_kills_are_judged():
    about = {"number": 1, "run": 1, "rank": 0, "aim": "any moment", "seconds": 1.0, "phase": "training"}
    kept = chaos.Kill(**about, step=8, newest=6, kept=6)
    kept.judge(6)
    assert not kept.faults
    later = chaos.Kill(**about, step=9, newest=6, kept=9)
    later.judge(9)
    assert not later.faults, "published by a rank that lived on"
    for step, newest, kept, start in ((8, 6, 6, 3), (8, 6, 3, 3), (8, 6, 6, 0), (13, 6, 6, 6)):
        bad = chaos.Kill(**about, step=step, newest=newest, kept=kept)
        bad.judge(start)
        assert bad.faults


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_kills_lose_nothing(tmp_path, capsys):
    assert chaos.main(["--runs", "8", "--out", str(tmp_path / "chaos")]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert printed.count("| ok |") == 8 and (tmp_path / "chaos" / "chaos.md").read_text() == printed
    with pytest.raises(chaos.UserError):
        chaos.main(["--out", str(tmp_path / "chaos")])
