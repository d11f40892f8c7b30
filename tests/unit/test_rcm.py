"""rcm in fp64: its schedule, its rollouts, both losses of the student and the fake score's."""

import math
from itertools import pairwise

import pytest
import torch
from scipy import stats

from distill.methods import METHODS, build_method
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from tests.unit.analytic import TO_LEARN, SmallNet, flow_map_error, train
from tests.unit.method_roles import (
    SHAPE,
    N,
    Net,
    Painter,
    close,
    gradients,
    is_normal,
    make_batch,
    noise_of,
    normal,
    random_at,
    student_sample,
    text_of,
    unshifted,
    wide,
)
from tests.unit.refused import refuses_all
from tests.unit.test_dmd2 import dmd_direction

FIXED = [math.tan(t) / (1 + math.tan(t)) for t in (1.5, 1.4, 1.0)]


def rcm(student=None, teacher=None, fake=None, **settings):
    settings = {"consistency_steps": 3, "student_every": 3, "tangent_warmup": 0, "guidance_scale": 2.5, **settings}
    roles = {"teacher": teacher or Net(20), "student": student or Net(21), "fake": fake or Net(22)}
    return build_method(RcmSettings(**settings), roles)


def closures(method, step, positions=range(4)):
    for role in method.roles.values():
        role.calls.clear()
        role.zero_grad()
    losses = list(method.losses(step, make_batch(positions), random_at(step, positions)))
    assert not any(role.calls for role in method.roles.values()), "losses are lazy: listing them must run nothing"
    return {loss.name: loss for loss in losses}


def step_of(method, role, length):
    """Return a step after the first ones at which ``role`` trains on rollouts of ``length``."""
    steps = range(method.settings.consistency_steps, 100)
    return next(s for s in steps if method.trained_role(s) == role and method.rollout_steps(s) == length)


# ---------------------------------------------------------------- schedule


@pytest.mark.parametrize(("first", "every"), [(0, 2), (7, 5)])
def test_whose_turn_it_is(first, every):
    method = rcm(consistency_steps=first, student_every=every)
    roles = [method.trained_role(step) for step in range(first + 4 * every)]
    assert roles == ["student"] * first + (["student"] + ["fake"] * (every - 1)) * 4
    for step, role in enumerate(roles):
        expected = {"fake_score"} if role == "fake" else {"scm"} if step < first else {"scm", "dmd"}
        assert closures(method, step).keys() == expected
        if role == "student":
            assert method.student_updates(step) == roles[:step].count("student")


@pytest.mark.parametrize("every", [2, 5])
def test_each_role_sees_every_length_in_turn(every):
    method = rcm(consistency_steps=7, student_every=every)
    for role in ("student", "fake"):
        steps = [step for step in range(7, 7 + 12 * every) if method.trained_role(step) == role]
        assert [method.rollout_steps(step) for step in steps[:12]] == [1, 2, 3, 4] * 3
        for step in steps[:4]:
            for positions in ([0, 1], [3]):
                losses = closures(method, step, positions)
                losses["dmd" if role == "student" else "fake_score"].closure()
                assert len(method.roles["student"].calls) == method.rollout_steps(step)


def test_weights():
    losses = closures(rcm(), 3)
    assert losses["scm"].weight == pytest.approx(50 / math.sqrt(N)) and losses["dmd"].weight == 1.0
    assert closures(rcm(), 0)["scm"].weight == losses["scm"].weight, "Adam's moments carry over"
    assert closures(rcm(consistency_weight=0.3), 3)["scm"].weight == 0.3
    assert closures(rcm(), 4)["fake_score"].weight == 1.0


# ---------------------------------------------------------------- rollouts


def rollout_times(method, step, positions=range(4)):
    """Return times ``(length, B)``."""
    losses = closures(method, step, positions)
    losses["dmd" if "dmd" in losses else "fake_score"].closure()
    return torch.stack([call.t for call in method.roles["student"].calls])


