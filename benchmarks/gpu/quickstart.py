"""Quickstart on a GPU: losses compared with the CPU, all methods, all ways to save memory, and the command."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.child import ROOT, Context, ended
from benchmarks.gpu.networks import Peak, gib
from benchmarks.gpu.wan import NOT_COMPILED
from benchmarks.steps import open_trainer
from distill.teacher_clips import main as teacher_clips
from fsdp_cp.launch import process_group

STEPS, COMPARED = 20, 10
"""Steps of each run, and steps whose losses are compared. Updates amplify small differences."""
TINY_STEPS = 2
WANTED = 1e-4
TRAINED = ("student", "fake")
OWN = "benchmarks.gpu.quickstart"


def _every(words: Sequence[str], roles: Sequence[str] = TRAINED) -> list[str]:
    return [f"{role}.{word}" for role in roles for word in words]


ALL_ROLES = ("teacher", *TRAINED)
LIKE_THE_CPU: dict[str, list[str]] = {
    "DMD2, fp32": [],
    "self_forcing, fp32": [
        "experiment=quickstart_self_forcing", "student.checkpoint=assets/quickstart_causal_teacher"
    ],
}  # fmt: skip
"""Runs whose losses are compared with those of the CPU."""
RUNS: dict[str, list[str]] = {
    "DMD2, bf16": ["precision=bf16"],
    **{f"{method}, bf16": [f"experiment=quickstart_{method}", "precision=bf16"]
       for method in ("rcm", "scm", "meanflow", "dcm")},
    "DMD2, offload=cpu": _every(["offload=cpu"], ALL_ROLES),
    "DMD2, activations in the host's memory": _every(["activation_offload=true", "activation_checkpointing=full"]),
    "DMD2 with a GAN": ["method.gan_weight_student=0.03"],
    "DMD2, adapters of rank 8, bf16": ["precision=bf16", *_every(["lora.rank=8"])],
    "DMD2, compiled": _every(["compile=true"], ALL_ROLES),  # last: a compiler may use up the remaining time
}  # fmt: skip


def like_the_cpu(context: Context) -> None:
    """Measure the runs whose losses are compared with the CPU's."""
    with tempfile.TemporaryDirectory(prefix="gpu_") as name:
        folder = Path(name)
        # Use a process that sees no GPU, so that its device and process groups are the CPU's.
        expected = {}
        for what, words in LIKE_THE_CPU.items():
            kept, on_cpu = folder / f"{what}.json", f"{what}, on the CPU"
            options = (on_cpu, str(kept), *words)
            context.isolated(on_cpu, f"{OWN}:on_the_cpu", *options, seconds=50, CUDA_VISIBLE_DEVICES="")
            expected[what] = json.loads(kept.read_text()) if kept.is_file() else []
        with process_group(context.device):
            for what, words in LIKE_THE_CPU.items():
                fp32 = partial(_run, context, folder, words, context.device, _steps(context))
                context.attempt(what, lambda what=what, fp32=fp32: _compared(fp32(), expected[what]))


def all_methods(context: Context) -> None:
    """Measure the other runs, and the command itself."""
    with tempfile.TemporaryDirectory(prefix="gpu_") as name, process_group(context.device):
        _all_runs(context, Path(name))


def on_the_cpu(context: Context, name: str, file: str, *words: str) -> None:
    """Write the row of the first steps on the CPU, and their losses to ``file``."""
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="gpu_") as folder, process_group(device):
        lines = _run(context, Path(folder), words, device, COMPARED)
        Path(file).write_text(json.dumps(_losses(lines)))
        context.row(name, **_cells(lines))


def _all_runs(context: Context, folder: Path) -> None:
    """Write the rows of :data:`RUNS` on the device, of ``ode_regression`` and of the command."""
    for what, words in RUNS.items():
        if context.tiny and what.endswith("compiled"):
            context.row(what, note=NOT_COMPILED)
            continue
        run = partial(_run, context, folder, words, context.device, _steps(context))
        context.attempt(what, lambda run=run: _cells(run()), needs=60 if what.endswith("compiled") else 15)
    words = ["experiment=quickstart_ode_regression", "batch_size=8"]
    target, out = f"{OWN}:states", str(folder / "clips")
    made, where = "ode_regression: the teacher's clips", f"run_dir={folder / 'made'}"
    if context.isolated(made, target, made, out, *words, where, seconds=40):
        words += ["data=encoded", f"data.path={out}"]
        run = partial(_run, context, folder, words, context.device, _steps(context))
        context.attempt("ode_regression", lambda: _cells(run()))
    command = "train.py itself, to its report"
    if importlib.util.find_spec("av") is None:
        context.row(command, note="left out: its videos need av, which is not installed")
    else:
        context.attempt(command, lambda: _command(context, folder), needs=30)


