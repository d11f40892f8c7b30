"""A stopped and resumed run is the run that was never stopped, on the same mesh bit by bit, on another to rounding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.parity import Setup, Trace, compare, make_config, make_trainer, write_checkpoints
from distill.config import EmaSettings
from distill.setup import check_resume
from fsdp_cp.checkpoint import find_resume, published_steps, step_folder
from fsdp_cp.errors import UserError
from fsdp_cp.local_ranks import RankPool

STEPS, STOP = 6, 3


@pytest.fixture(scope="module")
def run_ranks():
    """``run_ranks(world_size, function, *args)``; what is resumed is a new trainer on new networks, from files."""
    pools = {size: RankPool(size, preload=("torch", "distill.trainer")) for size in (1, 2, 4)}
    yield lambda size, function, *args: pools[size].run(function, *args)
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_checkpoints(folder)
    return folder


def _run(setup, folder, run_dir, first, last):
    """Steps ``first`` to ``last``, from the checkpoint of ``first`` if that is not 0; saves at ``last``."""
    config = make_config(setup, folder)
    config.run_dir, config.steps = str(run_dir), last
    config.student.ema = EmaSettings(enabled=True, decay=0.7, start=1)
    resume_from = step_folder(Path(run_dir) / "checkpoints", first) if first else None
    trainer = make_trainer(setup, folder, config, resume_from)
    assert trainer.step == first
    trace = trainer.record()
    trainer._save()
    trace.weights["ema"] = {name: w.full_tensor().clone() for name, w in trainer.ema.weights.items()}
    trace.weights["adam"] = {
        f"{role}.{name}.{key}": value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
        for role, optimizer in trainer.optimizers.items()
        for name, state in optimizer.state().items()
        for key, value in state.items()
    }
    return trace


@pytest.fixture(scope="module")
def straight(run_ranks, folder, tmp_path_factory):
    return run_ranks(4, _run, Setup(dp_shard=2, cp=2), folder, tmp_path_factory.mktemp("straight"), 0, STEPS)[0]


@pytest.fixture(scope="module")
def stopped(run_ranks, folder, tmp_path_factory):
    """A run folder with a checkpoint after the fake score's first and the student's second update."""
    run_dir = tmp_path_factory.mktemp("stopped")
    run_ranks(4, _run, Setup(dp_shard=2, cp=2), folder, run_dir, 0, STOP)
    return run_dir


def test_same_mesh_bit_by_bit(run_ranks, folder, straight, stopped):
    resumed = run_ranks(4, _run, Setup(dp_shard=2, cp=2), folder, stopped, STOP, STEPS)[0]
    assert resumed.losses == straight.losses[STOP:]
    assert resumed.norms == straight.norms[STOP:]
    for group, weights in straight.weights.items():
        for name, value in weights.items():
            assert torch.equal(resumed.weights[group][name], value), (group, name)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(cp=2),
        *(
            pytest.param(setup, marks=pytest.mark.slow)
            for setup in (Setup(), Setup(dp_shard=2), Setup(dp_replicate=2, cp=2))
        ),
    ],
)
def test_another_mesh(run_ranks, folder, straight, stopped, setup):
    resumed = run_ranks(setup.world_size, _run, setup, folder, stopped, STOP, STEPS)[0]
    rest = Trace(
        roles=straight.roles[STOP:],
        losses=straight.losses[STOP:],
        norms=straight.norms[STOP:],
        gradients=straight.gradients[STOP:],
        weights={k: v for k, v in straight.weights.items() if k != "adam"},
    )
    resumed.weights.pop("adam")
    assert compare(resumed, rest).largest < 1e-5


@pytest.mark.slow
def test_bf16_resumes_from_the_fp32_masters(run_ranks, folder, tmp_path):
    """Masters rebuilt from the bf16 copy that compute sees would differ in the third digit."""
    setup = Setup(dp_shard=2, precision="bf16")
    straight = run_ranks(2, _run, setup, folder, tmp_path / "straight", 0, STEPS)[0]
    run_ranks(2, _run, setup, folder, tmp_path / "stopped", 0, STOP)
    resumed = run_ranks(2, _run, setup, folder, tmp_path / "stopped", STOP, STEPS)[0]
    assert resumed.losses == straight.losses[STOP:] and resumed.norms == straight.norms[STOP:]
    weights = resumed.weights["student"]
    assert all(torch.equal(w, straight.weights["student"][name]) for name, w in weights.items())
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights.values())


@pytest.mark.slow
def test_resuming_from_an_earlier_step_leaves_the_later_ones(run_ranks, folder, tmp_path):
    setup = Setup(dp_shard=2)
    run_ranks(2, _run, setup, folder, tmp_path, 0, 2)
    run_ranks(2, _run, setup, folder, tmp_path, 2, 4)
    assert published_steps(tmp_path / "checkpoints") == [2, 4]
    run_ranks(2, _run, setup, folder, tmp_path, 2, 3)
    assert published_steps(tmp_path / "checkpoints") == [2, 3]
    assert (tmp_path / "checkpoints" / "left_step_00000004").is_dir()


def _mismatch(folder, run_dir):
    setup = Setup(cp=2)
    config = make_config(setup, folder)
    checkpoint = step_folder(Path(run_dir) / "checkpoints", STOP)
    for name, value in (("seed", 99), ("steps", STOP - 1)):
        with pytest.raises(UserError, match=f"{name}={value}|{name}=3, not {value}"):
            check_resume(replace(config, **{name: value}), checkpoint)
    # The run that wrote it had an average, this one has none.
    with pytest.raises(UserError, match="has student.ema.* in addition"):
        make_trainer(setup, folder, config, checkpoint)
    return True


def test_other_settings_are_refused(run_ranks, folder, stopped):
    assert all(run_ranks(2, _mismatch, folder, stopped))


def test_unfinished_checkpoints_are_not_resumed(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step_00000005.tmp").mkdir(parents=True)
    (checkpoints / "step_00000004").mkdir()  # without state.json: not complete
    assert published_steps(checkpoints) == [] and find_resume("auto", checkpoints) is None
    with pytest.raises(UserError, match="has no complete checkpoint; use auto, never"):
        find_resume(str(tmp_path), checkpoints)
    (checkpoints / "step_00000004" / "state.json").write_text("{}")
    (checkpoints / "step_00000010").mkdir()
    (checkpoints / "step_00000010" / "state.json").write_text("{}")
    assert find_resume("auto", checkpoints) == find_resume(str(tmp_path), checkpoints) == checkpoints / "step_00000010"
    assert find_resume(str(checkpoints / "step_00000004"), checkpoints) == checkpoints / "step_00000004"
    assert find_resume("never", checkpoints) is None