@pytest.mark.parametrize(("role", "length"), [("student", 1), ("student", 3), ("fake", 4)])
def test_rollouts(role, length):
    """A rollout starts from noise and adds fresh noise to each estimate. Only the last step has a gradient."""
    method = rcm()
    step = step_of(method, role, length)
    times = rollout_times(method, step)
    calls = method.roles["student"].calls
    assert len(times) == length and (times[0] == 1).all() and (times > 0).all() and (times.diff(dim=0) <= 0).all()
    assert all(len(drawn.unique()) == 4 for drawn in times[1:]), "every sample has times of its own"
    assert torch.equal(times[:, [2]], rollout_times(method, step, [2])), "whichever rank or micro-batch holds it"
    rollout_times(method, step)
    assert [call.with_grad for call in calls] == [False] * (length - 1) + [role == "student"]
    noises = [calls[0].x]
    for before, call in pairwise(calls):
        x0 = before.x - wide(before.t) * before.v
        noises.append(noise_of(call, x0))
        assert torch.equal(call.text, text_of(make_batch()))
    (score,) = method.roles["fake"].calls
    noises.append(noise_of(score, student_sample(method)))
    for noise in noises:
        assert is_normal(noise)
    together = torch.corrcoef(torch.stack([noise.detach().flatten() for noise in noises]))
    assert (together - torch.eye(len(noises))).abs().max() < 0.25, "every noise of a step is a fresh draw"


def test_random_times_are_drawn_from_p_d_and_never_rise():
    """The formula is TrigFlow's ``min(atan(r / (1 - r)), t)``, ``r = 5 u / (1 + 4 u)``; in flow times ``min(r, t)``."""
    method = rcm(student_every=2)
    steps = [s for s in range(3, 3 + 8 * 200) if method.trained_role(s) == "fake" and method.rollout_steps(s) == 4]
    times = torch.cat(
        [torch.stack([t for t, _ in method._rollout_times(s, make_batch(), random_at(s))], dim=1) for s in steps]
    )
    assert (times[:, 0] == 1).all() and (times.diff(dim=1) <= 0).all()
    drawn = unshifted(times, 5.0)
    for k, cdf in ((1, lambda u: u), (2, lambda u: 1 - (1 - u) ** 2), (3, lambda u: 1 - (1 - u) ** 3)):
        assert stats.kstest(drawn[:, k].numpy(), cdf).pvalue > 1e-3, "the least of k draws"


@pytest.mark.parametrize("length", [1, 4])
def test_fixed_times_begin_where_samples_do(length):
    """Samples start at pi/2 with ``sigma_max=null``, where DMD trains. At ``atan(sigma_max)`` it never does."""
    method = rcm(rollout="fixed", sigma_max=None)
    for role in ("student", "fake"):
        times = rollout_times(method, step_of(method, role, length))
        assert times.tolist() == [pytest.approx([time] * 4) for time in [1.0, *FIXED[: length - 1]]]
        assert times[:, 0].tolist() == method.sampling_times(length)
    assert rcm(rollout="fixed").sampling_times(length)[0] == pytest.approx(80 / 81)


# ---------------------------------------------------------------- the student's losses


@pytest.mark.parametrize(("length", "rollout"), [(1, "fixed"), (3, "random")])
def test_dmd_gradient_on_the_sample(length, rollout):
    theta = normal(4, *SHAPE, seed=9)
    method = rcm(Painter(theta), rollout=rollout)
    step = step_of(method, "student", length)
    loss = closures(method, step)["dmd"]
    loss.closure().backward()
    direction = dmd_direction(method, theta)
    assert close(method.roles["student"].theta.grad, direction, 1e-10)
    assert not gradients(method.roles["teacher"]) and not gradients(method.roles["fake"])
    flow = method.roles["student"].calls[-1].t
    sin = torch.sin(torch.atan2(flow, 1 - flow))
    expected = (sin * (4 * N * direction).flatten(1).square().mean(1).sqrt()).sum()
    total, count = method.observations.drain()["output_gradient/dmd"]
    assert count == 4 and total == pytest.approx(float(expected)), "of F: dx_G/dF is -sin t"


def test_the_consistency_loss_is_that_of_scm():
    """The loss has its own weight in what is observed, and warms up with the student's updates."""
    roles = {"teacher": Net(20), "student": Net(21)}
    for step, updates in ((2, 2), (9, 5)):
        method = rcm(tangent_warmup=10)
        loss = closures(method, step)["scm"]
        value = loss.closure()
        single = build_method(ScmSettings(tangent_warmup=10, guidance_scale=2.5), roles)
        single.student_updates = lambda _, updates=updates: updates
        (expected,) = single.losses(step, make_batch(), random_at(step))
        assert torch.equal(value, expected.closure())
        ours, theirs = (m.observations.drain()["output_gradient/scm"] for m in (method, single))
        assert ours[0] == pytest.approx(loss.weight * theirs[0])


