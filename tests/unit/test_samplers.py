"""The teacher's samplers: UniPC against diffusers' own pipeline and against the exact flow of a Gaussian."""

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline

from distill.methods.common.sampling import guided, integrate, unipc_sample
from fsdp_cp.context.check_parallel import relative_error
from tests.oracles.samples import Stub, video
from tests.oracles.tiny_wan import text_condition
from tests.tiers import parametrize, slow
from tests.tiny_pipeline import LATENT_CHANNELS, TEXT_WIDTH, build_tiny_pipeline
from tests.unit.method_roles import SHAPE, TEXT, Gaussian, dmd2, flow_matching, make_batch, normal, random_at
from tests.unit.refused import refused

# ---------------------------------------------------------------- against diffusers


class Wan(Stub):
    """Plain diffusers network as a role. ``truncated``: it gets times as diffusers' UniPC loop passes them."""

    def __init__(self, network, *, truncated):
        self.network, self.truncated = network, truncated

    def of_video(self, x, t, condition, **_):
        t = (1000 * t).floor() if self.truncated else 1000 * t
        return self.network(hidden_states=x, timestep=t, encoder_hidden_states=condition.tensors["text"]).sample


class ExactTimes(UniPCMultistepScheduler):
    """diffusers' scheduler, without the truncation of times to integers."""

    def set_timesteps(self, *args, **kwargs):
        super().set_timesteps(*args, **kwargs)
        self.timesteps = 1000 * self.sigmas[:-1]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return WanPipeline.from_pretrained(build_tiny_pipeline(tmp_path_factory.mktemp("pipeline")))


@parametrize(("steps", "shift", "scale"), [(1, 3.0, 3.0), (12, 5.0, 1.0), (20, 5.0, 5.0)], quick=2)
def test_unipc_is_the_loop_of_diffusers_pipeline(pipeline, steps, shift, scale):
    noise = torch.randn(2, LATENT_CHANNELS, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 6, TEXT_WIDTH, generator=torch.Generator().manual_seed(1))
    null_text = torch.randn(6, TEXT_WIDTH, generator=torch.Generator().manual_seed(2))
    condition = text_condition(text, null_text)
    pipeline.set_progress_bar_config(disable=True)

    def theirs(scheduler):
        pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config, flow_shift=shift)
        return pipeline(
            height=32, width=32, num_frames=5, num_inference_steps=steps, guidance_scale=scale, latents=noise,
            prompt_embeds=text, negative_prompt_embeds=null_text.expand_as(text), output_type="latent",
            return_dict=False,
        )[0]  # fmt: skip

    def ours(truncated):
        role = Wan(pipeline.transformer, truncated=truncated)
        return integrate(guided(role, condition, scale), video(noise), sampler="unipc", steps=steps, shift=shift)[
            0
        ].video

    assert relative_error(ours(False), theirs(ExactTimes)) < 1e-5
    plain = theirs(UniPCMultistepScheduler)
    assert relative_error(ours(True), plain) < 1e-5, "the truncation is all that differs from diffusers"
    assert relative_error(ours(False), plain) > 1e-4, "the check above can tell times apart"


# ---------------------------------------------------------------- against the exact flow


def gaussian_errors(sampler, steps, *, shift=3.0, std=0.5):
    """Return errors relative to the exact flow map ``mean + std * noise``."""
    text = torch.zeros(2, *TEXT, dtype=torch.float64)
    text[:, 0, 0] = torch.tensor([0.3, -0.2])
    noise = normal(2, *SHAPE, seed=4)
    exact = text[:, 0, 0].view(-1, 1, 1, 1, 1) + std * noise
    role = Gaussian(std=std)
    (out,) = integrate(guided(role, text_condition(text), 1.0), video(noise), sampler=sampler, steps=steps, shift=shift)
    out = out.video
    assert len(role.calls) == steps and out.dtype == torch.float64 and not out.requires_grad
    return relative_error(out, exact)


@slow
def test_unipc_converges_to_the_exact_flow_faster_than_euler():
    euler = [gaussian_errors("euler", steps) for steps in (50, 100, 200)]
    unipc = [gaussian_errors("unipc", steps) for steps in (50, 100, 200)]
    for n in range(3):
        assert unipc[n] < euler[n] / 8
    for n in range(2):
        assert 1.8 < euler[n] / euler[n + 1] < 2.2, "first order"
        assert unipc[n] / unipc[n + 1] > 2.3, "better than first order"
    assert unipc[2] < 3e-4, "below what truncated times allow"


# ---------------------------------------------------------------- as methods use them


@pytest.mark.parametrize("sampler", ["euler", "unipc"])
def test_methods_sample_with_the_sampler_of_their_settings(sampler):
    batch, noise = make_batch(), normal(4, *SHAPE, seed=4)
    for method, role in (
        (dmd2(teacher_sampler=sampler), "teacher"),
        (flow_matching(sampler=sampler, shift=3.0, guidance_scale=2.5), "student"),
    ):
        out = method.generate(role, video(noise), batch.condition, 6, random_at(0)).video
        velocity = guided(method.roles[role], batch.condition, 2.5)
        if sampler == "euler":
            expected = integrate(velocity, video(noise), sampler="euler", steps=6, shift=3.0)[0].video
        else:
            expected = unipc_sample(velocity, video(noise), steps=6, shift=3.0).video
        assert torch.equal(out, expected)


def test_an_unknown_sampler_is_refused_by_name():
    for make, setting in ((dmd2, "teacher_sampler"), (flow_matching, "sampler")):
        with refused(f"method.{setting}"):
            make(**{setting: "ddim"})
