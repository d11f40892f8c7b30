"""Wan 2.2's TI2V, from mp4 files to clips: trained at two ranks from first frames, exported, sampled by plain diffusers
pipelines, from a frame and from text alone."""

from pathlib import Path

import av
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image

from distill import sample
from distill.config import load_config
from distill.data.clips import ClipFormat, read_clip
from distill.methods import build_method
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from models.load import build_role
from models.role_plan import plan_role
from tests.e2e.launch import train
from tests.tiny_pipeline import build_tiny_pipeline, moving_square, render_clips
from train import main

pytestmark = pytest.mark.slow

CAPTIONS = ["a red square, drifting", "a square from a picture"]
STEPS = [1.0, 0.9375, 0.8333, 0.625]
SIZE = {"height": 32, "width": 64}
LATENTS = (48, 5, 2, 4)  # 10 tokens


def words(pipeline, clips, picture):
    return [
        "experiment=quickstart", "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")), "optim.student.lr=1e-2",
        "data.height=32", "data.width=64", "batch_size=2", "student.ema.enabled=false",
        f"method.step_list={STEPS}", "method.fake_updates_per_student_update=1", "data.image=first_frame",
        "sample.student_steps=[4]", "sample.report_clips=0", "sample.teacher_steps=[]",
        f"sample.captions=['{CAPTIONS[0]}','{CAPTIONS[1]}']", f"sample.images=[{clips}/clip_0.mp4,{picture}]",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pipeline folder, clips, a picture of another size, and a run of two steps."""
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_pipeline(pipeline, frame=True)
    render_clips(clips, 3, frames=24, fps=8, height=72, width=144)
    picture = clips.parent / "picture.png"
    Image.fromarray(moving_square("green", 1, 96, 192)[0]).save(picture)
    train(2, *words(pipeline, clips, picture), "mesh.cp=2", "steps=2", f"run_dir={run_dir}")
    return pipeline, clips, picture, run_dir


def image_of(file) -> torch.Tensor:
    """``(1, 3, H, W)`` in [0, 1]: a picture's 256 levels alone would make latents of .3 % others."""
    return read_clip(file, ClipFormat(num_frames=1, **SIZE, fps=8.0))[None, :, 0].add(1).div(2)


class NoDraws:
    """Of a sampler that adds no noise."""


def ours(run_dir, images, noise):
    """What our sampler makes at one rank, of images or of text alone; and an item of the data."""
    config = load_config(run_dir / "config.yaml")
    config.method.student_sampler = "ode"
    if not images:
        config.data.image = None
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=run_dir, captions=CAPTIONS, images=images)
    role = build_role(
        plan_role("student", checkpoint=str(run_dir / "export" / "student")),
        mesh=build_mesh(cp=1, heads=4),
        device=torch.device("cpu"),
        trainable=False,
        latent_shape=data.latent_shape,
        condition_shapes=data.condition_shapes,
    )
    method = build_method(config.method, {"student": role})
    return method.generate("student", noise, data.condition(CAPTIONS), 4, NoDraws()), data[0]


def theirs(kind, base, run_dir, noise, images=None):
    """What diffusers' pipeline makes with the exported student."""
    pipeline = kind.from_pretrained(
        base,
        transformer=WanTransformer3DModel.from_pretrained(run_dir / "export" / "student"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
            run_dir / "export" / "scheduler", stochastic_sampling=False
        ),
    )
    assert pipeline.config.expand_timesteps
    pipeline.set_progress_bar_config(disable=True)
    made = []
    for i, caption in enumerate(CAPTIONS):
        image = {} if images is None else {"image": image_of(images[i])}
        made += pipeline(
            prompt=caption, **SIZE, num_frames=17, num_inference_steps=4, guidance_scale=1.0,
            latents=noise[i : i + 1], output_type="latent", return_dict=False, **image,
        )  # fmt: skip
    return torch.cat(made)


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_plain_pipelines_make_what_our_sampler_does(folders):
    base, clips, picture, run_dir = folders
    files = [str(clips / "clip_0.mp4"), str(picture)]
    noise = torch.randn(2, *LATENTS, generator=torch.Generator().manual_seed(0))
    latents, item = run_ranks(1, ours, run_dir, files, noise)[0]
    assert {name: tuple(value.shape) for name, value in item.items() if name != "caption"} == {
        "latents": LATENTS, "text": (512, 32), "first_frame": (48, 1, 2, 4),
    }  # fmt: skip
    first = item["latents"][:, :1]
    assert error(item["first_frame"], first) < 1e-5, (
        "the VAE is causal: a clip's first latent frame is its first frame's"
    )
    of_images = theirs(WanImageToVideoPipeline, base, run_dir, noise, files)
    assert error(latents[:, :, 0], of_images[:, :, 0]) < 1e-4, "the frames that were given"
    matched = error(latents[:, :, 1:], of_images[:, :, 1:])
    assert matched < 5e-4, "the cost of times that are met to 1e-5"
    swapped, _ = run_ranks(1, ours, run_dir, files[::-1], noise)[0]
    assert error(swapped[:, :, 1:], of_images[:, :, 1:]) > 4 * matched, "the check above can tell images apart"
    of_text, item = run_ranks(1, ours, run_dir, [], noise)[0]
    assert "first_frame" not in item
    assert error(of_text, theirs(WanPipeline, base, run_dir, noise)) < 5e-4
    assert error(of_text[:, :, 1:], latents[:, :, 1:]) > 4 * matched, "a frame makes a difference"


def test_the_cache_is_used_again_and_the_run_has_clips(folders):
    base, clips, picture, run_dir = folders
    found = sorted(path.name for path in (run_dir / "samples").glob("*.mp4"))
    assert found == [f"step_00000002_student_4steps_{i}.mp4" for i in (0, 1)]
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "cache").rglob("*.safetensors")}
    assert {path.parent.name for path in before} == {"latents", "text", "first_frame"}
    out = run_dir / "elsewhere"
    arguments = f"{run_dir} --steps 2 --caption mine --image {picture} --out {out}".split()
    assert sample.main(arguments) == 0
    with av.open(str(out / "0.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == 17
    after = {path: path.stat().st_mtime_ns for path in (run_dir / "cache").rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before
    assert {path.parent.name for path in after.keys() - before.keys()} == {"text"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.image=null"], "are for an image-to-video model, and data.image is not set"),
        (["data.num_frames=1"], "data.num_frames gives 1 latent frame, and data.image=first_frame gives it already"),
        (["teacher.checkpoint={i2v}"], "teacher.checkpoint takes latents of 16 channels, but the data has 48"),
        (["data.encoders={i2v}"], "takes latents of 48 channels, but the data has 16"),
        (["data.height=48"], "data.height=48 is not a multiple of 32 (VAE 16 x patch 2)"),
    ],
)
def test_what_does_not_fit_a_frame_is_refused_by_name(folders, tmp_path, capfd, changes, message):
    base, clips, picture, _ = folders
    i2v = build_tiny_pipeline(tmp_path / "i2v", image=True) if "i2v" in changes[0] else None
    filled = [change.format(i2v=i2v) for change in changes]
    line = [*words(base, clips, picture), "mesh.cp=1", "steps=2", f"run_dir={tmp_path}/run", "device=cpu", *filled]
    assert main([*line, "dry_run=true"]) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert message in said, said
    assert not Path(tmp_path / "run" / "checkpoints").exists()
