"""Roles of two experts on every mesh equal plain diffusers networks in one process."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from distill.config import EmaSettings
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from fsdp_cp.checkpoint import step_folder
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sharding.state import fsdp_modules, param_groups
from models.condition import text_condition
from models.load import build_role
from models.lora.settings import LoraSettings
from models.role_plan import plan_role
from tests.oracles.difference import compare
from tests.oracles.full_tensors import full_tensors
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import MESHES, Setup, make_config
from tests.oracles.sharded_run import make_trainer, trace_on_ranks
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE, TEXT_SHAPE, write_checkpoints

BOUNDARIES = {"teacher": 0.75, "student": 0.7, "fake": 0.6}
"""Three, so that scores are compared within their common refinement."""
METHODS = {
    "dmd2": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, guidance_scale_2=2.0
    ),
    "dmd2, GAN": Dmd2Settings(
        fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, gan_weight_student=0.3,
        student_sampler="ode",
    ),
    "rcm": RcmSettings(
        tangent_warmup=2, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "scm": ScmSettings(tangent_warmup=3, guidance_scale=3.0, guidance_scale_2=1.0),
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
}  # fmt: skip
slow, long = pytest.mark.slow, pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_checkpoints(folder, boundaries=BOUNDARIES)
    return folder


def _trained(trace):
    """Which experts had gradients, step by step."""
    return [(role, *sorted({name[0] for name in of})) for role, of in zip(trace.roles, trace.gradients, strict=True)]


def _compare(pools, folder, setup):
    trace, oracle = trace_on_ranks(setup, folder, pools[setup.world_size]), oracle_trace(setup, folder)
    difference = compare(trace, oracle)
    assert difference.largest < 1e-5, difference
    return trace


@pytest.mark.parametrize(
    ("dp_shard", "cp"), [sizes if sizes == (2, 2) else pytest.param(*sizes, marks=slow) for sizes in MESHES]
)
def test_dmd2(pools, folder, dp_shard, cp):
    setup = Setup(dp_shard=dp_shard, cp=cp, steps=8, method=METHODS["dmd2"], boundaries=BOUNDARIES)
    trained = _trained(_compare(pools, folder, setup))
    assert {*trained} == {("student", "0"), ("student", "1"), ("fake", "0"), ("fake", "1")}, "each by itself"


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("rcm", {"cp": 2}),
        pytest.param("rcm", {"dp_replicate": 2, "cp": 2}, marks=slow),
        pytest.param("rcm", {}, marks=slow),
        pytest.param("scm", {"dp_shard": 2, "cp": 2}, marks=slow),
        ("dmd2, GAN", {"dp_shard": 2}),
        pytest.param("dmd2", {"dp_replicate": 2, "dp_shard": 2}, marks=slow),
        pytest.param("flow_matching", {}, marks=slow),
        ("flow_matching", {"cp": 2}),
    ],
    ids=str,
)
def test_other_methods(pools, folder, method, sizes):
    trace = _compare(pools, folder, Setup(**sizes, steps=7, method=METHODS[method], boundaries=BOUNDARIES))
    if method == "rcm":
        both = [step for step in _trained(trace) if len(step) == 3]
        assert both, "its two losses went to different experts, and were clipped together"


@pytest.mark.parametrize("roles", [("teacher",), ("teacher", "student"), ("fake",)], ids="-".join)
def test_some_roles_alone(pools, tmp_path, roles):
    """A student of one network from a teacher of two, and the other way about."""
    boundaries = {name: BOUNDARIES[name] for name in roles}
    write_checkpoints(tmp_path, boundaries=boundaries)
    _compare(pools, tmp_path, Setup(cp=2, steps=4, method=METHODS["dmd2, GAN"], boundaries=boundaries))


@pytest.mark.parametrize("micro_batch_size", [2, pytest.param(1, marks=slow)])
def test_accumulation(pools, folder, micro_batch_size):
    setup = Setup(
        cp=2, dp_replicate=2, micro_batch_size=micro_batch_size, steps=4, method=METHODS["rcm"], boundaries=BOUNDARIES
    )
    _compare(pools, folder, setup)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("dmd2", {"dp_shard": 2, "cp": 2}),
        pytest.param("dmd2", {"batch_size": 8, "micro_batch_size": 2}, marks=slow),
        ("rcm", {"cp": 2, "micro_batch_size": 2}),
        pytest.param("dmd2, GAN", {"dp_shard": 2, "changes": {"all": {"strategy": "optim"}}}, marks=slow),
        pytest.param("flow_matching", {"dp_shard": 2, "batch_size": 8, "expert_draws": 4}, marks=slow),
        pytest.param("scm", {"dp_replicate": 2, "cp": 2}, marks=slow),
    ],
    ids=str,
)
def test_parts_of_a_batch_that_draw_for_themselves(pools, folder, method, sizes):
    sizes = {"expert_draws": 2} | sizes
    trace = _compare(pools, folder, Setup(**sizes, steps=8, method=METHODS[method], boundaries=BOUNDARIES))
    both = [len(step) == 3 for step in _trained(trace)]
    assert any(both), "the parts of a step drew different experts"


@slow
def test_adapters_of_both_experts_with_a_gan(pools, tmp_path):
    """The student's step passes the fake score of one expert and trains the other: nothing may stay in the first.

    ``reduce_unused`` gives what a step does not use a gradient of 0, which Adam counts: the plain networks have none.
    """
    boundaries = dict.fromkeys(BOUNDARIES, 0.7)
    write_checkpoints(tmp_path, boundaries=boundaries)
    own = {"boundaries": boundaries, "lora": {"student": LoraSettings(rank=2), "fake": LoraSettings(rank=3)}}
    setup = Setup(cp=2, steps=8, method=METHODS["dmd2, GAN"], **own)
    trained = _trained(_compare(pools, tmp_path, setup))
    assert {("student", "0"), ("student", "1")} <= {*trained}
    replicas = Setup(
        dp_replicate=2, cp=2, steps=8, method=METHODS["dmd2, GAN"], changes={"all": {"reduce_unused": True}}, **own
    )
    losses, truth = (
        trace.losses for trace in (trace_on_ranks(replicas, tmp_path, pools[4]), oracle_trace(setup, tmp_path))
    )
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True)) < 1e-3


def _differences():
    """sCM's finite difference at a time whose step crosses the boundary, from one expert alone."""
    mesh = build_mesh(cp=1, heads=4)
    plan = plan_role("student", checkpoint=None, architecture=dict(ARCHITECTURE), boundary=0.5)
    role = build_role(
        plan, mesh=mesh, device=torch.device("cpu"), trainable=True, latent_shape=LATENT_SHAPE,
        condition_shapes=CONDITION_SHAPES,
    )  # fmt: skip
    x, text = torch.randn(1, *LATENT_SHAPE), torch.randn(1, *TEXT_SHAPE)
    t, condition = torch.tensor([0.5001]), text_condition(text)
    with torch.no_grad():
        with pytest.raises(ValueError, match="asks for the network of another range"):
            role.velocity(x, t - 0.0005, condition, at=0.5001)
        with role.differences(0.0005):
            found = [role.velocity(x, t - step, condition, at=0.5001).norm().item() for step in (0.0, 0.0005)]
            with pytest.raises(ValueError, match="asks for the network of another range"):
                role.velocity(x, t - 0.0007, condition, at=0.5001)
    return found


