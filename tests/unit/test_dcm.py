"""DCM in float64, against its formulas and against the map of its own Euler grid."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import nn

from distill.methods import build_method
from distill.methods.common.schedules import euler_times, widen
from distill.methods.dcm import Dcm, DcmSettings
from fsdp_cp.rng import StepRandom
from tests.oracles.samples import Stub
from tests.oracles.tiny_wan import text_condition
from tests.unit.analytic import PROBLEMS, TEXT, make_batch, normal
from tests.unit.method_roles import text_of

STEPS, SHIFT = 6, 3.0


class EulerMap(Stub, nn.Module):
    """Student whose ``x0`` is the end of Euler's method on the grid. Its parameters are 0."""

    def __init__(self, teacher, steps=STEPS):
        super().__init__()
        self.teacher, self.grid = teacher, euler_times(steps, SHIFT)
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def of_video(self, x, t, condition, **_):
        y = x
        for time, following in zip(self.grid, self.grid[1:], strict=False):
            started = widen(t >= time - 1e-9, x)
            v = self.teacher.velocity(y, torch.full_like(t, time), condition)
            y = torch.where(started, y + (following - time) * v, y)
        return (1 + self.scale) * (x - y) / widen(t.clamp_min(1e-3), x) + self.offset


class Net(Stub, nn.Module):
    """Nonlinear network of time and caption that records its calls."""

    def __init__(self, seed):
        super().__init__()
        self.mix, self.time = nn.Parameter(normal(2, 2, seed=seed)), nn.Parameter(normal(1, seed=seed + 1))
        self.calls = []

    def of_video(self, x, t, condition, **_):
        text = condition.tensors["text"]
        self.calls.append((x, t, text, torch.is_grad_enabled()))
        moved = torch.einsum("oc,bcthw->bothw", self.mix, torch.tanh(x))
        return moved * (1 + self.time * widen(t, x)) + widen(text.mean((1, 2)), x)


def dcm(student, teacher, **settings) -> Dcm:
    chosen = {"grid_steps": STEPS, "shift": SHIFT, "guidance_scale": 1.0} | settings
    return build_method(DcmSettings(**chosen), {"teacher": teacher, "student": student})


def run_loss(method, problem=PROBLEMS[0], step=0, positions=range(6), null=0.0, caption=0.0):
    positions = list(positions)
    batch = make_batch(problem, max(positions) + 1)
    batch = replace(
        batch,
        latents=batch.latents[positions],
        condition=text_condition(text_of(batch)[positions] + caption, torch.full(TEXT, null, dtype=torch.float64)),
    )
    (loss,) = method.losses(step, batch, StepRandom(seed=5, step=step, positions=positions))
    return loss.closure(), batch


@pytest.mark.parametrize(("problem", "steps"), [(PROBLEMS[0], 1), (PROBLEMS[1], STEPS)], ids=["gaussian", "mixture"])
def test_the_map_of_the_euler_grid_leaves_no_gradient(problem, steps):
    student = EulerMap(problem, steps)
    method = dcm(student, problem, grid_steps=steps)
    for step in range(4):
        run_loss(method, problem, step)[0].backward()
    assert student.scale.grad.abs() < 1e-10 and student.offset.grad.abs() < 1e-10
    other = EulerMap(problem, steps + 1)
    run_loss(dcm(other, problem, grid_steps=steps), problem)[0].backward()
    assert other.scale.grad.abs() > 1e-4, "another grid's map is not the optimum"


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_loss_and_gradient_by_the_formula(scale):
    student, teacher = Net(1), Net(7)
    method = dcm(student, teacher, guidance_scale=scale)
    loss, batch = run_loss(method, null=0.3, caption=0.8)
    loss.backward()
    ours = [p.grad.clone() for p in student.parameters()]
    (target_call, call) = student.calls
    x, t, _, with_grad = call
    next_x, next_t, _, target_with_grad = target_call
    assert with_grad and not target_with_grad
    grid = torch.tensor(euler_times(STEPS, SHIFT), dtype=torch.float64)
    node = (t[:, None] - grid).abs().argmin(1)
    assert torch.equal(t, grid[node]) and torch.equal(next_t, grid[node + 1])
    null = text_condition(torch.full_like(text_of(batch), 0.3))
    c, u = teacher.velocity(x, t, batch.condition), teacher.velocity(x, t, null)
    followed = x + widen(next_t - t, x) * (u + scale * (c - u))
    assert (next_x - followed).norm() < 1e-12 * followed.norm()
    student.zero_grad()
    target = (followed - widen(next_t, x) * student.velocity(followed, next_t, batch.condition)).detach()
    prediction = x - widen(t, x) * student.velocity(x, t, batch.condition)
    truth = ((prediction - target) ** 2).sum() / prediction.numel()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-12)
    for found, parameter in zip(ours, student.parameters(), strict=True):
        assert (found - parameter.grad).norm() < 1e-12 * parameter.grad.norm()
    noise = (x - (1 - widen(t, x)) * batch.latents.video) / widen(t, x)
    assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3


def test_nodes_are_uniform_and_each_samples_own():
    student = Net(1)
    run_loss(dcm(student, Net(7)), positions=range(1200))
    grid = torch.tensor(euler_times(STEPS, SHIFT), dtype=torch.float64)
    node = (student.calls[-1][1][:, None] - grid).abs().argmin(1)
    counts = torch.bincount(node, minlength=STEPS + 1)
    assert counts[STEPS] == 0
    assert stats.chisquare(counts[:STEPS].numpy()).pvalue > 1e-3


def test_the_target_may_be_the_average():
    student, inside = Net(1), []
    method = dcm(student, Net(7), target="ema")

    @contextmanager
    def average():
        kept = student.time.data.clone()
        student.time.data += 0.5
        inside.append(len(student.calls))
        yield
        inside.append(len(student.calls))
        student.time.data = kept

    method.student_average = average
    loss, batch = run_loss(method)
    assert inside == [0, 1], "the target alone"
    (next_x, next_t, _, _), (x, t, _, _) = student.calls
    prediction = x - widen(t, x) * student.velocity(x, t, batch.condition)
    student.time.data += 0.5
    target = next_x - widen(next_t, x) * student.velocity(next_x, next_t, batch.condition)
    assert loss.item() == pytest.approx((prediction - target).square().mean().item(), rel=1e-12)


def test_a_mean_over_samples():
    method = dcm(Net(1), Net(7))
    whole = run_loss(method)[0].item()
    parts = [run_loss(method, positions=p)[0].item() * len(p) / 6 for p in ([0, 4], [1, 2, 3], [5])]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)
