"""GPU memory of communicators and of the allocator, and the peak of every phase with its prediction."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.child import Context, in_two_lanes
from benchmarks.gpu.wan import TEN_BLOCKS, TRAINED, against_plan, plan_name

HELD = "benchmarks.gpu.held"
PHASES = "ten blocks of 1.3B"
EXPANDABLE = "expandable_segments:True"


def memory(context: Context) -> None:
    """Measure communicators and checkpoint copies, then the same steps with two allocators, and write their plan."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
    gpu = [
        partial(context.isolated, "communicators", f"{HELD}:communicators", seconds=30),
        partial(context.isolated, "checkpoint copies", f"{HELD}:copies", seconds=30),
        partial(context.isolated, PHASES, f"{HELD}:phases", PHASES, *TEN_BLOCKS, seconds=60),
    ]
    if context.device_type == "cuda":
        name = f"{PHASES}, {EXPANDABLE}"
        gpu.append(partial(context.isolated, name, f"{HELD}:phases", name, *TEN_BLOCKS, seconds=60, **settings))
    else:
        context.row(f"{PHASES}, {EXPANDABLE}", note="left out on the CPU, whose allocator has no such setting")
    planned = plan_name(PHASES)
    plan = partial(
        context.isolated, planned, f"{TRAINED}:plan_of_phases", planned, *TEN_BLOCKS, CUDA_VISIBLE_DEVICES=""
    )
    in_two_lanes(gpu, [plan])
    rows = context.written()
    plans = {row["phase"]: row["planned GiB"] for row in rows if row["what"] == planned and "phase" in row}
    peaks = {row["phase"]: row["peak GiB"] for row in rows if row["what"] == PHASES and "phase" in row}
    for phase in plans:
        if peaks.get(phase):
            context.row(f"{PHASES}: plan against peak", phase=phase, **against_plan(plans[phase], peaks[phase]))
