"""Steps of whole networks: three Wan 1.3B, and adapters on one Wan 14B. Each run is a separate process.

These functions import nothing slow; the measuring processes do (:mod:`benchmarks.gpu.trained`).
"""

from __future__ import annotations

from functools import partial

from benchmarks.gpu.child import Context, in_two_lanes

TRAINED = "benchmarks.gpu.trained"
ROLES = ("teacher", "student", "fake")
LORA_RANK, TINY_RANK = 64, 4
WITHIN = 0.05
"""Largest relative error of a plan."""
NOT_COMPILED = "left out at test size: the compiler takes longer than all other parts"


def _recomputing(kind: str) -> tuple[str, ...]:
    return tuple(f"{role}.activation_checkpointing={kind}" for role in ("student", "fake"))


COMPILED = ("1_3b", "dmd2", *_recomputing("selective"), *(f"{role}.compile=true" for role in ROLES))
RUNS: dict[str, tuple[str, ...]] = {
    "DMD2": ("1_3b", "dmd2", *_recomputing("selective")),
    "DMD2, none": ("1_3b", "dmd2", *_recomputing("none")),
    "rCM": ("1_3b", "rcm", *_recomputing("full")),
    "DMD2, compiled": COMPILED,
    "DMD2, compiled, cuDNN": (*COMPILED, "attention.backend=cudnn"),
    # In eager mode, separate cast kernels take the time that fp8 products save.
    "DMD2, compiled, fp8": (
        *COMPILED,
        *(f"{role}.{word}" for role in ROLES for word in ("fp8=torchao", "fp8_gather=true")),
    ),
    "DMD2, compiled, Transformer Engine": (*COMPILED, *(f"{role}.fp8=transformer_engine" for role in ROLES)),
    "14B, adapters": ("14b", "dmd2", *_recomputing("full"), "data.num_frames=17"),
}
"""Size, method and settings of each run."""
TEN_BLOCKS = ("1_3b", "dmd2", "layers=10", "data.num_frames=17")


def run(context: Context, name: str) -> None:
    """Measure the steps of one of :data:`RUNS`, and, unless it is compiled, its plan at the same time."""
    words, target = RUNS[name], f"{TRAINED}:steps"
    if "compiled" in name and context.tiny:
        context.row(name, note=NOT_COMPILED)
        return
    if name == "14B, adapters":
        rank = TINY_RANK if context.tiny else LORA_RANK
        words, target = (*words, *(f"{role}.lora.rank={rank}" for role in ("student", "fake"))), f"{TRAINED}:adapters"
    measured = partial(context.isolated, name, target, name, *words)
    if "compiled" in name:
        measured()
        return
    planned = partial(
        context.isolated, plan_name(name), f"{TRAINED}:plan", plan_name(name), *words, CUDA_VISIBLE_DEVICES=""
    )
    in_two_lanes([measured], [planned])  # a plan is made in a process that sees no GPU
    known = {row["what"]: row for row in context.written()}
    plan_row, whole = known.get(plan_name(name), {}), known.get(f"{name}: whole run", {})
    if plan_row.get("planned GiB") and whole.get("peak GiB"):
        context.row(f"{name}: plan against peak", **against_plan(plan_row["planned GiB"], whole["peak GiB"]))


def plan_name(name: str) -> str:
    """Return the name of the row of the plan of ``name``."""
    return f"{name}: its plan, made on the CPU"


def against_plan(planned_gib: float, measured_gib: float) -> dict[str, object]:
    """Return cells that compare a prediction with the measurement."""
    difference = planned_gib / measured_gib - 1
    return {
        "planned GiB": planned_gib,
        "peak GiB": measured_gib,
        "difference": f"{100 * difference:+.1f} %",
        "within 5 %": abs(difference) <= WITHIN,
    }
