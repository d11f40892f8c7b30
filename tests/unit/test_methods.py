"""Shared parts of all methods, and flow_matching, in fp64 against the formulas."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

from distill.methods import Batch, build_method
from distill.methods.base import guided_velocity
from distill.methods.dcm import DcmSettings
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.meanflow import MeanFlowSettings
from distill.methods.ode_regression import OdeRegressionSettings
from distill.methods.scm import ScmSettings
from models.causal import CausalSettings
from tests.oracles.samples import video
from tests.oracles.tiny_wan import text_condition
from tests.unit.method_roles import (
    SHAPE,
    TEXT,
    N,
    Net,
    Point,
    Recorder,
    close,
    dmd2,
    flow_matching,
    gradients,
    is_normal,
    make_batch,
    noise_of,
    normal,
    null_text_of,
    random_at,
    run_loss,
    student_sample,
    text_of,
    times_and_texts,
    unshifted,
    wide,
)
from tests.unit.refused import refused, refuses_all

# ---------------------------------------------------------------- guidance


def test_guidance_is_u_plus_w_times_c_minus_u_in_one_call():
    role, batch = Net(0), make_batch()
    t = torch.linspace(0.2, 0.9, 4, dtype=torch.float64)
    c, u = (role.formula(batch.latents.video, t, text) for text in (text_of(batch), null_text_of(batch)))
    for scale in (0.0, 3.0):
        role.calls.clear()
        v = guided_velocity(role, batch.latents, t, batch.condition, scale).video
        assert len(role.calls) == 1, "both branches share one gather of the parameters"
        assert close(v, u + scale * (c - u))
    v = guided_velocity(role, batch.latents, t, batch.condition, 1.0).video
    assert torch.equal(v, c) and len(role.calls[-1].x) == 4, "without guidance there is no second pass"


# ---------------------------------------------------------------- flow matching


@pytest.mark.parametrize("time", ["uniform", "logit_normal"])
def test_flow_matching_loss_is_the_mean_squared_velocity_error(time):
    method = flow_matching(time=time, shift=3.0, caption_dropout=0.0)
    loss = run_loss(method, 4)
    (call,) = method.roles["student"].calls
    x0 = make_batch().latents.video
    noise = noise_of(call, x0)
    assert torch.equal(call.text, text_of(make_batch()))
    assert close(loss, (call.v - (noise - x0)).square().sum() / (4 * N))
    assert is_normal(noise)
    loss.backward()
    assert len(gradients(method.roles["student"])) == 3


def test_flow_matching_times_have_the_distribution_that_the_settings_name():
    shift = 4.0
    t, _ = times_and_texts(flow_matching(time="uniform", shift=shift))
    assert stats.kstest(unshifted(t, shift).numpy(), "uniform").pvalue > 1e-3
    t, _ = times_and_texts(flow_matching(time="logit_normal", shift=shift, logit_mean=0.5, logit_std=1.5))
    assert stats.kstest(torch.logit(unshifted(t, shift)).numpy(), "norm", (0.5, 1.5)).pvalue > 1e-3


class CausalNet(Recorder):
    """Causal role whose velocity is zero, which keeps its calls' times and histories."""

    causal = CausalSettings(chunk=2, first_chunk=1, context_time=0.25)

    def of_video(self, x, t, condition, r, clean):
        self.calls.append((x, t, clean))
        return torch.zeros_like(x)


def causal_call(frames, history="clean", positions=(0, 1), method=None, **changes):
    """Return x0, x_t, the times, the history and the loss of a causal student."""
    student = CausalNet()
    student.causal = replace(student.causal, **changes)
    x0 = normal(2, 3, 9, 2, 2, seed=6)[: len(positions), :, :frames]
    batch = Batch(latents=video(x0), condition=texts([0.1] * len(positions), 0.2))
    (loss,) = flow_matching(student, history=history, **method or {}).losses(3, batch, random_at(3, positions))
    value = loss.closure()
    ((x, t, clean),) = student.calls
    return x0, x, t, clean, value


def test_a_chunk_draws_one_time_and_its_own_noise():
    x0, x, t, clean, loss = causal_call(5)
    assert t.shape == (2, 5) and (t[:, 1] == t[:, 2]).all() and (t[:, 3] == t[:, 4]).all()
    assert len({*t.flatten().tolist()}) == 6, "two samples of three chunks"
    time = t[:, None, :, None, None]
    noise = (x - (1 - time) * x0) / time
    assert loss.item() == pytest.approx((noise - x0).square().mean().item(), rel=1e-9)
    context = (clean - 0.75 * x0) / 0.25
    values = torch.stack([noise, context]).flatten()
    assert abs(values.mean()) < 0.3 and 0.7 < values.std() < 1.3
    assert (noise - context).abs().min() > 1e-6, "the history has noise of its own"


