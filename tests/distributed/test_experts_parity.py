"""Roles of two experts equal plain diffusers networks in one process."""

import shutil
from dataclasses import replace

import pytest
import torch

from distill.config.schema import EmaSettings
from fsdp_cp.checkpoint.folder import step_folder
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sharding.state import fsdp_modules, param_groups
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from tests.oracles import runs
from tests.oracles.difference import check_run
from tests.oracles.runs import Setup, make_config
from tests.oracles.samples import video
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import ARCHITECTURE, LATENT_SHAPE, TEXT_SHAPE, text_condition, tiny_role, write_checkpoints
from tests.tiers import long, long_case, slow, slow_case

BOUNDARIES = {"teacher": 0.75, "student": 0.7, "fake": 0.6}
"""Three, so that scores are compared within their common refinement."""
METHODS = runs.METHODS | {
    "dmd2": replace(runs.METHODS["dmd2"], guidance_scale_2=2.0),
    "dmd2, GAN": replace(
        runs.METHODS["dmd2, GAN"], fake_knows_last_step=False, gan_r1_weight=0.0, student_sampler="ode"
    ),
    "scm": replace(runs.METHODS["scm"], guidance_scale_2=1.0),
    "phased": replace(runs.METHODS["dmd2"], guidance_scale_2=2.0, phased=True, student_sampler="ode", projection=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_checkpoints(folder, ARCHITECTURE, BOUNDARIES)
    return folder


def _setup(method, steps=8, **changes):
    common = {"steps": steps, "method": METHODS[method], "boundaries": BOUNDARIES}
    return Setup(**common | changes)


def _check(pools, folder, setup):
    """Compare with plain networks; return which experts had gradients, step by step."""
    trace = check_run(pools, setup, folder)
    return [(role, *sorted({name[0] for name in of})) for role, of in zip(trace.roles, trace.gradients, strict=True)]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        slow_case("rcm", {"cp": 2, "micro_batch_size": 4, "steps": 4}),
        long_case("dmd2", {"dp_shard": 2, "cp": 2, "micro_batch_size": 2}),
        long_case("dmd2", {"cp": 4, "micro_batch_size": 4}),
        long_case("rcm", {"dp_replicate": 2, "cp": 2, "micro_batch_size": 2, "steps": 5}),
        long_case("scm", {"dp_shard": 2, "cp": 2, "micro_batch_size": 2}),
        long_case("dmd2, GAN", {"dp_shard": 2}),
        long_case("flow_matching", {"cp": 2, "micro_batch_size": 4}),
    ],
    ids=str,
)
def test_two_experts(pools, folder, method, changes):
    trained = _check(pools, folder, _setup(method, **changes))
    if method == "dmd2":
        assert {*trained} == {("student", "0"), ("student", "1"), ("fake", "0"), ("fake", "1")}, "each by itself"
    if method == "rcm":
        assert any(len(step) == 3 for step in trained), "two losses went to two experts, and were clipped together"


@slow
@pytest.mark.parametrize(
    "sizes", [{}, {"cp": 2, "micro_batch_size": 4}, {"dp_shard": 2}, {"dp_shard": 2, "cp": 2}], ids=str
)
def test_phases(pools, folder, sizes):
    """The high expert of each role serves times down to the border .5, below its boundary; then the low one trains."""
    for experts, index in (("high", "0"), ("low", "1")):
        trained = _check(pools, folder, _setup("phased", 4, experts=experts, **sizes))
        assert trained == [("student", index), ("fake", index)] * 2


@long
@pytest.mark.parametrize("roles", [("teacher", "student"), ("fake",)], ids="-".join)
def test_some_roles_alone(pools, tmp_path, roles):
    """A role of two experts next to roles of one network."""
    boundaries = {name: BOUNDARIES[name] for name in roles}
    write_checkpoints(tmp_path, ARCHITECTURE, boundaries)
    _check(pools, tmp_path, _setup("dmd2, GAN", 4, cp=2, micro_batch_size=4, boundaries=boundaries))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        long_case("rcm", {"cp": 2, "micro_batch_size": 2}),
        long_case("dmd2", {"dp_shard": 2, "cp": 2}),
        long_case("dmd2, GAN", {"dp_shard": 2, "changes": {"all": {"strategy": "optim"}}}),
        long_case("flow_matching", {"dp_shard": 2, "batch_size": 8, "expert_draws": 4}),
        long_case("scm", {"dp_replicate": 2, "cp": 2}),
    ],
    ids=str,
)
def test_parts_of_a_batch_that_draw_for_themselves(pools, folder, method, changes):
    trained = _check(pools, folder, _setup(method, 6, **{"expert_draws": 2} | changes))
    assert any(len(step) == 3 for step in trained), "the parts of a step drew different experts"


