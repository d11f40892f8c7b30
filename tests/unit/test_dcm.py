"""DCM in float64, against its formulas and against the map of its own Euler grid."""

from contextlib import contextmanager

import pytest
import torch
from scipy import stats

from distill.methods import build_method
from distill.methods.common.schedules import euler_times, widen
from distill.methods.dcm import Dcm, DcmSettings
from tests.unit import analytic
from tests.unit.analytic import PROBLEMS
from tests.unit.method_roles import (
    Net,
    close,
    gradients,
    is_normal,
    make_batch,
    null_text_of,
    random_at,
    run_loss,
    text_of,
    wide,
)

STEPS, SHIFT = 6, 3.0


class EulerMap(analytic.ExactStudent):
    """Student whose ``x0`` is the end of Euler's method on the grid. Its parameters are 0."""

    def __init__(self, problem, steps):
        super().__init__(problem)
        self.grid = euler_times(steps, SHIFT)

    def exact(self, x, t, condition, r):
        y = x
        for time, following in zip(self.grid, self.grid[1:], strict=False):
            started = widen(t >= time - 1e-9, x)
            v = self.problem.velocity(y, torch.full_like(t, time), condition)
            y = torch.where(started, y + (following - time) * v, y)
        return (x - y) / widen(t.clamp_min(1e-3), x)


def dcm(student=None, teacher=None, **settings) -> Dcm:
    chosen = {"grid_steps": STEPS, "shift": SHIFT, "guidance_scale": 1.0} | settings
    return build_method(DcmSettings(**chosen), {"teacher": teacher or Net(7), "student": student or Net(1)})


def run_on(problem, method, step=0):
    (loss,) = method.losses(step, analytic.make_batch(problem, 6), random_at(step, range(6)))
    loss.closure().backward()


@pytest.mark.parametrize(("problem", "steps"), [(PROBLEMS[0], 1), (PROBLEMS[1], STEPS)], ids=["gaussian", "mixture"])
def test_the_map_of_the_euler_grid_leaves_no_gradient(problem, steps):
    student = EulerMap(problem, steps)
    method = dcm(student, problem, grid_steps=steps)
    for step in range(4):
        run_on(problem, method, step)
    assert student.scale.grad.abs() < 1e-10 and student.offset.grad.abs().max() < 1e-10
    other = EulerMap(problem, steps + 1)
    run_on(problem, dcm(other, problem, grid_steps=steps))
    assert other.scale.grad.abs() > 1e-4, "another grid's map is not the optimum"


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_loss_and_gradient_by_the_formula(scale):
    method, batch = dcm(guidance_scale=scale), make_batch()
    teacher, student = (method.roles[name] for name in ("teacher", "student"))
    loss = run_loss(method, 0)
    loss.backward()
    ours = gradients(student)
    following, call = student.calls
    x, t, next_t = call.x, call.t, following.t
    assert call.with_grad and not following.with_grad
    grid = torch.tensor(euler_times(STEPS, SHIFT), dtype=torch.float64)
    node = (t[:, None] - grid).abs().argmin(1)
    assert torch.equal(t, grid[node]) and torch.equal(next_t, grid[node + 1])
    c, u = (teacher.formula(x, t, text) for text in (text_of(batch), null_text_of(batch)))
    followed = x + wide(next_t - t) * (u + scale * (c - u))
    assert close(following.x, followed)
    student.zero_grad()
    target = (followed - wide(next_t) * student.formula(followed, next_t, text_of(batch))).detach()
    prediction = x - wide(t) * student.formula(x, t, text_of(batch))
    truth = ((prediction - target) ** 2).sum() / prediction.numel()
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-12)
    assert all(close(ours[name], gradient) for name, gradient in gradients(student).items())
    noise = (x - (1 - wide(t)) * batch.latents.video) / wide(t)
    assert is_normal(noise)


def test_nodes_are_uniform_and_each_samples_own():
    student = Net(1)
    run_loss(dcm(student), 0, range(1200), make_batch(range(1200), 1200))
    grid = torch.tensor(euler_times(STEPS, SHIFT), dtype=torch.float64)
    node = (student.calls[-1].t[:, None] - grid).abs().argmin(1)
    counts = torch.bincount(node, minlength=STEPS + 1)
    assert counts[STEPS] == 0
    assert stats.chisquare(counts[:STEPS].numpy()).pvalue > 1e-3


def test_the_target_may_be_the_average():
    student, inside = Net(1), []
    method = dcm(student, target="ema")

    @contextmanager
    def average():
        kept = student.time.data.clone()
        student.time.data += 0.5
        inside.append(len(student.calls))
        yield
        inside.append(len(student.calls))
        student.time.data = kept

    method.student_average = average
    loss = run_loss(method, 0)
    assert inside == [0, 1], "the target alone"
    following, call = student.calls
    prediction = call.x - wide(call.t) * student.formula(call.x, call.t, call.text)
    student.time.data += 0.5
    target = following.x - wide(following.t) * student.formula(following.x, following.t, call.text)
    assert loss.item() == pytest.approx((prediction - target).square().mean().item(), rel=1e-12)
