"""``train.py`` from the command line: the same run on every mesh, resumed after a kill, on real clips."""

import gzip
import json
import math
import subprocess
import sys
import time

import pytest
import torch
from diffusers import WanTransformer3DModel

from distill.config import load_config
from tests.e2e.launch import ROOT, command, environment, kill_all, losses, train
from tests.tiny_pipeline import build_tiny_pipeline, render_clips

QUICK = (
    "experiment=quickstart",
    "sample.report_clips=0",
    "sample.prompts=2",
    "sample.teacher_steps=[1]",
    "sample.student_steps=[1]",
)


@pytest.mark.slow
def test_the_same_losses_on_every_mesh(tmp_path):
    traces = {}
    for dp, cp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)):
        run_dir = tmp_path / f"{dp}x{cp}"
        words = (*QUICK, "steps=6", "sample.at_end=false", "export.at_end=false")
        train(dp * cp, *words, f"mesh.dp_shard={dp}", f"mesh.cp={cp}", f"run_dir={run_dir}")
        traces[dp, cp] = losses(run_dir)
    truth = traces[1, 1]
    assert [r["step"] for r in truth] == [1, 2, 3, 4, 5, 6]
    for mesh, trace in traces.items():
        for ours, theirs in zip(trace, truth, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), mesh


