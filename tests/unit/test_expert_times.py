"""Times of steps that train experts: distributed as the method's own, with one expert per step on every rank.

The tests take one sample of each step. Samples of one step share a range, so they are not independent.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy import stats

from distill.methods import build_method
from distill.methods.base import ANY_SAMPLE
from distill.methods.common.expert_times import draw_times, pilot_times
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.roles.role import Role
from tests.tiers import slow, slow_case

STEPS = 1200


def role(name, *boundaries):
    """Return a role with boundaries alone."""
    made = object.__new__(Role)
    made.name, made.boundaries, made.trained_experts = name, boundaries, tuple(range(len(boundaries) + 1))
    made.causal = None
    return made


def random(step, *positions, seed=0):
    return StepRandom(seed=seed, step=step, positions=positions)


def own_draws(settings):
    """Yield (draw, purpose, roles evaluated at each time) for each draw of times of a method."""
    roles = {name: role(name, b) for name, b in (("teacher", 0.8), ("student", 0.6), ("fake", 0.7))}
    method = build_method(settings, roles)
    teacher, student, fake = roles["teacher"], roles["student"], roles["fake"]
    if settings.name == "flow_matching":
        yield method._draw, "flow_matching/time", [(student,)]
    if settings.name in ("scm", "rcm"):
        yield method._draw_time, "scm/time", [(), (student, teacher)]
    if settings.name in ("dmd2", "rcm"):
        yield method.draw_score_time, f"{settings.name}/time", [(teacher, fake)]
    if settings.name == "rcm":
        step = next(step for step in range(3, 40) if method.rollout_steps(step) == 4)
        yield partial(method._draw_rollout, method.rollout_steps(step)), "rcm/rollout_time", [(student,)] * 4


SETTINGS = [Dmd2Settings(), RcmSettings(consistency_steps=0), ScmSettings(), FlowMatchingSettings(shift=3.0)]


@pytest.mark.parametrize(
    "settings",
    [s if s.name == "flow_matching" else slow_case(s) for s in SETTINGS],
    ids=lambda settings: settings.name,
)
def test_their_distribution_is_the_methods_own(settings):
    """The test applies Kolmogorov-Smirnov to each time, and to differences of times that belong together."""
    for draw, purpose, roles in own_draws(settings):
        found, own = [], []
        for step in range(STEPS):
            drawn = draw_times(draw, random(step, 0, 1), purpose, torch.float64, roles)
            found.append([float(times.t[step % 2]) for times in drawn])
            own.append([float(t[0]) for t in draw(random(step, 7, seed=1), purpose, torch.float64)])
        found, own = torch.tensor(found), torch.tensor(own)
        columns = [*range(found.shape[1])]
        for i in columns:
            if found[:, i].std() > 0:
                assert stats.ks_2samp(found[:, i], own[:, i]).pvalue > 1e-3, (purpose, i)
        for i in columns[2:] if len(columns) > 2 else []:
            assert stats.ks_2samp(found[:, i] - found[:, 1], own[:, i] - own[:, 1]).pvalue > 1e-3, (purpose, i)


@pytest.mark.parametrize(
    "settings",
    [slow_case(s) if s.name == "rcm" else s for s in SETTINGS],
    ids=lambda settings: settings.name,
)
def test_a_step_has_one_range_whoever_holds_its_samples(settings):
    for draw, purpose, roles in own_draws(settings):
        several = 0
        for step in range(50):
            whole = draw_times(draw, random(step, *range(6)), purpose, torch.float32, roles)
            of_ranks = [draw_times(draw, random(step, *some), purpose, torch.float32, roles) for some in ((0, 3), (5,))]
            for i, (times, of) in enumerate(zip(whole, roles, strict=True)):
                for each in of:
                    experts = {each.expert_at(float(t)) for t in times.t} | {each.expert_at(times.at)}
                    assert len(experts) == 1, "one network, which the host knows"
                    several += experts != {0}
                assert [part[i].at for part in of_ranks] == [times.at] * 2, "the same on every rank"
                assert torch.equal(of_ranks[0][i].t, times.t[[0, 3]]) and torch.equal(of_ranks[1][i].t, times.t[[5]])
        assert several, "not always the first"


@slow
def test_parts_of_a_batch_draw_for_themselves():
    """The first part draws as a whole batch would. All parts have the method's distribution; their mean varies less."""
    method = build_method(FlowMatchingSettings(), {})
    student = role("student", 0.5)
    parts, own, means = {i: [] for i in range(4)}, [], {1: [], 4: []}
    for step in range(800):
        drawn = {
            i: draw_times(
                method._draw, replace(random(step, *range(4 * i, 4 * i + 4)), part=i), "x", torch.float64, [(student,)]
            )[0].t
            for i in parts
        }
        (whole,) = draw_times(method._draw, random(step, *range(16)), "x", torch.float64, [(student,)])
        torch.testing.assert_close(drawn[0], whole.t[:4])
        for i, t in drawn.items():
            parts[i].append(float(t[step % 4]))
        own.append(float(method._draw(random(step, 99), "y", torch.float64)[0]))
        means[1].append(float(whole.t.mean()))
        means[4].append(float(torch.cat([*drawn.values()]).mean()))
    for found in parts.values():
        assert stats.ks_2samp(found, own).pvalue > 1e-3
    high = torch.tensor([parts[i] for i in parts]) >= 0.5
    assert abs(torch.corrcoef(high.double()).fill_diagonal_(0)).max() < 0.1, "independent of each other"
    # The variance of the ranges' means falls with the parts. Within a range it is that of 16 samples in any case.
    t = torch.tensor(own)
    ranges = [t[t >= 0.5], t[t < 0.5]]
    between = sum(len(of) / len(t) * (of.mean() - t.mean()) ** 2 for of in ranges).item()
    within = sum(len(of) / len(t) * of.var() for of in ranges).item()
    for n, of in means.items():
        assert torch.tensor(of).var().item() == pytest.approx(between / n + within / 16, rel=0.15), n


