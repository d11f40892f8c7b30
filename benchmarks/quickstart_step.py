"""Step time, memory and communication of the quickstart: ``python -m benchmarks.quickstart_step``.

Each row is a run of the quickstart's own trainer (student and fake steps as they come) on local processes of one
thread each. *Collectives* is the share of the step during which at least one collective was in flight on rank 0,
from its start to its end by torch's profiler: waiting for the other ranks counts, and so does what overlaps compute.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import at_least_1
from benchmarks.steps import open_trainer
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.measure.memory import peak_gib
from fsdp_cp.measure.overlap import union

MESHES = ((1, 2), (2, 1), (1, 1))
"""``dp_shard`` and ``cp`` of each row."""


@dataclass(frozen=True)
class Result:
    """Of one rank."""

    seconds: dict[str, float]
    """Median seconds of a step, by role."""
    cycle: float
    """Seconds of one student update and its fake-score updates."""
    peak_gib: float
    import_gib: float
    """Resident before anything was built: Python and its libraries."""
    collectives: dict[str, float]
    """Share of the time with a collective in flight, by kind; ``all`` is their union."""


def run(overrides: list[str], cycles: int) -> Result:
    """``cycles`` rounds of the quickstart on this process group, after one to warm up; the last one is profiled."""
    before = peak_gib(torch.device("cpu"))
    device = torch.device("cpu")
    trainer = open_trainer(["experiment=quickstart", *overrides], device)
    steps = trainer._steps_of_data()
    length = trainer.config.method.fake_updates_per_student_update + 1
    for _ in range(length):
        trainer._train_step(steps)
    seconds: dict[str, list[float]] = {"student": [], "fake": []}
    for _ in range(cycles * length):
        name = trainer.method.trained_role(trainer.step)
        seconds[name].append(trainer._train_step(steps)["perf/seconds_per_step"])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        whole = sum(trainer._train_step(steps)["perf/seconds_per_step"] for _ in range(length))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return Result(
        seconds=medians,
        cycle=medians["student"] + (length - 1) * medians["fake"],
        peak_gib=peak_gib(device),
        import_gib=before,
        collectives=_in_flight(profiler, whole),
    )


def _in_flight(profiler: profile, seconds: float) -> dict[str, float]:
    intervals: dict[str, list[tuple[float, float]]] = {}
    for event in profiler.events():
        if event.name.startswith(("gloo:", "nccl:")):
            span = (event.time_range.start, event.time_range.end)
            intervals.setdefault(event.name.split(":")[1], []).append(span)
            intervals.setdefault("all", []).append(span)
    return {
        kind: sum(end - start for start, end in union(spans)) / 1e6 / seconds
        for kind, spans in sorted(intervals.items())
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart_step", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cycles", type=at_least_1, default=6, help="rounds of one student update and its fake-score updates"
    )
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread a rank, medians of {args.cycles} rounds\n")
    print(
        "| ranks | dp_shard x cp | student step, s | fake step, s | round, s | peak GiB | libraries GiB | collectives |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for dp, cp in MESHES:
            overrides = [f"mesh.dp_shard={dp}", f"mesh.cp={cp}", f"run_dir={Path(folder) / 'run'}", "steps=100000"]
            ranks = run_ranks(dp * cp, run, overrides, args.cycles, timeout=900, preload=("torch",))
            r = ranks[0]
            kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in r.collectives.items() if kind != "all")
            print(
                f"| {dp * cp} | {dp} x {cp} | {r.seconds['student']:.2f} | {r.seconds['fake']:.2f} | {r.cycle:.2f} |"
                f" {max(x.peak_gib for x in ranks):.2f} | {r.import_gib:.2f} | {r.collectives.get('all', 0.0):.0%}"
                + (f" ({kinds})" if kinds else "")
                + " |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
