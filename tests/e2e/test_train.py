"""``train.py`` from the command line to its export, samples and report; locked, killed and resumed; on real clips."""

import json
import math
import signal
import socket
import subprocess

import av
import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel

from distill import sample
from distill.config import load_config
from distill.data.sets.encoded_set import EncodedSet
from distill.report.media import Sound, write_mp4
from fsdp_cp.checkpoint.folder import saved_steps
from fsdp_cp.files.atomic_folder import description
from models import export
from tests.e2e.families import same_weights, weights
from tests.e2e.launch import (
    QUICK,
    ROOT,
    TINY,
    TINY_SOUND,
    environment,
    forked,
    losses,
    run_command,
    torchrun_command,
    train,
    wait_for,
)
from tests.tiers import long, long_case, slow
from tests.tiny_ltx2_pipeline import build_tiny_ltx2_pipeline
from tests.tiny_pipeline import build_tiny_pipeline, moving_square, render_clips, write_metadata

SAMPLES = ("sample.report_clips=0", "sample.prompts=2", "sample.teacher_steps=[1]", "sample.student_steps=[1]")
NO_END = ("sample.at_end=false", "export.at_end=false")
SMALL = ("experiment=quickstart", "batch_size=2", "log.every=1", "method.fake_updates_per_student_update=1", *SAMPLES)


def frames(file):
    with av.open(str(file)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_from_the_command_line_to_export_samples_and_report(tmp_path):
    """Two ranks train; then commands export and sample the run."""
    run_dir = tmp_path / "run"
    done = train(2, *SMALL, *TINY, "steps=2", "mesh.cp=2", "sample.report_clips=2", f"run_dir={run_dir}")
    assert "Traceback" not in done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for key in ("perf/tokens_per_second", "perf/mfu", "memory/peak_gib"):
        assert all(key in line for line in lines), key
    assert all(math.isfinite(value) for line in losses(run_dir) for value in line.values())
    assert {key for line in losses(run_dir) for key in line} >= {"student/loss", "fake/loss", "fake/grad_norm"}
    assert saved_steps(run_dir / "checkpoints") == [2]
    assert load_config(run_dir / "config.yaml").batch_size == 2
    WanTransformer3DModel.from_pretrained(run_dir / "export" / "student")
    clips = sorted((run_dir / "samples").glob("step_00000002_student_1steps_*.mp4"))
    assert len(clips) == 2 and frames(clips[0]) == 6
    assert (run_dir / "report.html").stat().st_size > 1000 and json.loads((run_dir / "report.json").read_text())

    card = (run_dir / "export" / "student" / "README.md").read_text()
    assert "python -m distill.sample" in card and "from_pretrained" not in card, "the encoders are no pipeline"

    out = tmp_path / "out"
    assert export.main([str(run_dir), str(out)]) == 0
    assert same_weights(run_dir / "export" / "student", out), "the command exports what the run did"
    files = [(folder / "scheduler" / "scheduler_config.json").read_text() for folder in (run_dir / "export", out)]
    assert files[0] == files[1]
    method = description(out)["method"]
    assert method["name"] == "dmd2" and method == description(run_dir / "export" / "student")["method"]
    assert sample.main([str(run_dir), "--steps", "2", "--count", "1", "--out", str(tmp_path / "clips")]) == 0
    assert frames(tmp_path / "clips" / "0.mp4") == 6


@slow
@pytest.mark.parametrize(
    "shown",
    [
        pytest.param((*QUICK, *TINY), id="video"),
        long_case(("experiment=quickstart_sound", *QUICK[1:], *TINY_SOUND), id="sound"),
    ],
)
def test_a_second_run_is_refused_and_a_killed_one_resumes(tmp_path, shown):
    run_dir, straight = tmp_path / "run", tmp_path / "straight"
    words = (*shown, "device=cpu", "mesh.cp=1", "export.at_end=false", "guard.every=1", "sample.teacher_steps=[1]")
    with forked(0, "train", *words, "steps=100000", f"run_dir={run_dir}") as first:
        wait_for(lambda: len(saved_steps(run_dir / "checkpoints")) >= 2, first.lives)
        first.send(signal.SIGSTOP)
        steps = max(saved_steps(run_dir / "checkpoints")) + 2
        again = (*words, f"steps={steps}", f"run_dir={run_dir}")
        refused = forked(0, "train", *again).wait()
        assert refused.returncode == 2 and "run_dir=" in refused.stderr and "Traceback" not in refused.stderr, refused
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "student/lo')  # as a kill in the middle of a write leaves it
    done = forked(0, "train", *again).wait()
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2 and starts[1]["from_step"] >= 2
    train(0, *words, f"steps={steps}", f"run_dir={straight}")
    assert losses(run_dir) == losses(straight), "the same to the last digit, the guard's looks too"
    assert {"guard/motion", "guard/alarm", "guard/fake_error"} <= losses(run_dir)[-2].keys() | losses(run_dir)[
        -1
    ].keys()


@long
def test_torchrun_repeats_a_users_mistake_last(tmp_path):
    done = run_command(2, "experiment=quickstart", "mesh.cp=3", f"run_dir={tmp_path}/run")
    assert done.returncode == 1, "torchrun's own"
    summary = done.stderr[done.stderr.rindex("Root Cause") :]
    assert "error: " in summary and "mesh.cp" in summary and "train.py" not in summary
    assert not list(tmp_path.iterdir())


@long
def test_two_nodes_meet(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    options = (
        "--nnodes", "2", "--rdzv-id", "17", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
    )  # fmt: skip
    words = torchrun_command(1, *SMALL, *TINY, *NO_END, "steps=1", f"run_dir={tmp_path}/run", options=options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(words, cwd=ROOT, env=environment(), **pipes) for _ in range(2)]
    printed = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    assert json.loads((tmp_path / "run" / "starts.jsonl").read_text())["world_size"] == 2


@slow
def test_real_clips_are_encoded_once(tmp_path):
    """Clips that cannot be read are left out; a longer run on another mesh reuses the cache."""
    pipeline, clips, run_dir = tmp_path / "pipeline", tmp_path / "clips", tmp_path / "run"
    build_tiny_pipeline(pipeline)
    render_clips(clips, 3, frames=24, fps=8, height=72, width=120, broken=True, short=True)
    words = (
        *SMALL, "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")), "data.height=32",
        "data.width=48", "sample.report_clips=2", f"run_dir={run_dir}",
    )  # fmt: skip
    train(2, *words, "steps=2", "mesh.cp=2")
    assert list((run_dir / "samples").glob("*student*.mp4")) and (run_dir / "report.html").is_file()
    cached = {p: p.stat().st_mtime_ns for p in (run_dir / "cache").rglob("*.safetensors")}
    assert len([path for path in cached if path.name.startswith("clips-")]) == 1
    train(2, *words, *NO_END, "steps=3", "mesh.cp=1")
    assert [r["step"] for r in losses(run_dir)] == [1, 2, 3]
    assert {p: p.stat().st_mtime_ns for p in (run_dir / "cache").rglob("*.safetensors")} == cached


