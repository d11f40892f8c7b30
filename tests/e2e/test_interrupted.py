"""Runs that are stopped, killed, stalled or out of disk: they save what they can, and the same command resumes them."""

import json
import os
import signal
import subprocess
import time

from fsdp_cp.checkpoint.folder import saved_steps
from models import export
from tests.e2e.launch import (
    QUICK,
    ROOT,
    TINY,
    environment,
    forked,
    kill_all,
    losses,
    processes,
    torchrun_command,
    train,
    wait_for,
)
from tests.tiers import long, slow

pytestmark = slow

ENDLESS = ("steps=100000", "checkpoint.every=0", "export.at_end=false")


def newest(run_dir):
    return max(saved_steps(run_dir / "checkpoints"), default=0)


def trained(run_dir):
    return losses(run_dir)[-1]["step"] if (run_dir / "metrics.jsonl").is_file() and losses(run_dir) else 0


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())


def test_a_signal_to_one_rank_stops_all(tmp_path):
    """All ranks save the same step and exit with 75. The same command then finishes the run."""
    run_dir = tmp_path / "run"
    with forked(2, "train", *QUICK, *TINY, *ENDLESS, "device=cpu", "mesh.cp=2", f"run_dir={run_dir}") as run:
        wait_for(lambda: trained(run_dir) >= 2, run.lives)
        assert status(run_dir)["state"] == "running"
        os.kill(run.processes[1].pid, signal.SIGTERM)
        for process in run.processes:
            process.join(60)
        assert [process.exitcode for process in run.processes] == [75, 75], run.output("err")
        assert "Traceback" not in run.output("err")
    step = newest(run_dir)
    assert step == trained(run_dir)
    about = status(run_dir)
    assert (about["state"], about["exit_code"], about["checkpoint"]) == ("stopped", 75, step)
    train(2, *QUICK, *TINY, "mesh.cp=2", "export.at_end=false", f"steps={step + 1}", f"run_dir={run_dir}")
    assert (status(run_dir)["state"], status(run_dir)["exit_code"]) == ("finished", 0)
    assert [line["step"] for line in losses(run_dir)] == list(range(1, step + 2))


@long
def test_torchrun_restarts_ranks_and_hands_signals_on(tmp_path):
    """Rank 1 is killed in the middle of a run, and resumes it after torchrun's restart. Then torchrun is stopped."""
    run_dir = tmp_path / "run"
    marker = f"run_dir={run_dir}"
    options = (
        "--standalone", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", "120",
        "--max-restarts", "1",
    )  # fmt: skip
    words = torchrun_command(2, *QUICK, *TINY, *ENDLESS, "checkpoint.every=2", "mesh.cp=2", marker, options=options)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(words, cwd=ROOT, env=environment(), **pipes)

    def starts():
        return [json.loads(line)["from_step"] for line in (run_dir / "starts.jsonl").read_text().splitlines()]

    try:
        wait_for(lambda: newest(run_dir), lambda: job.poll() is None)
        workers = [process for process in processes(marker) if process != job.pid]
        os.kill(workers[1], signal.SIGKILL)
        wait_for(lambda: len(starts()) == 2 and newest(run_dir) > starts()[1], lambda: job.poll() is None)
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=90)
        assert job.returncode == 1, out
        assert status(run_dir)["state"] == "stopped" and newest(run_dir) == trained(run_dir) and not processes(marker)
    finally:
        kill_all(marker)
    assert starts()[0] == 0 < starts()[1]
    assert [line["step"] for line in losses(run_dir)] == list(range(1, newest(run_dir) + 1))


def test_a_stalled_rank_ends_the_other(tmp_path):
    """The other rank waits for ``timeout.step`` and names the checkpoint from which the run resumes."""
    run_dir, seconds = tmp_path / "run", 9
    settings = (
        *QUICK,
        *TINY,
        *ENDLESS,
        "checkpoint.every=30",  # rarely: a save has a longer timeout
        "mesh.cp=2",
        f"timeout.step={seconds / 60}",
        f"run_dir={run_dir}",
    )
    with forked(2, "train", "device=cpu", *settings) as run:
        wait_for(lambda: trained(run_dir) >= 32 and newest(run_dir), run.lives)
        waiting, stalled = run.processes
        os.kill(stalled.pid, signal.SIGSTOP)
        started = time.monotonic()
        waiting.join(120)
        assert seconds - 1 < time.monotonic() - started < seconds + 45
        assert waiting.exitcode
        printed = run.output("out") + run.output("err")
    name = f"step_{newest(run_dir):08d}"
    assert name in printed
    errors = [line for line in (run_dir / "log.txt").read_text().splitlines() if " ERROR " in line]
    assert any("rank 0" in line and name in line for line in errors), errors


def test_a_full_disk_keeps_what_was_written(tmp_path):
    """A limit on the size of files stands for the disk. Checkpoints and exports appear whole or not at all."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    words = ("device=cpu", *QUICK, "mesh.cp=1", f"run_dir={run_dir}")

    def refused(module, *arguments, kilobytes):
        done = forked(0, module, *arguments, file_bytes=1000 * kilobytes).wait()
        assert done.returncode == 2 and "Traceback" not in done.stderr, done
        assert done.stderr.splitlines()[-1].startswith("error: ")

    train(0, *words, "steps=1")
    refused("train", *words, "steps=3", kilobytes=5_000)
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_00000001"], "no part of one fills the disk"
    train(0, *words, "steps=3")
    assert [r["step"] for r in losses(run_dir)] == [1, 2, 3]
    assert export.main([str(run_dir), str(out)]) == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    refused("models.export", str(run_dir), str(out), "--weights", "ema", kilobytes=1_000)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]
    refused("train", *words, "steps=3", kilobytes=3_000)
    assert sorted(p.name for p in (run_dir / "export").iterdir()) == ["scheduler", "student"]
