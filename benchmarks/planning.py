"""Comparison of the planner with measurements: ``python -m benchmarks.planning``.

Compares the prediction of ``plan=true`` for a run with the same steps on real tensors over gloo: peak memory of a step
and of each phase, operations, and bytes sent. Both count storages through torch's dispatcher. ``benchmarks.gpu``
compares plans with CUDA's allocator.

A run that the planner refuses is a row with the refusal. The exit code is 1 if a bound is broken.

``--minimax-h3`` plans that model's adapters over ``mesh.cp`` instead and draws ``results/minimax_h3.png``. A plan takes
a minute or two; ``results/minimax_h3.json`` keeps those that were made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from distill.config import compose_config
from distill.planning.command import FILE, plan_command, plan_without_gpus
from distill.planning.prediction import FRAGMENTATION, GIB, load_hardware
from distill.planning.prediction import predict as predict_from
from distill.planning.simulation import Simulation, run_steps
from fsdp_cp.errors import UserError
from tests.pools import run_ranks

BASE = ("experiment=quickstart", "data.num_clips=64", "batch_size=8", "plan=true")
METHODS = {"dmd2": (), "rcm": ("experiment=quickstart_rcm",)}
ROLES = ("teacher", "student", "fake")
SIZES: dict[str, dict[str, Any]] = {
    "one block": {"num_layers": 1, "num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 2048},
    "tiny": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 48},
    "small": {"num_layers": 8, "num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024},
    "1B": {"num_layers": 7, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960},
}
"""Blocks of each of the three networks. The last size has seven blocks of Wan 1.3B, .33e9 parameters per network."""
ENDS = {"freq_dim": 32, "text_dim": 32, "in_channels": 3, "out_channels": 3, "patch_size": [1, 4, 4]}
ONE_LENGTH = ("method.step_list=[1.0]", "sample.student_steps=[1]", "batch_size=4")
"""Settings for rollouts of one step: all steps of a role are then equal, and take seconds with large networks."""


@dataclass(frozen=True)
class Case:
    """Run to plan and to measure."""

    size: str
    world: int
    label: str
    words: tuple[str, ...] = ()
    method: str = "dmd2"


CASES = (
    Case("tiny", 1, "optim_grads_params"),
    Case("tiny", 1, "checkpointing full, selective; two micro-batches of two samples",
         ("micro_batch_size=2", "student.activation_checkpointing=full",
          "fake.activation_checkpointing=selective")),
    Case("tiny", 1, "offload=cpu", ("student.offload=cpu", "fake.offload=cpu")),
    Case("tiny", 1, "checkpointing full, activation_offload",
         ("student.activation_offload=true", "student.activation_checkpointing=full")),
    Case("tiny", 1, "optim_grads_params", method="rcm"),
    Case("tiny", 2, "cp=2 as a ring, bf16", ("mesh.cp=2", "mesh.ring=2", "precision=bf16")),
    Case("tiny", 2, "optim, optim_grads", ("student.strategy=optim", "fake.strategy=optim_grads")),
    Case("tiny", 2, "cp=2", ("mesh.cp=2",), method="rcm"),
    Case("tiny", 4, "dp 2 x cp 2, student no_shard", ("mesh.cp=2", "student.strategy=no_shard")),
    Case("tiny", 4, "two replicas", ("mesh.dp_replicate=2",)),
    Case("small", 1, "checkpointing full",
         ("student.activation_checkpointing=full", "fake.activation_checkpointing=full")),
    Case("small", 2, "keep_gathered", ("student.keep_gathered=true",)),
    Case("small", 4, "dp 2 x cp 2, bf16", ("mesh.cp=2", "precision=bf16")),
    Case("small", 4, "gather_stream=compute, one gradient buffer",
         ("student.gather_stream=compute", "fake.gather_stream=compute", "student.gradient_buffers=1")),
    Case("1B", 1, "checkpointing full", ("student.activation_checkpointing=full", *ONE_LENGTH)),
    Case("1B", 2, "cp=2, bf16", ("mesh.cp=2", "precision=bf16", *ONE_LENGTH)),
    Case("1B", 4, "bf16", ("precision=bf16", *ONE_LENGTH)),
)  # fmt: skip
BOUNDS = {1: (0.001, 0.001), 2: (0.03, 0.15), 4: (0.03, 0.15)}
"""Bounds on the errors of the step's peak and of a phase's peak, by number of ranks. gloo's threads free buffers a
little late."""


def words_of(case: Case) -> list[str]:
    """Return the settings of ``case``. Later settings win."""
    architecture = "{" + ", ".join(f"{key}: {value}" for key, value in {**SIZES[case.size], **ENDS}.items()) + "}"
    base = [*BASE, *METHODS[case.method]]
    if METHODS[case.method]:
        base = [word for word in base if word != BASE[0]]
    networks = [word for role in ROLES for word in (f"{role}.checkpoint=null", f"{role}.architecture={architecture}")]
    cp = [] if any(word.startswith("mesh.cp=") for word in case.words) else ["mesh.cp=1"]
    changed = {word.partition("=")[0] for word in case.words}
    base = [word for word in base if word.partition("=")[0] not in changed]
    return [*base, *networks, *cp, *case.words, f"world={case.world}"]


def predict(case: Case) -> dict[str, Any]:
    """Return ``plan.json`` of the run.

    Raises:
        UserError: the planner's refusal.
    """
    return planned(words_of(case))


def planned(settings: Sequence[str]) -> dict[str, Any]:
    """Return ``plan.json`` of the run of these settings, which must include ``plan=true`` and ``world``.

    Call it without a process group.

    Raises:
        UserError: the planner's refusal.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [*settings, f"run_dir={folder}"]
        plan_command(compose_config(words), ["train.py", *words])
        return json.loads((Path(folder) / FILE).read_text())