def test_a_finite_difference_may_step_over_a_boundary(pools):
    here, there = pools[1].run(_differences)[0]
    assert 0 < abs(here - there) < 0.01 * here, "the same network"


def _agreement(folder, steps):
    """On each rank: which experts ran, forward by forward, and the weights' checksums at the end."""
    setup = Setup(dp_shard=3, steps=steps, batch_size=3, method=METHODS["dmd2"], boundaries=BOUNDARIES)
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    ran = []
    for name, role in trainer.method.roles.items():
        for i, network in enumerate(role.networks):
            network.module.register_forward_pre_hook(lambda *_, key=(name, i): ran.append(key))
    trainer.record()
    return ran, trainer.trace.losses


def test_every_rank_runs_the_same_expert_in_every_forward(pools, folder):
    """Three data-parallel ranks, 50 steps: one that drew another expert would wait in its collectives for ever."""
    (first, losses), *others = pools[3].run(_agreement, folder, 50)
    assert all(ran == first and of == losses for ran, of in others)
    assert {*first} == {(role, i) for role in ("teacher", "student", "fake") for i in (0, 1)}
    crossed = sum(a[0] == b[0] == "student" and a[1] < b[1] for a, b in pairwise(first))
    assert crossed > 5, "rollouts cross the boundary"


