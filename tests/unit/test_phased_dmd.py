"""Phased DMD: the high phase's kernel, target, weight and comparison, on Gaussians in closed form, and its settings."""

from contextlib import nullcontext

import pytest
import torch
from scipy import stats

from distill.config import compose_config
from distill.methods.common.distribution_matching import project_out
from distill.methods.common.phases import CLEAN, Phase
from distill.methods.dmd2 import Dmd2, Dmd2Settings
from distill.run.setup import plan_run
from models.sample import Sample
from tests.oracles.samples import video
from tests.unit.method_roles import (
    N,
    Net,
    close,
    dmd2,
    gradients,
    is_normal,
    make_batch,
    noise_of,
    null_text_of,
    run_loss,
    text_of,
    wide,
)
from tests.unit.refused import refused

ENDS = [0.0, 0.3, 0.83]
SPREAD = 0.6
"""Standard deviation of the data, which have mean 0."""


def coefficients(end, t):
    """Return the factors of data, of the noise at ``end``, and of further noise, in ``x_s``, ``x_t`` and the target.

    All are linear in these three, so their covariances are exact."""
    basis = torch.eye(3, dtype=torch.float64)
    x_s, noise = (1 - end) * basis[0] + end * basis[1], basis[2]
    as_samples = [video(x.view(3, 1)) for x in (x_s, noise)]
    time, phase = torch.full((3,), t, dtype=torch.float64), Phase(end)
    x_t, target = phase.add_noise(*as_samples, time), phase.velocity(*as_samples, time)
    return x_s, x_t.video.flatten(), target.video.flatten(), phase.weight(video(x_s.view(3, 1)), time).video[0].item()


def covariance(x, y):
    return float((x * y * torch.tensor([SPREAD**2, 1.0, 1.0], dtype=torch.float64)).sum())


def times(end):
    return [end + share * (1 - end) for share in (0.02, 0.2, 0.5, 0.9, 0.98)]


@pytest.mark.parametrize("end", ENDS)
def test_marginal_and_mean_of_the_target_are_those_of_the_flow(end):
    for t in times(end):
        x_s, x_t, target, _ = coefficients(end, t)
        variance = (1 - t) ** 2 * SPREAD**2 + t**2
        assert covariance(x_t, x_t) == pytest.approx(variance) and x_t[0] == pytest.approx(1 - t)
        slope = (t - (1 - t) * SPREAD**2) / variance
        assert covariance(target, x_t) / variance == pytest.approx(slope)
        naive = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64) - x_s
        assert (covariance(naive, x_t) / variance == pytest.approx(slope)) == (end == 0)


@pytest.mark.parametrize("end", ENDS)
def test_the_weight_is_one_over_one_plus_the_targets_excess_variance(end):
    """Given data and the noise in ``x_t``, the target still varies along one direction."""
    for t in times(end):
        _, x_t, target, weight = coefficients(end, t)
        along = torch.stack([x_t[1:] / x_t[1:].norm(), x_t[1:].flip(0) * torch.tensor([1, -1]) / x_t[1:].norm()])
        assert 1 / weight - 1 == pytest.approx(float(along[1] @ target[1:]) ** 2, abs=1e-9)
    if end == 0.83:
        excess = [1 / coefficients(0.8333, t)[3] - 1 for t in (0.8433, 0.8533, 0.98)]
        assert excess == pytest.approx([256, 131, 26], rel=0.04)


@pytest.mark.parametrize("end", ENDS)
def test_an_exact_fake_score_leaves_no_trace_of_the_query(end):
    """``x_s`` less its posterior mean does not depend on the query; less that of x0 it does, so that a projection along
    it would take out signal."""
    for t in times(end):
        x_s, x_t, target, _ = coefficients(end, t)
        variance = covariance(x_t, x_t)
        slope = covariance(target, x_t) / variance
        query, time = video(torch.ones(1, 1, dtype=torch.float64)), torch.full((1,), t, dtype=torch.float64)
        estimate = Phase(end).estimate(query, query * slope, time).video.item()
        assert covariance(x_s, x_t) / variance - estimate == pytest.approx(0.0, abs=1e-12)
        of_x0 = CLEAN.estimate(query, query * slope, time).video.item()
        assert end == 0 or abs(covariance(x_s, x_t) / variance - of_x0) > 1e-5


