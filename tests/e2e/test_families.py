"""Each model family from mp4 files to clips: diffusers' pipeline and our sampler give the same from the export."""

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import av
import pytest
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    LTX2Pipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3CoreDenoiseStep
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from distill import sample
from fsdp_cp.context.check_parallel import relative_error
from models import export
from models.card import is_ours
from models.export_folder import SCHEDULERS
from tests.e2e.families import STEPS, Case, distil, same_weights, weights
from tests.e2e.launch import losses, train, train_killed
from tests.tiers import long, long_case, slow
from tests.tiny_hunyuan_pipeline import CHANNELS, build_tiny_hunyuan_pipeline
from tests.tiny_ltx2_pipeline import build_tiny_ltx2_pipeline
from tests.tiny_ltx_pipeline import build_tiny_ltx_pipeline
from tests.tiny_minimax_h3_pipeline import build_tiny_minimax_h3_pipeline
from tests.tiny_pipeline import build_tiny_pipeline
from train import main

pytestmark = slow

PUBLISHED = [1.0, 0.9375, 0.8333, 0.625]
WAN = Case(latents=(16, 5, 4, 6), height=32, width=48, more=(f"method.step_list={PUBLISHED}",))
ODE = "method.student_sampler=ode"
FRAMES = ("data.image=first_frame", "sample.images=[{clips}/clip_0.mp4,{clips}/clip_1.mp4]")
TI2V = Case(latents=(48, 5, 2, 4), height=32, width=64, more=(ODE,))
LTX = Case(
    latents=(8, 3, 2, 3), height=64, width=96, family="ltx", fps=12.0, more=(ODE, "data.max_text_tokens=128"),
    captions=("a red square, drifting", "a long & windy road"),
)  # fmt: skip
LTX2 = Case(
    latents=(8, 3, 2, 3), sound=(2, 35, 4), height=64, width=96, family="ltx2", fps=12.0,
    more=(ODE, "data.max_text_tokens=32", "data=captions"), captions=("a red square, drifting", "a long & windy road"),
)  # fmt: skip
MINIMAX_H3 = Case(
    latents=(24, 37, 2, 2), sound=(32, 207, 2), height=32, width=32, family="minimax_h3", fps=24.0, num_frames=124,
    more=(
        ODE, "data.max_text_tokens=32", "data=captions", "method.guidance_scale=1", "method.shift=6",
        "method.audio_shift_ratio=0.5", "method.teacher_shift=12", "method.time_limits=draw",
        "method.step_list=[1.0,0.947368,0.857143,0.666667]", "steps=3",  # the first has equal scores
    ),
)  # fmt: skip
H3_PDD = replace(
    MINIMAX_H3, method=("experiment=quickstart_pdd",), more=(
        "data.max_text_tokens=32", "data=captions", "method.guidance_scale=1", "method.shift=12", "steps=3",
        "method.grid_steps=8", "optim.student.additions_lr=5e-2",
    ),
)  # fmt: skip
HUNYUAN = Case(
    latents=(CHANNELS, 3, 3, 5), height=48, width=80, family="hunyuan15", fps=12.0, num_frames=9,
    more=(ODE, "data.max_text_tokens=40"), captions=("a red square, drifting", 'a sign that says "OPEN"'),
)  # fmt: skip
BOUNDARY = 0.875
A14B = Case(latents=(16, 5, 4, 6), height=32, width=48, more=(ODE, "method.guidance_scale_2=1.5", "seed=7"))
EXPERTS = ("transformer", "transformer_2")
LORA_WORDS = ("student.lora.rank=4", "fake.lora.rank=4")


def test_wan(tmp_path):
    """The student adds fresh noise between steps. The first samples show the teacher once."""
    run = distil(tmp_path, WAN, build_tiny_pipeline, "sample.every=1", "sample.teacher_steps=[2]")
    assert {path.name for path in (run.folder / "samples").iterdir()} == {
        *(f"teacher_2steps_{i}.mp4" for i in (0, 1)),
        *(f"step_0000000{step}_student_4steps_{i}.mp4" for step in (1, 2) for i in (0, 1)),
        "step_00000001.png", "step_00000002.png",
    }  # fmt: skip
    pipeline = run.theirs(WanPipeline, transformer=run.network)

    def generate(latents, **changes):
        torch.manual_seed(3)
        call = WAN.call() | {"guidance_scale": 1.0} | changes
        return pipeline(list(WAN.captions), latents=latents, **call)[0]

    noise = WAN.noise()
    theirs, frames = generate(noise), torch.from_numpy(generate(noise, output_type="np"))
    fitted = pipeline.scheduler.sigmas[:-1].tolist()
    # rCM's times fit no scheduler of diffusers. Its student's first input is less than noise.
    rcm = [80 / 81, 0.934, 0.853, 0.609]
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    pipeline.scheduler.set_timesteps = partial(pipeline.scheduler.set_timesteps, sigmas=rcm)
    other = generate(rcm[0] * noise)
    method, pixels, _, _, (exact, listed, ours_other) = run.ours(times=(fitted, PUBLISHED, rcm))
    assert relative_error(exact, theirs) < 1e-5
    assert relative_error(ours_other, other) < 1e-5
    assert torch.equal(method, listed) and relative_error(listed, theirs) < 1e-3, (
        "the scheduler meets the times to 1e-5"
    )
    assert relative_error(ours_other, theirs) > 1e-2, "the checks can tell times apart"
    assert frames.shape == pixels.shape == (2, 17, 32, 48, 3)


