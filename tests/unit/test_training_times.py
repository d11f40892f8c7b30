"""Training times of each recipe: the share of draws near each sampling time of the student must be large enough."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distill.config import Config, compose_config
from distill.config.errors import CONFIGS
from distill.data.settings import DATA
from distill.methods import METHODS, Batch, build_method
from distill.methods.common.schedules import euler_times
from distill.methods.meanflow import MeanFlowSettings
from models.causal import CausalSettings
from models.sample import VIDEO, Sample
from tests.oracles.samples import Stub, video
from tests.oracles.tiny_wan import text_condition
from tests.tiers import parametrize, slow
from tests.unit.analytic import BatchRandom

COUNT, STEPS = 1000, 40
NEAR, FLOOR = 0.05, 0.01
"""Time difference that counts as near, and smallest share of draws; 5 to 10 % of uniform times are this near."""
FLOOR_TEACHER = 0.001
"""Smallest share for flow matching: logit-normal times (Esser et al.) are rare near 1, where velocity is simple."""
NEAR_PAIR, FLOOR_PAIR = 0.1, 0.003
"""Distance and smallest share for both ends of an interval; 2 to 8 % of two uniform draws are this near."""
SHAPE = (1, 1, 1, 1)
RECIPES = [
    pytest.param(path.stem, marks=() if path.stem.startswith("quickstart") else slow)
    for path in sorted((CONFIGS / "experiment").glob("*.yaml"))
]


class Recorder(Stub, nn.Module):
    """Role that records the times at which it trains."""

    def __init__(self, causal):
        super().__init__()
        self.causal, self.family = causal, SimpleNamespace(parts={VIDEO: 1.0})
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.trained_at = []

    def of_video(self, x, t, condition, r, **_):
        if torch.is_grad_enabled():
            self.trained_at.append((t, r))
        return x * (1 + self.scale)

    def velocity(self, *inputs, heads=None, **options):
        """Repeat the velocity for each mean of last layers, as ``method=pdd`` asks for them."""
        v = super().velocity(*inputs, **options)
        return v if heads is None else Sample.cat([v] * len(heads[VIDEO]))

    def logits(self, x, t, condition, r=None, at=None):
        return (x.video * self.scale).flatten(1)

    def cache(self, condition, training):
        cache = SimpleNamespace(role=self, condition=condition)
        cache.with_chunk = lambda x0: cache
        return cache

    def chunk_velocity(self, x, t, cache):
        return self.velocity(x, t, cache.condition)


def training_times(settings):
    """Return ``t`` and, if the student has a second time, ``r`` of its updates in the latter half of a long run."""
    kind = METHODS[settings.name][0]
    if getattr(settings, "guidance_scale_2", None) is not None:  # only for two experts; times do not depend on it
        settings = replace(settings, guidance_scale_2=None)
    if getattr(settings, "phased", False):
        settings = replace(settings, phased=False)
    causal = None
    if settings.name == "self_forcing" or getattr(settings, "history", None) == "clean":
        causal = CausalSettings(chunk=1)
    method = build_method(settings, {name: Recorder(causal) for name in kind.roles_needed(settings)})
    ones = torch.ones(COUNT, *SHAPE, dtype=torch.float64)
    text = torch.zeros(COUNT, 1, 1, dtype=torch.float64)
    times = len(settings.student_times()) if hasattr(settings, "student_times") else 1
    batch = Batch(
        latents=video(ones),
        condition=text_condition(text, text[0], text[0]),
        states=video(ones[:, None].expand(-1, times, *SHAPE)),
    )
    student, done, step = method.roles["student"], 0, 10_000
    while done < STEPS:
        step += 1
        if method.trained_role(step) == "student":
            for loss in method.losses(step, batch, BatchRandom(seed=0, step=step, positions=range(COUNT))):
                loss.closure()
            done += 1
    t, r = zip(*student.trained_at, strict=True)
    return torch.cat(t), None if r[0] is None else torch.cat(r)


def sampled_intervals(settings):
    """Return (t, next t) of every step of every sampler that the student may use."""
    method = build_method(settings, {"student": Recorder(None)})
    if settings.name == "flow_matching":  # a teacher takes any number of steps; the last of many matter little
        lists = [euler_times(steps, settings.shift)[:-1] for steps in range(1, 9)]
    else:
        counts = getattr(settings, "steps", range(1, len(settings.student_times()) + 1))
        lists = [method.sampling_times(steps) for steps in counts]
    return sorted({pair for times in lists for pair in pairwise([*times, 0.0])}, reverse=True)


def shares(settings):
    """Yield, for each call of the sampler, its times, the share of training near them, and the smallest share."""
    t, r = training_times(settings)
    floor = FLOOR_TEACHER if settings.name == "flow_matching" else FLOOR
    for time, following in sampled_intervals(settings):
        if r is None:
            yield (time,), ((t - time).abs() <= NEAR).double().mean().item(), floor
        else:
            near = ((t - time).abs() <= NEAR_PAIR) & ((r - following).abs() <= NEAR_PAIR)
            yield (time, following), near.double().mean().item(), FLOOR_PAIR


def check_all(name, settings):
    for where, share, floor in shares(settings):
        assert share >= floor, f"{name}: {share:.5f} of the training is near {where}"


@parametrize("recipe", RECIPES, quick=3)
def test_every_call_of_a_recipes_sampler_is_trained(recipe):
    config = compose_config([f"experiment={recipe}"])
    assert type(config) is Config and type(config.data) in DATA.values()
    assert config.run_dir == f"runs/{recipe}" and config.steps >= 1 and config.batch_size >= 1
    assert type(config.method) is METHODS[config.method.name][1]
    check_all(recipe, config.method)


@pytest.mark.parametrize("name", METHODS)
def test_every_call_of_a_methods_sampler_is_trained_by_its_defaults(name):
    check_all(name, METHODS[name][1]())


def test_the_check_finds_a_student_that_is_sampled_where_it_does_not_train():
    """MeanFlow's earlier recipe sampled on a list with shift 5, and trained at unshifted times."""
    before = MeanFlowSettings(
        logit_mean=-0.4, logit_std=1.0, interval_ratio=0.25, step_list=[1.0, 0.9375, 0.8333, 0.625]
    )
    assert min(share for _, share, _ in shares(before)) < 1e-4
    assert min(share / floor for _, share, floor in shares(MeanFlowSettings())) > 1
