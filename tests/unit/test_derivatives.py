"""Directional derivatives of a small network: exact, and by finite differences."""

import torch

from distill.methods.common.derivatives import directional_derivative
from distill.methods.common.trigflow import trig_field
from tests.oracles.samples import video
from tests.unit.method_roles import SHAPE, Net, close, make_batch, normal


def test_modes_of_the_derivative():
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
