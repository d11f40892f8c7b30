"""LTX-Video from mp4 files to clips: trained at two ranks, exported, sampled by a plain diffusers LTXPipeline."""

from pathlib import Path

import av
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from PIL import Image
from safetensors.torch import load_file

from distill import sample
from distill.config import load_config
from distill.data.clips import ClipFormat, read_clip
from distill.methods import build_method
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from models import export
from models.load import build_role
from models.role_plan import plan_role
from tests.e2e.launch import train
from tests.tiny_ltx_pipeline import build_tiny_ltx_pipeline
from tests.tiny_pipeline import build_tiny_pipeline, render_clips
from train import main

CAPTIONS = ["a red square, drifting", "a long & windy road"]
STEPS = [1.0, 0.9375, 0.8333333, 0.625]
SIZE = {"height": 64, "width": 96}
FPS = 12.0


def words(pipeline, clips):
    return [
        "experiment=quickstart", "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.family=ltx" for role in ("teacher", "student", "fake")), f"teacher.checkpoint={pipeline}",
        "optim.student.lr=1e-2", "data.height=64", "data.width=96", f"data.fps={FPS}", "data.max_text_tokens=128",
        "batch_size=2", "student.ema.enabled=false", f"method.step_list={STEPS}", "method.student_sampler=ode",
        "method.fake_updates_per_student_update=1", "sample.student_steps=[4]", "sample.report_clips=0",
        "sample.teacher_steps=[]", f"sample.captions=['{CAPTIONS[0]}','{CAPTIONS[1]}']",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pipeline folder, clips, and a run of two steps on two ranks that share a clip's 18 tokens."""
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_ltx_pipeline(pipeline)
    render_clips(clips, 3, frames=36, fps=12, height=72, width=120)
    train(2, *words(pipeline, clips), "mesh.cp=2", "steps=2", "checkpoint.every=2", f"run_dir={run_dir}")
    return pipeline, clips, run_dir


def ours(run_dir, noise, images=()):
    """Latents, pixels, the condition and the shapes of an item, of our own sampler and data."""
    config = load_config(run_dir / "config.yaml")
    given = {"captions": CAPTIONS, "images": images}
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=run_dir, **given)
    role = build_role(
        plan_role("student", checkpoint=str(run_dir / "export" / "student"), family="ltx"),
        mesh=build_mesh(cp=1, heads=4),
        device=torch.device("cpu"),
        trainable=False,
        latent_shape=data.latent_shape,
        condition_shapes=data.condition_shapes,
    )
    method, condition = build_method(config.method, {"student": role}), data.condition(CAPTIONS)
    latents = method.generate("student", noise, condition, 4, None)
    shapes = {name: tuple(x.shape) for name, x in data[0].items() if name != "caption"}
    return latents, data.decode(latents), dict(condition.tensors), shapes