@long
def test_adapters_of_both_experts_with_a_gan(pools, tmp_path):
    """The student's step passes one expert of the fake score and trains the other. The first must keep no gradient."""
    boundaries = dict.fromkeys(BOUNDARIES, 0.7)
    write_checkpoints(tmp_path, ARCHITECTURE, boundaries)
    own = {"boundaries": boundaries, "lora": {"student": LoraSettings(rank=2), "fake": LoraSettings(rank=3)}}
    setup = _setup("dmd2, GAN", 6, cp=2, micro_batch_size=4, **own)
    assert {("student", "0"), ("student", "1")} <= {*_check(pools, tmp_path, setup)}
    _check(pools, tmp_path, replace(setup, dp_replicate=2, micro_batch_size=2))


def _differences():
    """Return sCM's finite difference at a time whose step crosses the boundary."""
    mesh = build_mesh(cp=1, heads=4)
    plan = plan_role("student", checkpoint=None, architecture=dict(ARCHITECTURE), boundary=0.5)
    role = tiny_role(plan, mesh)
    x, text = torch.randn(1, *LATENT_SHAPE), torch.randn(1, *TEXT_SHAPE)
    t, condition = torch.tensor([0.5001]), text_condition(text)
    with torch.no_grad():
        with pytest.raises(ValueError, match="at="):
            role.velocity(video(x), t - 0.0005, condition, at=0.5001)
        with role.reaching(0.0005):
            found = [
                role.velocity(video(x), t - step, condition, at=0.5001).video.norm().item() for step in (0.0, 0.0005)
            ]
            with pytest.raises(ValueError, match="at="):
                role.velocity(video(x), t - 0.0007, condition, at=0.5001)
    return found


def test_a_finite_difference_may_step_over_a_boundary(pools):
    here, there = pools[1].run(_differences)[0]
    assert 0 < abs(here - there) < 0.01 * here, "the same network"


def _gathered(network):
    """Return the bytes of a network's parameters that are gathered on this rank."""
    return sum(
        p._unsharded_param.untyped_storage().size()
        for module in fsdp_modules(network.module)
        for group in param_groups(module)
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")
    )


def _held(folder):
    """Return what the student's experts hold after a step, and which networks are gathered within steps.

    The latter is recorded when a block of any network runs forward or gets its gradient.
    """
    setup = _setup("dmd2", 2, dp_shard=2, micro_batch_size=2)
    trainer = make_trainer(setup, folder)
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
    for _ in range(setup.steps):  # steps of the fake score, and of the student
        trainer._train_step(data)
    trained = [i for i in (0, 1) if trainer.updates[f"student.{('high', 'low')[i]}"]]
    held = [
        (_gathered(network), any(p.grad is not None for p in network.module.parameters()))
        for network in trainer.roles["student"].networks
    ]
    return trained, held, seen


@slow
def test_an_expert_that_does_not_run_takes_its_shard_alone(pools, folder):
    """The test looks between steps, and within two steps that run experts of all three roles."""
    for trained, held, seen in pools[2].run(_held, folder):
        assert len(trained) == 1 and held == [(0, False), (0, False)]
        assert {direction for direction, *_ in seen} == {"forward", "backward"}
        assert {running[0] for _, running, _ in seen} == {"teacher", "student", "fake"}
        for direction, running, gathered in seen:
            assert gathered == [running] if direction == "forward" else set(gathered) <= {running}


@slow
def test_resume(pools, folder, tmp_path):
    """Each expert's counts, Adam state and average equal those of an uninterrupted run."""
    first = _setup("rcm", 8, cp=2, micro_batch_size=2)
    truth, updates = pools[2].run(_part, first, folder, tmp_path / "straight", 0, 8)[0]
    shutil.copytree(
        step_folder(tmp_path / "straight" / "checkpoints", 5), step_folder(tmp_path / "resumed" / "checkpoints", 5)
    )
    ours, counted = pools[2].run(_part, first, folder, tmp_path / "resumed", 5, 8)[0]
    assert counted == updates and sum(updates.values()) > 8, "rCM updates both experts in some steps"
    assert ours.losses == truth.losses[5:] and ours.norms == truth.norms[5:]
    for group, weights in truth.weights.items():
        assert all(torch.equal(ours.weights[group][n], value) for n, value in weights.items()), group


def _part(setup, folder, run_dir, first, last):
    """Train steps ``first`` to ``last`` and save after the fifth and the last one."""
    config = make_config(setup, folder, run_dir)
    config.steps = last
    config.student.ema = EmaSettings(enabled=True, decay=None, gamma=1.0)
    config.optim.student.schedule, config.optim.student.warmup = "constant", 3
    trainer = make_trainer(setup, folder, config, first)
    return trainer.record(save_at=(5, last)), trainer.updates