def test_parts_have_their_own_times_and_a_phase_without_end_is_the_flow():
    x = Sample({"video": torch.ones(2, 1, 1), "audio": torch.ones(2, 1, 1)}, {"audio": 0.5})
    t, phase = torch.tensor([0.9, 0.95]), Phase(0.8)
    both = phase.add_noise(x, x * 0, t)
    for part in x.parts:
        assert torch.allclose(both.parts[part].flatten(), (1 - x.time(part, t)) / (1 - x.time(part, 0.8)))
    assert phase.weight(x, t).parts["audio"].shape == (2,)
    assert torch.equal(CLEAN.velocity(x, 3 * x, t).video, 2 * x.video)


# ---------------------------------------------------------------- the method


class Expert(Net):
    """Stand-in for a role of two experts, of which the first trains."""

    has_experts, trained_experts, reach = True, (0,), 0.0

    def __init__(self, seed, boundary):
        super().__init__(seed)
        self.boundaries, self.served = (boundary,), []

    def velocity(self, x, t, condition, r=None, *, at=None, clean=None):
        self.served.append(at)
        return super().velocity(x, t, condition, r, at=at, clean=clean)

    def trains_at(self, time):
        return (time >= self.boundaries[0]) == (self.trained_experts == (0,))

    def reaching(self, distance):
        self.reach = max(self.reach, distance)
        return nullcontext()


def phased(**settings):
    roles = {"student": Expert(21, 0.7), "teacher": Expert(20, 0.75), "fake": Expert(22, 0.6)}
    return dmd2(**roles, phased=True, student_sampler="ode", shift=2.0, **settings)


@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize("step", [0, 6, 12, 18])
def test_the_high_phase_compares_samples_at_the_border(step, projection):
    """The step with a gradient leads from a high time to the border .5; scores see noise from there on."""
    s, method = 0.5, phased(projection=projection)
    run_loss(method, step).backward()
    calls, (fake,), (real,) = (method.roles[name].calls for name in ("student", "fake", "teacher"))
    assert [call.t[0].item() for call in calls] == [1.0, 0.8][: len(calls)], "never below the border"
    x_s, t = calls[-1].x + (s - wide(calls[-1].t)) * calls[-1].v, wide(fake.t)
    assert ((fake.t > s + 0.02) & (fake.t < 0.98)).all()
    a = (1 - t) / (1 - s)
    b = (t**2 - a**2 * s**2).sqrt()
    assert stats.kstest(((fake.x - a * x_s) / b).flatten().numpy(), "norm").pvalue > 1e-5
    teacher, batch, w = method.roles["teacher"], make_batch(), method.settings.guidance_scale
    given, null = (teacher.formula(fake.x, fake.t, text) for text in (text_of(batch), null_text_of(batch)))
    assert torch.equal(real.x[:4], fake.x)

    def at_border(v):
        return (1 - s) * (fake.x - t * v) + a * s**2 / t * (fake.x + (1 - t) * v)

    x_real, x_fake = at_border(null + w * (given - null)), at_border(fake.v)
    d, r = (x_fake - x_real).detach(), x_s - x_fake
    if projection:
        d = project_out(video(d), video(r))[0].video
    direction = d / wide((x_s - x_real).abs().mean((1, 2, 3, 4))) / (4 * N)
    ours, student = gradients(method.roles["student"]), method.roles["student"]
    student.zero_grad()
    x = calls[-1].x.detach()
    ((s - wide(calls[-1].t)) * student.formula(x, calls[-1].t, calls[-1].text)).backward(direction.detach())
    assert all(close(ours[name], gradient, 1e-9) for name, gradient in gradients(student).items())
    assert teacher.served == method.roles["fake"].served == [1.0], "the high experts"
    assert teacher.reach == pytest.approx(0.25) and method.roles["fake"].reach == pytest.approx(0.1)


