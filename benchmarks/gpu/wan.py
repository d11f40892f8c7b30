"""Steps of whole networks: three Wan 1.3B, and adapters on one Wan 14B. Each run is a separate process.

The runs are spread over several parts, so that a short time on a GPU finishes some of them. These functions import
nothing slow; the measuring processes do (:mod:`benchmarks.gpu.trained`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.gpu.child import Context, in_two_lanes

TRAINED = "benchmarks.gpu.trained"
FP8 = tuple(f"{role}.{word}" for role in ("teacher", "student", "fake") for word in ("fp8=torchao", "fp8_gather=true"))
COMPILED = ("teacher.compile=true", "student.compile=true", "fake.compile=true")
NOT_COMPILED = "left out at test size: the compiler takes longer than all other parts"
SHARE = 0.6
LORA_RANK, TINY_RANK = 64, 4
WITHIN = 0.05
"""Largest relative error of a plan."""


DMD2, RCM = ("1_3b", "dmd2"), ("1_3b", "rcm")


def _recomputing(kind: str) -> tuple[str, ...]:
    return tuple(f"{role}.activation_checkpointing={kind}" for role in ("student", "fake"))


def small(context: Context) -> None:
    """Measure DMD2 and rCM of 1.3B with full recomputation; with their plans."""
    runs = {"DMD2": (*DMD2, *_recomputing("full")), "rCM": (*RCM, *_recomputing("full"))}
    with_plans(context, f"{TRAINED}:steps", runs, runs)


def recomputed(context: Context) -> None:
    """Measure DMD2 of 1.3B with selective recomputation and with none; with their plans."""
    runs = {f"DMD2, {kind}": (*DMD2, *_recomputing(kind)) for kind in ("selective", "none")}
    with_plans(context, f"{TRAINED}:steps", runs, runs)


def compiled(context: Context) -> None:
    """Measure DMD2 of 1.3B with compiled blocks, in bf16 and in fp8.

    fp8 is only measured compiled: in eager mode, separate cast kernels take the time that fp8 products save.
    """
    runs: dict[str, tuple[str, ...]] = {
        "DMD2, compiled": (*DMD2, *COMPILED), "DMD2, compiled, fp8": (*DMD2, *COMPILED, *FP8)
    }  # fmt: skip
    if context.tiny:
        for name in runs:
            context.row(name, note=NOT_COMPILED)
        return
    with_plans(context, f"{TRAINED}:steps", runs, {})


def large(context: Context) -> None:
    """Measure 14B with adapters of student and fake score on one base, with its plan."""
    rank = TINY_RANK if context.tiny else LORA_RANK
    run = {
        f"DMD2, adapters of rank {rank}": (
            "14b", "dmd2", *_recomputing("full"), *(f"{role}.lora.rank={rank}" for role in ("student", "fake"))
        )
    }  # fmt: skip
    with_plans(context, f"{TRAINED}:adapters", run, run)


def with_plans(
    context: Context,
    target: str,
    runs: Mapping[str, Sequence[str]],
    plans: Mapping[str, Sequence[str]],
) -> None:
    """Call ``target`` for each of ``runs``; make ``plans`` in parallel; write rows that compare them.

    The plans are made in processes that see no GPU.
    """

    def run(name: str, words: Sequence[str], after: int) -> None:
        # Give it a share of the remaining time, so that a slow run leaves time for the later ones.
        context.isolated(name, target, name, *words, seconds=context.left() * (SHARE if after else 1.0))

    def plan(name: str, words: Sequence[str]) -> None:
        plan_row = plan_name(name)
        context.isolated(plan_row, f"{TRAINED}:plan", plan_row, *words, CUDA_VISIBLE_DEVICES="")

    lane = [partial(run, name, words, len(runs) - 1 - i) for i, (name, words) in enumerate(runs.items())]
    in_two_lanes(lane, [partial(plan, name, words) for name, words in plans.items()])
    known = {row["what"]: row for row in context.written()}
    for name in plans:
        plan_row, measured = known.get(plan_name(name), {}), known.get(f"{name}: whole run", {})
        if plan_row.get("planned GiB") and measured.get("peak GiB"):
            context.row(f"{name}: plan against peak", **against_plan(plan_row["planned GiB"], measured["peak GiB"]))


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
