"""A stopped and resumed run is the run that was never stopped, on the same mesh bit by bit, on another to rounding."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distill.config import EmaSettings
from distill.resume_checks import check_resume
from fsdp_cp.checkpoint import published_steps, step_folder
from fsdp_cp.errors import UserError
from tests.oracles.clips import RandomClips
from tests.oracles.difference import compare
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import Setup, Trace, make_config
from tests.oracles.sharded_run import make_trainer

STEPS, STOP = 6, 3


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
    trainer.checkpoints.wait()
    trace.weights["ema"] = full_tensors(trainer.averages["student"].weights)
    trace.weights["adam"] = full_tensors(
        {
            f"{role}.{name}.{key}": value
            for role, optimizer in trainer.optimizers.items()
            for name, state in optimizer.state().items()
            for key, value in state.items()
        }
    )
    return trace


@pytest.fixture(scope="module")
def straight(pools, checkpoints, tmp_path_factory):
    return pools[4].run(_run, Setup(dp_shard=2, cp=2), checkpoints, tmp_path_factory.mktemp("straight"), 0, STEPS)[0]


@pytest.fixture(scope="module")
def stopped(pools, checkpoints, tmp_path_factory):
    """A run checkpoints with a checkpoint after the fake score's first and the student's second update."""
    run_dir = tmp_path_factory.mktemp("stopped")
    pools[4].run(_run, Setup(dp_shard=2, cp=2), checkpoints, run_dir, 0, STOP)
    return run_dir


def test_same_mesh_bit_by_bit(pools, checkpoints, straight, stopped):
    resumed = pools[4].run(_run, Setup(dp_shard=2, cp=2), checkpoints, stopped, STOP, STEPS)[0]
    assert resumed.losses == straight.losses[STOP:]
    assert resumed.norms == straight.norms[STOP:]
    for group, weights in straight.weights.items():
        for name, value in weights.items():
            assert torch.equal(resumed.weights[group][name], value), (group, name)


@pytest.mark.slow
@pytest.mark.parametrize("setup", [Setup(cp=2), Setup(), Setup(dp_shard=2), Setup(dp_replicate=2, cp=2)])
def test_another_mesh(pools, checkpoints, straight, stopped, setup):
    resumed = pools[setup.world_size].run(_run, setup, checkpoints, stopped, STOP, STEPS)[0]
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
def test_bf16_resumes_from_the_fp32_masters(pools, checkpoints, tmp_path):
    """Masters rebuilt from the bf16 copy that compute sees would differ in the third digit."""
    setup = Setup(dp_shard=2, precision="bf16")
    straight = pools[2].run(_run, setup, checkpoints, tmp_path / "straight", 0, STEPS)[0]
    pools[2].run(_run, setup, checkpoints, tmp_path / "stopped", 0, STOP)
    resumed = pools[2].run(_run, setup, checkpoints, tmp_path / "stopped", STOP, STEPS)[0]
    assert resumed.losses == straight.losses[STOP:] and resumed.norms == straight.norms[STOP:]
    weights = resumed.weights["student"]
    assert all(torch.equal(w, straight.weights["student"][name]) for name, w in weights.items())
    assert any(not torch.equal(w, w.bfloat16().float()) for w in weights.values())


@pytest.mark.slow
def test_resuming_from_an_earlier_step_leaves_the_later_ones(pools, checkpoints, tmp_path):
    setup = Setup(dp_shard=2)
    pools[2].run(_run, setup, checkpoints, tmp_path, 0, 2)
    pools[2].run(_run, setup, checkpoints, tmp_path, 2, 4)
    assert published_steps(tmp_path / "checkpoints") == [2, 4]
    pools[2].run(_run, setup, checkpoints, tmp_path, 2, 3)
    assert published_steps(tmp_path / "checkpoints") == [2, 3]
    assert (tmp_path / "checkpoints" / "left_step_00000004").is_dir()


def _mismatch(folder, run_dir):
    setup = Setup(cp=2)
    config = make_config(setup, folder)
    checkpoint = step_folder(Path(run_dir) / "checkpoints", STOP)
    for name, value in (("seed", 99), ("steps", STOP - 1)):
        with pytest.raises(UserError, match=f"{name}={value}|{name}=3, not {value}"):
            check_resume(replace(config, **{name: value}), checkpoint)
    # Nothing is left to be trained with it; of a version without this setting there was one draw.
    with pytest.raises(UserError, match=r"expert_draws=2, but .* was made with 1: nothing would be trained"):
        check_resume(replace(config, steps=STOP, expert_draws=2), checkpoint)
    # The run that wrote it had an average, this one has none.
    with pytest.raises(UserError, match="has student.ema.* in addition"):
        make_trainer(setup, folder, config, checkpoint)
    return True


def test_a_checkpoint_from_before_a_setting_had_its_default(checkpoints, stopped, tmp_path):
    earlier = step_folder(tmp_path, STOP)
    shutil.copytree(step_folder(stopped / "checkpoints", STOP), earlier)
    state = json.loads((earlier / "state.json").read_text())
    del state["settings"]["expert_draws"]
    (earlier / "state.json").write_text(json.dumps(state))
    config = replace(make_config(Setup(cp=2), checkpoints), steps=STOP)
    check_resume(
        replace(config, student=replace(config.student, ema=EmaSettings(enabled=True, decay=0.7, start=1))), earlier
    )
    with pytest.raises(UserError, match=r"expert_draws=4, but .* was made with 1"):
        check_resume(replace(config, expert_draws=4), earlier)


def test_other_settings_are_refused(pools, checkpoints, stopped):
    assert all(pools[2].run(_mismatch, checkpoints, stopped))


def _watched(setup, folder, run_dir, first, last):
    """Like :func:`_run`: losses and norms, and which clips this rank's samples were of, by step."""
    config = make_config(setup, folder)
    config.run_dir, config.steps = str(run_dir), last
    config.student.ema = EmaSettings(enabled=True, decay=0.7, start=1)
    trainer = make_trainer(setup, folder, config, step_folder(Path(run_dir) / "checkpoints", first) if first else None)
    seen: dict[int, list[int]] = {}
    item = RandomClips.__getitem__

    def noted(clips, index):
        seen.setdefault(trainer.step, []).append(index)
        return item(clips, index)

    RandomClips.__getitem__ = noted
    try:
        trace = trainer.record()
    finally:
        RandomClips.__getitem__ = item
    trainer._save()
    trainer.checkpoints.wait()
    return trace.losses, trace.norms, seen, trainer.mesh.cp_rank