def test_each_loss_has_a_backward_of_its_own():
    """The gradients add up, in either order."""
    method = rcm(consistency_weight=0.01)
    step = step_of(method, "student", 2)

    def gradient(names):
        losses = closures(method, step)
        for name in names:
            (losses[name].weight * losses[name].closure()).backward()
        return gradients(method.roles["student"])

    both, scm, dmd = gradient(["scm", "dmd"]), gradient(["scm"]), gradient(["dmd"])
    assert both.keys() == {"mix", "time", "caption"}
    for name in both:
        assert close(both[name] - scm[name], dmd[name], 1e-9) and close(both[name] - dmd[name], scm[name], 1e-9)


# ---------------------------------------------------------------- the fake score's loss


def test_fake_loss_is_the_weighted_error_of_x0():
    """The error of x0 in TrigFlow is ``sin t`` times the error of F."""
    theta = normal(4, *SHAPE, seed=9)
    method = rcm(Painter(theta))
    loss = closures(method, step_of(method, "fake", 2))["fake_score"].closure()
    (call,) = method.roles["fake"].calls
    assert call.with_grad and torch.equal(call.text, text_of(make_batch())) and not method.roles["teacher"].calls
    sin = torch.sin(torch.atan2(call.t, 1 - call.t))
    x0 = call.x - wide(call.t) * call.v
    assert close(loss, ((x0 - theta).square() / wide(sin) ** 2).sum() / (4 * N), 1e-10)
    loss.backward()
    assert not gradients(method.roles["student"]) and len(gradients(method.roles["fake"])) == 3


def test_batches_are_means():
    for name, step in (("scm", 0), ("dmd", 3), ("fake_score", 4)):
        method = rcm()
        losses = {
            tuple(positions): closures(method, step, positions)[name].closure()
            for positions in (range(4), [0, 1, 2, 3, 0, 1, 2, 3], [0], [1, 2, 3])
        }
        whole, twice, one, three = losses.values()
        assert close(twice, whole) and close(one / 4 + 3 * three / 4, whole), name


# ---------------------------------------------------------------- a problem with a known answer


@pytest.mark.long
def test_a_student_converges_to_the_flow_map():
    """The fake score starts from the teacher, too."""
    problem = TO_LEARN[0]
    student, fake = SmallNet(problem, width=32), SmallNet(problem, width=32, seed=1)
    assert flow_map_error(problem, student) > 0.6
    settings = RcmSettings(guidance_scale=1.0, tangent_warmup=0, consistency_steps=300, student_every=2)
    train(build_method(settings, {"teacher": problem, "student": student, "fake": fake}), problem, 600, 1e-2)
    assert flow_map_error(problem, student) < 0.05


# ---------------------------------------------------------------- settings


def test_refused_settings():
    refuses_all(RcmSettings, {"consistency_steps": -1}, {"student_every": 1}, {"consistency_weight": 0.0})
    refuses_all(RcmSettings, {"rollout": "none"}, {"tangent": "none"})


@pytest.mark.parametrize("steps", [1, 30, 61])
@pytest.mark.parametrize(("alone", "every", "mids"), [(0, 2, 1), (10, 5, 3), (100, 3, 0)])
def test_representative_steps_have_the_mean_rollout_of_all(steps, alone, every, mids):
    """A planner simulates the mean of a cost that grows linearly with a rollout's steps."""
    settings = RcmSettings(consistency_steps=alone, student_every=every, mid_times=[1.5, 1.4, 1.0][:mids])
    method = METHODS["rcm"][0](settings, {})

    def cost(step):
        return 3.0 if step < alone else 10.0 + 7.0 * method.rollout_steps(step)

    for role in ("student", "fake"):
        all_steps = [step for step in range(steps) if method.trained_role(step) == role]
        shares = method.representative_steps(role, steps)
        assert set(shares) <= set(all_steps) and bool(shares) == bool(all_steps) and len(shares) <= 3
        if all_steps:
            mean = sum(map(cost, all_steps)) / len(all_steps)
            assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0
            assert sum(share * cost(step) for step, share in shares.items()) == pytest.approx(mean)
            assert cost(next(iter(shares))) == max(map(cost, all_steps)), "the largest first"
