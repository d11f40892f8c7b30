"""Image to video, from mp4 files to clips: trained at two ranks, exported, sampled by a plain diffusers pipeline."""

from pathlib import Path

import av
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanTransformer3DModel
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

CAPTIONS = ["a red square, drifting", "a square from a picture"]
STEPS = [1.0, 0.9375, 0.8333, 0.625]
SIZE = {"height": 32, "width": 48}


def words(pipeline, clips, picture):
    return [
        "experiment=quickstart", "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")), "optim.student.lr=1e-2",
        "data.height=32", "data.width=48", "batch_size=2", "student.ema.enabled=false",
        f"method.step_list={STEPS}", "method.fake_updates_per_student_update=1", "data.image=first_frame",
        "sample.student_steps=[4]", "sample.report_clips=0", "sample.teacher_steps=[]",
        f"sample.captions=['{CAPTIONS[0]}','{CAPTIONS[1]}']", f"sample.images=[{clips}/clip_0.mp4,{picture}]",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pipeline folder, clips, a picture of another size, and a run of two steps."""
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_pipeline(pipeline, image=True)
    render_clips(clips, 3, frames=24, fps=8, height=72, width=120)
    picture = clips.parent / "picture.png"
    Image.fromarray(moving_square("green", 1, 96, 144)[0]).save(picture)
    train(2, *words(pipeline, clips, picture), "mesh.cp=2", "steps=2", f"run_dir={run_dir}")
    return pipeline, clips, picture, run_dir


def first_frame(file) -> Image.Image:
    frame = read_clip(file, ClipFormat(num_frames=1, **SIZE, fps=8.0))[:, 0]
    return Image.fromarray(frame.add(1).mul(127.5).round().to(torch.uint8).permute(1, 2, 0).numpy())


class NoDraws:
    """Of a sampler that adds no noise."""


def ours(run_dir, images, noise):
    config = load_config(run_dir / "config.yaml")
    config.method.student_sampler = "ode"
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
    latents = method.generate("student", noise, data.condition(CAPTIONS), 4, NoDraws())
    item = data[0]
    return latents, {name: tuple(value.shape) for name, value in item.items() if name != "caption"}


def test_a_plain_pipeline_makes_of_an_image_what_our_sampler_does(folders):
    base, clips, picture, run_dir = folders
    files = [str(clips / "clip_0.mp4"), str(picture)]
    noise = torch.randn(2, 16, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    latents, shapes = run_ranks(1, ours, run_dir, files, noise)[0]
    assert shapes == {
        "latents": (16, 5, 4, 6), "text": (512, 32), "image_latents": (16, 5, 4, 6), "image_mask": (4, 5, 4, 6),
        "image_embeds": (5, 20),
    }  # fmt: skip
    pipeline = WanImageToVideoPipeline.from_pretrained(
        base,
        transformer=WanTransformer3DModel.from_pretrained(run_dir / "export" / "student"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(
            run_dir / "export" / "scheduler", stochastic_sampling=False
        ),
    )
    pipeline.set_progress_bar_config(disable=True)
    theirs = [
        pipeline(
            image=first_frame(file), prompt=caption, **SIZE, num_frames=17, num_inference_steps=4, guidance_scale=1.0,
            latents=noise[i : i + 1], output_type="latent", return_dict=False,
        )[0]
        for i, (file, caption) in enumerate(zip(files, CAPTIONS, strict=True))
    ]  # fmt: skip
    theirs = torch.cat(theirs)
    assert ((latents - theirs).norm() / theirs.norm()).item() < 1e-3, "the cost of times that are met to 1e-5"
    swapped, _ = run_ranks(1, ours, run_dir, files[::-1], noise)[0]
    assert ((swapped - theirs).norm() / theirs.norm()).item() > 3e-3, "the check above can tell images apart"


def test_the_cache_is_used_again_and_the_run_has_clips(folders, capfd):
    base, clips, picture, run_dir = folders
    found = sorted(path.name for path in (run_dir / "samples").glob("*.mp4"))
    assert found == [f"step_00000002_student_4steps_{i}.mp4" for i in (0, 1)]
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "cache").rglob("*.safetensors")}
    assert {path.parent.name for path in before} == {"latents", "text", "image_latents", "image_embeds"}
    out = run_dir / "elsewhere"
    arguments = f"{run_dir} --steps 2 --caption mine --image {picture} --out {out}".split()
    assert sample.main(arguments) == 0
    with av.open(str(out / "0.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == 17
    assert str(picture) in (out / "fsdp_cp_export.json").read_text()
    after = {path: path.stat().st_mtime_ns for path in (run_dir / "cache").rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before
    assert {path.parent.name for path in after.keys() - before.keys()} == {"text"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.image=null", "sample.images=[]"], "the data give it no image; use data.image=first_frame"),
        (["data.image=last_frame"], "data.image=last_frame is unknown; use first_frame, or null for none"),
        (["data.max_text_tokens=64"], "data.max_text_tokens=64: teacher.checkpoint is an image-to-video Wan"),
        (["sample.images=[{picture}]"], "sample.images has 1 images and sample.captions 2 captions"),
        (["sample.images=[{picture},{picture}.gone]"], "picture.png.gone is not a file"),
        (["sample.images=[{clips}/metadata.csv,{picture}]"], "metadata.csv gives no image"),
        (["sample.captions=[nobody knows it]", "sample.images=[]"], "is of no clip of"),
        (["data.image=null"], "are for an image-to-video model, and data.image is not set"),
        (["data=captions", "data.path={clips}/metadata.csv"], "data=captions has no clips; use data=video_folder"),
        (["teacher.checkpoint={t2v}"], "teacher.checkpoint is a text-to-video Wan, which takes no image"),
        (["data.encoders={t2v}"], "has no image_encoder/, which data.image=first_frame needs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_an_image_is_refused_by_name(folders, tmp_path, capfd, changes, message):
    base, clips, picture, _ = folders
    t2v = build_tiny_pipeline(tmp_path / "t2v") if any("{t2v}" in change for change in changes) else None
    filled = [change.format(clips=clips, picture=picture, t2v=t2v) for change in changes]
    line = [*words(base, clips, picture), "mesh.cp=1", "steps=2", f"run_dir={tmp_path}/run", "device=cpu", *filled]
    needs_the_data = message in ("metadata.csv gives no image", "is of no clip of")  # of the rest a dry run is told
    assert main([*line, f"dry_run={str(not needs_the_data).lower()}"]) == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert message in error, error
    assert not Path(tmp_path / "run" / "checkpoints").exists()
