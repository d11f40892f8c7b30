"""DMD2 in float64: ``x_G`` is the student's sample, and ``g / (N B)`` is the gradient on it."""

import itertools
import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from distill.config import compose_config
from distill.methods import METHODS
from distill.methods.self_forcing import SelfForcingSettings
from distill.run.setup import plan_run
from tests.oracles.samples import video
from tests.unit.method_roles import (
    SHAPE,
    N,
    Painter,
    Recorder,
    are_uniform_then_shifted_then_clamped,
    close,
    dmd2,
    is_normal,
    make_batch,
    noise_of,
    normal,
    null_text_of,
    random_at,
    run_loss,
    text_of,
    times_and_texts,
    wide,
)
from tests.unit.refused import refused


def student_steps(method):
    """Return a student step for each rollout length."""
    found = {}
    for step in range(0, 600, method.settings.fake_updates_per_student_update + 1):
        if len(found) == len(method.settings.step_list):
            break
        length = random_at(step).shared_integer("dmd2/rollout_length", 1, len(method.settings.step_list))
        found.setdefault(length, step)
    return found


# ---------------------------------------------------------------- dmd2: whose turn


@pytest.mark.parametrize("n", [1, 5])
def test_the_student_trains_every_n_plus_first_step(n):
    method = dmd2(fake_updates_per_student_update=n)
    roles = [method.trained_role(step) for step in range(3 * (n + 1))]
    assert roles == (["student"] + ["fake"] * n) * 3
    for step, role in enumerate(roles[: n + 1]):
        (loss,) = method.losses(step, make_batch(), random_at(step))
        assert loss.name == {"student": "dmd", "fake": "fake_score"}[role]


def test_rollout_length_is_the_steps_own_and_takes_every_value():
    method = dmd2()
    lengths = []
    for step in range(0, 240, 6):
        run_loss(method, step, [0, 1])
        first = len(method.roles["student"].calls)
        run_loss(method, step, [3])
        assert len(method.roles["student"].calls) == first, "micro-batches and ranks must run as many forwards"
        lengths.append(first)
    assert set(lengths) == {1, 2, 3}


# ---------------------------------------------------------------- dmd2: backward simulation


# ---------------------------------------------------------------- dmd2: the student's loss


def dmd_direction(method, sample) -> Tensor:
    """Return ``g / (N B)`` by its formula, at the noised samples that the roles were called with."""
    (fake_call,) = method.roles["fake"].calls
    batch, t, x_t = make_batch(), fake_call.t, fake_call.x
    w = method.settings.guidance_scale
    c = method.roles["teacher"].formula(x_t, t, text_of(batch))
    u = method.roles["teacher"].formula(x_t, t, null_text_of(batch))
    x_real = x_t - wide(t) * (u + w * (c - u))
    x_fake = x_t - wide(t) * method.roles["fake"].formula(x_t, t, text_of(batch))
    q = torch.stack([(a - b).abs().sum() / N for a, b in zip(sample, x_real, strict=True)])
    return ((x_fake - x_real) / wide(q.clamp(min=1e-5)) / (N * len(sample))).detach()


@pytest.mark.parametrize(("length", "scale"), [(1, 1.0), (3, 2.5)])
def test_gradient_on_the_sample_is_g_over_n_b(length, scale):
    theta = normal(4, *SHAPE, seed=9)
    method = dmd2(Painter(theta), guidance_scale=scale)
    loss = run_loss(method, student_steps(method)[length])
    loss.backward()
    direction = dmd_direction(method, theta)
    assert close(method.roles["student"].theta.grad, direction, 1e-10)
    assert close(loss, 0.5 * (direction * 4 * N).square().sum() / (4 * N), 1e-10)


@pytest.mark.parametrize("role", ["student", "fake"])
def test_score_times_are_uniform_shifted_and_then_held_in_their_range(role):
    """Check the times of the student's scores and of the fake score's training (Self-Forcing, FastVideo)."""
    method = dmd2(shift=4.0, min_time=0.2, max_time=0.9, step_list=[1.0])
    method.trained_role = lambda step: role
    t, _ = times_and_texts(method)
    assert are_uniform_then_shifted_then_clamped(t, 4.0, 0.2, 0.9)


@pytest.mark.parametrize("step", [0, 1])
def test_the_ode_follows_the_students_own_velocity(step):
    """Euler's steps use the times of the list, without draws between them. Sampling does the same."""
    method = dmd2(rollout="full", student_sampler="ode")
    run_loss(method, step)
    calls = method.roles["student"].calls
    assert [call.t[0].item() for call in calls] == [1.0, 0.8, 0.5]
    assert [call.with_grad for call in calls] == [False, False, method.trained_role(step) == "student"]
    for before, after in itertools.pairwise(calls):
        assert close(after.x, before.x + wide(after.t - before.t) * before.v)
    noise, batch = calls[0].x, make_batch()
    assert is_normal(noise)
    sample = method.generate("student", video(noise), batch.condition, 3, random_at(9)).video
    assert torch.equal(sample, method.generate("student", video(noise), batch.condition, 3, random_at(8)).video)
    assert close(sample, calls[2].x - wide(calls[2].t) * calls[2].v)


