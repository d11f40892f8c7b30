"""Samples of two parts with different clocks: arithmetic, DMD2 against a reference, and what is refused."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distill.config import compose_config
from distill.methods import METHODS, build_method
from distill.methods.base import Batch
from distill.methods.common.sampling import integrate
from distill.methods.dmd2 import Dmd2, Dmd2Settings
from distill.run.setup import plan_run
from fsdp_cp.rng import StepRandom
from models.families.ltx2 import LTX2
from models.roles.role_plan import plan_role
from models.sample import Sample, shift_time
from tests.oracles.dmd2_of_parts import Dmd2OfParts, wide
from tests.oracles.samples import Stub
from tests.oracles.tiny_wan import text_condition
from tests.unit.method_roles import close, gradients, normal
from tests.unit.refused import refused

SHAPES = {"video": (2, 3, 4, 4), "audio": (3, 7, 2)}
TEXT = (3, 5)
RATIO = 0.5
CHOSEN = {
    "step_list": [1.0, 0.8], "shift": 6.0, "time_limits": "draw", "guidance_scale": 2.0, "audio_guidance_scale": 3.0,
    "audio_weight": 0.7, "audio_shift_ratio": RATIO, "fake_updates_per_student_update": 1,
}  # fmt: skip


class Duet(Stub, nn.Module):
    """Stand-in for a role whose parts depend on each other, on their own times and on the caption."""

    family = SimpleNamespace(parts={"video": 1.0, "audio": 0.25})

    def __init__(self, seed):
        super().__init__()
        self.mix = nn.ParameterDict({part: normal(shape[0], shape[0], seed=seed) for part, shape in SHAPES.items()})
        self.time = nn.Parameter(normal(2, seed=seed + 1))
        self.other = nn.Parameter(normal(2, seed=seed + 2))

    def expert_at(self, time):
        return 0

    def formula(self, x, times, text):
        means = {part: value.flatten(1).mean(1) for part, value in x.items()}
        v = {}
        for i, (part, value) in enumerate(x.items()):
            moved = torch.einsum("oc,bc...->bo...", self.mix[part], torch.tanh(value))
            (other,) = x.keys() - {part}
            own = 1 + self.time[i] * times[part] + self.other[i] * means[other] + text.mean((1, 2))
            v[part] = moved * wide(own, value)
        return v

    def velocity(self, x, t, condition, second_time=None, at=None, clean=None):
        times = {part: x.time(part, t) for part in x.parts}
        return replace(x, parts=self.formula(x.parts, times, condition.tensors["text"]))


def random_at(step, positions=range(4)):
    return StepRandom(seed=11, step=step, positions=list(positions))


def parts(count=4, seed=1, shifts=None):
    return Sample({name: normal(count, *shape, seed=seed) for name, shape in SHAPES.items()}, shifts or {})


def duets(**settings):
    roles = {name: Duet(seed) for name, seed in (("teacher", 30), ("student", 40), ("fake", 50))}
    method = build_method(Dmd2Settings(**CHOSEN | settings), roles)
    text = text_condition(normal(4, *TEXT, seed=2), normal(*TEXT, seed=3), normal(*TEXT, seed=13))
    return method, Batch(latents=None, condition=text, latent_shapes=SHAPES, latent_shifts=method.clock("student"))


@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize(("step", "role"), [(0, "student"), (1, "fake"), (2, "student"), (3, "fake")])
def test_dmd2_equals_the_reference(step, role, projection):
    method, batch = duets(projection=projection)
    (loss,) = method.losses(step, batch, random_at(step))
    value = loss.closure()
    value.backward()
    ours = gradients(method.roles[role])

    def call(name, x, times, null):
        condition = batch.condition.null if null else batch.condition
        return method.roles[name].formula(x, times, condition.tensors["text"])

    truth = Dmd2OfParts(call, method.settings, random_at(step), SHAPES, {"video": 1.0, "audio": RATIO})
    method.roles[role].zero_grad()
    expected = truth.student_loss() if role == "student" else truth.fake_loss()
    expected.backward()
    assert close(value.detach(), expected.detach(), 1e-9)
    wanted = gradients(method.roles[role])
    assert ours.keys() == wanted.keys() and all(close(ours[name], wanted[name], 1e-9) for name in ours)
    observed = method.observations.drain()
    for part, q in truth.normalisers.items():
        total, count = observed["dmd_normaliser" if part == "video" else f"dmd_normaliser/{part}"]
        assert total / count == pytest.approx(q.mean().item(), rel=1e-12)


def test_clocks_of_training_and_of_the_teachers_own_sampling():
    method, _ = duets()
    assert method.clock("student") == {"video": 1.0, "audio": RATIO}
    assert method.clock("teacher") == {"video": 1.0, "audio": 0.25}, "the teacher keeps its released shifts"
    assert duets(audio_shift_ratio=None)[0].clock("student") == {"video": 1.0, "audio": 0.25}
    settings = Dmd2Settings(shift=6.0, teacher_shift=12.0)
    assert settings.sampling_shift == 12.0 and Dmd2Settings(shift=6.0).sampling_shift == 6.0


@pytest.mark.parametrize("sampler", ["euler", "unipc"])
def test_a_sampler_moves_each_part_along_its_own_times(sampler):
    """On straight paths to one clip every sampler is exact, if each part steps by its own times."""
    clip, noise = parts(seed=5, shifts={"audio": 0.25}), parts(seed=6, shifts={"audio": 0.25})
    seen = []

    def velocity(x, t):
        seen.append(t)
        return x.map(lambda part, x0, time: (part - x0) / time, clip, {name: x.time(name, t) for name in x.parts})

    *_, end = integrate(velocity, noise, sampler=sampler, steps=5, shift=12.0)
    assert len(seen) == 5 and all(close(end.parts[name], clip.parts[name], 1e-6) for name in clip.parts)
    assert shift_time(shift_time(0.3, 12.0), 0.25) == pytest.approx(shift_time(0.3, 3.0)), "shifts compose"


def test_a_weight_of_0_leaves_the_audio_out_of_the_loss():
    method, batch = duets(audio_weight=0.0)
    (loss,) = method.losses(1, batch, random_at(1))
    loss.closure().backward()
    found = gradients(method.roles["fake"])
    assert found["mix.audio"].abs().max() == 0 < found["mix.video"].abs().max()


def test_samples_refuse_other_parts_and_other_clocks():
    x = parts()
    assert torch.equal((2 - x * {"video": 1.0, "audio": 3.0}).parts["audio"], 2 - 3 * x.parts["audio"])
    assert torch.equal(Sample.cat([x, x])[4:].video, x.video) and len(x[:3]) == 3
    for other in (Sample({"video": x.video}), parts(shifts={"audio": 0.5})):
        with pytest.raises(AssertionError):
            x + other


@pytest.mark.parametrize("name", [*METHODS])
def test_methods_that_do_not_know_sound_name_those_that_do(name):
    kind, settings = METHODS[name]
    if name in ("dmd2", "pdd", "flow_matching", "ode_regression", "self_forcing"):
        kind.check_parts(settings(), ["audio"])
        return
    with refused(f"method={name}"):
        kind.check_parts(settings(), ["audio"])


def test_a_gan_does_not_know_sound():
    with refused("method=dmd2 without GAN"):
        Dmd2.check_parts(Dmd2Settings(gan_weight_student=0.1), ["audio"])


def test_sound_that_no_network_makes_is_not_used_and_has_no_settings(caplog):
    config = compose_config(["experiment=quickstart", "mesh.cp=1"])
    for name in ("audio_weight", "audio_shift_ratio", "audio_guidance_scale"):
        with refused(f"method.{name}=0.5"):
            plan_run(replace(config, method=replace(config.method, **{name: 0.5})))
    shapes, conditions = config.data.sample_shapes()
    with caplog.at_level("INFO"):
        plan = plan_run(config, shapes=({**shapes, "audio": (8, 24, 16)}, conditions))
    assert plan.tokens == 96 and "audio" in caplog.text


def test_a_network_with_sound_needs_it_and_a_frame_of_its_size():
    role = plan_role("student", checkpoint=None, architecture=LTX2().examples()["2.0"], family="ltx2")
    video, text = (4, 3, 2, 3), role.family.condition_shapes(role.config, (4, 3, 2, 3), 5)
    sound = role.family.sample_shapes(role.config, video)
    assert role.tokens(sound, text) == 18
    with refused("audio"):
        role.tokens({"video": video}, text)
    assert role.tokens(sound, text | {"first_frame": (4, 1, 2, 3)}) == 18
    for name, shape in (("first_frame", (4, 1, 3, 2)), ("image_latents", (4, 3, 2, 3))):
        with refused(name):
            role.tokens(sound, text | {name: shape})


def test_only_released_shifts_have_a_scheduler_for_a_pipeline():
    ours = duets(audio_shift_ratio=0.25)[0].few_steps
    assert ours["shifts"] == {"video": 1.0, "audio": 0.25}
    for shifts, fits in ((LTX2.parts, True), (ours["shifts"], False)):
        with nullcontext() if fits else refused("shifts"):
            assert [*LTX2().schedulers(times=[1.0, 0.5], stochastic=False, shifts=shifts)] == ["scheduler"]