@dataclass(frozen=True)
class Measured:
    """Measurements of the steps on this rank."""

    simulation: Simulation
    flops_per_step: float
    """Operations of all ranks, averaged over the run's steps, as in ``plan.json``."""


def measure(case: Case, tensors: AbstractContextManager | None = None) -> Measured:
    """Run the same steps on real tensors, in the current process group."""
    config, plan = plan_without_gpus(compose_config(words_of(case)))
    made = run_steps(config, plan, tensors or nullcontext(), every_micro_batch=True)
    return Measured(made, predict_from(config, plan, made, None).flops_per_step)


def parameters_of(case: Case) -> int:
    """Return the number of parameters of all networks."""
    _, plan = plan_without_gpus(compose_config(words_of(case)))
    return sum(weight.numel() for role in plan.roles for weight in role.network.parameters())


@dataclass(frozen=True)
class Compared:
    """Relative errors of a prediction."""

    predicted: float
    """Predicted peak of a step, in bytes."""
    measured: float
    peak: float
    """Error of the peak of a step."""
    phase: float
    """Error of the phase with the largest error."""
    phase_name: str
    counts: bool
    """Whether operations and bytes sent are equal."""

    def kept(self, world: int) -> bool:
        """Return whether the bounds for ``world`` ranks hold."""
        return self.counts and abs(self.peak) <= BOUNDS[world][0] and abs(self.phase) <= BOUNDS[world][1]


def compare(plan: dict[str, Any], result: Measured) -> Compared:
    """Compare ``plan.json`` with the measured steps.

    Raises:
        RuntimeError: the phases differ.
    """
    measured = result.simulation
    predicted = {
        # Leave out the workspace, which a formula predicts for a GPU kernel.
        name: GIB * (phase["gib"] - sum(size for key, size in phase["of"].items() if key.endswith(".workspace")))
        for name, phase in plan["phases"].items()
    }
    if predicted.keys() != measured.peaks.keys():
        raise RuntimeError(f"phases {sorted(predicted)} were planned, and {sorted(measured.peaks)} were met")
    errors = {name: predicted[name] / peak.bytes - 1 for name, peak in measured.peaks.items()}
    worst = max(errors, key=lambda name: abs(errors[name]))
    peak = max(predicted.values())
    sent = {
        name: {f"{kind}, {group}": size for (kind, group), size in cost.sent.items()}
        for name, cost in measured.steps.items()
    }
    return Compared(
        predicted=peak,
        measured=measured.peak.bytes,
        peak=peak / measured.peak.bytes - 1,
        phase=errors[worst],
        phase_name=worst or "between phases",
        counts=sent == plan["bytes_sent_per_step"] and math.isclose(result.flops_per_step, plan["flops_per_step"]),
    )


# --- the report ---


def _percent(error: float) -> str:
    return f"{100 * error:+.2f} %"


