"""A resumed run is the run that was never stopped: bit by bit on the same mesh, to rounding on another one."""

import shutil
from dataclasses import replace

import pytest
import torch

from distill.config.schema import EmaSettings
from distill.methods.self_forcing import SelfForcingSettings
from distill.run.checkpoint_checks import check_resume
from fsdp_cp.checkpoint.folder import saved_steps, step_folder
from fsdp_cp.errors import UserError
from models.causal import CausalSettings
from tests.oracles.difference import check_trace
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import METHODS, Setup, Trace, make_config
from tests.oracles.sharded_run import make_trainer
from tests.tiers import long_case, slow
from tests.unit.refused import change

STEPS, STOP = 5, 3
OWN = Setup(cp=2, micro_batch_size=2)
EMA = EmaSettings(enabled=True, decay=None, gamma=1.0, start=1)
pytestmark = slow


def _trainer(setup, folder, run_dir, first, last):
    config = make_config(replace(setup, ema=EMA), folder, run_dir)
    config.steps = last
    config.optim.student.schedule, config.optim.student.warmup = "constant", 4  # a rate for each count of updates
    trainer = make_trainer(setup, folder, config, first)
    assert trainer.step == first
    return trainer


def _run(setup, folder, run_dir, first, last):
    """Train from step ``first``, of a checkpoint if that is not 0, to ``last``; save at STOP and at ``last``."""
    trainer = _trainer(setup, folder, run_dir, first, last)
    trace = trainer.record(save_at=(STOP, last))
    adam = {
        f"{role}.{name}.{key}": value
        for role, network in trainer.trained.items()
        for name, state in network.optimizer.state.items()
        for key, value in state.items()
    }
    trace.weights["adam"] = full_tensors(adam)
    return trace


@pytest.fixture(scope="module")
def straight(pools, checkpoints, tmp_path_factory):
    """Return the run directory and the trace of a run that never stopped.

    It saved after the fake score's first update too.
    """
    run_dir = tmp_path_factory.mktemp("straight")
    return run_dir, pools[2].run(_run, OWN, checkpoints, run_dir, 0, STEPS)[0]


@pytest.mark.parametrize("precision", ["fp32", long_case("bf16")])
def test_same_mesh_bit_by_bit(pools, checkpoints, straight, tmp_path, precision):
    """The runs are equal in bf16 too: masters rebuilt from the bf16 copy would differ in the third digit."""
    setup = replace(OWN, precision=precision)
    begun, truth = straight
    if precision == "bf16":
        begun = tmp_path / "straight"
        truth = pools[2].run(_run, setup, checkpoints, begun, 0, STEPS)[0]
    shutil.copytree(begun / "checkpoints", tmp_path / "checkpoints")
    resumed = pools[2].run(_run, setup, checkpoints, tmp_path, STOP, STEPS)[0]
    assert resumed.losses == truth.losses[STOP:] and resumed.norms == truth.norms[STOP:]
    assert {*truth.weights} == {"student", "fake", "average of student", "adam"}
    for group, weights in truth.weights.items():
        for name, value in weights.items():
            assert torch.equal(resumed.weights[group][name], value), (group, name)
    assert any(not torch.equal(w, w.bfloat16().float()) for w in truth.weights["student"].values())
    assert saved_steps(tmp_path / "checkpoints") == [STOP, STEPS]
    assert (tmp_path / "checkpoints" / f"left_step_{STEPS:08d}").is_dir(), "the later checkpoint was overwritten"


def test_clips_of_several_sizes(pools, checkpoints, tmp_path):
    """Bit by bit on the same mesh; on one rank to rounding."""
    setup = replace(OWN, more_shapes=((4, 2, 8, 12), (4, 1, 12, 6)))
    _resumes_on_two_and_on_one(pools, setup, checkpoints, tmp_path)


def _resumes_on_two_and_on_one(pools, setup, checkpoints, tmp_path):
    """Compare losses; return the weights of the run that never stopped and of the one resumed on its mesh."""
    truth = pools[2].run(_run, setup, checkpoints, tmp_path / "straight", 0, STEPS)[0]
    resumed = {}
    for size in (2, 1):
        run_dir = tmp_path / str(size)
        shutil.copytree(tmp_path / "straight" / "checkpoints", run_dir / "checkpoints")
        resumed[size] = pools[size].run(_run, replace(setup, cp=size), checkpoints, run_dir, STOP, STEPS)[0]
        assert resumed[size].losses == pytest.approx(truth.losses[STOP:], rel=0 if size == 2 else 1e-5)
    return truth.weights, resumed[2].weights