def _clips(answers):
    """All ranks' clips by step; those of a cp group are the same samples."""
    together = {}
    for _, _, seen, cp_rank in answers:
        for step, clips in seen.items() if cp_rank == 0 else ():
            together.setdefault(step, []).extend(clips)
    return {step: sorted(clips) for step, clips in together.items()}


@pytest.fixture(scope="module")
def watched(pools, checkpoints, tmp_path_factory):
    """A run at (2, 2) that is never stopped; and the first two steps of one, with their folder."""
    own, folder = Setup(dp_shard=2, cp=2), tmp_path_factory.mktemp("watched")
    straight = pools[4].run(_watched, own, checkpoints, folder / "straight", 0, STEPS)
    return straight, pools[4].run(_watched, own, checkpoints, folder / "begun", 0, 2), folder / "begun"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Setup(dp_shard=4), id="4x1", marks=pytest.mark.slow),
        pytest.param(Setup(cp=2), id="1x2", marks=pytest.mark.long),
        pytest.param(Setup(), id="1x1", marks=pytest.mark.slow),
    ],
)
def test_there_and_back(pools, checkpoints, tmp_path, watched, other):
    """From (2, 2) to another mesh for two steps and back: the losses to 1e-6, and each sample once, in its step."""
    own = Setup(dp_shard=2, cp=2)
    straight, begun, folder = watched
    shutil.copytree(folder, tmp_path / "run")
    parts = [
        begun,
        pools[other.world_size].run(_watched, other, checkpoints, tmp_path / "run", 2, 4),
        pools[4].run(_watched, own, checkpoints, tmp_path / "run", 4, STEPS),
    ]
    losses = [loss for part in parts for loss in part[0][0]]
    assert losses[:2] == straight[0][0][:2] and losses == pytest.approx(straight[0][0], rel=1e-6)
    assert [norm for part in parts for norm in part[0][1]] == pytest.approx(straight[0][1], rel=1e-5)
    clips = {step: clips for part in parts for step, clips in _clips(part).items()}
    assert clips == _clips(straight) and all(len(clips[step]) == own.batch_size for step in range(STEPS))