@pytest.mark.slow
def test_killed_and_started_again(tmp_path):
    arguments = (*QUICK, "steps=9", "checkpoint.every=3", "mesh.cp=2")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    train(2, *arguments, f"run_dir={straight}")
    process = subprocess.Popen(
        command(2, *arguments, f"run_dir={killed}"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    metrics = killed / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    kill_all(f"run_dir={killed}")
    process.wait()
    with metrics.open("a") as file:
        file.write('{"step": 6, "student/lo')  # as a kill in the middle of a write leaves it
    done = train(2, *arguments, f"run_dir={killed}")
    assert "resumed from step 3" in done.stdout or "resumed from step 6" in done.stdout
    assert losses(killed) == losses(straight), "the same to the last digit"
    ours, theirs = (WanTransformer3DModel.from_pretrained(d / "export" / "student") for d in (killed, straight))
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.slow
def test_video_folder(tmp_path):
    pipeline, clips, run_dir = tmp_path / "pipeline", tmp_path / "clips", tmp_path / "run"
    build_tiny_pipeline(pipeline)
    render_clips(clips, 3, frames=24, fps=8, height=72, width=120, broken=1, short=1)
    arguments = (
        *QUICK, "data=video_folder", f"data.path={clips}", f"data.encoders={pipeline}",
        *(f"{role}.checkpoint={pipeline}" for role in ("teacher", "student", "fake")),
        "sample.teacher_steps=[2]", "sample.student_steps=[2]", "sample.report_clips=2", "batch_size=4",
        f"run_dir={run_dir}",
    )  # fmt: skip
    first = train(2, *arguments, "steps=3", "mesh.cp=2")
    assert "2 of 5 clips left out" in first.stdout + first.stderr
    assert [r["step"] for r in losses(run_dir)] == [1, 2, 3]
    assert list((run_dir / "samples").glob("*student*.mp4")) and (run_dir / "report.html").is_file()
    cached = {p: p.stat().st_mtime_ns for p in (run_dir / "cache").rglob("*.safetensors")}
    assert len(cached) >= 3
    again = train(2, *arguments, "steps=5", "mesh.cp=1")  # longer, on another mesh
    assert "resumed from step 3" in again.stdout
    assert [r["step"] for r in losses(run_dir)] == [1, 2, 3, 4, 5]
    assert {p: p.stat().st_mtime_ns for p in (run_dir / "cache").rglob("*.safetensors")} == cached, "encoded once"


@pytest.mark.slow
def test_start_afresh_moves_the_earlier_run_aside_and_sample_shows_clips(tmp_path):
    arguments = (*QUICK, "mesh.cp=1", f"run_dir={tmp_path}", "checkpoint.resume=never")
    train(0, *arguments, "steps=2")
    train(0, *arguments, "steps=1")
    assert [r["step"] for r in losses(tmp_path)] == [1]
    assert [r["step"] for r in losses(tmp_path / "previous" / "1")] == [1, 2]
    assert (tmp_path / "previous" / "1" / "checkpoints" / "step_00000002").is_dir()
    out = tmp_path / "clips"
    sample = [sys.executable, "-m", "distill.sample", str(tmp_path), "--out", str(out), "--steps", "2"]
    captions = ["--caption", "a red circle growing", "--caption", "a blue square falling"]
    subprocess.run([*sample, *captions], cwd=ROOT, env=environment(), check=True)
    assert {p.name for p in out.iterdir()} == {"0.mp4", "1.mp4", "samples.png", "fsdp_cp_export.json"}
    refused = subprocess.run(
        [*sample, "--caption", "a purple cow"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert refused.returncode == 2 and refused.stderr.startswith("error: ") and "a purple cow" in refused.stderr


@pytest.mark.slow
def test_every_role_sharded_in_its_own_way(tmp_path):
    """The same losses as a run with the defaults, and what the settings were asked to show."""
    arguments = (*QUICK, "mesh.cp=1", "micro_batch_size=2", "method.fake_updates_per_student_update=1", "log.every=1")
    own = (
        "student.strategy=optim_grads", "fake.strategy=optim", "teacher.offload=cpu",
        "student.activation_checkpointing=selective", "student.gather_early=true", "fake.activation_checkpointing=true",
        "student.keep_operators=[fsdp_cp.ring_attention,aten.mm]", "log.norms_every=1", "log.groups=true",
        "optim.student.implementation=fused", "profile.steps=[2,2]", "profile.ranks=all",
    )  # fmt: skip
    plain, run_dir = tmp_path / "plain", tmp_path / "own"
    train(2, *arguments, "steps=4", f"run_dir={plain}")
    first = train(2, *arguments, *own, "steps=3", f"run_dir={run_dir}").stdout
    for line in ("student on rank 0, optim_grads:", "fake on rank 0, optim:", "teacher on rank 0, optim_grads_params:"):
        table = first.partition(line)[2].strip().splitlines()
        assert [words.split()[0] for words in table[:3]] == ["unit", "(root)", "blocks.0"], line
    assert not (plain / "norms.jsonl").exists() and not (plain / "profile").exists()
    traces = {f"steps_2_2_rank{rank}{end}" for rank in range(2) for end in (".json.gz", "_summary.json")}
    assert {file.name for file in (run_dir / "profile").iterdir()} == traces and "profiled steps 2 to 2 on 2" in first
    for rank in range(2):
        with gzip.open(run_dir / "profile" / f"steps_2_2_rank{rank}.json.gz") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"ProfilerStep#2", "gloo:all_gather", "fake/fake_score/backward", "aten::mm"} <= names

    # Resumed from step 3 with other sharding; the norms go on without a gap or a repetition.
    with (run_dir / "norms.jsonl").open("a") as file:
        file.write('{"step": 4, "role": "student", "norms": {}}\n{"step": 5, "ro')
    changed = ("student.strategy=no_shard", "student.gather_early=false", "fake.strategy=optim_grads_params")
    resumed = train(2, *arguments, *own, *changed, "steps=4", f"run_dir={run_dir}").stdout
    assert "resumed with student.strategy=no_shard, which was optim_grads" in resumed
    assert "resumed with student.keep_operators" not in resumed, "what stays the same is not a change"
    assert "step 3 is behind them, nothing is profiled" in resumed
    assert {file.name for file in (run_dir / "profile").iterdir()} == traces
    for ours, theirs in zip(losses(run_dir), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    lines = [json.loads(line) for line in (run_dir / "norms.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] == [line["step"] for line in metrics]
    assert {line["role"] for line in lines} == {"student", "fake"}
    assert 0 < metrics[1]["perf/collectives_exposed_share"] <= metrics[1]["perf/collectives_share"] < 1
    assert not any("perf/collectives_share" in line for line in (metrics[0], *metrics[2:]))
    for line, step in zip(lines, metrics, strict=True):
        total = math.sqrt(sum(gradient**2 for _, gradient in line["norms"].values()))
        assert total == pytest.approx(step[f"{line['role']}/grad_norm"], rel=1e-6)
        assert all(weight > 0 for weight, _ in line["norms"].values()) and "blocks.0.ffn.net.2.bias" in line["norms"]
    # What was written is what was set, and can be read again.
    config = load_config(run_dir / "config.yaml")
    assert (config.student.strategy, config.fake.strategy, config.teacher.offload) == (
        "no_shard", "optim_grads_params", "cpu",
    )  # fmt: skip
    assert config.student.keep_operators == ["fsdp_cp.ring_attention", "aten.mm"]
    assert config.fake.activation_checkpointing == "full" and config.student.activation_checkpointing == "selective"
    assert config.teacher.precision == config.precision == "fp32" and config.log.norms_every == 1
