"""A run's export in a plain diffusers pipeline: the same latents as from our own sampler, from a prompt on."""

from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

from distill.config import load_config
from distill.methods import build_method
from distill.methods.sampling import rollout
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from models.export import main as export_command
from models.load import build_role
from models.lora.settings import LoraSettings
from models.role_plan import plan_role
from tests.e2e.launch import train
from tests.tiny_pipeline import build_tiny_pipeline, render_clips

CAPTIONS = ["a green square, drifting", "a red square, drifting"]
PUBLISHED = [1.0, 0.9375, 0.8333, 0.625]
RCM = [80 / 81, 0.934, 0.853, 0.609]
"""Near rCM's times: no diffusers scheduler has them."""


def distil(tmp_path_factory, *changes):
    """A pipeline folder and a run of two steps, sampled after each."""
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_pipeline(pipeline)
    render_clips(clips, 2, frames=24, fps=8, height=72, width=120)
    train(
        2, "experiment=quickstart", "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")), "optim.student.lr=1e-2",
        "data.height=32", "data.width=48", "mesh.cp=2", "batch_size=2", "steps=2", "student.ema.enabled=false",
        f"method.step_list={PUBLISHED}", "method.fake_updates_per_student_update=1",
        "sample.every=1", "sample.teacher_steps=[2]", "sample.student_steps=[4]", "sample.report_clips=0",
        f"sample.captions=['{CAPTIONS[0]}','{CAPTIONS[1]}']", f"run_dir={run_dir}", *changes,
    )  # fmt: skip
    return pipeline, run_dir


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a student that re-noises."""
    return distil(tmp_path_factory)


class TorchDraws:
    """Fresh noise as a pipeline draws it: its scheduler has no generator, so from torch's global stream."""

    def normal(self, purpose, shape, dtype):
        return torch.randn(len(CAPTIONS), *shape, dtype=dtype)


def our_latents(run_dir, noise, lists, **student):
    """From the exported student (or ``student``), sharded as in training, by the times of each of ``lists``; and the
    method's own."""
    config = load_config(run_dir / "config.yaml")
    data = config.data.build(seed=config.seed, device=torch.device("cpu"), run_dir=run_dir)
    role = build_role(
        plan_role("student", **student or {"checkpoint": str(run_dir / "export" / "student")}),
        mesh=build_mesh(cp=1, heads=4),
        device=torch.device("cpu"),
        trainable=False,
        latent_shape=data.latent_shape,
        condition_shapes=data.condition_shapes,
    )
    condition = data.condition(CAPTIONS)
    assert noise.shape[1:] == data.latent_shape
    found = []
    with torch.no_grad():
        for times in lists:
            torch.manual_seed(3)
            found.append(rollout(role, noise, condition, times, TorchDraws(), "renoise", sampler="renoise"))
        torch.manual_seed(3)
        method = build_method(config.method, {"student": role})
        found.append(method.generate("student", noise, condition, 4, TorchDraws()))
    return found