@pytest.mark.parametrize(
    ("case", "build", "vae", "changes"),
    [
        (WAN, build_tiny_pipeline, AutoencoderKLWan, (f"method.step_list={STEPS}",)),
        long_case(WAN, build_tiny_pipeline, AutoencoderKLWan, ("method.step_list=[1.0,0.7,0.6,0.1]",)),
        long_case(WAN, build_tiny_pipeline, AutoencoderKLWan, (ODE, f"method.step_list={STEPS}", *LORA_WORDS)),
        long_case(A14B, partial(build_tiny_pipeline, boundary=BOUNDARY), AutoencoderKLWan, ()),
        long_case(LTX, build_tiny_ltx_pipeline, AutoencoderKLLTXVideo, ()),
        long_case(HUNYUAN, build_tiny_hunyuan_pipeline, AutoencoderKLHunyuanVideo15, ()),
    ],
    ids=["wan", "no scheduler fits", "adapters", "experts", "ltx", "hunyuan"],
)
def test_the_code_on_a_card(tmp_path, monkeypatch, case, build, vae, changes):
    """The code as it stands makes the clip of ``distill.sample``; the card has clips and a license."""
    run = distil(tmp_path, case, build, *changes)
    (run.pipeline / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    out, found, decode = tmp_path / "card", [], vae.decode
    adapters = ("--format", "diffusers-lora") if set(LORA_WORDS) <= {*changes} else ()
    assert export.main([str(run.folder), str(out), *adapters]) == 0
    monkeypatch.setattr(
        vae, "decode", lambda self, z, *rest, **named: found.append(z) or decode(self, z, *rest, **named)
    )

    def execute_card(folder):
        text = (folder / "README.md").read_text()
        monkeypatch.chdir(folder)
        exec(text.split("```python")[1].split("```")[0], {})
        return text

    for folder, license_of_base in ((run.student, "other"), (out, "apache-2.0")):
        text = execute_card(folder)
        assert is_ours(text) and ModelCard(text).data.license == license_of_base
        assert sorted(path.name for path in (folder / "samples").iterdir()) == ["0.mp4", "1.mp4"]
    if adapters:
        execute_card(run.folder / "export" / "student_lora")
    words = ["--steps", "4", "--caption", case.captions[0], "--out", str(tmp_path / "sampled")]
    assert sample.main([str(run.folder), *words]) == 0
    assert max(relative_error(theirs, found[-1]) for theirs in found[:-1]) < 1e-5


def check_commands(run, image, load_heads=False):
    """The export command repeats the run's export; the sample command adds to the run's cache and writes a clip."""
    out = run.folder.parent / "out"
    assert export.main([str(run.folder), str(out), "--weights", "raw"]) == 0
    for name in ("diffusion_pytorch_model", *(("additions", "heads") if load_heads else ())):
        assert same_weights(out, run.student, f"{name}.safetensors")
    before = {path: path.stat().st_mtime_ns for path in (run.folder / "cache").rglob("*.safetensors")}
    clips = run.folder.parent / "sampled"
    words = [str(run.folder), "--steps", "2", "--caption", "mine", "--out", str(clips)]
    assert sample.main([*words, *(["--image", str(image)] if image else [])]) == 0
    with av.open(str(clips / "0.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == run.case.num_frames
    after = {path: path.stat().st_mtime_ns for path in (run.folder / "cache").rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before, "nothing is encoded twice"
    assert after.keys() > before.keys(), "a set with the caption"


@long
def test_wan_image_to_video(tmp_path):
    case = Case(latents=WAN.latents, height=32, width=48, more=(ODE,))
    run = distil(tmp_path, case, build_tiny_pipeline, *FRAMES, image=True)
    files = run.files
    latents, _, _, shapes, _ = run.ours(files)
    assert shapes == {
        "latents": (16, 5, 4, 6), "text": (512, 32), "image_latents": (16, 5, 4, 6), "image_mask": (4, 5, 4, 6),
        "image_embeds": (5, 20),
    }  # fmt: skip
    pipeline = run.theirs(WanImageToVideoPipeline, transformer=run.network)
    theirs = torch.cat([
        pipeline(image=case.picture(file), prompt=caption, guidance_scale=1.0, latents=start[None], **case.call())[0]
        for file, caption, start in zip(files, case.captions, case.noise(), strict=True)
    ])  # fmt: skip
    assert relative_error(latents, theirs) < 1e-3, "the scheduler meets the times to 1e-5"
    assert relative_error(run.ours(files[::-1])[0], theirs) > 3e-3, "the check can tell images apart"
    check_commands(run, files[0])


@long
def test_wan_from_a_frame_or_from_text(tmp_path):
    """One student of Wan 2.2's TI2V serves both."""
    run = distil(tmp_path, TI2V, build_tiny_pipeline, *FRAMES, frame=True)
    files = run.files
    latents, _, _, shapes, _ = run.ours(files)
    assert shapes == {"latents": TI2V.latents, "text": (512, 32), "first_frame": (48, 1, 2, 4)}

    def theirs(kind, images=None):
        pipeline = run.theirs(kind, transformer=run.network)
        assert pipeline.config.expand_timesteps
        made = []
        for i, (caption, start) in enumerate(zip(TI2V.captions, TI2V.noise(), strict=True)):
            image = {"image": TI2V.first_frame(images[i])[None].add(1).div(2)} if images else {}
            made += pipeline(prompt=caption, guidance_scale=1.0, latents=start[None], **TI2V.call(), **image)[0]
        return torch.stack(made)

    of_images = theirs(WanImageToVideoPipeline, files)
    assert relative_error(latents[:, :, 0], of_images[:, :, 0]) < 1e-4, "the frames that were given"
    matched = relative_error(latents[:, :, 1:], of_images[:, :, 1:])
    assert matched < 5e-4, "the scheduler meets the times to 1e-5"
    assert relative_error(run.ours(files[::-1])[0][:, :, 1:], of_images[:, :, 1:]) > 4 * matched, (
        "the check can tell images apart"
    )
    of_text, _, _, shapes, _ = run.ours(text_alone=True)
    assert "first_frame" not in shapes and relative_error(of_text, theirs(WanPipeline)) < 5e-4
    assert relative_error(of_text[:, :, 1:], latents[:, :, 1:]) > 4 * matched, "a frame makes a difference"
    check_commands(run, files[0])


def test_ltx_from_a_frame_or_from_text(tmp_path):
    run = distil(tmp_path, LTX, build_tiny_ltx_pipeline, *FRAMES)
    assert not same_weights(run.student, run.pipeline / "transformer"), "the student was trained"
    files = run.files
    noise = LTX.noise()
    of_text = run.theirs(LTXPipeline, transformer=run.network)

    def theirs(pipeline, start, **changes):
        call = LTX.call() | {"frame_rate": LTX.fps, "guidance_scale": 1.0, "prompt": list(LTX.captions)} | changes
        packed = pipeline(latents=pipeline._pack_latents(start), **call)[0]
        return pipeline._unpack_latents(packed, 3, 2, 3) if packed.ndim == 3 else packed

    latents, pixels, _, _, _ = run.ours(text_alone=True)
    assert relative_error(latents, theirs(of_text, noise)) < 1e-5
    for change in ({"prompt": list(LTX.captions[::-1])}, {"frame_rate": 24.0}):
        assert relative_error(latents, theirs(of_text, noise, **change)) > 3e-4, f"the check can tell {change}"
    frames = torch.from_numpy(theirs(of_text, noise, output_type="np"))
    assert frames.shape == pixels.shape == (2, 17, 64, 96, 3)
    assert (frames * 255 - pixels.float()).abs().max() < 1.01

    latents, _, condition, shapes, _ = run.ours(files)
    assert shapes["first_frame"] == (8, 1, 2, 3) and shapes["text_mask"] == (128,)
    frame = condition["first_frame"]
    assert (latents[:, :, :1] - frame).abs().max() < 1e-5, "the frame that was given"
    of_images = LTXImageToVideoPipeline.from_pipe(of_text)
    of_images.set_progress_bar_config(disable=True)
    start = noise.clone()
    start[:, :, :1] = frame  # as the pipeline makes it of the image
    found = theirs(of_images, start)
    assert relative_error(latents, found) < 1e-4
    assert relative_error(run.ours(files[::-1])[0][:, :, 1:], found[:, :, 1:]) > 1e-3, "the check can tell images apart"
    image = of_images.video_processor.preprocess(LTX.picture(files[0]), height=LTX.height, width=LTX.width)
    mode = of_images.vae.encode(image[:, :, None]).latent_dist.mode()
    encoded = of_images._normalize_latents(mode, of_images.vae.latents_mean, of_images.vae.latents_std)
    assert relative_error(frame[:1], encoded) < 0.02, "their pipeline rounds pixels to 8 bits"
    check_commands(run, files[0])


@pytest.mark.parametrize(("version", "is_sparse"), [("2.5", False), ("2.3", True), long_case("2.3", False)])
def test_ltx2_with_sound(tmp_path, version, is_sparse):
    """LTX2Pipeline with neutral scales makes the same picture and sound. It normalizes given latents."""
    words = (*SPARSE, "student.sparse_attention.tile=[2,1,1]") if is_sparse else ()
    run = distil(tmp_path, LTX2, build_tiny_ltx2_pipeline, *words, version=version)
    assert not same_weights(run.student, run.pipeline / "transformer"), "the student was trained"
    if version == "2.5":
        before, after = (weights(f)["keyframes_abs_pos_embedding"] for f in (run.pipeline / "transformer", run.student))
        assert torch.equal(before, after) and before.std() > 0.5, "it is saved as it was"
    latents, _, condition, shapes, (sound,) = run.ours()
    assert shapes == {"text": (32, 48), "audio_text": (32, 24), "fps": (1,)}
    start = LTX2.start()
    pipeline = run.theirs(LTX2Pipeline, transformer=run.network)
    vae, sound_vae = pipeline.vae, pipeline.audio_vae
    spread, mean = (x.view(-1, 1, 4) for x in (sound_vae.latents_std, sound_vae.latents_mean))
    # The texts of bf16, as encoded sets have them; a pipeline in fp32 makes others.
    texts = (condition["text"], condition["audio_text"], torch.ones(2, 32, dtype=torch.long))

    def theirs(**changes):
        neutral = dict.fromkeys(("guidance_scale", "modality_scale"), 1.0)
        neutral |= dict.fromkeys(("stg_scale", "guidance_rescale"), 0.0)
        neutral |= {f"audio_{name}": scale for name, scale in neutral.items()}
        given = {"latents": pipeline._denormalize_latents(start.video, vae.latents_mean, vae.latents_std)}
        given |= {"audio_latents": start.parts["audio"] * spread + mean, "frame_rate": LTX2.fps}
        call = LTX2.call() | neutral | given | {"prompt": list(LTX2.captions), "max_sequence_length": 32} | changes
        with mock.patch.object(pipeline.connectors, "forward", return_value=texts):
            video, audio = pipeline(**call)
        video = pipeline._normalize_latents(video, vae.latents_mean, vae.latents_std)
        return {"video": relative_error(latents, video), "audio": relative_error(sound, (audio - mean) / spread)}

    if is_sparse:
        assert min(theirs().values()) > 1e-4, "the lines make a difference"
        _with_sparse_attention(run.student, pipeline)
    assert max(theirs().values()) < 1e-5
    assert min(theirs(frame_rate=24.0).values()) > 1e-4, "the check can tell frame rates apart"
    check_commands(run, None)
    with av.open(str(tmp_path / "sampled" / "0.mp4")) as container:
        assert container.streams.audio[0].channels == 2


def _steps_of_minimax_h3(run, network, latents, sound, condition):
    """Return a function that samples a clip by diffusers' modular steps and returns how far ours is off, by part."""
    steps, export_dir, start = MiniMaxH3CoreDenoiseStep().init_pipeline(), run.folder / "export", run.case.start()
    schedulers = {name: MiniMaxH3Scheduler.from_pretrained(export_dir / name) for name in SCHEDULERS}

    def theirs(i, **changes):
        steps.update_components(transformer=network, **schedulers | changes)
        length = condition["text_length"][i]
        made = steps(
            prompt_embeds=condition["text"][i : i + 1, :length], text_token_tags=torch.ones(length, dtype=torch.long),
            latents=start.video[i : i + 1], audio_latents=start.parts["audio"][i].permute(2, 0, 1),
            **{key: run.case.call()[key] for key in ("height", "width", "num_frames")}, num_inference_steps=5,
        )  # fmt: skip
        found = made.get("audio_latents").permute(1, 2, 0)
        return relative_error(latents[i : i + 1], made.get("latents")), relative_error(sound[i], found)

    return theirs, [made.config.shift for made in schedulers.values()]


def _with_sparse_attention(folder, pipeline):
    """Run the lines that an export's notes show."""
    lines = (folder / "README.md").read_text().split("```python")[1].split("```")[0]
    exec(lines, {"pipeline": pipeline, "FOLDER": folder})


SPARSE = ("student.sparse_attention.sparsity=0.7", "optim.student.additions_lr=0.3")


def test_a_sparse_wan(tmp_path):
    """The three lines give a pipeline the gates and the sparse attention; each makes a difference."""
    run = distil(tmp_path, WAN, build_tiny_pipeline, *SPARSE, "student.sparse_attention.tile=[2,1,1]", ODE)
    pipeline = run.theirs(WanPipeline, transformer=run.network)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler()  # at exactly the student's times
    pipeline.scheduler.set_timesteps = partial(pipeline.scheduler.set_timesteps, sigmas=PUBLISHED)
    call = WAN.call() | {"guidance_scale": 1.0, "latents": WAN.noise()}
    dense = pipeline(list(WAN.captions), **call)[0]
    _with_sparse_attention(run.student, pipeline)
    ours = run.ours()[0]
    assert relative_error(ours, pipeline(list(WAN.captions), **call)[0]) < 1e-5
    gates = [gate for name, gate in pipeline.transformer.named_parameters() if "to_gate_compress" in name]
    assert len(gates) == 4
    for gate in gates:
        gate.data.zero_()
    assert relative_error(ours, pipeline(list(WAN.captions), **call)[0]) > 1e-3 < relative_error(ours, dense)
    network = WanTransformer3DModel.from_pretrained(run.student, torch_dtype=torch.bfloat16)  # some parts stay fp32
    _with_sparse_attention(run.student, SimpleNamespace(transformer=network))
    assert {p.dtype for name, p in network.named_parameters() if "to_gate" in name} == {network.dtype}


def test_a_sparse_minimax_h3(tmp_path):
    run = distil(
        tmp_path, MINIMAX_H3, build_tiny_minimax_h3_pipeline, *SPARSE,
        "student.sparse_attention.tile=[4,1,1]",
    )  # fmt: skip
    latents, _, condition, _, (sound,) = run.ours()
    network = run.network
    theirs, _ = _steps_of_minimax_h3(run, network, latents, sound, condition)
    assert min(theirs(0)) > 1e-3, "the lines make a difference"
    _with_sparse_attention(run.student, SimpleNamespace(transformer=network))
    assert max(*theirs(0), *theirs(1)) < 1e-5


def test_minimax_h3_with_sound(tmp_path):
    """The steps of diffusers' modular pipeline, with the exported schedulers of both parts."""
    run = distil(tmp_path, MINIMAX_H3, build_tiny_minimax_h3_pipeline)
    assert not same_weights(run.student, run.pipeline / "transformer"), "the student was trained"
    latents, pixels, condition, shapes, (sound,) = run.ours()
    assert shapes == {"text": (32, 24), "text_length": ()} and pixels.shape == (2, 124, 32, 32, 3)
    network = run.network
    theirs, shifts = _steps_of_minimax_h3(run, network, latents, sound, condition)
    assert shifts == pytest.approx([6.0, 3.0], abs=1e-3)
    assert max(*theirs(0), *theirs(1)) < 1e-5
    assert min(theirs(0, audio_scheduler=MiniMaxH3Scheduler(shift=6.0))) > 1e-4, "the check can tell clocks apart"
    check_commands(run, None)
    assert all((tmp_path / "out" / name / "scheduler_config.json").is_file() for name in SCHEDULERS)
    assert "fl2va" in (run.student / "README.md").read_text()
    with av.open(str(tmp_path / "sampled" / "0.mp4")) as container:
        assert container.streams.audio[0].channels == 2


def _with_heads(folder, network):
    """Switch the heads of an export with the function that its notes show."""
    found = {}
    exec((folder / "README.md").read_text().split("```python")[1].split("```")[0], found)
    found["use_heads"](network, str(folder / "heads.safetensors"))
    return network


def test_minimax_h3_by_heads(tmp_path, capfd):
    """A student of several step counts, with the hook of its notes in diffusers' modular steps, and in one step."""
    run = distil(tmp_path, H3_PDD, build_tiny_minimax_h3_pipeline)
    latents, _, condition, _, (sound,) = run.ours()
    network = run.network
    theirs, shifts = _steps_of_minimax_h3(run, network, latents, sound, condition)
    assert shifts == pytest.approx([12.0, 3.0], abs=1e-3)
    assert min(theirs(0)) > 1e-4, "the heads make a difference"
    _with_heads(run.student, network)
    assert max(*theirs(0), *theirs(1)) < 1e-5
    heads = load_file(run.student / "heads.safetensors")
    assert {name: tuple(x.shape) for name, x in heads.items()} == {
        "proj_out.heads.weight": (4, 96, 40), "proj_out.heads.bias": (4, 96),
        "audio_proj_out.heads.weight": (4, 32, 40), "audio_proj_out.heads.bias": (4, 32),
    }  # fmt: skip
    check_commands(run, None, load_heads=True)

    def written(out, *words):
        return export.main([str(run.folder), str(tmp_path / out), "--weights", "raw", *words])

    assert written("one", "--steps", "1") == 0 and written("two", "--steps", "2") == 0
    one, two = (MiniMaxH3Transformer3DModel.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert not (tmp_path / "one" / "additions.safetensors").exists()
    assert len(load_file(tmp_path / "two" / "heads.safetensors")["proj_out.heads.weight"]) == 2
    trunk, plain = two.state_dict(), one.state_dict()
    changed = {name for name in plain if not torch.equal(plain[name], trunk[name])}
    assert changed == {name.replace(".heads", "") for name in heads}
    mean = load_file(tmp_path / "two" / "heads.safetensors")["proj_out.heads.bias"]
    ends = torch.tensor(
        [1 - 12 / 13, 12 / 13], dtype=torch.float32
    )  # the steps' lengths: 12 / (1 + 11 / 2) / 2 = 12/13
    assert relative_error((ends[:, None] * mean).sum(0), plain["proj_out.bias"]) < 1e-5
    for words, name in ((("--steps", "3"), "--steps"), (("--format", "diffusers-lora"), "--format")):
        assert written("no", *words) == 2 and name in capfd.readouterr().err and not (tmp_path / "no").exists()


def _of_hunyuan(run, kind):
    return run.theirs(kind, transformer=run.network, guider=ClassifierFreeGuidance(guidance_scale=1.0))


@long
def test_hunyuan_image_to_video(tmp_path):
    run = distil(tmp_path, HUNYUAN, build_tiny_hunyuan_pipeline, *FRAMES, image=True)
    files = []
    for i in range(2):  # 8-bit images, of which both sides read the same pixels
        files.append(str(tmp_path / f"{i}.png"))
        HUNYUAN.picture(run.clips / f"clip_{i}.mp4").save(files[-1])
    latents, _, condition, _, _ = run.ours(tuple(files))
    assert condition["first_frame"].shape == (2, CHANNELS, 1, 3, 5) and condition["image_embeds"].shape == (2, 9, 20)
    pipeline = _of_hunyuan(run, HunyuanVideo15ImageToVideoPipeline)
    call = {key: value for key, value in HUNYUAN.call().items() if key not in ("height", "width")}
    for i, file in enumerate(files):  # the pipeline takes one image, and finds the size of 48 x 80 itself
        image, caption, start = Image.open(file), HUNYUAN.captions[i], HUNYUAN.noise()[i : i + 1]
        features = pipeline._get_image_embeds(pipeline.image_encoder, pipeline.feature_extractor, image, "cpu")
        assert torch.allclose(condition["image_embeds"][i], features[0], atol=1e-5)
        theirs = pipeline(image=image, prompt=caption, latents=start, **call)[0]
        assert relative_error(latents[i], theirs[0]) < 1e-5
        other = pipeline(image=Image.open(files[1 - i]), prompt=caption, latents=start, **call)[0]
        assert relative_error(other, theirs) > 1e-3, "the check can tell images apart"


@long
def test_two_experts_from_images(tmp_path):
    """Wan 2.2's A14B resumes on another mesh, is exported, and is sampled by a plain pipeline of both experts."""
    words = ("data.image=first_frame", "checkpoint.every=2", "checkpoint.keep=0")
    run = distil(tmp_path, A14B, build_tiny_pipeline, *words, image=True, boundary=BOUNDARY)
    line = (*A14B.words(run.pipeline, run.clips), *words, f"run_dir={run.folder}")
    train(2, *line, "mesh.dp_shard=2", "mesh.cp=1", "steps=6")
    assert [r["step"] for r in losses(run.folder)] == [1, 2, 3, 4, 5, 6]
    state = json.loads((run.folder / "checkpoints" / "step_00000006" / "state.json").read_text())
    assert state["boundaries"] == {"student": [BOUNDARY], "fake": [BOUNDARY]}
    assert sum(state["updates"].values()) == 6 and all(state["updates"].values()), "each expert has its turn"
    assert not any(same_weights(run.student / name, run.pipeline / name) for name in EXPERTS), "both were trained"

    latents = run.ours()[0]

    def generate(experts, boundary=BOUNDARY):
        networks = {name: WanTransformer3DModel.from_pretrained(experts / name) for name in EXPERTS}
        pipeline = run.theirs(WanImageToVideoPipeline, **networks, boundary_ratio=boundary)
        made = []
        for i, caption in enumerate(A14B.captions):
            image = A14B.picture(run.clips / ["clip_1.mp4", "clip_0.mp4"][i])
            made += pipeline(
                prompt=caption, image=image, guidance_scale=1.0, guidance_scale_2=1.0,
                latents=A14B.noise()[i : i + 1], **A14B.call(),
            )[0]  # fmt: skip
        return torch.stack(made)

    assert relative_error(latents, generate(run.student)) < 1e-3, "the scheduler meets the times to 1e-5"
    assert relative_error(latents, generate(run.student, boundary=0.7)) > 3e-3, "the check can tell the experts apart"
    assert relative_error(latents, generate(run.pipeline)) > 3e-3, "and the training"

    assert export.main([str(run.folder), str(tmp_path / "both"), "--weights", "raw"]) == 0
    for name, expert in zip(EXPERTS, ("high", "low"), strict=True):
        alone = tmp_path / name
        assert export.main([str(run.folder), str(alone), "--weights", "raw", "--expert", expert]) == 0
        assert same_weights(tmp_path / "both" / name, run.student / name) and same_weights(alone, run.student / name)
    assert json.loads((tmp_path / "both" / "model_index.json").read_text())["boundary_ratio"] == BOUNDARY


@long
def test_adapters_of_two_experts(tmp_path, capfd):
    """Adapters merged in the export and adapters that diffusers loads from one file per expert give the same clips."""
    words = ("student.lora.rank=4", "fake.lora.rank=4", "optim.student.lr_scale={{*.lora_*: 10.0}}", "steps=6")
    run = distil(tmp_path, A14B, build_tiny_pipeline, *words, boundary=BOUNDARY)
    files = {
        name: run.folder / "export" / f"student_lora_{e}" for name, e in zip(EXPERTS, ("high", "low"), strict=True)
    }
    assert not (run.folder / "export" / "student_lora").exists()

    def generate(pipeline):
        call = A14B.call() | {"guidance_scale": 1.0, "guidance_scale_2": 1.0}
        return pipeline(A14B.captions[0], latents=A14B.noise()[:1], **call)[0]

    merged = {name: WanTransformer3DModel.from_pretrained(run.student / name) for name in EXPERTS}
    whole = generate(run.theirs(WanPipeline, **merged))
    plain = run.theirs(WanPipeline)
    untrained = generate(plain)
    for name, folder in files.items():
        plain.load_lora_weights(folder, load_into_transformer_2=name == EXPERTS[1])
    assert relative_error(generate(plain), whole) < 1e-4 and relative_error(untrained, whole) > 1e-3

    # A file of adapters belongs to one expert. An export never replaces an expert of its base.
    command = [str(run.folder), str(tmp_path / "lora"), "--weights", "raw", "--format", "diffusers-lora"]
    assert export.main(command) == 2 and "--expert" in capfd.readouterr().err
    assert export.main([*command, "--expert", "low"]) == 0 and same_weights(tmp_path / "lora", files[EXPERTS[1]])
    pipeline = tmp_path / "copy"
    shutil.copytree(run.pipeline, pipeline)
    for name in EXPERTS:
        shutil.rmtree(pipeline / name)
        command = [str(run.folder), str(pipeline / name), "--weights", "raw", "--format", "merged", "--expert", "low"]
        assert export.main(command) == 0, "the run's own base is another folder"
        before = {path: path.read_bytes() for path in (pipeline / name).iterdir()}
        assert export.main([*command, "--base", str(pipeline)]) == 2
        assert {path: path.read_bytes() for path in (pipeline / name).iterdir()} == before


@long
def test_one_expert_trained_alone(tmp_path, capfd):
    """The export has the other expert as its checkpoint has it. A checkpoint holds the trained expert only."""
    run = distil(tmp_path, A14B, build_tiny_pipeline, "student.experts=low", "steps=4", boundary=BOUNDARY)
    assert same_weights(run.student / EXPERTS[0], run.pipeline / EXPERTS[0])
    assert not same_weights(run.student / EXPERTS[1], run.pipeline / EXPERTS[1])
    state = json.loads((run.folder / "checkpoints" / "step_00000004" / "state.json").read_text())
    assert sorted(state["updates"]) == ["fake.high", "fake.low", "student.low"]
    command = [str(run.folder), str(tmp_path / "one"), "--weights", "raw"]
    assert export.main(command) == 2
    assert export.main([*command, "--expert", "low"]) == 0
    assert same_weights(tmp_path / "one", run.student / EXPERTS[1])
    line = [*A14B.words(run.pipeline, run.clips), f"run_dir={run.folder}", "device=cpu", "dry_run=true", "mesh.cp=1"]
    assert main([*line, "steps=4"]) == 2
    assert "student.experts" in capfd.readouterr().err


@long
def test_two_phases(tmp_path):
    """Phased DMD: the high expert, then the low one from its export. A second pair of runs is killed within both phases
    and between them, and ends with the same weights. A pipeline runs each expert at the times of its steps."""
    words = ("method.phased=true", "student.experts=high", "steps=4", "checkpoint.every=1")
    high = distil(tmp_path, A14B, build_tiny_pipeline, *words, boundary=BOUNDARY)
    given = *A14B.words(high.pipeline, high.clips), *words

    def second(start):
        return "student.experts=low", f"student.checkpoint={start.student}"

    low, again, again_low = (replace(high, folder=tmp_path / name) for name in ("low", "again", "again_low"))
    train(2, *given, *second(high), f"run_dir={low.folder}")
    assert 0 < train_killed(2, again.folder, 1, *given) < 4
    assert train_killed(2, again.folder, 4, *given) == 4, "between the phases"
    train(2, *given, f"run_dir={again.folder}")
    assert 0 < train_killed(2, again_low.folder, 1, *given, *second(again)) < 4
    train(2, *given, *second(again), f"run_dir={again_low.folder}")
    for whole, killed in ((high, again), (low, again_low)):
        assert losses(killed.folder) == losses(whole.folder)
        assert all(same_weights(killed.student / name, whole.student / name) for name in EXPERTS)
    for run, trained, start in ((high, 0, high.pipeline), (low, 1, high.student)):
        for i, name in enumerate(EXPERTS):
            assert same_weights(run.student / name, start / name) == (i != trained)
        state = json.loads((run.folder / "checkpoints" / "step_00000004" / "state.json").read_text())
        assert {*state["updates"]} == {f"{role}.{('high', 'low')[trained]}" for role in ("student", "fake")}

    experts = {name: WanTransformer3DModel.from_pretrained(low.student / name) for name in EXPERTS}
    seen = {name: [] for name in EXPERTS}
    for name, expert in experts.items():
        expert.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen[name].append(kwargs["timestep"][0].item() / 1000), with_kwargs=True
        )
    call = A14B.call() | {"guidance_scale": 1.0, "guidance_scale_2": 1.0}
    low.theirs(WanPipeline, **experts)(A14B.captions[0], latents=A14B.noise()[:1], **call)
    for name, times in zip(EXPERTS, (STEPS[:2], STEPS[2:]), strict=True):
        assert seen[name] == pytest.approx(times, abs=2e-3)


@long
def test_adapters_of_hunyuan_are_loaded_by_diffusers(tmp_path):
    run = distil(tmp_path, HUNYUAN, build_tiny_hunyuan_pipeline, *(f"{r}.lora.rank=2" for r in ("student", "fake")))
    pipeline = run.theirs(HunyuanVideo15Pipeline, guider=ClassifierFreeGuidance(guidance_scale=1.0))
    call = {"prompt": list(HUNYUAN.captions), "latents": HUNYUAN.noise()} | HUNYUAN.call()
    untrained = pipeline(**call)[0]
    pipeline.transformer.load_lora_adapter(weights(run.folder / "export" / "student_lora"), prefix="transformer")
    merged = _of_hunyuan(run, HunyuanVideo15Pipeline)(**call)[0]
    assert relative_error(pipeline(**call)[0], merged) < 1e-5 < 1e-4 < relative_error(untrained, merged)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Return pipeline folders by name, and clips."""
    base = tmp_path_factory.mktemp("pipelines")
    early, late, latest = (build_tiny_ltx2_pipeline(base / v, version=v) for v in ("2.0", "2.3", "2.5"))
    mixed, unconnected = (shutil.copytree(late, base / name) for name in ("mixed", "unconnected"))
    shutil.copy(early / "transformer" / "config.json", mixed / "transformer")
    shutil.rmtree(unconnected / "connectors")
    return {
        "ltx2_0": early,
        "ltx2": late,
        "ltx2_5": latest,
        "mixed": mixed,
        "unconnected": unconnected,
        "t2v": build_tiny_pipeline(base / "t2v"),
        "i2v": build_tiny_pipeline(base / "i2v", image=True),
        "ti2v": build_tiny_pipeline(base / "ti2v", frame=True),
        "a14b": build_tiny_pipeline(base / "a14b", boundary=BOUNDARY),
        "ltx": build_tiny_ltx_pipeline(base / "ltx"),
        "clips": WAN.clips(base / "clips"),
    }


@pytest.mark.parametrize(
    ("model", "changes", "name"),
    [
        ("i2v", ["data.image=null", "sample.images=[]"], "data.image"),
        ("i2v", ["data.image=last_frame"], "data.image"),
        ("i2v", ["data.max_text_tokens=64"], "data.max_text_tokens"),
        ("i2v", ["sample.images=[{clips}/clip_0.mp4]"], "sample.images"),
        ("i2v", ["data=captions", "data.path={clips}/metadata.csv"], "the column image"),
        ("i2v", ["teacher.checkpoint={t2v}"], "teacher.checkpoint"),
        ("i2v", ["data.encoders={t2v}"], "data.encoders"),
        ("ti2v", ["data.num_frames=1"], "data.num_frames"),
        ("ti2v", ["data.height=48"], "data.height"),
        ("ti2v", ["teacher.checkpoint={i2v}"], "teacher.checkpoint"),
        ("ltx", ["teacher.family=wan"], "family=wan"),
        ("ltx", ["data.encoders={t2v}"], "teacher.checkpoint"),
        ("ltx", ["data.num_frames=15"], "data.num_frames"),
        ("ltx2", ["teacher.checkpoint={mixed}"], "teacher.checkpoint"),
        ("ltx2", ["teacher.checkpoint={ltx2_0}"], "teacher.checkpoint"),
        ("ltx2", ["data.encoders={ltx2_0}"], "teacher.checkpoint"),
        pytest.param("ltx2", ["data.encoders={ltx2_5}"], "teacher.checkpoint", id="ltx2, encoders of 2.5"),
        ("ltx2", ["teacher.checkpoint={ltx2_5}", "data.encoders={ltx2_5}"], "student.checkpoint"),
        ("ltx2", ["data.encoders={ltx}", "data.max_text_tokens=128"], "teacher.checkpoint"),
        ("ltx2", ["data.encoders={unconnected}"], "data.encoders"),
        ("ltx2", ["data.num_frames=16"], "data.num_frames"),
        ("ltx2", ["data.width=112"], "data.width"),
        ("ltx2", ["data.fps=0"], "data.fps"),
        ("ltx2", ["data.max_text_tokens=30"], "data.max_text_tokens"),
        ("ltx2", ["mesh.ulysses=3"], "mesh.ulysses"),
        ("a14b", ["method.rollout=full"], "method.rollout"),
        ("a14b", ["method.step_list=[1.0,0.9]", "sample.student_steps=[2]"], "method.step_list"),
        ("a14b", ["teacher.checkpoint={a14b}/transformer"], "teacher.checkpoint"),
        ("a14b", ["teacher.boundary=0.5"], "teacher.boundary"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(pipelines, tmp_path, capfd, model, changes, name):
    case = {"i2v": WAN, "ti2v": TI2V, "ltx": LTX, "ltx2": LTX2, "a14b": A14B}[model]
    words = case.words(pipelines[model], pipelines["clips"])
    words += [change.format(**pipelines) for change in ((*FRAMES,) if "i2v" in model else ()) + tuple(changes)]
    assert main([*words, "mesh.cp=1", f"run_dir={tmp_path}/run", "device=cpu", "dry_run=true"]) == 2
    assert name in capfd.readouterr().err.splitlines()[-1] and not (tmp_path / "run").exists()