@slow
def test_the_teachers_clips_are_sampled_and_trained_on(tmp_path):
    """Regression on the states, and a GAN whose real clips these are."""
    words = ("device=cpu", "mesh.cp=2")
    options = ("--clips", "4", "--steps", "4", "--states", "1.0,0.9,0.75,0.5")
    clips = str(tmp_path / "clips")
    command = (2, "distill.teacher_clips", "experiment=quickstart_ode_regression", *options, *words)
    made = forked(*command, clips).wait()
    assert made.returncode == 0, made
    refused = forked(*command, "seed=1", clips).wait()
    assert refused.returncode == 2 and "teacher.seed=0" in refused.stderr, refused
    for name, gan in (("ode_regression", ()), ("dmd2", ("method.gan_weight_student=0.01", "sample.at_end=false"))):
        run_dir = tmp_path / name
        train(
            2, f"experiment=quickstart_{name}", *words, *gan, "data=encoded", f"data.path={clips}", "batch_size=2",
            "steps=2", *SAMPLES, f"run_dir={run_dir}",
        )  # fmt: skip
        assert [r["step"] for r in losses(run_dir)] == [1, 2]
        WanTransformer3DModel.from_pretrained(run_dir / "export" / "student")


@slow
def test_sound_of_a_teachers_clips_is_trained_on(tmp_path):
    """Videos with sound are encoded; a set of their captions' clips by the teacher has both parts, and trains."""
    pipeline, videos, clips = build_tiny_ltx2_pipeline(tmp_path / "pipeline"), tmp_path / "videos", tmp_path / "clips"
    videos.mkdir()
    for color in ("red", "white"):
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 16000)).astype(np.float32)
        write_mp4(videos / f"{color}.mp4", moving_square(color, 24, 64, 96), 24, Sound(noise, 16000))
    write_metadata(videos, [("red.mp4", "a red square"), ("white.mp4", "a white square")])
    words = (
        "experiment=quickstart_ode_regression", "device=cpu", "mesh.cp=2", *(
            word for role in ("teacher", "student") for word in (f"{role}.family=ltx2", f"{role}.checkpoint={pipeline}")
        ),
    )  # fmt: skip
    source = (
        "data=video_folder", f"data.path={videos}", f"data.encoders={pipeline}", "data.num_frames=17",
        "data.height=64", "data.width=96", "data.fps=24", "data.max_text_tokens=8",
    )  # fmt: skip
    options = ("--clips", "2", "--steps", "4", "--states", "1.0,0.9,0.75,0.5")
    made = forked(2, "distill.teacher_clips", *words, *source, *options, str(clips)).wait()
    assert made.returncode == 0, made
    parts = {name: shape for name, (_, shape) in EncodedSet(clips, "OUT").parts.items()}
    sizes = {"latents": [[8, 3, 2, 3]], "latents/audio": [[2, 18, 4]]}
    states = {name.replace("latents", "states"): [[4, *shape] for shape in shapes] for name, shapes in sizes.items()}
    assert parts == sizes | states
    run_dir = tmp_path / "run"
    more = ("data=encoded", f"data.path={clips}", "batch_size=2", "steps=2", *SAMPLES, f"run_dir={run_dir}")
    train(2, *words, *more)
    assert [r["step"] for r in losses(run_dir)] == [1, 2] and (run_dir / "export" / "student").is_dir()
    with av.open(str(next((run_dir / "samples").glob("*student*.mp4")))) as container:
        assert container.streams.audio
    toy = forked(0, "distill.teacher_clips", "experiment=quickstart_sound", "device=cpu", str(tmp_path / "toy")).wait()
    assert toy.returncode == 2 and "data.encoders" in toy.stderr, toy


