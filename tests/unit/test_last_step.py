"""``fake_knows_last_step``: the time that the fake score of DMD2 and rCM is told, and its effect."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distill.methods import METHODS, build_method
from distill.methods.distribution_matching import distribution_matching
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.expert_times import Times
from distill.methods.rcm import RcmSettings
from distill.observations import Observations
from models.additions.registry import build_additions
from models.additions.time_conditioning import second_time
from models.families.wan import Wan
from tests.unit.analytic import Mixture, nothing
from tests.unit.method_roles import Judge, Net, make_batch, normal, random_at

DMD2 = {"step_list": [1.0, 0.8, 0.5], "fake_updates_per_student_update": 1}
SETTINGS = {
    "dmd2 with a GAN": Dmd2Settings(**DMD2, fake_knows_last_step=True, gan_weight_student=0.1, gan_r1_weight=0.1),
    "rcm": RcmSettings(consistency_steps=0, student_every=2, fake_knows_last_step=True, jvp="finite_difference"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_the_fake_score_is_told_when_the_last_step_was_and_no_other_role_is(case):
    roles = {"teacher": Net(20), "student": Net(21), "fake": Judge(22)}
    method = build_method(SETTINGS[case], roles)
    lengths = set()
    for step in range(24):
        for role in roles.values():
            role.calls.clear()
            role.logit_calls.clear()
        for loss in method.losses(step, make_batch(), random_at(step)):
            if loss.name == "scm":
                continue
            loss.closure()
        student = roles["student"].calls
        lengths.add(len(student))
        calls = roles["fake"].calls + roles["fake"].logit_calls
        assert len(calls) == (2 if "GAN" in case else 1)
        for call in calls:
            assert torch.equal(call.r, student[-1].t.repeat(len(call.x) // 4)), "the time of each sample's own rollout"
        assert all(call.r is None for name in ("teacher", "student") for call in roles[name].calls)
    assert lengths >= {1, 2, 3}


@pytest.mark.parametrize("case", SETTINGS)
def test_without_it_nothing_is_told_and_nothing_is_added(case):
    kind = METHODS[case.split()[0]][0]
    settings = SETTINGS[case]
    assert "last_step" in kind.additions(settings)["fake"]
    plain = type(settings)(**vars(settings) | {"fake_knows_last_step": False})
    assert "last_step" not in kind.additions(plain).get("fake", {})
    roles = {"teacher": Net(20), "student": Net(21), "fake": Judge(22)}
    method = build_method(plain, roles)
    for step in range(4):
        for loss in method.losses(step, make_batch(), random_at(step)):
            loss.closure()
    assert all(call.r is None for call in roles["fake"].calls + roles["fake"].logit_calls)


class _OfEachLength(nn.Module):
    """The exact score of the samples whose last step was at ``r``: one problem for each ``r``."""

    boundaries = ()

    def __init__(self, problems):
        super().__init__()
        self.problems = problems

    def velocity(self, x, t, condition, r=None, at=None):
        rows = [self.problems[float(r[i])].velocity(x[i : i + 1], t[i : i + 1], condition) for i in range(len(x))]
        return torch.cat(rows)


class _Mixed(nn.Module):
    """The exact score of the samples of all lengths together, as many of each: the velocities by their posteriors."""

    boundaries = ()

    def __init__(self, problems):
        super().__init__()
        self.problems = list(problems)

    def velocity(self, x, t, condition, r=None, at=None):
        densities = torch.stack([problem._log_density(x, t) for problem in self.problems])
        velocities = torch.stack([problem.velocity(x, t, condition) for problem in self.problems])
        return (densities.softmax(0) * velocities).sum(0)


def test_a_score_of_the_mixture_does_not_see_that_each_length_has_lost_a_mode():
    """The data have two modes; one step makes one of them, two steps the other: the mixture is that of the data."""
    shape, count = (1, 1, 1, 1), 200
    means = (-1.0, 1.0)
    data = Mixture(shape=shape, weights=(0.5, 0.5), means=means, stds=(0.3, 0.3))
    parts = {r: Mixture(shape=shape, weights=(1.0,), means=(m,), stds=(0.3,)) for r, m in ((1.0, -1.0), (0.5, 1.0))}
    batch = SimpleNamespace(condition=nothing(count))

    def push(fake, r):
        """``-dL/dx_G`` on samples of one length."""
        sample = parts[r].sample(count, seed=5).requires_grad_()
        loss = distribution_matching(
            sample,
            Times(torch.rand(count, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 0.96 + 0.02),
            normal(count, *shape, seed=7),
            batch=batch,
            teacher=data,
            fake=fake,
            scale=1.0,
            last_step=torch.full((count,), r, dtype=torch.float64),
            observations=Observations(),
        )
        loss.backward()
        return -sample.grad.flatten()

    blind = _Mixed(parts.values())
    for r, towards in ((1.0, 1), (0.5, -1)):
        assert push(blind, r).abs().max() < 1e-9, "the mixture has the score of the data: nothing moves"
        seen = towards * push(_OfEachLength(parts), r)
        assert (seen > 0).double().mean() > 0.9 and seen.min() > -1e-9 * seen.max(), "towards the mode that is missing"


def test_the_addition_embeds_the_second_time_itself():
    """It embeds ``r`` itself, not the interval, which differs at each time of the score."""
    config = {"freq_dim": 8, "num_attention_heads": 2, "attention_head_dim": 4}
    network = nn.Module()
    network.condition_embedder = nn.Module()
    network.condition_embedder.time_embedder = nn.Identity()
    additions = build_additions(("last_step",), Wan(), config)
    addition = additions["last_step"]
    addition.attach(network, Wan(), None)
    nn.init.normal_(addition.linear_2.weight)
    t, r = torch.tensor([0.2, 0.9]), torch.tensor([0.5, 0.5])

    def called(t, r):
        with second_time(additions, t, r):
            return network.condition_embedder.time_embedder(torch.zeros(2, 8))

    out = called(t, r)
    assert torch.equal(out[0], out[1]) and out.abs().max() > 1e-2
    assert not torch.allclose(called(t, r + 0.3), out)
    with pytest.raises(RuntimeError):
        called(t, None)
