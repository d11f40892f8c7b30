"""A run that is told to end saves, says so, and goes on by the same command to what it would have been."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fsdp_cp.checkpoint import published_steps
from tests.e2e.launch import ROOT, command, environment, losses, train

STEPS = 8
QUICK = (
    "experiment=quickstart", "batch_size=2", "sample.at_end=false", f"steps={STEPS}", "log.every=1",
    "method.fake_updates_per_student_update=1",
)  # fmt: skip
TORCHRUN = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", "120")


def start(ranks: int, run_dir: Path, *overrides: str, torchrun: tuple[str, ...] = TORCHRUN) -> subprocess.Popen:
    words = command(ranks, *QUICK, f"run_dir={run_dir}", *overrides)
    if ranks:
        place = words.index("--standalone")
        words[place:place] = torchrun
    return subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(what, process: subprocess.Popen, seconds: float = 120):
    """What ``what`` returns as soon as it is true."""
    limit = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < limit and process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return found


def trained(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").is_file() and len(losses(run_dir)) >= 2


def status(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def workers(run_dir: Path) -> list[int]:
    """Processes of a run, torchrun aside."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if f"run_dir={run_dir}" in words and "torch.distributed.run" not in words:
            found.append(int(entry.name))
    return sorted(found)


def equal_runs(run_dir: Path, other: Path) -> bool:
    weights, others = (load_file(d / "export/student/diffusion_pytorch_model.safetensors") for d in (run_dir, other))
    return losses(run_dir) == losses(other) and all(torch.equal(w, others[name]) for name, w in weights.items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folders = {}

    def of(ranks: int) -> Path:
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp("undisturbed") / str(ranks)
            train(ranks, *QUICK, f"mesh.cp={max(1, ranks)}", f"run_dir={folders[ranks]}")
        return folders[ranks]

    return of


@pytest.mark.slow
def test_one_process(tmp_path, undisturbed):
    run_dir = tmp_path / "run"
    process = start(0, run_dir, "mesh.cp=1")
    wait_for(lambda: trained(run_dir), process)
    assert status(run_dir)["state"] == "running"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "Traceback" not in out
    (step,) = published_steps(run_dir / "checkpoints")
    assert f"stopped by SIGTERM after step {step} of {STEPS}, which is saved" in out.splitlines()[-1]
    about = status(run_dir)
    assert (about["state"], about["exit_code"], about["checkpoint"]) == ("stopped", 75, step)
    train(0, *QUICK, "mesh.cp=1", f"run_dir={run_dir}")
    assert status(run_dir)["state"] == "finished" and status(run_dir)["exit_code"] == 0
    assert equal_runs(run_dir, undisturbed(0)) and "resumed from step" in (run_dir / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGUSR1]
)
def test_two_ranks_under_torchrun(tmp_path, undisturbed, number):
    run_dir = tmp_path / "run"
    process = start(2, run_dir)
    wait_for(lambda: trained(run_dir), process)
    process.send_signal(number)  # to torchrun, which hands it to its workers
    out, _ = process.communicate(timeout=90)
    (step,) = published_steps(run_dir / "checkpoints")
    assert process.returncode == 1 and f"stopped by {number.name} after step {step} of {STEPS}" in out
    assert out.count("Traceback") == 1, "torchrun's own"
    assert status(run_dir)["state"] == "stopped" and not workers(run_dir)
    train(2, *QUICK, f"run_dir={run_dir}")
    assert equal_runs(run_dir, undisturbed(2))


@pytest.mark.slow
def test_a_signal_to_one_worker_stops_all_at_the_same_step(tmp_path):
    run_dir = tmp_path / "run"
    process = start(2, run_dir)
    wait_for(lambda: trained(run_dir), process)
    os.kill(workers(run_dir)[1], signal.SIGUSR1)
    out, _ = process.communicate(timeout=90)
    (step,) = published_steps(run_dir / "checkpoints")
    assert f"stopped by SIGUSR1 after step {step} of {STEPS}" in out and losses(run_dir)[-1]["step"] == step


@pytest.mark.slow
def test_workers_save_and_end_when_torchrun_is_killed(tmp_path, undisturbed):
    run_dir = tmp_path / "run"
    process = start(2, run_dir)
    wait_for(lambda: trained(run_dir), process)
    process.kill()
    process.communicate(timeout=90)  # until the last of them has closed its end
    assert not workers(run_dir) and status(run_dir)["state"] == "stopped"
    train(2, *QUICK, f"run_dir={run_dir}")
    assert equal_runs(run_dir, undisturbed(2))


@pytest.mark.slow
def test_torchrun_restarts_go_on_from_the_last_checkpoint(tmp_path, undisturbed):
    """``checkpoint.resume=never`` was meant for the first start."""
    run_dir = tmp_path / "run"
    settings = ("checkpoint.every=2", "checkpoint.resume=never")
    process = start(2, run_dir, *settings, torchrun=(*TORCHRUN, "--max-restarts", "2"))
    wait_for(lambda: published_steps(run_dir / "checkpoints"), process)
    os.kill(workers(run_dir)[1], signal.SIGKILL)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    starts = [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    assert starts[0]["from_step"] == 0 and starts[1]["from_step"] >= 2 and len(starts) == 2
    assert equal_runs(run_dir, undisturbed(2)) and not (run_dir / "previous").exists()
