"""Stand-ins for roles that record their arguments, so that the oracles of the method tests know the drawn noise and
times. All in fp64; B samples of N elements.
"""

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor, nn

from distill.methods import Batch, build_method
from distill.methods.dmd2 import Dmd2, Dmd2Settings
from distill.methods.flow_matching import FlowMatching, FlowMatchingSettings
from fsdp_cp.rng import StepRandom
from tests.oracles.samples import Stub, video
from tests.oracles.tiny_wan import text_condition

SHAPE = (2, 3, 4, 4)  # C, T, H, W
N = math.prod(SHAPE)
TEXT = (3, 5)


def wide(t: Tensor) -> Tensor:
    return t.view(-1, 1, 1, 1, 1)


@dataclass
class Call:
    x: Tensor
    t: Tensor
    text: Tensor
    v: Tensor
    with_grad: bool
    r: Tensor | None = None


class Recorder(Stub, nn.Module):
    """Role that records its calls."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []
        self.logit_calls: list[Call] = []

    def of_video(self, x, t, condition, r, clean):
        assert clean is None
        text = condition.tensors["text"]
        assert x.shape[1:] == SHAPE and t.shape == (len(x),) and text.shape == (len(x), *TEXT)
        v = self.formula(x, t, text)
        self.calls.append(Call(x, t, text, v.detach(), torch.is_grad_enabled(), r))
        return v

    def logits(self, x, t, condition, r=None, at=None):
        x, text = x.video, condition.tensors["text"]
        assert x.shape[1:] == SHAPE and t.shape == (len(x),) and text.shape == (len(x), *TEXT)
        d = self.judge(x, t, text)
        self.logit_calls.append(Call(x, t, text, d.detach(), torch.is_grad_enabled(), r))
        return d


class Net(Recorder):
    """Small nonlinear network that mixes channels and depends on time and caption."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.mix = nn.Parameter(torch.randn(2, 2, generator=generator, dtype=torch.float64))
        self.time = nn.Parameter(torch.randn((), generator=generator, dtype=torch.float64))
        self.caption = nn.Parameter(torch.randn(TEXT, generator=generator, dtype=torch.float64))

    def formula(self, x, t, text):
        moved = torch.einsum("oc,bcthw->bothw", self.mix, torch.tanh(x))
        return moved * (1 + self.time * wide(t)) + wide((text * self.caption).mean((1, 2)))


class Judge(Net):
    """Network with a discriminator of two logits, which share ``mix`` and ``caption``."""

    def __init__(self, seed):
        super().__init__(seed)
        self.head = nn.Parameter(normal(2, *SHAPE, seed=seed))

    def judge(self, x, t, text):
        return (self.formula(x, t, text)[:, None] * self.head).flatten(2).mean(2) * 5


class Painter(Recorder):
    """Role whose x0 is always ``theta`` (a row per global position), so that dL/dtheta is dL/dx_G."""

    def __init__(self, theta: Tensor):
        super().__init__()
        self.theta = nn.Parameter(theta)

    def formula(self, x, t, text):
        return (x - self.theta[: len(x)]) / wide(t)


class Gaussian(Recorder):
    """Exact velocity for data from N(mean, std^2), where ``mean`` is the caption embedding's first number."""

    def __init__(self, std):
        super().__init__()
        self.std = std

    def formula(self, x, t, text):
        t, mean = wide(t), wide(text[:, 0, 0])
        x0 = mean + (1 - t) * self.std**2 / ((1 - t) ** 2 * self.std**2 + t**2) * (x - (1 - t) * mean)
        return (x - x0) / t

    def score(self, x, t, text):
        t, mean = wide(t), wide(text[:, 0, 0])
        return -(x - (1 - t) * mean) / ((1 - t) ** 2 * self.std**2 + t**2)


