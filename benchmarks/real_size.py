"""Adapters at a real size on a machine without a GPU: ``python -m benchmarks.real_size``.

Wan 2.1 1.3B with random weights (all that is small are the encoders), teacher, student and fake score on one base, 17
frames of 256 x 256 on two ranks that share each sample's tokens: a few steps of DMD2, killed after a checkpoint and
gone on with; one step of rCM with its derivative in forward mode; exports in every format. Seconds and the peak of a
process's resident memory are the run's own; exit code 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.arguments import at_least_1
from benchmarks.faults import Start, end_all, new_folder, newest
from benchmarks.load_memory import TINY, WAN_1_3B
from fsdp_cp.errors import UserError
from models.export import main as export
from tests.tiny_pipeline import build_tiny_pipeline, render_clips

ROLES = ("teacher", "student", "fake")
STEPS, KILLED = 4, 2
PATIENCE = 3600.0
"""Seconds for a start."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    what: str
    seconds: float
    peak_gib: float | None
    found: str


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 if something was lost; 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_size", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder for what the runs write")
    parser.add_argument("--rank", type=at_least_1, default=64, help="of the adapters")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of the base")
    parser.add_argument("--tiny", action="store_true", help="one small block instead: does the program work?")
    args = parser.parse_args(argv)
    try:
        folder = new_folder(args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    architecture = TINY if args.tiny else WAN_1_3B
    rank = min(args.rank, 4) if args.tiny else args.rank
    words = settings(folder, architecture, rank, args.precision, tiny=args.tiny)
    rows, problems = measure(folder, words, rank, layers=architecture["num_layers"])
    print(f"torch {torch.__version__}, gloo, {platform.machine()}, {os.cpu_count()} cores, 2 ranks of one thread,"
          f" base in {args.precision}, rank {rank}\n")  # fmt: skip
    print("| | seconds | peak of a rank, GiB | |\n|---|---|---|---|")
    for row in rows:
        peak = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        print(f"| {row.what} | {row.seconds:.2f} | {peak} | {row.found} |")
    for problem in problems:
        print(f"not as it must be: {problem}", file=sys.stderr)
    return 1 if problems else 0


def settings(folder: Path, architecture: dict[str, Any], rank: int, precision: str, *, tiny: bool) -> list[str]:
    """What both runs are told; writes clips and encoders."""
    size = 32 if tiny else 256
    build_tiny_pipeline(folder / "encoders", text_width=architecture["text_dim"])
    render_clips(folder / "clips", 2, frames=40, height=size, width=size)
    network = "{" + ", ".join(f"{key}: {str(value).lower()}" for key, value in architecture.items()) + "}"
    return [
        "data=video_folder",
        f"data.path={folder / 'clips'}",
        f"data.encoders={folder / 'encoders'}",
        "data.num_frames=17",
        f"data.height={size}",
        f"data.width={size}",
        "device=cpu",
        f"precision={precision}",
        "mesh.cp=2",
        *(["mesh.ring=2", "mesh.ulysses=1"] if architecture["num_attention_heads"] % 2 else []),
        "batch_size=1",
        *(f"{role}.checkpoint=null" for role in ROLES),
        *(f"{role}.architecture={network}" for role in ROLES),
        *(f"{role}.lora.rank={rank}" for role in ROLES[1:]),
        *(f"{role}.activation_checkpointing=full" for role in ROLES[1:]),
        *(f"{role}.compile=false" for role in ROLES),  # inductor's minutes are not what is measured
        "log.every=1",
        "sample.every=0",
        "sample.at_end=false",
        "sample.student_steps=[2]",
        "export.at_end=false",
        "checkpoint.every=1",
    ]


def measure(folder: Path, words: list[str], rank: int, layers: int) -> tuple[list[Row], list[str]]:
    """All parts, one after another; the rows, and what is not as it must be."""
    rows, problems = [], []
    log, run_dir = folder / "log.txt", folder / "dmd2"
    dmd2 = [
        "experiment=wan2_1_t2v_1_3b_dmd2", *words, f"steps={STEPS}", "method.step_list=[1.0,0.5]",
        "method.fake_updates_per_student_update=1",
    ]  # fmt: skip
    with Start(run_dir, dmd2, log=log) as first:
        first.until(lambda: newest(run_dir) >= KILLED, PATIENCE)
        end_all(run_dir)
        first.process.wait()
        rows.append(Row(f"DMD2, start to the kill after the checkpoint of step {KILLED}", first.age(), None, ""))
    with Start(run_dir, dmd2, log=log) as second:
        code = second.process.wait()
        began = second.from_step()
        rows.append(Row("the same command again, to its end", second.age(), None, f"went on from step {began}"))
    if code != 0 or began is None or began < KILLED:
        problems.append(f"the killed run ended with exit code {code}, gone on with from step {began}; {log} says more")
        return rows, problems
    steps = _steps(run_dir)
    if [line["step"] for line in steps] != list(range(1, STEPS + 1)):
        problems.append(f"metrics.jsonl has the steps {[line['step'] for line in steps]}")
    for line in steps:
        role = "student" if "student/loss" in line else "fake"
        found = f"loss {line[f'{role}/loss']:.4f}, gradient norm {line[f'{role}/grad_norm']:.3g}"
        step = f"DMD2, step {line['step']}: {role}"
        rows.append(Row(step, line["perf/seconds_per_step"], line["memory/peak_gib"], found))
    rcm = ["experiment=wan2_1_t2v_1_3b_rcm", *words, "steps=2", "method.consistency_steps=0", "method.student_every=2"]
    with Start(folder / "rcm", rcm, log=log) as start:
        code = start.process.wait()
    if code != 0:
        problems.append(f"rCM ended with exit code {code}; {log} says more")
    for line in _steps(folder / "rcm"):
        role = "student, with a derivative in forward mode" if "student/loss" in line else "fake"
        losses = f"loss {line['student/loss' if 'student/loss' in line else 'fake/loss']:.4f}"
        step = f"rCM, step {line['step']}: {role}"
        rows.append(Row(step, line["perf/seconds_per_step"], line["memory/peak_gib"], losses))
    for kind in ("diffusers-lora", "wan-lora", "merged"):
        out, began_at = folder / kind, time.perf_counter()
        code = export([str(run_dir), str(out), "--format", kind, "--dtype", "bf16"])
        seconds = time.perf_counter() - began_at
        size = sum(file.stat().st_size for file in out.glob("*.safetensors")) if code == 0 else 0
        rows.append(Row(f"export --format {kind}", seconds, None, f"{size / 1e6:,.1f} MB"))
        if code != 0:
            problems.append(f"--format {kind} ended with exit code {code}")
    saved = run_dir / "checkpoints" / f"step_{STEPS:08d}"
    checkpoint = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    rows.append(Row("a checkpoint: adapters, Adam, average", _last(steps, "perf/checkpoint_seconds"), None,
                    f"{checkpoint / 1e6:,.1f} MB"))  # fmt: skip
    if not problems:
        problems += _wrong_adapters(folder / "diffusers-lora", rank, 10 * layers)
    return rows, problems


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``."""
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _last(steps: list[dict[str, Any]], key: str) -> float:
    return next((line[key] for line in reversed(steps) if line.get(key) is not None), float("nan"))


def _wrong_adapters(folder: Path, rank: int, layers: int) -> list[str]:
    """Are A and B of every layer there, of the rank, finite, and have they moved?"""
    problems = []
    with safe_open(folder / "pytorch_lora_weights.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if len(tensors) != 2 * layers:
        problems.append(f"{len(tensors)} tensors of adapters, not {2 * layers}")
    for name, tensor in tensors.items():
        of_rank = tensor.shape[0 if "lora_A" in name else 1]
        finite, moved = bool(tensor.isfinite().all()), "lora_A" in name or bool(tensor.any())
        if of_rank != rank or not finite or not moved:
            problems.append(f"{name}: rank {of_rank}, finite {finite}, moved {moved}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
