"""A sweep of real torchrun jobs: stopped, resumed, and one point out of memory."""

import csv
import json
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from tests.e2e.launch import ROOT, environment, processes

SHORT = (
    "experiment=quickstart", "device=cpu", "batch_size=2", "method.fake_updates_per_student_update=1", "steps=4",
)  # fmt: skip
LARGER_THAN_ANY_MEMORY = (
    "fake.architecture={num_layers: 1, num_attention_heads: 4096, attention_head_dim: 256, in_channels: 3,"
    " out_channels: 3, text_dim: 32, freq_dim: 64, ffn_dim: 1048576, patch_size: [1, 4, 4], rope_max_seq_len: 64}"
)
"""Fake score of 10^13 parameters."""


@pytest.mark.long
def test_two_lengths_on_two_meshes(tmp_path):
    """SIGTERM ends the sweep within its second point; the same command resumes it."""
    folder, prefix = tmp_path / "sweep", tmp_path / "prefix.sh"
    prefix.write_text(
        '#!/bin/sh\ncase "$*" in *"data.num_frames=8 mesh.cp=1 "*) '
        f'set -- "$@" fake.checkpoint=null "{LARGER_THAN_ANY_MEMORY}";; esac\nexec "$@"\n'
    )
    words = [sys.executable, "-m", "distill.sweep", "--nproc-per-node", "2", "--no-plan", "--prefix", f"sh {prefix}"]
    words += [*SHORT, f"sweep_dir={folder}", "data.num_frames=6,8", "mesh.cp=1,2"]
    place = {"cwd": tmp_path, "env": environment() | {"PYTHONPATH": str(ROOT)}}
    second = folder / "num_frames=6,cp=2"
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **place) as sweep:
        limit = time.monotonic() + 300
        while not (second / "metrics.jsonl").exists():  # it trains
            assert sweep.poll() is None and time.monotonic() < limit, sweep.communicate()
            time.sleep(0.1)
        sweep.send_signal(signal.SIGTERM)
        out, error = sweep.communicate(timeout=100)
    assert sweep.returncode == 75, out + error
    assert processes(str(folder)) == [], "its torchrun and workers are gone"
    assert not list(second.glob("checkpoints/step_*"))
    known = json.loads((folder / "sweep.json").read_text())["rows"][0]
    assert [row["status"] for row in csv.DictReader((folder / "sweep.csv").open())] == ["done", "interrupted", "", ""]

    done = subprocess.run(words, capture_output=True, text=True, timeout=500, **place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "sweep.json").read_text())["rows"][0] == known
    rows = list(csv.DictReader((folder / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["done", "done", "out_of_memory", "done"], rows
    assert rows[2]["reason"] and rows[2]["tokens_per_second"] == ""
    assert [row["tokens"] for row in rows] == ["96", "96", "128", "128"]
    for row in (rows[0], rows[1], rows[3]):
        run = folder / f"num_frames={row['data.num_frames']},cp={row['mesh.cp']}"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
        seconds = sum(line["perf/seconds_per_step"] for line in lines)
        assert float(row["tokens_per_second"]) == pytest.approx(int(row["tokens"]) * 2 * 2 / seconds)
        # Memory since the start holds at least three networks of 1.1e6 weights, and is far below the whole process's.
        assert 0.01 < float(row["allocated_gib"]) < lines[-1]["memory/peak_gib"] - 0.1
        assert not (run / "export").exists() and not (run / "checkpoints").exists() and not (run / "samples").exists()
    assert (second / "previous" / "1" / "metrics.jsonl").exists(), "started from scratch, and nothing removed"
    assert Image.open(folder / "sweep.png").size[0] > 500
