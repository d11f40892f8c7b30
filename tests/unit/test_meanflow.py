"""meanflow in fp64 against the formulas, and against data whose mean velocities are known in closed form."""

from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

from distill.methods import build_method
from distill.methods.common.schedules import widen
from distill.methods.meanflow import MeanFlow, MeanFlowSettings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.rng import StepRandom
from tests.oracles.samples import Stub, video
from tests.oracles.tiny_wan import text_condition
from tests.tiers import parametrize, slow
from tests.unit.analytic import PROBLEMS, TEXT, BatchRandom, ExactStudent, Mixture, make_batch, normal, nothing, train
from tests.unit.method_roles import is_normal, text_of
from tests.unit.refused import refuses_all

IDS = ["gaussian", "mixture"]


class SmallNet(Stub, nn.Module):
    """Velocity of ``problem`` plus a network of each element and both times, zero at first. It records its calls."""

    def __init__(self, problem, width=32, seed=0, zero=True):
        super().__init__()
        self.problem, self.calls = problem, []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
            ).double()
        if zero:
            nn.init.zeros_(self.body[-1].weight)
            nn.init.zeros_(self.body[-1].bias)

    def of_video(self, x, t, condition, r, **_):
        assert r.shape == t.shape == (len(x),) and (r <= t).all()
        self.calls.append((x, t, r, torch.is_grad_enabled()))
        rows = torch.stack([x, *(widen(time, x).expand_as(x) for time in (t, r, t * r))], -1)
        return self.problem.velocity(x, t, condition) + self.body(rows)[..., 0]


def meanflow(student, teacher=None, **settings) -> MeanFlow:
    chosen = {"guidance_scale": 1.0, "interval_ratio": 0.5, "tangent_warmup": 0, "weight_power": 0.0} | settings
    return build_method(MeanFlowSettings(**chosen), {"teacher": teacher, "student": student})


def run_loss(method, step=0, count=6, problem=PROBLEMS[0]):
    batch, random = make_batch(problem, count), StepRandom(seed=5, step=step, positions=range(count))
    (loss,) = method.losses(step, batch, random)
    return loss.closure(), batch


# ---------------------------------------------------------------- known answers


@parametrize(("problem", "power"), list(zip(PROBLEMS, (1.0, 0.0), strict=True)), ids=IDS, quick=1)
def test_exact_mean_velocities_leave_no_gradient(problem, power):
    student = ExactStudent(problem)
    method = meanflow(
        student, problem, tangent_warmup=3, interval_ratio=1.0, time_shift=2.0, weight_power=power, weight_floor=1.0
    )
    for step in (3, 4, 9):
        loss, _ = run_loss(method, step, problem=problem)
        loss.backward()
    for parameter in student.parameters():
        assert parameter.grad.abs().max() < 1e-8
    assert method.observations.drain()["jvp_norm"][0] > 1, "the derivative is not zero there"
    student.scale.data.fill_(0.01)
    run_loss(method, 9, problem=problem)[0].backward()
    assert student.scale.grad.abs() > 1e-3, "another velocity has one"


@slow
def test_a_student_converges_to_the_flow_map():
    problem = Mixture(shape=(1, 1, 1, 1), weights=(0.4, 0.6), means=(-1.0, 1.0), stds=(0.5, 0.6))
    student = SmallNet(problem, width=48)
    method = meanflow(student, problem, interval_ratio=1.0, time="uniform")
    noise = normal(512, 1, 1, 1, 1, seed=3)
    zero = torch.zeros(512, dtype=torch.float64)
    truth = problem.flow_map(noise, zero + 1, zero)

    def error(steps):
        random = StepRandom(seed=0, step=0, positions=range(512))
        sample = method.generate("student", video(noise), nothing(512), steps, random).video
        return relative_error(sample, truth)

    before = error(1)
    train(method, problem, 400, 3e-2, count=256, kind=BatchRandom)
    assert before > 0.9, "one Euler step of the teacher is far from its flow map"
    assert error(1) < 0.15
    assert error(4) < 0.15


@pytest.mark.parametrize("problem", PROBLEMS, ids=IDS)
def test_exact_mean_velocities_sample_the_flow_map_in_any_number_of_steps(problem):
    method = meanflow(ExactStudent(problem), problem, step_list=[1.0, 0.7, 0.2])
    noise = normal(5, *problem.shape, seed=8)
    truth = problem.flow_map(noise, torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64))
    for steps in (1, 3):
        sample = method.generate(
            "student", video(noise), nothing(5), steps, StepRandom(seed=0, step=0, positions=range(5))
        ).video
        assert relative_error(sample, truth) < 1e-9
        assert method.evaluations("student", steps) == steps


# ---------------------------------------------------------------- the loss


def reference(method, batch, v, power, floor, growth=1.0):
    """Compute the last step's loss by torch.func and the paper's formulas, at the student's inputs."""
    student = method.roles["student"]
    x, t, r, with_grad = student.calls[-1]
    assert with_grad
    _, derivative = torch.func.jvp(
        lambda x, t: student.velocity(x, t, batch.condition, r), (x, t), (v, torch.ones_like(t))
    )
    target = (v - growth * widen(t - r, x) * derivative).detach()
    total = 0.0
    for u, wanted in zip(student.velocity(x, t, batch.condition, r), target, strict=True):
        error = ((u - wanted) ** 2).sum() / u.numel()
        total = total + error / (error.detach().sqrt() + floor) ** power
    return total / len(x)


