"""The student's gradient of data forcing equals its formula, written out with plain networks in float64."""

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel

from distill.data.order import clip_at
from distill.methods.dmd2 import Dmd2Settings
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.rng import StepRandom
from models.lora.settings import LoraSettings
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import BATCH, Setup, random_clips
from tests.oracles.sharded_run import trace_on_ranks
from tests.tiers import long_case, slow, slow_case

METHOD = Dmd2Settings(
    fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0, student_input="clips"
)
SEED = 3
"""Seed of :func:`tests.oracles.runs.make_config`, whose first rollout has two steps: the student's time is .8."""


def wide(x):
    return x.view(-1, 1, 1, 1, 1)


def written_out(setup, folder):
    """Return loss and gradients of the student's first step."""
    data, random = random_clips(setup), StepRandom(seed=SEED, step=0, positions=range(BATCH))
    indices = [clip_at(SEED, len(data), i) for i in range(BATCH)]
    clips, text = data.latents[indices], data.tensors["text"][indices]
    empty = data.null["text"].expand_as(text)
    networks = {n: WanTransformer3DModel.from_pretrained(folder / n).double() for n in ("teacher", "student", "fake")}

    def x0(name, x, t, text):
        v = networks[name](hidden_states=x, timestep=1000 * t, encoder_hidden_states=text, return_dict=False)[0]
        return x - wide(t) * v

    def noise(purpose):
        return random.normal(purpose, setup.latent_shape, torch.float64)

    time = setup.method.step_list[random.shared_integer("dmd2/rollout_length", 1, 3) - 1]
    assert time < 1, "the clip shows in the student's input"
    x_k = (1 - time) * clips + time * noise("dmd2/noise")
    x_g = x0("student", x_k, torch.full((BATCH,), time, dtype=torch.float64), text)
    u = random.uniform("dmd2/time", torch.float64)
    t = (2 * u / (1 + u)).clamp(setup.method.min_time, setup.method.max_time)
    with torch.no_grad():
        e, scored = noise("dmd2/score_noise"), clips if setup.method.data_forcing else x_g
        x_fake = x0("fake", (1 - wide(t)) * x_g + wide(t) * e, t, text)
        x_t = (1 - wide(t)) * scored + wide(t) * e
        given, null = x0("teacher", x_t, t, text), x0("teacher", x_t, t, empty)
        x_real = null + setup.method.guidance_scale * (given - null)
        g = (x_fake - x_real) / wide((x_g - x_real).abs().mean((1, 2, 3, 4)))
    loss = 0.5 * (x_g - (x_g - g).detach()).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in networks["student"].named_parameters() if p.grad is not None}


@pytest.mark.parametrize("probability", [1.0, 0.0])
@pytest.mark.parametrize(
    "sizes",
    [
        slow_case({"dp_shard": 2, "cp": 2, "micro_batch_size": 2}),
        long_case({"micro_batch_size": 4}),
        long_case({"dp_shard": 4, "micro_batch_size": 1}),
        slow_case({"cp": 3, "micro_batch_size": 4}),
    ],
    ids=str,
)
def test_the_gradient_is_the_formula(pools, checkpoints, sizes, probability):
    setup = Setup(steps=1, precision="fp64", method=replace(METHOD, data_forcing=probability), **sizes)
    trace, (loss, gradients) = (
        trace_on_ranks(setup, checkpoints, pools[setup.world_size]),
        written_out(setup, checkpoints),
    )
    assert trace.losses[0] == pytest.approx(loss, rel=1e-6)
    assert trace.gradients[0].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(trace.gradients[0][name], gradient) <= 1e-6, name


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"student": LoraSettings(rank=2), "fake": LoraSettings(rank=2)}, "dp_shard": 2, "cp": 1},
        long_case({"dp_shard": 1, "cp": 2, "micro_batch_size": 2}),
    ],
    ids=str,
)
def test_steps_with_a_coin_equal_one_process(pools, checkpoints, changes):
    """Forced and other steps of student and fake score, and adapters."""
    setup = Setup(**{"steps": 3, "micro_batch_size": 1, "method": replace(METHOD, data_forcing=0.5)} | changes)
    trace, truth = trace_on_ranks(setup, checkpoints, pools[setup.world_size]), oracle_trace(setup, checkpoints)
    assert compare(trace, truth).largest < 1e-5
    always = oracle_trace(replace(setup, method=replace(METHOD, data_forcing=1.0)), checkpoints)
    assert [a == b for a, b in zip(truth.losses, always.losses, strict=True)] == [True, True, False]
