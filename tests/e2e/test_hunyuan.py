"""HunyuanVideo 1.5 from mp4 files to clips: trained at two ranks, exported, sampled by plain diffusers pipelines."""

import pytest
import torch
from diffusers import (
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
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
from tests.e2e.launch import ROOT, train
from tests.tiny_hunyuan_pipeline import CHANNELS, build_tiny_hunyuan_pipeline
from tests.tiny_pipeline import render_clips

pytestmark = pytest.mark.slow
CAPTIONS = ["a red square, drifting", 'a sign that says "OPEN"']
STEPS = [1.0, 0.9375, 0.8333333, 0.625]
SIZE = {"height": 48, "width": 80}
FPS = 12.0
TOKENS = 40
"""Fewer than the pipelines' 1000, which are masked."""


def words(pipeline, clips):
    return [
        "experiment=quickstart", "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.family=hunyuan15" for role in ("teacher", "student", "fake")), f"teacher.checkpoint={pipeline}",
        "optim.student.lr=1e-2", "data.height=48", "data.width=80", f"data.fps={FPS}", f"data.max_text_tokens={TOKENS}",
        "data.num_frames=9", "batch_size=2", "student.ema.enabled=false", f"method.step_list={STEPS}",
        "method.student_sampler=ode", "method.fake_updates_per_student_update=1", "sample.student_steps=[4]",
        "sample.report_clips=0", "sample.teacher_steps=[]", f"sample.captions=['{CAPTIONS[0]}','{CAPTIONS[1]}']",
        "mesh.cp=2", "steps=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return render_clips(folder, 3, frames=24, fps=12, height=64, width=96)


@pytest.fixture(scope="module")
def of_text(tmp_path_factory, clips):
    """A pipeline folder, and a run of two steps on two ranks that share a clip's 45 tokens."""
    pipeline, run_dir = tmp_path_factory.mktemp("pipeline"), tmp_path_factory.mktemp("run")
    build_tiny_hunyuan_pipeline(pipeline)
    train(2, *words(pipeline, clips), "checkpoint.every=2", f"run_dir={run_dir}")
    return pipeline, run_dir


@pytest.fixture(scope="module")
def of_images(tmp_path_factory, clips):
    """The same of an image-to-video pipeline, each clip from its first frame."""
    pipeline, run_dir = tmp_path_factory.mktemp("pipeline"), tmp_path_factory.mktemp("run")
    build_tiny_hunyuan_pipeline(pipeline, image=True)
    files = [str(clips / "clip_0.mp4"), str(clips / "clip_1.mp4")]
    images = f"sample.images=[{files[0]},{files[1]}]"
    train(2, *words(pipeline, clips), "data.image=first_frame", images, f"run_dir={run_dir}")
    return pipeline, run_dir


def ours(run_dir, noise, images=()):
    """Latents, pixels and the condition, of our own sampler and data."""
    config = load_config(run_dir / "config.yaml")
    given = {"captions": CAPTIONS, "images": images}
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=run_dir, **given)
    role = build_role(
        plan_role("student", checkpoint=str(run_dir / "export" / "student"), family="hunyuan15"),
        mesh=build_mesh(cp=1, heads=4),
        device=torch.device("cpu"),
        trainable=False,
        latent_shape=data.latent_shape,
        condition_shapes=data.condition_shapes,
    )
    method, condition = build_method(config.method, {"student": role}), data.condition(CAPTIONS)
    latents = method.generate("student", noise, condition, 4, None)
    return latents, data.decode(latents), dict(condition.tensors)