def test_a_sample_that_the_teacher_finds_perfect_stays_finite():
    """If x_real equals x_G, the normalizer is its lower bound and not zero."""
    theta = normal(4, *SHAPE, seed=9)

    class Agrees(Recorder):
        def formula(self, x, t, text):
            return (x - theta.repeat(len(x) // 4, 1, 1, 1, 1)) / wide(t)

    method = dmd2(Painter(theta), Agrees())
    run_loss(method, 0).backward()
    (call,) = method.roles["fake"].calls
    x_fake = call.x - wide(call.t) * call.v
    assert close(method.roles["student"].theta.grad, (x_fake - theta) / 1e-5 / (4 * N), 1e-6)


# ---------------------------------------------------------------- dmd2: data forcing


@pytest.mark.parametrize("step", [0, 1, 12, 13])
def test_the_student_starts_from_a_clip_noised_to_one_of_its_times(step):
    method = dmd2(student_input="clips")
    run_loss(method, step)
    (call,), batch = method.roles["student"].calls, make_batch()
    length = random_at(step).shared_integer("dmd2/rollout_length", 1, 3)
    assert (call.t == [1.0, 0.8, 0.5][length - 1]).all() and call.with_grad == (step % 6 == 0)
    noise = noise_of(call, batch.latents.video)
    assert is_normal(noise)


def test_a_forced_teacher_scores_the_clip_with_the_time_and_noise_of_the_fake_score():
    theta, batch = normal(4, *SHAPE, seed=9), make_batch()
    method = dmd2(Painter(theta), student_input="clips", data_forcing=1.0)
    run_loss(method, 0).backward()
    (real,), (fake,) = method.roles["teacher"].calls, method.roles["fake"].calls
    noise = noise_of(fake, theta)
    x_t = (1 - wide(fake.t)) * batch.latents.video + wide(fake.t) * noise
    assert close(real.x, torch.cat([x_t, x_t])) and torch.equal(real.t, torch.cat([fake.t, fake.t]))
    w, teacher = method.settings.guidance_scale, method.roles["teacher"]
    c, u = teacher.formula(x_t, fake.t, text_of(batch)), teacher.formula(x_t, fake.t, null_text_of(batch))
    x_real = x_t - wide(fake.t) * (u + w * (c - u))
    x_fake = fake.x - wide(fake.t) * fake.v
    q = wide((theta - x_real).abs().mean((1, 2, 3, 4)))
    assert close(method.roles["student"].theta.grad, (x_fake - x_real) / q / (4 * N), 1e-10)


def test_one_coin_decides_for_the_whole_batch_of_a_step():
    method, forced = dmd2(data_forcing=0.3), []
    for step in range(400):
        forced.append(method._forces_data(random_at(step)))
        other = replace(random_at(step, [7]), part=1)
        assert method._forces_data(other) == forced[-1], "other samples, another part of the batch"
    assert stats.binomtest(sum(forced), 400, 0.3).pvalue > 1e-3
    assert not any(dmd2(student_input="clips")._forces_data(random_at(step)) for step in range(20))


def test_data_forcing_needs_what_it_works_with():
    for settings in ({"data_forcing": 1.5}, {"data_forcing": -0.1}, {"data_forcing": 0.5, "gan_weight_student": 0.1}):
        with refused("method.data_forcing"):
            dmd2(**settings)
    with refused("method.student_input=clips"):
        SelfForcingSettings(student_input="clips")
    for settings in ("method.data_forcing=0.5", "method.student_input=clips"):
        with refused(settings.split("=")[0]):
            compose_config([settings, "data=captions", "data.path=x", "sample.report_clips=0"])


def test_data_forcing_from_the_teacher_is_warned_of(caplog, tmp_path):
    words = ["method.student_input=clips", "device=cpu", "mesh.cp=1"]
    plan_run(compose_config(words))
    assert "data_forcing" not in caplog.text
    plan_run(compose_config([*words, "method.data_forcing=0.5"]))
    assert caplog.text.count("give student.checkpoint") == 1
    caplog.clear()
    other = shutil.copytree("assets/quickstart_teacher/transformer", tmp_path / "student")
    plan_run(compose_config([*words, "method.data_forcing=0.5", f"student.checkpoint={other}"]))
    assert "data_forcing" not in caplog.text


# ---------------------------------------------------------------- dmd2: the fake score's loss


@pytest.mark.parametrize(("name", "warns"), [("dmd2", True), ("flow_matching", False)])
@pytest.mark.parametrize(
    "words", [(), ("method=flow_matching", "student.architecture=null")], ids=["teacher", "student"]
)
def test_a_few_step_student_in_another_role_is_named(tmp_path, caplog, name, warns, words):
    export = tmp_path / "student"
    shutil.copytree("assets/quickstart_teacher", export)
    about = {"method": asdict(METHODS[name][1]())}
    (export / "fsdp_cp_export.json").write_text(json.dumps({"about": about, "files": {}}))
    start = [f"teacher.checkpoint={export}", f"student.checkpoint={export}"]
    plan_run(compose_config(["experiment=quickstart", "mesh.cp=1", *start, *words]))
    assert ("few-step student (method=dmd2" in caplog.text) == warns
