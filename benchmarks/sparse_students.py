"""Students with sparse attention next to dense ones: ``python -m benchmarks.sparse_students``.

Clips of moving shapes of 15 frames have 240 tokens in 60 tiles of 1 x 2 x 2, of which a query tile attends to 12. The
shipped teacher, trained on for this length, is distilled by DMD2 to students that are dense, sparse from the start,
sparse by a ramp, sparse without a gate, and sparse with random tiles. The last one is the entry condition: if tiles at
random are as good as dense attention, this data cannot tell the others apart. The same command resumes.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.arguments import add_students
from benchmarks.distillation import (
    CLIPS,
    Row,
    Run,
    all_settings,
    claim,
    measured,
    measured_student,
    over_seeds,
    renders,
    table,
    train_all,
)
from fsdp_cp.attention import sparse
from fsdp_cp.errors import UserError
from fsdp_cp.launch import end_process

TEACHER = "assets/quickstart_teacher"
FRAMES = "data.num_frames=15"
SHORT = ("method.fake_updates_per_student_update=2", "optim.student.lr=4e-4")
"""The recipe's 150 updates of the student are too many for five arms, so each of fewer ones is larger."""
VSA = ("student.sparse_attention.sparsity=0.8", "student.sparse_attention.tile=[1,2,2]")
ARMS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "random tiles": VSA,
    "sparse from the start": VSA,
    "sparse by a ramp": (*VSA, "student.sparse_attention.warmup=[0.1,5]"),
    "sparse without a gate": (*VSA, "optim.student.additions_lr=0"),
}
"""Changes of ``quickstart_dmd2`` by arm."""
RANDOM = "--random-tiles"


@contextmanager
def random_tiles() -> Iterator[Any]:
    """Choose tiles at random instead of by their scores, other ones in each call."""

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.rand(*q.shape[:3], k.shape[2], dtype=torch.float64)

    with mock.patch.object(sparse, "exact_scores", scores):
        yield


def arm_run(arm: str, seed: int, out: Path, teacher: Path, steps: int, batch: int) -> Run:
    """Return the training of one arm's student."""
    roles = [f"{role}.checkpoint={teacher}" for role in ("teacher", "student", "fake")]
    return Run(
        method="dmd2",
        folder=out / arm.replace(" ", "_") / str(seed),
        changes=(*roles, FRAMES, *SHORT, f"steps={steps}", f"batch_size={batch}", *ARMS[arm]),
        seed=seed,
        program=("-m", "benchmarks.sparse_students", RANDOM) if arm == "random tiles" else ("train.py",),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_students", description=__doc__.splitlines()[0])
    add_students(parser, "runs/sparse_students", "arm")
    parser.add_argument("--steps", type=int, default=180, help="steps of DMD2, two in three of the fake score")
    parser.add_argument("--teacher-steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--clips", type=int, default=CLIPS)
    args = parser.parse_args(argv)
    out = args.out.resolve()
    shipped = (
        "student.architecture=null",
        f"student.checkpoint={TEACHER}",
        "optim.student.lr=1e-3",
        "optim.student.warmup=30",
    )
    longer = Run(
        method="flow_matching",
        folder=out / "teacher",
        changes=(FRAMES, f"steps={args.teacher_steps}", f"batch_size={args.batch}", *shipped),
    )
    train_all([longer], 1)
    teacher = longer.folder / "export" / "student"
    runs = {
        arm: [arm_run(arm, seed, out, teacher, args.steps, args.batch) for seed in range(args.seeds)] for arm in ARMS
    }
    train_all([run for runs_of_arm in zip(*runs.values(), strict=True) for run in runs_of_arm], args.workers)

    torch.set_num_threads(args.workers)
    config = runs["dense"][0].config()
    claim(out / "measures", all_settings(config))
    rows: list[Row] = [renders(config, args.clips)]
    rows += [measured(config, "teacher", teacher, n, out / "measures" / f"{n}.json", args.clips) for n in (50, 4)]
    for arm, seeds in runs.items():
        with random_tiles() if arm == "random tiles" else nullcontext():
            rows.append(over_seeds([measured_student(run, 4, args.clips) for run in seeds], arm))
    print(table(rows))
    return 0


if __name__ == "__main__":
    if RANDOM in sys.argv:  # a student's training, started by arm_run
        sys.argv = ["train.py", *(word for word in sys.argv[1:] if word != RANDOM)]
        with random_tiles():
            runpy.run_path("train.py", run_name="__main__")
    try:
        end_process(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