def test_the_gaussian_weight_is_the_published_one():
    """The oracle is the table of 1000 times that Self-Forcing and Causal-Forcing look a time up in."""
    sigmas = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    times = 1000 * 5 * sigmas / (1 + 4 * sigmas)
    bell = torch.exp(-2 * ((times - 500) / 1000) ** 2)
    table = (bell - bell.min()) * (1000 / (bell - bell.min()).sum())
    x0, x, t, _, loss = causal_call(5, method={"weight": "gaussian", "shift": 5.0, "time": "uniform"})
    nearest = (times - 1000 * t[..., None]).abs().argmin(-1)
    assert (table[nearest] < 0.5).any() and (table[nearest] > 1).any(), "the draws show the weight"
    squares = ((x - (1 - t[:, None, :, None, None]) * x0) / t[:, None, :, None, None] - x0).square().mean((1, 3, 4))
    assert loss.item() == pytest.approx((table[nearest] * squares).mean().item(), rel=5e-3)
    assert loss.item() != pytest.approx(squares.mean().item(), rel=0.02)


def test_a_longer_clip_begins_with_the_same_draws_wherever_a_sample_is():
    for shorter, longer in zip(causal_call(5)[:4], causal_call(9)[:4], strict=True):
        dim = 1 if shorter.ndim == 2 else 2
        assert torch.equal(shorter, longer.narrow(dim, 0, 5))
    alone = causal_call(5, positions=(1,))
    assert torch.equal(alone[2], causal_call(5)[2][1:])


def test_the_history_is_clean_without_context_time_and_absent_in_diffusion_forcing():
    x0, _, _, clean, _ = causal_call(5, context_time=0.0)
    assert torch.equal(clean, x0)
    assert causal_call(5, history="noisy")[3] is None


@pytest.mark.parametrize(("p", "least", "most"), [(0.0, 0, 0), (0.3, 0.26, 0.34)])
def test_captions_are_dropped_whole_with_the_asked_probability(p, least, most):
    t, text = times_and_texts(flow_matching(caption_dropout=p), null=2.0)
    dropped = (text == 0).all((1, 2))
    assert ((text == 1).all((1, 2)) | dropped).all(), (
        "a caption is dropped whole or not at all, and not for the negative prompt"
    )
    assert least <= dropped.double().mean() <= most
    if 0 < p < 1:  # dropping must not depend on the time of the same sample
        assert stats.ks_2samp(t[dropped].numpy(), t[~dropped].numpy()).pvalue > 1e-3


# ---------------------------------------------------------------- losses are means


def of_teacher(settings):
    return build_method(settings, {"teacher": Net(20), "student": Net(21)})


METHODS_AND_STEPS = [
    (lambda: flow_matching(caption_dropout=0.5), 0),
    (dmd2, 0),
    (lambda: dmd2(fake_updates_per_student_update=1), 3),
    (lambda: of_teacher(ScmSettings(tangent_warmup=0, guidance_scale=2.5)), 3),
    (lambda: of_teacher(DcmSettings(grid_steps=6)), 0),
    (lambda: of_teacher(MeanFlowSettings(tangent_warmup=0, weight_power=1.0)), 0),
    (lambda: of_teacher(OdeRegressionSettings(step_list=[1.0, 0.8, 0.5])), 0),
]
NAMES = ["flow_matching", "dmd", "fake_score", "scm", "dcm", "meanflow", "ode_regression"]


def loss_and_gradients(method, step, groups):
    """Return the loss and gradients. Each group of positions is a micro-batch, weighted by its share."""
    trained = method.roles[method.trained_role(step)]
    trained.zero_grad()
    count = sum(map(len, groups))
    total = 0.0
    for group in groups:
        share = len(group) / count * run_loss(method, step, group)
        share.backward()
        total += share.item()
    return total, gradients(trained)


@pytest.mark.parametrize(("make", "step"), METHODS_AND_STEPS, ids=NAMES)
def test_splitting_or_repeating_the_batch_changes_nothing(make, step):
    method = make()
    whole, expected = loss_and_gradients(method, step, [[0, 1, 2, 3]])
    for groups in ([[0], [1], [2], [3]], [[0, 2], [3, 1]], [[0, 1, 2, 3, 0, 1, 2, 3]]):
        total, found = loss_and_gradients(method, step, groups)
        assert total == pytest.approx(whole, rel=1e-12), groups
        assert found.keys() == expected.keys() and found
        for name, gradient in expected.items():
            assert close(found[name], gradient), (name, groups)
    other, _ = loss_and_gradients(method, step, [[0, 1, 2, 2]])
    assert other != pytest.approx(whole, rel=1e-6), "the check above can tell batches apart"