class Point(Recorder):
    """Exact velocity for data of one clip, whose elements are all the caption embedding's first number."""

    def formula(self, x, t, text):
        return (x - wide(text[:, 0, 0])) / wide(t)


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_batch(positions=range(4), count=4):
    """Return the samples at ``positions`` of a fixed global batch of ``count``, with states at three times."""
    positions = list(positions)
    text = normal(count, *TEXT, seed=2)[positions]
    return Batch(
        latents=video(normal(count, *SHAPE, seed=1)[positions]),
        condition=text_condition(text, normal(*TEXT, seed=3), normal(*TEXT, seed=13)),
        states=video(normal(count, 3, *SHAPE, seed=4)[positions]),
    )


def text_of(batch: Batch) -> Tensor:
    return batch.condition.tensors["text"]


def null_text_of(batch: Batch) -> Tensor:
    """Return the embedding of the negative prompt, for every sample."""
    return batch.condition.null_values["text"].expand_as(text_of(batch))


def random_at(step, positions=range(4)):
    return StepRandom(seed=11, step=step, positions=list(positions))


def dmd2(student=None, teacher=None, fake=None, **settings) -> Dmd2:
    settings = Dmd2Settings(**{"step_list": [1.0, 0.8, 0.5], "shift": 3.0, "guidance_scale": 2.5, **settings})
    roles = {"teacher": teacher or Net(20), "student": student or Net(21), "fake": fake or Net(22)}
    return build_method(settings, roles)


def run_loss(method, step, positions=range(4), batch=None) -> Tensor:
    for role in method.roles.values():
        role.calls.clear()
        role.logit_calls.clear()
    (loss,) = method.losses(step, batch or make_batch(positions), random_at(step, positions))
    assert loss.weight == 1.0
    assert not any(role.calls for role in method.roles.values()), "losses are lazy: listing them must run nothing"
    return loss.closure()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def close(a, b, tolerance=1e-12):
    return (a - b).norm() <= tolerance * b.norm()


def noise_of(call, x0) -> Tensor:
    """Return the noise in the state of a call, whose clean samples are ``x0``."""
    return (call.x - (1 - wide(call.t)) * x0) / wide(call.t)


def is_normal(noise) -> bool:
    """Return whether all numbers of ``noise`` may be standard normal draws."""
    return stats.kstest(noise.detach().flatten().numpy(), "norm").pvalue > 1e-3


def student_sample(method) -> Tensor:
    """Return x_G of the last loss."""
    last = method.roles["student"].calls[-1]
    return last.x - wide(last.t) * last.v


def flow_matching(student=None, **settings) -> FlowMatching:
    return build_method(FlowMatchingSettings(**settings), {"student": student or Net(5)})


def times_and_texts(method, count=1500, null=0.0):
    """Return the student's times and texts at many positions. Captions are 1, empty ones 0, negative ones ``null``."""
    role = Recorder()
    role.formula = lambda x, t, text: x
    method.roles = {name: role for name in method.roles}
    batch = Batch(
        latents=video(torch.zeros(count, *SHAPE, dtype=torch.float64)),
        condition=text_condition(
            torch.ones(count, *TEXT, dtype=torch.float64),
            torch.full(TEXT, null, dtype=torch.float64),
            torch.zeros(*TEXT, dtype=torch.float64),
        ),
    )
    (loss,) = method.losses(1, batch, random_at(1, range(count)))
    loss.closure()
    call = role.calls[-1]
    return call.t, call.text


def are_uniform_then_shifted_then_clamped(t, shift, least, most):
    """Return whether times ``t`` are uniform draws, shifted and then clamped to the bounds."""
    inside = t[(t > least) & (t < most)]
    low, high = unshifted(least, shift), unshifted(most, shift)
    expected = [low, high - low, 1 - high]
    found = [(t == least).sum(), len(inside), (t == most).sum()]
    assert sum(found) == len(t)
    assert stats.kstest(unshifted(inside, shift).numpy(), "uniform", (low, high - low)).pvalue > 1e-3
    assert stats.chisquare([int(n) for n in found], [p * len(t) for p in expected]).pvalue > 1e-3
    return True


def unshifted(t, shift):
    return t / (shift - (shift - 1) * t)
