"""Adapters compared with whole networks: ``python -m benchmarks.lora`` distills the quickstart's teacher with both.

Trains students of ``experiment=quickstart`` (DMD2) whose student and fake score are adapters on the teacher, with
several adapter ranks, and students with whole networks, for the same steps and seeds. Each run is one process, with one
run per core in parallel. The same command resumes an interrupted benchmark. ``--quick`` is a short test of the whole
benchmark.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence

import torch

from benchmarks.arguments import add_students, at_least_1
from benchmarks.distillation import (
    CLIPS,
    COUNTS_FROM,
    FULL,
    ROOT,
    STUDENT_STEPS,
    Row,
    Run,
    all_settings,
    claim,
    clip_flops,
    closed,
    in_words,
    measured,
    measured_student,
    over_seeds,
    renders,
    table,
    train_all,
)
from distill.config import compose_config, load_config
from distill.data.shape_measures import MEASURES
from fsdp_cp.errors import UserError
from models.roles.role_plan import plan_role

RECIPE = "quickstart"
WHOLE = "whole networks"
TEACHER_STEPS = (*STUDENT_STEPS, FULL)


def runs_of(rank: int | None, args: argparse.Namespace) -> list[Run]:
    """Return the runs of one table line, one per seed.

    Args:
        rank: rank of the adapters of student and fake score; ``None`` for whole networks.
        args: the command line.
    """
    changes: tuple[str, ...] = ()
    name = "whole"
    if rank is not None:
        name = f"rank_{rank}"
        changes = ("adapters=lora", *(f"{role}.lora.rank={rank}" for role in ("student", "fake")))
        changes += tuple(f"optim.{role}.lr_scale={{*.lora_*: {args.rate}}}" for role in ("student", "fake"))
    if args.quick:
        changes += ("steps=10", "batch_size=8")
    return [
        Run(method="dmd2", recipe=RECIPE, folder=args.out / name / str(seed), changes=changes, seed=seed)
        for seed in range(args.seeds)
    ]


def students(runs: Sequence[Run], name: str, count: int) -> dict[int, Row]:
    """Return the measures over the seeds, by number of sampling steps."""
    return {n: over_seeds([measured_student(run, n, count) for run in runs], name) for n in STUDENT_STEPS}


def distances(teachers: dict[int, Row], whole: dict[int, Row], adapters: dict[int, Row], name: str) -> list[str]:
    """Return lines of the second table: the measures that count, the shares that both recover, and the difference.

    A measure counts if the teacher in so few steps is worse than in 50 steps by three standard errors, as in
    :mod:`benchmarks.distillation`.
    """
    lines = []
    for steps, row in adapters.items():
        for key in MEASURES:
            teacher, full = teachers[steps], teachers[FULL]
            if teacher.measures[key].worse_by(full.measures[key]) < COUNTS_FROM:
                continue
            ours, theirs = row.measures[key], whole[steps].measures[key]
            error = math.hypot(ours.standard_error, theirs.standard_error)
            shares = [closed(teacher, full, student, key) for student in (row, whole[steps])]
            lines.append(
                f"| {name}, {in_words(steps)} | {key.replace('_', ' ')} | {shares[0]:.0%} | {shares[1]:.0%} |"
                f" {ours.value - theirs.value:+.3f} ± {error:.3f} |"
            )
    return lines


def trained_parameters(run: Run) -> int:
    """Return the number of trained parameters of the student."""
    config = load_config(run.folder / "config.yaml")
    plan = plan_role("student", checkpoint=str(ROOT / str(config.teacher.checkpoint)), lora=config.student.lora)
    return sum(math.prod(shape) for shape in plan.own_shapes.values())


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Return exit code 0, or 2 with one line for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=at_least_1, nargs="+", default=[4, 16], help="of the adapters")
    parser.add_argument("--rate", type=float, default=10.0, help="of adapters, over the recipe's")
    add_students(parser, "runs/lora", "line")
    parser.add_argument("--quick", action="store_true", help="one seed, one rank, 10 steps")
    args = parser.parse_args(argv)
    if args.quick:
        args.ranks, args.seeds, args.out = args.ranks[:1], 1, args.out.with_name(args.out.name + "_quick")
    args.out, count = args.out.resolve(), CLIPS // 8 if args.quick else CLIPS
    lines = {WHOLE: runs_of(None, args)} | {f"rank {rank}": runs_of(rank, args) for rank in args.ranks}
    train_all([run for seed in zip(*lines.values(), strict=True) for run in seed], args.workers)
    torch.set_num_threads(args.workers)

    config = compose_config([f"experiment={RECIPE}", f"run_dir={args.out}"])
    source, measures = ROOT / config.teacher.checkpoint, args.out / "teacher"
    claim(measures, all_settings(config))
    teachers = {n: measured(config, "teacher", source, n, measures / f"{n}.json", count) for n in TEACHER_STEPS}
    rows = {name: students(runs, name, count) for name, runs in lines.items()}
    print(
        table([renders(config, count), *teachers.values(), *(row for line in rows.values() for row in line.values())])
    )
    forward = clip_flops(config)
    print("\n| | parameters of the student | network evaluations of a clip, thousands, by seed | its updates |")
    print("|---|---|---|---|")
    for name, runs in lines.items():
        spent = ", ".join(f"{run.evaluations(forward) / 1e3:.1f}" for run in runs)
        print(f"| {name} | {trained_parameters(runs[0]):,} | {spent} | {runs[0].student_updates()} |")
    print(f"\n| | measure | closed | closed by {WHOLE} | difference of the measure |\n|---|---|---|---|---|")
    for name, by_seed in rows.items():
        if name != WHOLE:
            print("\n".join(distances(teachers, rows[WHOLE], by_seed, name)))
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