def off(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_samples_on_the_way_show_the_teacher_once(folders):
    names = {path.name for path in (folders[1] / "samples").iterdir()}
    assert names == {
        *(f"teacher_2steps_{i}.mp4" for i in (0, 1)),
        *(f"step_0000000{step}_student_4steps_{i}.mp4" for step in (1, 2) for i in (0, 1)),
        "step_00000001.png", "step_00000002.png",
    }  # fmt: skip


def test_a_plain_pipeline_generates_what_our_sampler_does(folders):
    base, run_dir = folders
    export = run_dir / "export"
    pipeline = WanPipeline.from_pretrained(
        base,
        transformer=WanTransformer3DModel.from_pretrained(export / "student"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(export / "scheduler"),
    )
    pipeline.set_progress_bar_config(disable=True)
    shape = (2, 16, 5, 4, 6)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def generate(latents, output_type="latent"):
        torch.manual_seed(3)
        return pipeline(
            CAPTIONS, height=32, width=48, num_frames=17, num_inference_steps=4, guidance_scale=1.0,
            latents=latents, output_type=output_type, return_dict=False,
        )[0]  # fmt: skip

    theirs = generate(noise)
    assert generate(noise, "np").shape == (2, 17, 32, 48, 3)
    fitted = pipeline.scheduler.sigmas[:-1].tolist()
    # Times that no scheduler has, as docs/run.md shows; this student's first input is less than noise.
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    pipeline.scheduler.set_timesteps = partial(pipeline.scheduler.set_timesteps, sigmas=RCM)
    other = generate(RCM[0] * noise)
    exact, listed, ours_other, method = run_ranks(1, our_latents, run_dir, noise, [fitted, PUBLISHED, RCM])[0]
    assert off(exact, theirs) < 1e-5
    assert off(ours_other, other) < 1e-5
    assert torch.equal(method, listed) and off(listed, theirs) < 1e-3, "the cost of times that are met to 1e-5"
    assert off(ours_other, theirs) > 1e-2, "the checks above can tell times apart"


def _our_own(run_dir, noise):
    return our_latents(run_dir, noise, [])[0]


@pytest.mark.slow
def test_a_student_that_is_trained_along_its_ode_is_sampled_so_by_a_plain_pipeline(tmp_path_factory):
    base, run_dir = distil(tmp_path_factory, "method.student_sampler=ode", "method.rollout=full", "sample.every=0")
    export = run_dir / "export"
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(export / "scheduler")
    assert not scheduler.config.stochastic_sampling
    noise = torch.randn(2, 16, 5, 4, 6, generator=torch.Generator().manual_seed(0))

    def generate(scheduler):
        pipeline = WanPipeline.from_pretrained(
            base,
            transformer=WanTransformer3DModel.from_pretrained(export / "student"),
            scheduler=scheduler,
        )
        pipeline.set_progress_bar_config(disable=True)
        torch.manual_seed(3)
        return pipeline(
            CAPTIONS, height=32, width=48, num_frames=17, num_inference_steps=4, guidance_scale=1.0,
            latents=noise, output_type="latent", return_dict=False,
        )[0]  # fmt: skip

    ours = run_ranks(1, _our_own, run_dir, noise)[0]
    assert off(ours, generate(scheduler)) < 1e-3, "the cost of times that are met to 1e-5"
    stochastic = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config, stochastic_sampling=True)
    assert off(ours, generate(stochastic)) > 1e-2, "the check above can tell the samplers apart"


def _adapted(run_dir, noise, base):
    adapters = run_dir / "export" / "student_lora" / "pytorch_lora_weights.safetensors"
    return our_latents(run_dir, noise, [], checkpoint=str(base), lora=LoraSettings(), saved=adapters)[0]


@pytest.mark.slow
def test_adapters_generate_the_same_in_a_plain_pipeline_in_every_format(tmp_path_factory, tmp_path):
    """Loaded at strength 1, with either keys, and merged; our sampler has base and adapters apart, as in training."""
    base, run_dir = distil(tmp_path_factory, "student.lora.rank=4", "fake.lora.rank=4", "sample.every=0")
    export = run_dir / "export"
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(export / "scheduler")
    noise = torch.randn(2, 16, 5, 4, 6, generator=torch.Generator().manual_seed(0))

    def generate(merged=None, adapters=None):
        network = WanTransformer3DModel.from_pretrained(merged or base, subfolder=None if merged else "transformer")
        pipeline = WanPipeline.from_pretrained(base, transformer=network, scheduler=scheduler)
        pipeline.set_progress_bar_config(disable=True)
        if adapters is not None:
            pipeline.load_lora_weights(adapters)
        torch.manual_seed(3)
        return pipeline(
            CAPTIONS, height=32, width=48, num_frames=17, num_inference_steps=4, guidance_scale=1.0, latents=noise,
            output_type="latent", return_dict=False,
        )[0]  # fmt: skip

    for kind in ("wan-lora", "diffusers-lora", "merged"):
        assert export_command([str(run_dir), str(tmp_path / kind), "--format", kind]) == 0
    ours = run_ranks(2, _adapted, run_dir, noise, base)[0]
    exact = generate(export / "student")
    assert off(exact, ours) < 1e-3, "the cost of times that are met to 1e-5"
    assert off(generate(tmp_path / "merged"), exact) < 1e-4
    for folder in (export / "student_lora", tmp_path / "diffusers-lora", tmp_path / "wan-lora"):
        assert off(generate(adapters=folder), exact) < 1e-4, folder
    assert off(generate(), exact) > 1e-2, "nothing to compare"
