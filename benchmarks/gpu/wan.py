"""Steps of whole networks: three Wan 1.3B, and adapters on one Wan 14B; each run in a process of its own.

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


def small(context: Context) -> None:
    """The part of 1.3B: DMD2, rCM, DMD2 with compiled blocks, in fp8 too, a derivative of a plain network; and their
    plans. fp8 is measured compiled alone: casts that are kernels of their own take what its products save."""
    dmd2, rcm = ("1_3b", "dmd2"), ("1_3b", "rcm")
    runs: dict[str, tuple[str, ...]] = {"DMD2": dmd2, "rCM": rcm}
    if context.tiny:
        context.row("DMD2, compiled", note=NOT_COMPILED)
        context.row("DMD2, compiled, fp8", note=NOT_COMPILED)
    else:
        runs["DMD2, compiled"] = (*dmd2, *COMPILED)
        runs["DMD2, compiled, fp8"] = (*dmd2, *COMPILED, *FP8)
    derivative = partial(
        context.isolated, "derivative of a forward", f"{TRAINED}:derivative", "derivative of a forward"
    )
    with_plans(context, f"{TRAINED}:steps", runs, {"DMD2": dmd2, "rCM": rcm}, last=[derivative])


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