def pipeline_of(kind, base, run_dir):
    pipeline = kind.from_pretrained(
        base,
        transformer=HunyuanVideo15Transformer3DModel.from_pretrained(run_dir / "export" / "student"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(run_dir / "export" / "scheduler"),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


NOISE = torch.randn(2, CHANNELS, 3, 3, 5, generator=torch.Generator().manual_seed(0))
CALL = {"num_inference_steps": 4, "num_frames": 9, "output_type": "latent", "return_dict": False}


def off(found, truth):
    return ((found - truth).norm() / truth.norm()).item()


def test_a_plain_pipeline_makes_what_our_sampler_does(of_text):
    base, run_dir = of_text
    latents, pixels, condition = run_ranks(1, ours, run_dir, NOISE)[0]
    assert {name: tuple(x.shape[1:]) for name, x in condition.items()} == {
        "text": (TOKENS, 32), "text_mask": (TOKENS,), "glyphs": (256, 24), "glyph_mask": (256,)
    }  # fmt: skip
    assert condition["glyph_mask"].sum(1).tolist() == [0, 14], 'of Text "OPEN". and what ends it'
    pipeline = pipeline_of(HunyuanVideo15Pipeline, base, run_dir)
    trained = load_file(run_dir / "export" / "student" / "diffusion_pytorch_model.safetensors")
    before = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    assert trained.keys() == before.keys() and any(not torch.equal(trained[n], before[n]) for n in before)
    theirs = pipeline(prompt=CAPTIONS, latents=NOISE, **SIZE, **CALL)[0]
    assert off(latents, theirs) < 1e-5
    # A batch whose captions are swapped, and one that quotes nothing.
    for other in (CAPTIONS[::-1], [caption.replace('"', "'") for caption in CAPTIONS]):
        assert off(latents, pipeline(prompt=other, latents=NOISE, **SIZE, **CALL)[0]) > 3e-4, other
    for i, caption in enumerate(CAPTIONS):  # diffusers' VAE (0.42) decodes no batch
        decoded = pipeline(prompt=caption, latents=NOISE[i : i + 1], **SIZE, **CALL | {"output_type": "np"})[0]
        frames = torch.from_numpy(decoded)[0]
        assert frames.shape == pixels[i].shape == (9, 48, 80, 3)
        assert (frames * 255 - pixels[i].float()).abs().max() < 1.01


def run_block(number, base, run_dir):
    """What a block of the page names, as it stands, but for folders and sizes."""
    code = (ROOT / "docs" / "hunyuan.md").read_text().split("```python\n")[1 + number].split("```")[0]
    for written, here in (
        ("/ckpt/HunyuanVideo-1.5", str(base)),
        ("RUN/", f"{run_dir}/"),
        ("num_frames=121, height=480, width=848", "num_frames=9, height=48, width=80"),
    ):
        code = code.replace(written, here)
    assert "480" not in code and "/ckpt" not in code
    names: dict = {}
    exec(compile(code, "docs/hunyuan.md", "exec"), names)
    return names


def test_the_block_of_its_page(of_text):
    assert run_block(0, *of_text)["video"].frames[0].shape == (9, 48, 80, 3)


def test_adapters_are_loaded_as_its_page_says(of_text, clips, tmp_path):
    """By diffusers into the base; they say what the merged export does, and something."""
    base, _ = of_text
    lora = [f"{role}.lora.rank=2" for role in ("student", "fake")]
    train(
        2,
        *words(base, clips),
        "adapters=lora",
        *lora,
        "method.fake_updates_per_student_update=1",
        f"run_dir={tmp_path}",
    )
    loaded = run_block(1, base, tmp_path)["transformer"].eval()
    merged, before = (
        HunyuanVideo15Transformer3DModel.from_pretrained(folder).eval()
        for folder in (tmp_path / "export" / "student", base / "transformer")
    )
    texts = {"encoder_hidden_states": torch.randn(1, 5, 32), "encoder_hidden_states_2": torch.randn(1, 4, 24)}
    masks = {"encoder_attention_mask": torch.ones(1, 5), "encoder_attention_mask_2": torch.ones(1, 4)}
    with torch.no_grad():
        found, wanted, without = (
            network(
                hidden_states=torch.cat([NOISE[:1], torch.zeros(1, CHANNELS + 1, 3, 3, 5)], dim=1),
                timestep=torch.tensor([625.0]),
                image_embeds=torch.zeros(1, 3, 20),
                **texts,
                **masks,
            ).sample
            for network in (loaded, merged, before)
        )
    assert off(found, wanted) < 1e-5 < 1e-4 < off(without, wanted)


def test_the_export_of_a_checkpoint_is_that_of_the_run(of_text, tmp_path):
    _, run_dir = of_text
    assert export.main([str(run_dir), str(tmp_path / "out")]) == 0
    first, second = (
        load_file(folder / "diffusion_pytorch_model.safetensors")
        for folder in (run_dir / "export" / "student", tmp_path / "out")
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, clips):
    """The clips' first frames as 8-bit images of the run's size, of which both sides read the same pixels."""
    files = []
    for i in range(2):
        pixels = read_clip(clips / f"clip_{i}.mp4", ClipFormat(num_frames=1, **SIZE, fps=FPS))[:, 0]
        levels = pixels.add(1).mul(127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
        files.append(tmp_path_factory.mktemp("pictures") / f"{i}.png")
        Image.fromarray(levels).save(files[-1])
    return files


def test_a_plain_pipeline_makes_of_an_image_what_our_sampler_does(of_images, pictures, tmp_path):
    base, run_dir = of_images
    latents, _, condition = run_ranks(1, ours, run_dir, NOISE, list(map(str, pictures)))[0]
    assert condition["first_frame"].shape == (2, CHANNELS, 1, 3, 5) and condition["image_embeds"].shape == (2, 9, 20)
    pipeline = pipeline_of(HunyuanVideo15ImageToVideoPipeline, base, run_dir)
    for i, file in enumerate(pictures):  # the pipeline takes one image, and finds the size of 48 x 80 itself
        image, start = Image.open(file), NOISE[i : i + 1]
        features = pipeline._get_image_embeds(pipeline.image_encoder, pipeline.feature_extractor, image, "cpu")
        assert torch.allclose(condition["image_embeds"][i], features[0], atol=1e-5)
        encoded = pipeline._get_image_latents(pipeline.vae, pipeline.video_processor, image, 48, 80, "cpu")
        assert off(condition["first_frame"][i], encoded[0]) < 1e-5
        theirs = pipeline(image=image, prompt=CAPTIONS[i], latents=start, **CALL)[0]
        assert off(latents[i], theirs[0]) < 1e-5
        other = pipeline(image=Image.open(pictures[1 - i]), prompt=CAPTIONS[i], latents=start, **CALL)[0]
        assert off(other, theirs) > 1e-3, "the check above can tell images apart"
    out = tmp_path / "clips"
    arguments = f"{run_dir} --steps 2 --caption mine --image {pictures[0]} --out {out}".split()
    assert sample.main(arguments) == 0 and (out / "0.mp4").is_file()
