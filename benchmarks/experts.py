"""Distillation of two experts with DMD2, compared with one network: ``python -m benchmarks.experts``.

The teacher has two experts with a boundary at t = .875: two copies of the shipped teacher, each trained further on its
range of times. The recipe ``experiment=quickstart_dmd2`` trains two kinds of students, three seeds each. In the first,
student and fake score have one network, initialized from the shipped teacher. In the second they have two experts, and
train for twice the steps, so that each network gets the same number of samples; each batch has four parts that draw
their experts independently (``expert_draws``).

Each run is one process, with one run per core in parallel. The same command resumes an interrupted benchmark.
``--quick`` is a short test of the whole benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path

import torch

from benchmarks.arguments import add_students
from benchmarks.distillation import (
    CLIPS,
    FULL,
    ROOT,
    STUDENT_STEPS,
    Run,
    all_settings,
    claim,
    measured,
    renders,
    table,
    train_all,
)
from benchmarks.lora import students
from distill.config import compose_config
from distill.data.shape_measures import MEASURES
from fsdp_cp.errors import UserError
from models.files.checkpoint_files import EXPERT_FOLDERS

SHIPPED = ROOT / "assets" / "quickstart_teacher" / "transformer"
BOUNDARY = 0.875
"""Boundary of Wan 2.2's text-to-video model. The recipe's step list has two times on each side."""
STEPS, DRAWS = 5000, 4
"""Steps and ``expert_draws`` of the students with two experts. A sample trains only one expert, so they train for twice
the recipe's steps. With one draw, all samples of a step would have times of one expert."""
EXPERTS, ONE = "an expert on either side", "one network"
TEACHER_STEPS = (*STUDENT_STEPS, FULL)
MOST_WORSE = 3.0
"""Limit, in standard errors, by which students with two experts may be worse than students with one network."""


def start(folder: Path) -> Path:
    """Write the initial experts, two copies of the shipped teacher, in a pipeline's layout. Return ``folder``."""
    index = folder / "model_index.json"
    if not index.exists():
        for name in EXPERT_FOLDERS:
            shutil.copytree(SHIPPED, folder / name, dirs_exist_ok=True)
        index.write_text(json.dumps({"_class_name": "WanPipeline", "boundary_ratio": BOUNDARY}))
    return folder


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Return exit code 0; 1 if two experts are worse; 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=(__doc__ or "").splitlines()[0])
    add_students(parser, "runs/experts", "kind")
    parser.add_argument("--quick", action="store_true", help="one seed, 6 steps")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.out = 1, args.out.with_name(args.out.name + "_quick")
    out = args.out.resolve()
    quick, count = (("steps=6", "batch_size=8"), CLIPS // 8) if args.quick else ((), CLIPS)
    further = ("student.architecture=null", "steps=2000", "optim.student.lr=5e-4", *quick)
    teacher = Run(
        method="flow_matching",
        folder=out / "teacher",
        changes=(f"student.checkpoint={start(out / 'start')}", *further),
    )
    train_all([teacher], 1)
    exported = teacher.folder / "export" / "student"
    one = tuple(f"{role}.checkpoint={SHIPPED}" for role in ("student", "fake"))
    kinds = {
        name: [
            Run(
                method="dmd2",
                folder=out / folder / str(seed),
                changes=(f"teacher.checkpoint={exported}", *more, *quick),
                seed=seed,
            )
            for seed in range(args.seeds)
        ]
        for name, folder, more in ((EXPERTS, "experts", (f"steps={STEPS}", f"expert_draws={DRAWS}")), (ONE, "one", one))
    }
    train_all([run for seed in zip(*kinds.values(), strict=True) for run in seed], args.workers)
    torch.set_num_threads(args.workers)

    # The teacher gets the guidance of the students' targets, and evenly spaced times: the methods' shifts differ.
    config = compose_config(["experiment=quickstart_dmd2", "method.shift=1.0", f"run_dir={out}"])
    claim(out / "measures", all_settings(config))
    steps = TEACHER_STEPS[:1] if args.quick else TEACHER_STEPS
    teachers = [measured(config, "teacher", exported, n, out / "measures" / f"{n}.json", count) for n in steps]
    rows = {name: students(runs, name, count) for name, runs in kinds.items()}
    print(table([renders(config, count), *teachers, *(row for by_seed in rows.values() for row in by_seed.values())]))
    updates = " and ".join(str(sum(updates_of(kinds[EXPERTS][0], expert))) for expert in ("high", "low"))
    print(f"\nUpdates of the student: {kinds[ONE][0].student_updates()}; of its experts {updates}.")
    print(f"\n| steps | measure | {EXPERTS}, less {ONE} | worse by, standard errors |\n|---|---|---|---|")
    worst = -float("inf")
    for n in STUDENT_STEPS:
        for key in MEASURES:
            experts, other = (rows[name][n].measures[key] for name in (EXPERTS, ONE))
            worse = experts.worse_by(other)
            worst = max(worst, float("inf") if math.isnan(worse) else worse)
            print(f"| {n} | {key.replace('_', ' ')} | {experts.value - other.value:+.3f} | {worse:.1f} |")
    good = worst <= MOST_WORSE
    print(f"\nnone worse by more than {MOST_WORSE:g} standard errors: {'yes' if good else '**no**'}")
    return 0 if good or args.quick else 1


def updates_of(run: Run, expert: str) -> list[bool]:
    """Return, for each step of the student, whether this expert trained."""
    return [f"student.{expert}/lr" in line for line in run.metrics() if "student/loss" in line]


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