COMMANDS = (
    "train", "distill.encode", "distill.evaluate", "distill.sample", "distill.sweep", "distill.teacher_clips",
    "models.export", "models.lora", "models.verify",
    "tests.tiny_pipeline", "tests.tiny_ltx_pipeline", "tests.tiny_hunyuan_pipeline", "benchmarks.gpu",
)  # fmt: skip


@slow
def test_every_command_has_help():
    benchmarks = sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py") if "__main__" in p.read_text())
    failed = {}
    for module in (*COMMANDS, *(f"benchmarks.{name}" for name in benchmarks)):
        done = forked(0, module, "--help").wait(120)
        if done.returncode != 0 or not done.stdout or "Traceback" in done.stderr:
            failed[module] = done
    assert not failed, failed


@long
def test_the_fake_score_has_an_average(tmp_path):
    """The fake score trains at steps 2 and 4: first before ``start``, then with weight one half. The run resumes."""
    run_dir = tmp_path / "run"
    words = (
        *QUICK, *TINY, "device=cpu", "mesh.cp=1", "checkpoint.keep=9", "fake.ema.enabled=true", "fake.ema.decay=0.5",
        "fake.ema.start=1", "export.at_end=false", f"run_dir={run_dir}",
    )  # fmt: skip
    for steps in (3, 5):
        train(0, *words, f"steps={steps}")

    def fake(step, kind):
        out = tmp_path / f"{kind}_{step}"
        command = [str(run_dir / f"checkpoints/step_{step:08d}"), str(out), "--role", "fake", "--weights", kind]
        assert export.main([*command, "--dtype", "fp32"]) == 0
        return {name: weight.double() for name, weight in weights(out).items()}

    first, second, average = fake(2, "raw"), fake(4, "raw"), fake(5, "ema")
    assert average.keys() == first.keys() and any(not torch.equal(first[name], second[name]) for name in first)
    for name, weight in average.items():
        truth = (first[name] + second[name]) / 2
        assert (weight - truth).abs().max() <= 2e-7 * truth.abs().max(), name