def _gathered(network):
    """Bytes of a network's parameters that are whole on this rank."""
    return sum(
        p._unsharded_param.untyped_storage().size()
        for module in fsdp_modules(network.module)
        for group in param_groups(module)
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")
    )


def _held(folder):
    """Of each expert of the student, whether it holds whole parameters or gradients behind a step; and in mid-step,
    where a block of any network runs forward or gets its gradient, which networks hold whole parameters."""
    setup = Setup(dp_shard=2, cp=2, steps=2, method=METHODS["dmd2"], boundaries=BOUNDARIES)
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    networks = {(name, i): of for name, role in trainer.method.roles.items() for i, of in enumerate(role.networks)}
    seen = []

    def note(running, direction):
        seen.append((direction, running, [key for key, network in networks.items() if _gathered(network)]))

    for key, network in networks.items():
        for block in network.module.blocks:

            def forward(_block, _args, output, key=key):
                note(key, "forward")
                if output.requires_grad:
                    output.register_hook(lambda _gradient: note(key, "backward"))

            block.register_forward_hook(forward, prepend=True)  # before FSDP frees them
    data = trainer._steps_of_data()
    for _ in range(setup.steps):  # of the fake score, and of the student
        trainer._train_step(data)
    trained = [i for i in (0, 1) if trainer.updates[f"student.{('high', 'low')[i]}"]]
    held = [
        (_gathered(network), any(p.grad is not None for p in network.module.parameters()))
        for network in trainer.roles["student"].networks
    ]
    return trained, held, seen


def test_an_expert_that_does_not_run_takes_its_shard_alone(pools, folder):
    """Between steps, and in the midst of two that run experts of all three roles."""
    for trained, held, seen in pools[4].run(_held, folder):
        assert len(trained) == 1 and held == [(0, False), (0, False)]
        assert {direction for direction, *_ in seen} == {"forward", "backward"}
        assert {running[0] for _, running, _ in seen} == {"teacher", "student", "fake"}
        for direction, running, gathered in seen:
            assert gathered == [running] if direction == "forward" else set(gathered) <= {running}


@slow
@pytest.mark.parametrize(
    ("sizes", "resumed"), [({"dp_shard": 2}, {"dp_shard": 2}), ({"cp": 2}, {"dp_shard": 2})], ids=["same", "another"]
)
def test_resume(pools, folder, tmp_path, sizes, resumed):
    """Counts of each expert, its Adam and its average among what is gone on with: the run that was never stopped."""

    def setup(mesh, steps):
        return Setup(**mesh, steps=steps, method=METHODS["rcm"], boundaries=BOUNDARIES)

    pool = pools[2]
    straight = pool.run(_part, setup(sizes, 8), folder, tmp_path / "straight", 0, 8)[0]
    pool.run(_part, setup(sizes, 8), folder, tmp_path / "stopped", 0, 5)
    went_on = pool.run(_part, setup(resumed, 8), folder, tmp_path / "stopped", 5, 8)[0]
    assert went_on[1] == straight[1] and sum(went_on[1].values()) > 8, "rCM updates both experts in some steps"
    if sizes == resumed:
        assert went_on[0].losses == straight[0].losses[5:] and went_on[0].norms == straight[0].norms[5:]
        for group, weights in straight[0].weights.items():
            assert all(torch.equal(went_on[0].weights[group][name], value) for name, value in weights.items())
    else:
        pairs = zip(went_on[0].losses, straight[0].losses[5:], strict=True)
        assert max(abs(a - b) / abs(b) for a, b in pairs) < 1e-5


def _part(setup, folder, run_dir, first, last):
    config = make_config(setup, folder)
    config.run_dir, config.steps = str(run_dir), last
    config.student.ema = EmaSettings(enabled=True, decay=0.7, start=1)
    config.optim.student.schedule, config.optim.student.warmup = "constant", 3
    resume_from = step_folder(Path(run_dir) / "checkpoints", first) if first else None
    trainer = make_trainer(setup, folder, config, resume_from)
    trace = trainer.record()
    trainer._save()
    trainer.checkpoints.wait()
    for part, average in trainer.averages.items():
        trace.weights[f"average of {part}"] = full_tensors(average.weights)
    return trace, trainer.updates
