"""DMD2 in float64: its GAN, its full rollout and its operation without clips."""

from dataclasses import replace

import pytest
import torch

from distill.config import compose_config
from distill.methods.dmd2 import Dmd2, Dmd2Settings
from distill.run.setup import plan_run
from models.additions.gan_head import default_blocks
from tests.oracles.samples import video
from tests.unit.method_roles import (
    SHAPE,
    TEXT,
    Judge,
    Painter,
    are_uniform_then_shifted_then_clamped,
    close,
    dmd2,
    gradients,
    is_normal,
    make_batch,
    noise_of,
    normal,
    random_at,
    run_loss,
    student_sample,
    text_of,
    wide,
)
from tests.unit.refused import refused

B = 4


def gan(student=None, **settings):
    return dmd2(student, fake=Judge(22), **{"gan_weight_student": 0.7, "gan_weight_head": 0.3, **settings})


def head_losses(method, step=1):
    """Return the losses of a fake step by name, before any of them runs."""
    losses = {loss.name: loss for loss in method.losses(step, make_batch(), random_at(step))}
    assert list(losses) == ["gan", "fake_score"], "the last loss must reach every block"
    assert losses["gan"].weight == method.settings.gan_weight_head and losses["fake_score"].weight == 1.0
    assert not any(role.calls or role.logit_calls for role in method.roles.values()), "losses are lazy"
    return losses


def softplus(x):
    return torch.log(1 + torch.exp(x))


# ---------------------------------------------------------------- the student


def test_student_gradient_is_dmd_plus_the_gradient_of_softplus():
    theta = normal(B, *SHAPE, seed=9)
    method = gan(Painter(theta))
    loss = run_loss(method, 0)
    loss.backward()
    plain = dmd2(Painter(theta), fake=Judge(22))
    alone = run_loss(plain, 0)
    alone.backward()
    fake, (call,) = method.roles["fake"], method.roles["fake"].logit_calls
    assert call.with_grad and torch.equal(call.text, text_of(make_batch()))
    x = call.x.detach().requires_grad_()
    d = fake.judge(x, call.t, call.text)
    (towards,) = torch.autograd.grad(d, x, -torch.sigmoid(-d))
    expected = 0.7 / (2 * B) * towards * wide(1 - call.t)
    assert close(method.roles["student"].theta.grad - plain.roles["student"].theta.grad, expected.detach(), 1e-10)
    assert expected.norm() > 1e-3 * plain.roles["student"].theta.grad.norm()
    assert close(loss - alone, 0.7 * softplus(-d).sum() / (2 * B), 1e-10)


def test_student_is_judged_at_its_own_time_and_noise():
    theta = normal(B, *SHAPE, seed=9)
    method = gan(Painter(theta))
    run_loss(method, 0)
    (score,), (call,) = method.roles["fake"].calls, method.roles["fake"].logit_calls
    noises = [noise_of(c, theta).flatten().detach() for c in (score, call)]
    assert is_normal(noises[1])
    assert abs(torch.corrcoef(torch.stack(noises))[0, 1]) < 0.25
    assert len({*score.t.tolist(), *call.t.tolist()}) == 2 * B


@pytest.mark.parametrize("step", [0, 1])
def test_judged_times_are_uniform_shifted_and_then_held_in_their_range(step):
    method = gan(shift=4.0, min_time=0.2, max_time=0.9, step_list=[1.0])
    positions = range(1500)
    batch = replace(
        make_batch(),
        latents=video(torch.zeros(1500, *SHAPE, dtype=torch.float64)),
        condition=replace(make_batch().condition, tensors={"text": torch.ones(1500, *TEXT, dtype=torch.float64)}),
    )
    next(iter(method.losses(step, batch, random_at(step, positions)))).closure()
    assert are_uniform_then_shifted_then_clamped(method.roles["fake"].logit_calls[0].t[:1500], 4.0, 0.2, 0.9)


def test_the_fake_score_is_frozen_while_the_student_trains_through_it():
    method = gan(fake_updates_per_student_update=2)
    assert [method.frozen_roles(step) for step in range(4)] == [("fake",), (), (), ("fake",)]
    assert not any(dmd2().frozen_roles(step) for step in range(4)), "nothing passes through it without a GAN"


