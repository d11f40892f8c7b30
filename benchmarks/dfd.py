"""Data forcing of a student that lost its variety: ``python -m benchmarks.dfd``.

DMD2 with high guidance makes a student whose clips of one caption are alike. Student and fake score are then trained on
for a tenth of its steps with the teacher's usual guidance: by data forcing, by clips as input alone, and by DMD2.
The same command resumes an interrupted benchmark. ``--quick`` is a short test of the whole benchmark.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.arguments import add_students
from benchmarks.distillation import Row, Run, measured_student, over_seeds, renders, table, train_all
from distill.config import compose_config
from fsdp_cp.errors import UserError
from fsdp_cp.launch import end_process
from models import export

COLLAPSED = ("method.guidance_scale=5.0",)
AFTER = {
    "dmd2": ("method.student_input=rollout", "method.data_forcing=0.0"),
    "clips alone": ("method.data_forcing=0.0",),
    "data forcing": (),
}
"""Changed settings of ``quickstart_dfd``, by the name in the table."""
STUDENT_STEPS = (1, 4)
SHOWN = ("spread/position", "spread/phase", "colour_accuracy", "motion_accuracy")


def shown(row: Row) -> Row:
    """Return ``row`` with the measures of the table."""
    return Row(name=row.name, steps=row.steps, measures={key: row.measures[key] for key in SHOWN})


def start(run: Run) -> list[str]:
    """Return the settings with which training goes on from the student and the fake score of ``run``."""
    fake = run.folder / "fake"
    if not fake.exists() and export.main([str(run.folder), str(fake), "--role", "fake"]):
        raise UserError(f"{run.folder} has no fake score; remove the folder and start again")
    return [f"student.checkpoint={run.folder}/export/student", f"fake.checkpoint={fake}", "fake.architecture=null"]


def students(out: Path, seed: int, steps: Sequence[int], workers: int) -> dict[str, Run]:
    """Train the collapsed student of ``seed`` for the first of ``steps``, and from it one of each kind for the last."""
    changes, recipe = (f"steps={steps[0]}", *COLLAPSED), "quickstart"
    lost = Run(method="dmd2", recipe=recipe, folder=out / "lost" / str(seed), seed=seed, changes=changes)
    train_all([lost], 1)
    after = {
        name: Run(
            method="dmd2",
            recipe="quickstart_dfd",
            folder=out / name.replace(" ", "_") / str(seed),
            seed=seed,
            changes=(*start(lost), f"steps={steps[-1]}", *settings),
        )
        for name, settings in AFTER.items()
    }
    train_all([*after.values()], workers)
    return {"dmd2, guidance 5": lost} | {f"then {name}": run for name, run in after.items()}


def main(argv: list[str] | None = None) -> int:
    """Train, measure and print the table. Return exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dfd", description=__doc__.splitlines()[0])
    add_students(parser, "runs/dfd", "kind")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps and clips, to test the benchmark")
    args = parser.parse_args(argv)
    seeds, steps, count, out = args.seeds, (750, 75), 256, args.out.absolute()
    if args.quick:
        seeds, steps, count, out = 1, (10, 5), 16, out.with_name(out.name + "_quick")
    trained = [students(out, seed, steps, args.workers) for seed in range(seeds)]
    torch.set_num_threads(args.workers)
    rows = [renders(compose_config(["experiment=quickstart"]), count)]
    for name in trained[0]:
        for n in STUDENT_STEPS:
            rows.append(over_seeds([measured_student(runs[name], n, count) for runs in trained], name))
    print(table([*map(shown, rows)]))
    return 0


if __name__ == "__main__":
    try:
        end_process(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