def states(context: Context, name: str, out: str, *words: str) -> None:
    """Make the set for ``ode_regression``, like ``python -m distill.teacher_clips``."""
    options = ["--clips", "16", "--steps", "6", "--states", "1.0,0.9,0.75,0.5"]
    if teacher_clips([*words, "mesh.cp=1", f"device={context.device_type}", out, *options]):
        raise RuntimeError("the set was not made")


def _steps(context: Context) -> int:
    return TINY_STEPS if context.tiny else STEPS


def _words(words: Sequence[str], device: str, run_dir: Path) -> list[str]:
    experiment = [] if any(word.startswith("experiment=") for word in words) else ["experiment=quickstart"]
    return [*experiment, *words, "mesh.cp=1", f"device={device}", f"run_dir={run_dir}"]


def _run(
    context: Context, folder: Path, words: Sequence[str], device: torch.device, steps: int
) -> list[dict[str, Any]]:
    """Train the first ``steps``, and return the metrics of each, with its peak memory on a GPU."""
    context.let_go()  # free the previous run's memory, which would count for this run
    steps = min(steps, TINY_STEPS) if context.tiny else steps
    trainer = open_trainer([*_words(words, device.type, folder / "run"), "steps=1000"], device)
    data, peak, lines = trainer._steps_of_data(), Peak(device), []
    for _ in range(steps):
        peak.reset()
        metrics = trainer._train_step(data)
        lines.append(metrics | {"peak": peak.read()})
    return lines


def _losses(lines: Sequence[dict[str, Any]]) -> list[float]:
    """Return each step's loss of the role that trained."""
    return [next(line[f"{role}/loss"] for role in TRAINED if f"{role}/loss" in line) for line in lines]


def _cells(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the cells of a run's steps.

    Raises:
        ArithmeticError: a loss that is not finite.
    """
    losses = _losses(lines)
    for i, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of step {i + 1} is {loss}")
    later = [line["perf/seconds_per_step"] for line in lines][len(lines) // 2 :]
    peaks = [line["peak"] for line in lines if line["peak"] is not None]
    return {
        "steps": len(lines),
        "ms a step": 1e3 * statistics.median(later),
        "first loss": losses[0],
        "last loss": losses[-1],
        "peak GiB": gib(max(peaks)) if peaks else None,
    }


def _compared(lines: Sequence[dict[str, Any]], expected: Sequence[float]) -> dict[str, Any]:
    """Return the cells of a run, compared with the losses of the same run on the CPU, if any."""
    pairs = list(zip(_losses(lines), expected, strict=False))  # the lengths may differ
    if not pairs:
        return _cells(lines)
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    return _cells(lines) | {"difference": difference, "of steps": len(pairs), "within 1e-4": difference <= WANTED}


def _command(context: Context, folder: Path) -> dict[str, Any]:
    """Run the command line, with checkpoints, samples, export and report.

    Raises:
        RuntimeError: the run fails, or a file is missing.
    """
    run_dir, steps = folder / "command", 2 if context.tiny else 60
    words = _words([f"steps={steps}", f"checkpoint.every={max(1, steps // 3)}"], context.device_type, run_dir)
    # The default of 256 clips with 50 steps takes longer than the training.
    words += ["sample.teacher_steps=[1]", "sample.report_clips=2"] if context.tiny else ["sample.report_clips=32"]
    done = subprocess.run(
        [sys.executable, "train.py", *words], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        timeout=max(1.0, context.left() - 5),
    )  # fmt: skip
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise RuntimeError(f"{ended(done.returncode)}: {lines[-1]}")
    for name in ("report.html", "export/student/config.json"):
        if not (run_dir / name).is_file():
            raise RuntimeError(f"there is no {name}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = {key: value for line in lines for key, value in line.items() if value is not None}
    return {
        "steps": lines[-1]["step"],
        "ms a step": 1e3 * statistics.median(line["perf/seconds_per_step"] for line in lines[len(lines) // 2 :]),
        "peak GiB": last["memory/peak_gib"] if context.device_type == "cuda" else None,
        "checkpoint s": last.get("perf/checkpoint_seconds"),
        "MFU": last.get("perf/mfu"),
    }