# ---------------------------------------------------------------- the head


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_head_loss_and_its_gradient(weight):
    theta = normal(B, *SHAPE, seed=9)
    method = gan(Painter(theta), gan_r1_weight=weight)
    fake = method.roles["fake"]
    loss = head_losses(method)["gan"].closure()
    loss.backward()
    ours = gradients(fake)
    fake.zero_grad()
    (call,) = fake.logit_calls
    assert len(call.x) == (3 if weight else 2) * B and not call.x.requires_grad
    d = fake.judge(call.x, call.t, call.text)
    expected = softplus(d[:B]).sum() / (2 * B) + softplus(-d[B : 2 * B]).sum() / (2 * B)
    if weight:
        r1 = (d[B : 2 * B] - d[2 * B :]).square()
        expected = expected + weight * r1.sum() / (2 * B)
        assert (r1 > 1e-7).all()
    assert close(loss, expected, 1e-12)
    expected.backward()
    assert ours.keys() == {"mix", "time", "caption", "head"}, "it trains the network under the head too"
    for name, gradient in gradients(fake).items():
        assert close(ours[name], gradient, 1e-10), name
    assert not gradients(method.roles["student"]) and not method.roles["teacher"].calls


def test_what_the_head_is_shown():
    """Samples and clips share their times but not their noise. Disturbed clips differ by sigma e."""
    theta = normal(B, *SHAPE, seed=9)
    method = gan(Painter(theta), gan_r1_weight=1.0)
    losses = head_losses(method)
    for loss in losses.values():
        loss.closure()
    (call,), (score,) = method.roles["fake"].logit_calls, method.roles["fake"].calls
    student, real, disturbed = call.x.chunk(3)
    t = call.t[:B]
    assert torch.equal(call.t, t.repeat(3)) and torch.equal(call.text, text_of(make_batch()).repeat(3, 1, 1))
    noises = [
        (student - (1 - wide(t)) * theta) / wide(t),
        (real - (1 - wide(t)) * make_batch().latents.video) / wide(t),
        (disturbed - real) / 0.1,
        noise_of(score, theta),
    ]
    noises = [noise.detach().flatten() for noise in noises]
    for noise in noises:
        assert is_normal(noise)
    assert (torch.corrcoef(torch.stack(noises)) - torch.eye(4)).abs().max() < 0.25


def test_both_losses_share_one_rollout_and_drop_it():
    method = gan(rollout="full")
    losses = head_losses(method)
    losses["gan"].closure()
    assert len(method.roles["student"].calls) == 3
    sample = student_sample(method)
    losses["fake_score"].closure()
    assert len(method.roles["student"].calls) == 3, "a rollout is expensive: not twice"
    assert not any(call.with_grad for call in method.roles["student"].calls)
    call = method.roles["fake"].calls[-1]
    noise = noise_of(call, sample)
    assert is_normal(noise)
    losses["fake_score"].closure()
    assert len(method.roles["student"].calls) == 6, "the second loss took the samples away"


def test_without_a_gan_there_is_no_head():
    assert Dmd2.additions(Dmd2Settings()) == {} and not Dmd2.needs_latents(Dmd2Settings())
    settings = Dmd2Settings(gan_weight_student=1e-3, gan_blocks=[3])
    assert Dmd2.additions(settings) == {"fake": {"gan_head": {"blocks": [3]}}} and Dmd2.needs_latents(settings)
    assert default_blocks(30) == [15, 22, 29] and default_blocks(1) == [0], "FastGen's of Wan 1.3B"
    method = dmd2(fake=Judge(22))
    for step in (0, 1):
        run_loss(method, step)
        assert not method.roles["fake"].logit_calls


# ---------------------------------------------------------------- rollouts and captions


@pytest.mark.parametrize("step", [0, 1])
def test_captions_are_enough(step):
    method = dmd2()
    batch = make_batch()
    with_clips = run_loss(method, step, batch=batch)
    seen = method.observations.drain().keys()
    without = run_loss(method, step, batch=replace(batch, latents=None, latent_shapes={"video": SHAPE}))
    assert torch.equal(with_clips, without) and without.isfinite()
    assert method.observations.drain().keys() == {name for name in seen if not name.startswith("data_")}


# ---------------------------------------------------------------- settings


def test_replicas_reduce_unused_parameters_which_fp8_cannot_send():
    """One loss uses the head, the other the blocks after it."""
    fp8 = ["fake.fp8=torchao", "fake.fp8_gather=true"]
    for setting in ("mesh.dp_replicate=2", "fake.shard_ranks=2"):
        with refused("fake.fp8_gather"):
            compose_config(["method.gan_weight_student=0.001", setting, *fp8])
        compose_config([setting, *fp8])


def test_a_learning_rate_of_the_heads_own():
    scaled = "optim.fake.lr_scale={additions.gan_head.*: 10}"
    config = compose_config(["mesh.cp=1", "method.gan_weight_student=0.001", scaled])
    fake = {role.name: role for role in plan_run(config).roles}["fake"]
    assert dict(fake.additions) == {"gan_head": {"blocks": None}}
    with refused("optim.fake.lr_scale"):
        plan_run(compose_config(["mesh.cp=1", scaled]))
