"""Steps of whole networks: three Wan 1.3B, and adapters on one Wan 14B; each run in a process of its own.

Runs are spread over several parts, so that a short lease of a GPU finishes some of them.

These functions import nothing that takes long: the processes do that measure (:mod:`benchmarks.gpu.trained`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.child import Context, in_two_lanes

TRAINED = "benchmarks.gpu.trained"
FP8 = tuple(f"{role}.{word}" for role in ("teacher", "student", "fake") for word in ("fp8=torchao", "fp8_gather=true"))
COMPILED = ("teacher.compile=true", "student.compile=true", "fake.compile=true")
NOT_COMPILED = "left out at test size: the compiler takes longer than all other parts"
SHARE = 0.6
LORA_RANK, TINY_RANK = 64, 4
WITHIN = 0.05
"""Of what is measured a plan may differ by so much."""


DMD2, RCM = ("1_3b", "dmd2"), ("1_3b", "rcm")


def small(context: Context) -> None:
    """Measure DMD2 and rCM of 1.3B with full recomputation, and a derivative of a plain network; with their plans."""
    runs = {"DMD2": DMD2, "rCM": RCM}
    name = "derivative of a forward"
    derivative = partial(context.isolated, name, f"{TRAINED}:derivative", name)
    with_plans(context, f"{TRAINED}:steps", runs, runs, last=[derivative])


def recomputed(context: Context) -> None:
    """Measure DMD2 of 1.3B with selective recomputation and with none; with their plans."""
    runs = {
        f"DMD2, {kind}": (*DMD2, *(f"{role}.activation_checkpointing={kind}" for role in ("student", "fake")))
        for kind in ("selective", "none")
    }
    with_plans(context, f"{TRAINED}:steps", runs, runs)


def compiled(context: Context) -> None:
    """Measure DMD2 of 1.3B with compiled blocks, in bf16 and in fp8.

    fp8 is measured compiled alone: casts that are kernels of their own take the time that its products save.
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
    """The part of 14B: adapters of all roles on one base, and the plan."""
    rank = TINY_RANK if context.tiny else LORA_RANK
    run = {
        f"DMD2, adapters of rank {rank}": (
            "14b", "dmd2", *(f"{role}.lora.rank={rank}" for role in ("student", "fake"))
        )
    }  # fmt: skip
    with_plans(context, f"{TRAINED}:adapters", run, run)


def with_plans(
    context: Context,
    target: str,
    runs: Mapping[str, Sequence[str]],
    plans: Mapping[str, Sequence[str]],
    last: Sequence[Any] = (),
) -> None:
    """``target`` for each of ``runs``, then ``last``; beside them the ``plans``; and rows that compare them.

    A plan is made where no GPU is seen, as a run plans itself.
    """

    def run(name: str, words: Sequence[str], after: int) -> None:
        # A share of what is left: one that takes too long must not take the time of all behind it.
        context.isolated(name, target, name, *words, seconds=context.left() * (SHARE if after else 1.0))

    def plan(name: str, words: Sequence[str]) -> None:
        said = plan_name(name)
        context.isolated(said, f"{TRAINED}:plan", said, *words, CUDA_VISIBLE_DEVICES="")

    count = len(runs) + len(last)
    lane = [partial(run, name, words, count - 1 - i) for i, (name, words) in enumerate(runs.items())]
    in_two_lanes([*lane, *last], [partial(plan, name, words) for name, words in plans.items()])
    known = {row["what"]: row for row in context.written()}
    for name in plans:
        said, measured = known.get(plan_name(name), {}), known.get(f"{name}: whole run", {})
        if said.get("planned GiB") and measured.get("peak GiB"):
            context.row(f"{name}: plan against peak", **against_plan(said["planned GiB"], measured["peak GiB"]))


def plan_name(name: str) -> str:
    """Of the row of the plan of ``name``."""
    return f"{name}: its plan, made on the CPU"


def against_plan(planned_gib: float, measured_gib: float) -> dict[str, object]:
    """Cells of a prediction beside what was measured."""
    difference = planned_gib / measured_gib - 1
    return {
        "planned GiB": planned_gib,
        "peak GiB": measured_gib,
        "difference": f"{100 * difference:+.1f} %",
        "within 5 %": abs(difference) <= WITHIN,
    }