@pytest.mark.parametrize(("velocity", "power"), [("teacher", 0.0), ("data", 0.75)])
def test_gradient_equals_a_dense_reference(velocity, power):
    problem = PROBLEMS[0]
    student = SmallNet(problem, zero=False)
    method = meanflow(student, Mixture(), velocity=velocity, time_shift=3.0, weight_power=power, weight_floor=0.02)
    loss, batch = run_loss(method)
    loss.backward()
    ours = [p.grad.clone() for p in student.parameters()]
    x, t, _, _ = student.calls[-1]
    noise = (x - (1 - widen(t, x)) * batch.latents.video) / widen(t, x)
    v = noise - batch.latents.video if velocity == "data" else Mixture().velocity(x, t, batch.condition)
    truth = reference(method, batch, v, power, 0.02)
    student.zero_grad()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-10)
    for found, parameter in zip(ours, student.parameters(), strict=True):
        assert relative_error(found, parameter.grad) < 1e-9
    assert is_normal(noise)


def test_the_velocity_is_the_teachers_with_guidance():
    class Captioned(Stub, nn.Module):
        def of_video(self, x, t, condition, **_):
            return widen(condition.tensors["text"][:, 0, 0], x) * torch.ones_like(x)

    student = SmallNet(PROBLEMS[0], zero=False)
    method = meanflow(student, Captioned(), guidance_scale=3.0)
    batch = make_batch(PROBLEMS[0], 6)
    null_text = torch.full(TEXT, 0.5, dtype=torch.float64)
    batch = replace(batch, condition=text_condition(text_of(batch) + 2, null_text))
    (loss,) = method.losses(0, batch, StepRandom(seed=5, step=0, positions=range(6)))
    loss = loss.closure()
    x = student.calls[-1][0]
    v = torch.full_like(x, 0.5 + 3.0 * (2 - 0.5))
    assert loss.item() == pytest.approx(reference(method, batch, v, 0.0, 1e-3).item(), rel=1e-10)


def test_finite_difference_is_near_the_exact_derivative():
    losses = []
    for mode in ("exact", "finite_difference"):
        method = meanflow(SmallNet(PROBLEMS[1], zero=False), PROBLEMS[1], interval_ratio=1.0, jvp=mode)
        losses.append(run_loss(method, problem=PROBLEMS[1])[0].item())
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_derivative_is_warmed_up_and_costs_nothing_before():
    student = SmallNet(PROBLEMS[0], zero=False)
    method = meanflow(student, Mixture(), tangent_warmup=4, interval_ratio=1.0)
    for step, growth in ((0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (99, 1.0)):
        student.calls.clear()
        loss, batch = run_loss(method, step)
        assert len(student.calls) == (2 if growth else 1)
        x, t, r, _ = student.calls[-1]
        assert (r < t).all()
        truth = reference(method, batch, Mixture().velocity(x, t, batch.condition), 0.0, 1.0, growth)
        assert loss.item() == pytest.approx(truth.item(), rel=1e-10)


# ---------------------------------------------------------------- times


@pytest.mark.parametrize(("time", "ratio"), [("uniform", 0.25), ("logit_normal", 1.0)])
def test_times_are_the_greater_and_the_lesser_of_two_draws(time, ratio):
    problem, count = Mixture(shape=(1, 1, 1, 1)), 3000
    student = SmallNet(problem)
    method = meanflow(student, problem, time=time, interval_ratio=ratio, time_shift=3.0, logit_mean=0.4, logit_std=0.7)
    run_loss(method, count=count, problem=problem)
    _, t, r, _ = student.calls[-1]
    interval = r < t
    assert abs(interval.double().mean() - ratio) < 0.03
    assert (r[~interval] == t[~interval]).all()
    share = {}
    for name, shifted in (("t", t), ("r", r[interval])):
        u = shifted / (3 - 2 * shifted)
        share[name] = u if time == "uniform" else torch.special.ndtr((torch.logit(u) - 0.4) / 0.7)
    assert stats.kstest((share["t"] ** 2).numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest((1 - (1 - share["r"]) ** 2).numpy(), "uniform").pvalue > 1e-3


# ---------------------------------------------------------------- settings


def test_roles_and_additions():
    assert MeanFlow.roles_needed(MeanFlowSettings()) == ("teacher", "student")
    assert MeanFlow.roles_needed(MeanFlowSettings(velocity="data", guidance_scale=1.0)) == ("student",)
    assert MeanFlow.additions(MeanFlowSettings()) == {"student": ("second_time",)}


def test_settings_are_refused_by_name():
    refuses_all(
        MeanFlowSettings,
        {"time": "normal"},
        {"jvp_step": 0.0},
        {"logit_std": 0.0},
        {"weight_floor": 0.0},
        {"weight_power": -1.0},
        {"time_shift": 0.0},
        {"step_list": [0.9, 0.5]},
    )