def test_the_fake_score_of_the_high_phase_fits_the_weighted_target():
    s, method = 0.5, phased()
    loss = run_loss(method, 1)
    last, (fake,) = method.roles["student"].calls[-1], method.roles["fake"].calls
    x_s, t = last.x + (s - wide(last.t)) * last.v, wide(fake.t)
    a = (1 - t) / (1 - s)
    b = (t**2 - a**2 * s**2).sqrt()
    noise, c = (fake.x - a * x_s) / b, (t + (1 - t) * s**2 / (1 - s) ** 2) / b
    errors = (fake.v - (c * noise - x_s / (1 - s))).square().mean((1, 2, 3, 4))
    weights = 1 / (1 + ((s / t) * (b / (1 - s) + a * c)).flatten() ** 2)
    assert close(loss, (weights * errors).mean(), 1e-10)


def test_the_low_phase_is_dmd2_below_the_border():
    method, plain = phased(), dmd2(student_sampler="ode")
    for role in method.roles.values():
        role.trained_experts, role.has_experts = (1,), role is method.roles["student"]
    for step in (0, 1):
        run_loss(method, step)
        calls, (fake,) = method.roles["student"].calls, method.roles["fake"].calls
        assert [call.t[0].item() for call in calls] == [1.0, 0.8, 0.5]
        assert ((fake.t > 0.02) & (fake.t < 0.5)).all() and method.roles["fake"].reach == 0
        x_g = calls[-1].x - 0.5 * calls[-1].v
        noise = noise_of(fake, x_g)
        assert is_normal(noise)
    assert plain.phase is CLEAN


def test_a_plan_runs_an_expert_as_one_network():
    method = dmd2(phased=True, student_sampler="ode")
    assert method.phase is CLEAN
    for step in (0, 1):
        assert run_loss(method, step).isfinite()


def test_the_border_is_the_first_time_below_the_boundary():
    settings = Dmd2Settings()
    assert settings.border(0.875) == 0.8333
    even = Dmd2Settings(step_list=[1.0, 0.9545, 0.875, 0.7])
    assert even.border(0.875) == 0.7, "a time that equals the boundary is the high expert's"
    assert settings.border(0.5) is None


def test_what_does_not_fit_is_refused():
    words = {"phased": True, "student_sampler": "ode"}
    for other in (
        {"student_sampler": "renoise"}, {"student_input": "clips"}, {"data_forcing": 0.5}, {"gan_weight_student": 0.1},
        {"score_noise": "own"}, {"score_interval": "step"}, {"fake_knows_last_step": True},
    ):  # fmt: skip
        with refused("method."):
            Dmd2Settings(**words | other)
    config = compose_config(["mesh.cp=1", "device=cpu", "method.phased=true", "method.student_sampler=ode"])
    with refused("method.phased=true"):
        plan_run(config)
    settings, both = Dmd2Settings(**words), {"student": (0.875,), "fake": (0.875,)}
    for trained in ("high", "low"):
        Dmd2.check_experts(settings, both, trained)
    with refused("student.experts"):
        Dmd2.check_experts(settings, both, "both")
    for trained in ("high", "low"):
        with refused("method.step_list"):
            Dmd2.check_experts(settings, {"student": (0.6,)}, trained)
    with refused("fake.checkpoint"):
        Dmd2.check_experts(settings, both | {"fake": (0.8,)}, "low")
    for limits in ({"min_time": 0.0}, {"min_time": 0.2}, {"max_time": 0.8}):
        with refused("method.min_time"):
            Dmd2.check_experts(Dmd2Settings(**words | limits), both, "high")
    with refused("method.rollout=full"):
        Dmd2.check_experts(Dmd2Settings(**words, rollout="full"), both, "high")


def test_the_fake_score_trains_the_students_expert():
    tiny = (
        "{num_attention_heads: 4, attention_head_dim: 12, in_channels: 3, out_channels: 3, text_dim: 32, ffn_dim: 32, "
    )
    tiny += "num_layers: 1, patch_size: [1, 2, 2], rope_max_seq_len: 64}"
    words = [f"{role}.architecture={tiny}" for role in ("teacher", "student", "fake")]
    words += [f"{role}.checkpoint=null" for role in ("teacher", "student", "fake")]
    words += [f"{role}.boundary=0.8" for role in ("teacher", "student", "fake")]
    words += ["mesh.cp=1", "device=cpu", "method.phased=true", "method.student_sampler=ode", "student.experts=high"]
    plan = plan_run(compose_config(words))
    assert {role.name: role.trained_experts for role in plan.roles} == {
        "teacher": (0, 1), "student": (0,), "fake": (0,),
    }  # fmt: skip