def report(cases: Sequence[Case]) -> bool:
    """Print a row for each case, and return whether all bounds hold."""
    print("| parameters | method | ranks | | planned, MiB | measured, MiB | peak | worst phase | flops, bytes sent |")
    print("|---|---|---|---|---|---|---|---|---|")
    good = True
    for case in cases:
        start = f"| {parameters_of(case) / 1e6:,.1f} M | {case.method} | {case.world} | {case.label} |"
        try:
            plan = predict(case)
        except UserError as refusal:
            print(f"{start} refused: {refusal} | | | | |", flush=True)
            continue
        ranks = run_ranks(case.world, measure, case, timeout=1800, preload=("torch", "distill.planning.command"))
        compared = compare(plan, ranks[0])  # the planner predicts rank 0
        kept = compared.kept(case.world)
        good &= kept
        print(
            f"{start} {compared.predicted / 2**20:,.2f} | {compared.measured / 2**20:,.2f} |"
            f" {_percent(compared.peak)} | {_percent(compared.phase)} ({compared.phase_name}) |"
            f" {'equal' if compared.counts else 'DIFFERENT'}"
            f"{'' if kept else ' BROKEN'} |",
            flush=True,
        )
    return good


# --- MiniMax-H3 over cp ---

RESULTS = Path(__file__).parent / "results"
SPLITS = {124: (1, 2, 4, 8), 243: (2, 4, 8), 345: (2, 4, 8)}
"""Frames, and the values of cp that were planned; with cp=2, 345 frames need H200."""
KEYFRAMES = ((124, 8), (345, 8))
"""Frames and cp that were planned with two keyframes too, for the text of docs/models.md."""


def plan_minimax_h3(file: Path) -> dict[str, dict[str, float]]:
    """Return memory in training (GiB) and seconds a step on 8 H20, by frames and cp; plan what ``file`` has not."""
    plans = json.loads(file.read_text()) if file.exists() else {}
    clips = [(f"{frames} frames, cp={cp}", frames, cp, "null") for frames, ranks in SPLITS.items() for cp in ranks]
    clips += [(f"{frames} frames, cp={cp}, two keyframes", frames, cp, "both") for frames, cp in KEYFRAMES]
    for name, frames, cp, image in clips:
        if name not in plans:
            sizes = [f"data.num_frames={frames}", f"mesh.cp={cp}", f"batch_size={8 // cp}", "planning.hardware=h20"]
            sizes.append(f"data.image={image}")
            plan = planned(["experiment=minimax_h3_t2av_dmd2", "plan=true", "world=8", *sizes])
            added = sum(plan["device_gib_of"][part] for part in ("cuda_context", "nccl"))
            device = (1 + FRAGMENTATION) * plan["allocated_gib"] + added
            plans[name] = {"device_gib": round(device, 2), "seconds_per_step": round(plan["seconds_per_step"], 1)}
            file.write_text(json.dumps(plans, indent=1) + "\n")
    return plans


def draw_minimax_h3(file: Path, plans: Mapping[str, Mapping[str, float]]) -> None:
    """Draw memory and seconds against cp, a line for each length."""
    figure, (memory, time) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, key, label in (
        (memory, "device_gib", "GiB a GPU in training"),
        (time, "seconds_per_step", "seconds a step of 8 / cp clips, 8 H20"),
    ):
        for frames, ranks in SPLITS.items():
            axes.plot(ranks, [plans[f"{frames} frames, cp={cp}"][key] for cp in ranks], "o-", label=f"{frames} frames")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SPLITS[124], map(str, SPLITS[124]))
        axes.set_xlabel("cp: GPUs that share a clip, of 8")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    for name in ("h100", "h20", "h200"):
        limit = load_hardware(name).memory_gib
        memory.axhline(limit, color="0.4", linewidth=0.8, linestyle="--")
        memory.annotate(name.upper(), (8, limit), ha="right", va="bottom", fontsize="small", color="0.4")
    memory.set_ylim(0)
    time.set_yscale("log")
    time.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="networks of one block, two runs")
    parser.add_argument("--minimax-h3", action="store_true", help="plan MiniMax-H3 over cp, and draw it, instead")
    args = parser.parse_args(argv)
    if args.minimax_h3:
        draw_minimax_h3(RESULTS / "minimax_h3.png", plan_minimax_h3(RESULTS / "minimax_h3.json"))
        return 0
    print(f"torch {torch.__version__}, gloo, {platform.machine()}, {os.cpu_count()} cores, one thread a rank\n")
    cases: tuple[Case, ...] = CASES
    if args.quick:
        cases = (
            Case("one block", 2, "cp=2, bf16", ("mesh.cp=2", "precision=bf16", *ONE_LENGTH)),
            Case("one block", 1, "offload=cpu", ("student.offload=cpu", *ONE_LENGTH)),
        )
    return 0 if report(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
