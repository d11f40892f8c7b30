"""TrigFlow against problems whose trajectories are known, in fp64."""

import math

import torch
from torch.autograd import forward_ad

from distill.methods.base import guided_velocity
from distill.methods.common.derivatives import directional_derivative
from distill.methods.common.schedules import add_noise, denoise
from distill.methods.scm import add_trig_noise, flow_time, trig_denoise, trig_field
from tests.oracles.samples import video
from tests.tiers import parametrize
from tests.unit.analytic import PROBLEMS, normal, nothing
from tests.unit.method_roles import SHAPE, Net, close, make_batch, wide

TIMES = torch.tensor([1e-3, 0.2, math.pi / 4, 1.2, 1.5, math.pi / 2 - 1e-3], dtype=torch.float64)
PROBLEM_NAMES = [type(problem).__name__ for problem in PROBLEMS]


def scale_of(t):
    return wide(torch.cos(t) + torch.sin(t))


def test_states_are_those_of_rectified_flow():
    dtype = torch.float64
    t = TIMES.to(dtype)
    x0, noise = normal(len(t), 2, 3, 4, 4, seed=0).to(dtype), normal(len(t), 2, 3, 4, 4, seed=1).to(dtype)
    x = add_trig_noise(video(x0), video(noise), t).video
    assert x.dtype == flow_time(t).dtype == dtype
    torch.testing.assert_close(x, torch.cos(wide(t)) * x0 + torch.sin(wide(t)) * noise)
    torch.testing.assert_close(x / scale_of(t), add_noise(video(x0), video(noise), flow_time(t)).video)


@parametrize("problem", PROBLEMS, ids=PROBLEM_NAMES, quick=1)
def test_the_field_is_the_derivative_along_the_trajectory(problem):
    """The test includes other times than the state's, so the velocities check the flow maps too."""
    t = TIMES
    x = add_trig_noise(video(problem.sample(len(t), 3)), video(normal(len(t), *problem.shape, seed=4)), t).video

    def trajectory(at):
        return scale_of(at) * problem.flow_map(x / scale_of(t), flow_time(t), flow_time(at))

    torch.testing.assert_close(trajectory(t), x, rtol=1e-9, atol=1e-9)
    for at in (t, t.flip(0)):
        with forward_ad.dual_level():
            there, speed = forward_ad.unpack_dual(trajectory(forward_ad.make_dual(at, torch.ones_like(at))))
        torch.testing.assert_close(
            trig_field(problem, video(there), at, nothing(len(t))).video, speed, rtol=1e-7, atol=1e-7
        )


def test_guidance_is_that_of_the_fields_in_one_call():
    net, t, batch = Net(3), TIMES[:4], make_batch()
    x = normal(4, 2, 3, 4, 4, seed=5)
    guided = trig_field(net, video(x), t, batch.condition, 2.5).video
    assert len(net.calls) == 1
    c, u = trig_field(net, video(x), t, batch.condition).video, trig_field(net, video(x), t, batch.condition.null).video
    torch.testing.assert_close(guided, u + 2.5 * (c - u), rtol=1e-12, atol=1e-12)
    v = guided_velocity(net, video(x / scale_of(t)), flow_time(t), batch.condition, 2.5).video
    torch.testing.assert_close(
        trig_denoise(video(x), video(guided), t).video,
        denoise(video(x / scale_of(t)), video(v), flow_time(t)).video,
        rtol=1e-12,
        atol=1e-12,
    )


def test_modes_of_the_directional_derivative():
    net, condition = Net(3), make_batch().condition
    x, t, dx = normal(4, *SHAPE, seed=1), torch.tensor([0.1, 0.5, 1.0, 1.5]), normal(4, *SHAPE, seed=2)
    primals, tangents = (x, t.double()), (dx, torch.ones(4, dtype=torch.float64))

    def field(x, t):
        return trig_field(net, x, t, condition)

    def derivative(mode, step):
        return directional_derivative(field, video(x), t.double(), video(dx), mode=mode, step=step).video

    truth = torch.func.jvp(lambda x, t: field(video(x), t).video, primals, tangents)[1]
    exact = derivative("exact", 0.1)
    assert close(exact, truth, 1e-12) and not exact.requires_grad
    errors = [(derivative("finite_difference", step) - truth).norm() for step in (0.02, 0.01)]
    assert 3.8 < errors[0] / errors[1] < 4.2, "central differences are of second order"
