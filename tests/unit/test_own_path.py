"""Settings of PDMD's recipe for MiniMax-H3: scores on the student's own path, whole rollouts for the fake score, limits
of errors, and a clip norm for each role. In float64, with roles that record their calls.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from distill.config import compose_config
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.self_forcing import SelfForcingSettings
from distill.run.setup import plan_run
from distill.train.trainer import Trainer
from tests.unit.method_roles import (
    SHAPE,
    N,
    Painter,
    close,
    dmd2,
    gradients,
    is_normal,
    noise_of,
    normal,
    run_loss,
    student_sample,
    wide,
)
from tests.unit.refused import refused
from tests.unit.test_dmd2 import dmd_direction, student_steps
from tests.unit.test_parts import duets, random_at

LIST = [1.0, 0.8, 0.5]
OWN = {"student_sampler": "ode", "score_noise": "own", "score_interval": "step"}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_scores_are_compared_where_the_students_last_step_passes(length):
    """The query is ``(1 - t) x0 + t z`` with ``z = x_k + (1 - t_k) v``, and has no gradient."""
    method = dmd2(**OWN)
    run_loss(method, student_steps(method)[length]).backward()
    last, (fake,) = method.roles["student"].calls[-1], method.roles["fake"].calls
    start, end = LIST[length - 1], [*LIST, 0.0][length]
    assert ((fake.t > end) & (fake.t < start)).all() and len(set(fake.t.tolist())) == 4
    assert close(fake.x, last.x + wide(fake.t - last.t) * last.v), "on the straight line through the step"
    ours, student = gradients(method.roles["student"]), method.roles["student"]
    student.zero_grad()
    x = last.x.detach()
    (x - wide(last.t) * student.formula(x, last.t, last.text)).backward(dmd_direction(method, student_sample(method)))
    assert all(close(ours[name], gradient, 1e-10) for name, gradient in gradients(student).items())


def test_each_setting_works_alone():
    own = dmd2(student_sampler="ode", score_noise="own", shift=4.0)
    run_loss(own, student_steps(own)[2])
    last, (fake,) = own.roles["student"].calls[-1], own.roles["fake"].calls
    assert close(fake.x, last.x + wide(fake.t - last.t) * last.v) and (fake.t > 0.8).any()
    step = dmd2(student_sampler="ode", score_interval="step")
    run_loss(step, student_steps(step)[2])
    (fake,) = step.roles["fake"].calls
    noise = noise_of(fake, student_sample(step))
    assert ((fake.t > 0.5) & (fake.t < 0.8)).all() and is_normal(noise)


def test_the_fake_score_can_train_on_whole_rollouts_alone():
    method = dmd2(fake_rollout="full")
    fakes, students = set(), set()
    for step in range(60):
        run_loss(method, step)
        (students if method.trained_role(step) == "student" else fakes).add(len(method.roles["student"].calls))
    assert fakes == {3} and students == {1, 2, 3}
    whole = dmd2(rollout="full")
    run_loss(whole, 1)
    assert len(whole.roles["student"].calls) == 3, "the fake score follows the student"


@pytest.mark.parametrize("step", [0, 1])
def test_errors_are_limited_for_each_sample_and_have_no_gradient_above(step):
    """A limit over the batch would depend on the mesh."""
    theta, found = normal(4, *SHAPE, seed=9), {}
    theta[0] *= 30.0
    for limit in (None, 2.0):
        method = dmd2(Painter(theta.clone()), max_error=limit)
        value = run_loss(method, step)
        value.backward()
        found[limit] = value.detach(), method.roles["student"].theta.grad, gradients(method.roles["fake"])
    (plain, grad, fake), (limited, below, fake_below) = found[None], found[2.0]
    if step == 0:
        squares = (grad * 4 * N).flatten(1).square().mean(1)
        assert 0 < (squares > 2.0).sum() < 4, "some are above"
        assert close(limited, 0.5 * squares.clamp_max(2.0).mean())
        kept = wide((squares <= 2.0).double())
        assert close(below, grad * kept, 1e-10)
    else:
        assert limited < plain and all(not close(fake_below[name], fake[name], 1e-3) for name in fake)
        alone = dmd2(Painter(theta.clone()), max_error=2.0)
        one = [run_loss(alone, step, [position]).item() for position in range(1)]
        assert one[0] == 2.0, "the loud sample"


def test_an_error_that_is_not_finite_stays_so():
    theta = normal(4, *SHAPE, seed=9)
    theta[1, 0, 0, 0, 0] = torch.inf
    for step, role in ((0, "student"), (1, "fake")):
        method = dmd2(Painter(theta), max_error=2.0)
        run_loss(method, step).backward()
        assert not all(gradient.isfinite().all() for gradient in gradients(method.roles[role]).values())


def test_parts_are_limited_apart():
    settings = {"max_error": 1e-4, "audio_weight": 1.0}
    method, batch = duets(**settings)
    (loss,) = method.losses(1, batch, random_at(1))
    assert loss.closure().item() == pytest.approx(2e-4), "each of two parts is at its limit"


def test_what_does_not_fit_is_refused():
    for setting, value in (("score_noise", "own"), ("score_interval", "step")):
        for other in ({"student_sampler": "renoise"}, {"student_input": "clips"}, {"data_forcing": 0.5}):
            with refused(f"method.{setting}={value}"):
                Dmd2Settings(**{"student_sampler": "ode", setting: value} | other)
        with refused(f"method.{setting}={value}"):
            SelfForcingSettings(**{"student_sampler": "ode", setting: value})
        config = compose_config(["mesh.cp=1", "device=cpu", "method.student_sampler=ode", f"method.{setting}={value}"])
        plan_run(config)
        with refused(f"method.{setting}={value}"):
            dmd2().check_experts(config.method, {"teacher": (0.9,)}, "both")
    with refused("method.fake_knows_last_step"):
        Dmd2Settings(fake_rollout="full", fake_knows_last_step=True)
    with refused("method.max_error"):
        Dmd2Settings(max_error=0.0)


def test_a_role_can_have_its_own_clip_norm():
    config, scales = compose_config(["optim.clip=2", "optim.student.clip=0.5"]), {}
    optim = config.optim
    for role in ("student", "fake"):
        network = SimpleNamespace(update=partial(scales.__setitem__, role), moved=0, tried=0, is_stuck=False)
        Trainer._update(SimpleNamespace(config=config, skipped_in_a_row={}), role, 4.0, [network])
    assert scales == {"student": 0.125, "fake": 0.5}
    assert (optim.clip_of("student"), optim.clip_of("fake")) == (0.5, 2.0)
    assert replace(optim, clip=None).clip_of("fake") is None
    with refused("clip"):
        compose_config(["optim.student.clip=0"])