@pytest.mark.parametrize(
    "method",
    [
        long_case(replace(METHODS["flow_matching"], history="clean")),
        SelfForcingSettings(fake_updates_per_student_update=1, step_list=[1.0, 0.5], exit="each", guidance_scale=3.0),
    ],
    ids=lambda method: method.name,
)
def test_a_causal_run_bit_by_bit(pools, checkpoints, tmp_path, method):
    """Draws per chunk continue; on another mesh the losses are the same to rounding."""
    causal = CausalSettings(chunk=1, window=1, context_time=0.1)
    setup = replace(OWN, method=method, causal=causal, causal_roles=("student",))
    truth, resumed = _resumes_on_two_and_on_one(pools, setup, checkpoints, tmp_path)
    assert all(torch.equal(value, truth["student"][name]) for name, value in resumed["student"].items())


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param((Setup(cp=3, micro_batch_size=4), Setup(dp_shard=2)), id="3 ranks, then 2"),
        long_case((Setup(dp_replicate=2, cp=2), Setup()), id="replicas, then one rank"),
        long_case((Setup(dp_shard=2, cp=2), OWN), id="there and back"),
    ],
)
def test_another_mesh(pools, checkpoints, straight, tmp_path, meshes):
    """The run continues for one step on each of two other meshes."""
    shutil.copytree(straight[0] / "checkpoints", tmp_path / "checkpoints")
    ours, truth = Trace(), straight[1]
    for first, setup in enumerate(meshes, STOP):
        part = pools[setup.world_size].run(_run, setup, checkpoints, tmp_path, first, first + 1)[0]
        for name in ("roles", "losses", "norms", "gradients"):
            getattr(ours, name).extend(getattr(part, name))
        ours.weights = part.weights
    rest = truth.after(STOP)
    rest.weights = {name: of for name, of in truth.weights.items() if name != "adam"}
    check_trace(ours, rest)


def _clips(setup, folder, run_dir, first, last):
    steps = _trainer(setup, folder, run_dir, first, last)._steps_of_data()
    return torch.cat([batch.latents.video for step in steps for batch in step])


def test_another_batch_size(pools, checkpoints, straight, tmp_path):
    """The clips continue after the batches of the first size."""
    shutil.copytree(straight[0] / "checkpoints", tmp_path / "checkpoints")
    (order,) = pools[1].run(_clips, Setup(), checkpoints, tmp_path / "none", 0, STOP + 1)
    (rest,) = pools[1].run(_clips, Setup(batch_size=2), checkpoints, tmp_path, STOP, STOP + 2)
    assert torch.equal(rest, order[STOP * Setup().batch_size :])


def _without_average(folder, run_dir):
    setup = Setup(cp=2)
    with pytest.raises(UserError, match=r"student\.ema"):
        make_trainer(setup, folder, make_config(setup, folder, run_dir), STOP)
    return True


def test_other_settings_are_refused(pools, checkpoints, straight):
    checkpoint = step_folder(straight[0] / "checkpoints", STOP)
    config = make_config(Setup(steps=STOP, ema=EMA), checkpoints)
    for changes in ({"seed": 99}, {"steps": STOP - 1}, {"expert_draws": 2}):
        with pytest.raises(UserError, match=next(iter(changes))):
            check_resume(replace(config, **changes), checkpoint)
    assert all(pools[2].run(_without_average, checkpoints, straight[0]))


def _resume_with_other_data(setup, folder, run_dir, accept):
    config = make_config(replace(setup, ema=EMA), folder, run_dir)
    config.checkpoint.accept = accept
    try:
        trainer = make_trainer(setup, folder, config, STOP)
        return trainer.step, trainer.unlogged, trainer.seconds
    except UserError as error:
        return str(error)


def test_other_data_are_accepted_by_a_name_of_the_data_alone(pools, checkpoints, straight, tmp_path):
    shutil.copytree(straight[0] / "checkpoints", tmp_path / "checkpoints")
    state = step_folder(tmp_path / "checkpoints", STOP) / "state.json"
    change(state, data="another", unlogged={"fake/loss": 1.5}, seconds=12.5)
    for accept in ([], ["teacher.checkpoint"]):
        (refused, _) = pools[2].run(_resume_with_other_data, OWN, checkpoints, tmp_path, accept)
        assert "other data" in refused
    found = pools[2].run(_resume_with_other_data, OWN, checkpoints, tmp_path, ["data.path"])
    assert found == [(STOP, {"fake/loss": 1.5}, 12.5)] * 2, "metrics since the last line, and the time, continue"