@pytest.mark.parametrize(("make", "step"), METHODS_AND_STEPS, ids=NAMES)
def test_a_step_draws_the_same_again_and_another_step_draws_otherwise(make, step):
    method = make()
    first = run_loss(method, step).item()
    torch.manual_seed(1234)
    assert run_loss(method, step).item() == first
    period = getattr(method.settings, "fake_updates_per_student_update", 0) + 1
    assert run_loss(method, step + 4 * period).item() != first


# ---------------------------------------------------------------- sampling


def texts(conditional, null):
    text, null_text = torch.zeros(2, *TEXT, dtype=torch.float64), torch.zeros(2, *TEXT, dtype=torch.float64)
    text[:, 0, 0], null_text[:, 0, 0] = torch.tensor(conditional), null
    return text_condition(text, null_text[0])


@pytest.mark.parametrize("steps", [3])
@pytest.mark.parametrize("make", [dmd2, flow_matching], ids=["dmd2", "flow_matching"])
def test_teacher_sampler_follows_the_guided_flow_to_its_end(make, steps):
    """On straight paths to one clip Euler's method is exact, and guidance moves the clip to u + w (c - u)."""
    method = make(guidance_scale=3.0)
    role = Point()
    method.roles = {"teacher": role, "student": role}
    condition = texts([0.5, -1.0], 0.25)
    noise = normal(2, *SHAPE, seed=4)
    name = "teacher" if make is dmd2 else "student"
    clips = method.generate(name, video(noise), condition, steps, random_at(0, [0, 1])).video
    expected = 0.25 + 3.0 * (torch.tensor([0.5, -1.0]) - 0.25)
    assert (clips - wide(expected)).abs().max() < 1e-12
    assert len(role.calls) == steps and not clips.requires_grad
    assert sum(len(call.x) for call in role.calls) == 2 * method.evaluations(name, steps)
    assert torch.equal(role.calls[0].x[:2], noise) and (role.calls[0].t == 1).all()


@pytest.mark.parametrize(("steps", "times"), [(2, [1.0, 0.8333]), (4, [1.0, 0.9375, 0.8333, 0.625])])
def test_student_samples_at_its_own_times_without_gradient_or_guidance(steps, times):
    method = dmd2(step_list=[1.0, 0.9375, 0.8333, 0.625])
    batch, noise = make_batch(), normal(4, *SHAPE, seed=4)
    clips = method.generate("student", video(noise), batch.condition, steps, random_at(0)).video
    calls = method.roles["student"].calls
    assert [call.t[0].item() for call in calls] == times
    assert torch.equal(calls[0].x, noise) and not any(call.with_grad for call in calls) and not clips.requires_grad
    assert all(torch.equal(call.text, text_of(batch)) for call in calls)
    assert torch.equal(clips, student_sample(method))
    assert method.evaluations("student", steps) == steps
    for i in range(4):  # a clip does not depend on the rank or the batch that makes it
        alone = method.generate(
            "student", video(noise[i : i + 1]), batch.condition[i : i + 1], steps, random_at(0, [i])
        ).video
        assert close(alone[0], clips[i])


def test_steps_and_what_they_cost():
    """A step without guidance is one evaluation. More steps than the student was trained for are refused."""
    assert dmd2(guidance_scale=1.0).evaluations("teacher", 7) == 7
    assert flow_matching(guidance_scale=1.0).evaluations("student", 7) == 7

    method, batch = dmd2(), make_batch()
    for steps in (0, 4):
        with refused("steps"):
            method.generate("student", batch.latents, batch.condition, steps, random_at(0))


# ---------------------------------------------------------------- settings


def test_settings_out_of_bounds_are_refused_by_name():
    steps = ([], [0.9, 0.5], [1.0, 0.5, 0.5], [1.0, 0.5, 0.6], [1.0, 0.0])
    refuses_all(Dmd2Settings, *({"step_list": times} for times in steps))
    refuses_all(Dmd2Settings, {"max_time": 0.5, "min_time": 0.5}, {"min_time": -0.1}, {"max_time": 1.1})
    refuses_all(FlowMatchingSettings, {"time": "gaussian"}, {"caption_dropout": -0.1}, {"logit_std": 0.0})
