"""A training run of which one rank stalls or fails: the other says where it waited, and the job ends non-zero."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, command, environment, kill_all

SECONDS = 9
"""``timeout.step``; torchrun itself gives a rank that it ends 30 s."""
SETTINGS = (
    "experiment=quickstart", "device=cpu", "steps=100000", "mesh.cp=2", "batch_size=2", "sample.at_end=false",
    "checkpoint.every=3", "log.every=1", "method.fake_updates_per_student_update=1", f"timeout.step={SECONDS / 60}",
)  # fmt: skip
LINE = re.compile(
    rf"rank 0 (waited {SECONDS} s in vain for another rank|lost another rank.*):"
    r" in step \d+ of 100000, (in|after) phase (data|checkpoint|(student|fake)/\S+);"
    r" last collective: \w+ \d+ of group (mesh_\w+|default_pg); the same command resumes from step_0000\d+"
)


def _worker(rank: int, marker: str) -> int:
    """Its process: torchrun's own has no rank."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, around = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in words and f"RANK={rank}".encode() in around:
            return int(entry.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_one_rank_stalls(tmp_path):
    run_dir = tmp_path / "run"
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            command(2, *SETTINGS, f"run_dir={run_dir}"), cwd=ROOT, env=environment(), stdout=output, stderr=output
        )
    try:
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        waiting, stalled = (_worker(rank, f"run_dir={run_dir}") for rank in (0, 1))
        os.kill(stalled, signal.SIGSTOP)
        started = time.monotonic()
        while Path(f"/proc/{waiting}").exists() and time.monotonic() < started + 120:
            time.sleep(0.1)
        seconds = time.monotonic() - started
        os.kill(stalled, signal.SIGKILL)  # torchrun would, 30 s later
        assert job.wait(timeout=60) != 0
    finally:
        kill_all(f"run_dir={run_dir}")
        job.wait()
    text = (tmp_path / "output").read_text()
    assert SECONDS - 1 < seconds < SECONDS + 45, (seconds, text)
    assert LINE.search(text), text
    logged = (run_dir / "log.txt").read_text().splitlines()
    assert [bool(LINE.search(line)) for line in logged if " ERROR rank 0 " in line] == [True], logged
    newest = sorted((run_dir / "checkpoints").glob("step_*[0-9]"))[-1].name
    assert f"the same command resumes from {newest}" in text


BROKEN = """
import os, sys
from distill.trainer import Trainer
from train import main

update = Trainer._update

def broken(self, *arguments):
    if self.step == 3 and os.environ["RANK"] == "1":
        raise ZeroDivisionError("a bug of rank 1")
    update(self, *arguments)

Trainer._update = broken
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_one_rank_raises(tmp_path):
    """The other does not wait for its timeout: torchrun ends it."""
    (tmp_path / "broken.py").write_text(BROKEN)
    words = [*command(2, *SETTINGS, f"run_dir={tmp_path}/run", "timeout.start=5", "timeout.step=5")]
    words[words.index("train.py")] = str(tmp_path / "broken.py")
    started = time.monotonic()
    done = subprocess.run(
        words, cwd=ROOT, env=environment() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert time.monotonic() - started < 200
    assert done.returncode != 0 and "ZeroDivisionError: a bug of rank 1" in done.stderr, done.stdout + done.stderr
    assert "traceback : " in done.stderr and "rank      : 1 " in done.stderr.partition("Root Cause")[2], done.stderr