def pipeline_of(base, run_dir):
    pipeline = LTXPipeline.from_pretrained(
        base,
        transformer=LTXVideoTransformer3DModel.from_pretrained(run_dir / "export" / "student"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(run_dir / "export" / "scheduler"),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.slow
def test_a_plain_pipeline_makes_what_our_sampler_does(folders):
    base, _, run_dir = folders
    noise = torch.randn(2, 8, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    latents, pixels, _, shapes = run_ranks(1, ours, run_dir, noise)[0]
    assert shapes == {
        "latents": (8, 3, 2, 3), "text": (128, 32), "text_mask": (128,), "latent_spacing": (4,)
    }  # fmt: skip
    pipeline = pipeline_of(base, run_dir)
    trained = load_file(run_dir / "export" / "student" / "diffusion_pytorch_model.safetensors")
    before = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    assert trained.keys() == before.keys() and any(not torch.equal(trained[n], before[n]) for n in before)

    def theirs(**changes):
        arguments = {
            **SIZE, "num_frames": 17, "frame_rate": FPS, "num_inference_steps": 4, "guidance_scale": 1.0,
            "prompt": CAPTIONS, "output_type": "latent", "return_dict": False,
        }  # fmt: skip
        packed = pipeline(latents=pipeline._pack_latents(noise), **arguments | changes)[0]
        return pipeline._unpack_latents(packed, 3, 2, 3) if packed.ndim == 3 else packed

    found = theirs()
    off = ((latents - found).norm() / found.norm()).item()
    print(f"latents of LTXPipeline and ours differ by {off:.1e}")
    assert off < 1e-5
    for change in ({"prompt": CAPTIONS[::-1]}, {"frame_rate": 24.0}):
        other = theirs(**change)
        assert ((latents - other).norm() / other.norm()).item() > 3e-4, f"the check above can tell {change}"
    frames = torch.from_numpy(theirs(output_type="np"))
    assert frames.shape == pixels.shape == (2, 17, 64, 96, 3)
    assert (frames * 255 - pixels.float()).abs().max() < 1.01


@pytest.mark.slow
def test_the_export_of_a_checkpoint_is_that_of_the_run(folders, tmp_path):
    _, _, run_dir = folders
    assert export.main([str(run_dir), str(tmp_path / "out")]) == 0
    first, second = (
        load_file(folder / "diffusion_pytorch_model.safetensors")
        for folder in (run_dir / "export" / "student", tmp_path / "out")
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_the_run_has_clips_and_others_are_sampled_from_its_cache(folders):
    _, _, run_dir = folders
    found = sorted(path.name for path in (run_dir / "samples").glob("*.mp4"))
    assert found == [f"step_00000002_student_4steps_{i}.mp4" for i in (0, 1)]
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "cache").rglob("*.safetensors")}
    assert {path.parent.name for path in before} == {"latents", "text"}
    out = run_dir / "elsewhere"
    assert sample.main(f"{run_dir} --steps 2 --caption mine --out {out}".split()) == 0
    with av.open(str(out / "0.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == 17
    after = {path: path.stat().st_mtime_ns for path in (run_dir / "cache").rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before
    assert {path.parent.name for path in after.keys() - before.keys()} == {"text"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], None),
        (["teacher.family=wan"], "is a LTXVideoTransformer3DModel, but family=wan needs a WanTransformer3DModel"),
        (["data.encoders={wan}"], "but the data's have 16; use a checkpoint made for this VAE"),
        (["teacher.checkpoint={wan}"], "is a WanTransformer3DModel, but family=ltx needs a LTXVideoTransformer3DModel"),
        (["data.image=first_frame", "data.num_frames=1"], "gives 1 latent frame, and data.image=first_frame gives it"),
        (["data=moving_shapes"], "use data.encoders of an LTX pipeline"),
        (["data.num_frames=15"], "data.num_frames=15 does not fit the VAE, which joins 8 frames after the first"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path_factory, tmp_path, capfd, changes, message):
    base, clips = build_tiny_ltx_pipeline(tmp_path / "ltx"), render_clips(tmp_path / "clips", 1)
    wan = build_tiny_pipeline(tmp_path / "wan") if any("{wan}" in change for change in changes) else None
    line = [word for word in words(base, clips) if "data=moving_shapes" not in changes or not word.startswith("data")]
    if "data=moving_shapes" in changes:
        architecture = "{in_channels: 3, out_channels: 3, num_attention_heads: 2, attention_head_dim: 6, "
        architecture += "cross_attention_dim: 12, num_layers: 1, caption_channels: 32}"
        line = [word for word in line if "checkpoint" not in word and "captions" not in word]
        line += [f"{role}.architecture={architecture}" for role in ("teacher", "student", "fake")]
        line += [f"{role}.checkpoint=null" for role in ("teacher", "student", "fake")]
    filled = [change.format(wan=wan) for change in changes]
    code = main([*line, "mesh.cp=1", "steps=2", f"run_dir={tmp_path}/run", "device=cpu", "dry_run=true", *filled])
    error = (capfd.readouterr().err.strip().splitlines() or [""])[-1]
    assert code == (2 if message else 0) and (message or "") in error, error
    assert not Path(tmp_path / "run" / "checkpoints").exists()


@pytest.fixture(scope="module")
def of_frames(tmp_path_factory):
    """A run of two steps on two ranks, each clip from its first frame."""
    pipeline, clips, run_dir = (tmp_path_factory.mktemp(name) for name in ("pipeline", "clips", "run"))
    build_tiny_ltx_pipeline(pipeline)
    render_clips(clips, 3, frames=36, fps=12, height=72, width=120)
    line = [*words(pipeline, clips), "data.image=first_frame", "mesh.cp=2", "steps=2", f"run_dir={run_dir}"]
    files = [str(clips / "clip_0.mp4"), str(clips / "clip_1.mp4")]
    train(2, *line, f"sample.images=[{files[0]},{files[1]}]")
    return pipeline, files, run_dir


def test_a_plain_pipeline_makes_of_an_image_what_our_sampler_does(of_frames, tmp_path):
    base, files, run_dir = of_frames
    noise = torch.randn(2, 8, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    latents, _, condition, _ = run_ranks(1, ours, run_dir, noise, files)[0]
    frame = condition["first_frame"]
    assert (latents[:, :, :1] - frame).abs().max() < 1e-5, "the frame that was given"
    pipeline = LTXImageToVideoPipeline.from_pipe(pipeline_of(base, run_dir))
    pipeline.set_progress_bar_config(disable=True)
    start = noise.clone()
    start[:, :, :1] = frame  # as it makes of the image
    found = pipeline(
        prompt=CAPTIONS, **SIZE, num_frames=17, frame_rate=FPS, num_inference_steps=4, guidance_scale=1.0,
        latents=pipeline._pack_latents(start), output_type="latent", return_dict=False,
    )[0]  # fmt: skip
    theirs = pipeline._unpack_latents(found, 3, 2, 3) if found.ndim == 3 else found
    assert ((latents - theirs).norm() / theirs.norm()).item() < 1e-4
    other = run_ranks(1, ours, run_dir, noise, files[::-1])[0][0]
    assert ((other - theirs)[:, :, 1:].norm() / theirs.norm()).item() > 1e-3, "the check above can tell images apart"
    out = tmp_path / "clips"
    arguments = f"{run_dir} --steps 2 --caption mine --image {files[0]} --out {out}".split()
    assert sample.main(arguments) == 0 and (out / "0.mp4").is_file()


def test_the_given_frame_is_what_their_pipeline_encodes(of_frames):
    base, files, run_dir = of_frames
    noise = torch.zeros(2, 8, 3, 2, 3)
    frame = run_ranks(1, ours, run_dir, noise, files)[0][2]["first_frame"]
    pipeline = LTXImageToVideoPipeline.from_pipe(pipeline_of(base, run_dir))
    image = pipeline.video_processor.preprocess(first_frame(files[0]), height=SIZE["height"], width=SIZE["width"])
    mode = pipeline.vae.encode(image[:, :, None]).latent_dist.mode()
    theirs = pipeline._normalize_latents(mode, pipeline.vae.latents_mean, pipeline.vae.latents_std)
    off = ((frame[:1] - theirs).norm() / theirs.norm()).item()
    assert off < 0.02, "the cost of pixels that are rounded to 8 bits for their pipeline"


def first_frame(file):
    """Resized and cropped as clips are."""
    pixels = read_clip(Path(file), ClipFormat(num_frames=1, **SIZE, fps=FPS))[:, 0]
    return Image.fromarray(pixels.add(1).mul(127.5).round().to(torch.uint8).permute(1, 2, 0).numpy())