@slow
def test_scores_are_compared_in_the_common_refinement():
    method = build_method(Dmd2Settings(shift=1.0), {"student": role("student")})
    teacher, fake = role("teacher", 0.8), role("fake", 0.3)
    seen = set()
    for step in range(100):
        ((t, at),) = draw_times(method.draw_score_time, random(step, 0, 1, 2), "x", torch.float64, [(teacher, fake)])
        seen.add((teacher.expert_at(at), fake.expert_at(at)))
        of_samples = {(teacher.expert_at(x), fake.expert_at(x)) for x in t.tolist()}
        assert of_samples == {(teacher.expert_at(at), fake.expert_at(at))}
    assert seen == {(0, 0), (1, 0), (1, 1)}


def test_a_boundary_is_the_noisier_experts():
    """diffusers uses ``t >= boundary``. An fp32 time of .9, a little below .9, must count as the boundary too."""
    of = role("student", 0.9)
    assert [of.expert_at(t) for t in (1.0, 0.9, 0.8999)] == [0, 0, 1]
    assert role("student").expert_at(None) == 0, "one network serves all times"
    with pytest.raises(ValueError, match="at="):
        of.expert_at(None)
    in_fp32 = torch.tensor([0.9], dtype=torch.float32)
    assert float(in_fp32) < 0.9 and of.expert_at(float(in_fp32)) == 0

    def draw(streams, purpose, dtype):
        return [torch.full((len(streams.positions),), 0.9, dtype=dtype)]

    for dtype in (torch.float32, torch.float64):
        ((t, at),) = draw_times(draw, random(0, 0), "x", dtype, [(of,)])
        assert of.expert_at(at) == 0 and float(t) == pytest.approx(0.9)
    assert pilot_times(draw, random(0, 0), "x") == [0.9]


@slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.name)
@pytest.mark.parametrize("expert", [0, 1])
def test_one_expert_trained_alone_has_its_times_alone(settings, expert):
    student = role("student", 0.6)
    student.trained_experts = (expert,)
    method = build_method(settings, {"student": student, "teacher": role("teacher"), "fake": role("fake")})
    if settings.name == "rcm":
        return  # refused: its rollouts end at times of both
    if settings.name == "dmd2":
        settings.step_list = [1.0, 0.8, 0.5, 0.3]
        lengths = {len(method._rollout_times(random(step), whole=False)) for step in range(60)}
        assert lengths == ({1, 2}, {3, 4})[expert]
        losses = [loss for step in (0, 6, 12) for loss in method.losses(step, ANY_SAMPLE, random(step, 0))]
        assert [student.expert_at(loss.at) for loss in losses] == 3 * [expert]
        return
    draw, purpose = (method._draw_time, "scm/time") if settings.name == "scm" else (method._draw, "flow_matching/time")
    roles = [(), (student,)] if settings.name == "scm" else [(student,)]
    found, own = [], []
    for step in range(800):
        times = draw_times(draw, random(step, 0), purpose, torch.float64, roles, student)[-1]
        (loss,) = method.losses(step, ANY_SAMPLE, random(step, 0))
        assert student.expert_at(times.at) == expert and loss.at == times.at
        found.append(float(times.t))
        own.append(float(draw(random(step, 0, seed=1), purpose, torch.float64)[-1]))
    inside = [t for t in own if student.expert_at(t) == expert]
    assert len(inside) > 100 and stats.ks_2samp(found, inside).pvalue > 1e-3


def test_an_expert_that_no_draw_reaches_is_refused():
    """The draw must not loop for ever."""
    student = role("student", 0.9)
    student.trained_experts = (0,)
    method = build_method(FlowMatchingSettings(logit_std=0.1), {"student": student})
    with pytest.raises(UserError, match="student.experts"):
        next(method.losses(0, ANY_SAMPLE, random(0, 0)))
