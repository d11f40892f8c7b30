"""Students trained on a teacher's clips next to students trained on renders: ``python -m benchmarks.teacher_data``.

``distill.teacher_clips`` samples one set from the shipped teacher. DMD2 with a GAN and rCM train on that set and on
renders; ODE regression needs the set's states. The same command resumes an interrupted benchmark.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.arguments import add_students, at_least_1
from benchmarks.distillation import ROOT, Run, measured, measured_student, over_seeds, renders, table, train_all
from distill.config import compose_config
from fsdp_cp.launch import end_process

STUDENT_STEPS, TEACHER_STEPS, SET_STEPS = (1, 4), (4,), 24
MEASURED = 128
GAN = ("method.gan_weight_student=0.03",)
"""Weight of the GAN's loss in the student's, as in ``benchmarks.modes``."""
WARMUP = 600 / 1540
"""Share of rCM's steps in its tangent's warm-up, as in its recipe."""


@dataclass(frozen=True, kw_only=True)
class SetRun(Run):
    """Training run on an encoded set; its measures compare with renders."""

    data: Path

    def _commands(self) -> list[list[str]]:
        return [[sys.executable, "train.py", *self.overrides(), "data=encoded", f"data.path={self.data}"]]


def sample_set(out: Path, clips: int) -> Path:
    """Return the teacher's set, sampled by the recipe of ODE regression; continue a set that is not complete."""
    run = Run(method="ode_regression", folder=out / "teacher_run")
    times = ",".join(map(str, compose_config(run.overrides()).method.step_list))
    options = ["--clips", str(clips), "--steps", str(SET_STEPS), "--states", times]
    command = [sys.executable, "-m", "distill.teacher_clips", *run.overrides(), str(out / "set"), *options]
    subprocess.run(command, cwd=ROOT, check=True)
    return out / "set"


def main(argv: list[str] | None = None) -> int:
    """Train, measure and print the table. Return exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.teacher_data", description=__doc__.splitlines()[0])
    add_students(parser, "runs/teacher_data", "method and kind of data")
    parser.add_argument("--steps", type=at_least_1, default=300, help="training steps of each student")
    parser.add_argument("--clips", type=at_least_1, default=512, help="clips of the teacher's set")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    data = sample_set(out, args.clips)
    steps = (f"steps={args.steps}",)
    warmup = (f"method.tangent_warmup={round(args.steps * WARMUP)}",)
    groups: dict[str, list[Run]] = {}
    for method, changes in (("dmd2", GAN), ("rcm", warmup), ("ode_regression", ())):
        name = f"{method} + GAN" if changes == GAN else method
        for seed in range(args.seeds):
            options = {"method": method, "seed": seed, "changes": (*steps, *changes)}
            if method != "ode_regression":
                folder = out / method / "renders" / str(seed)
                groups.setdefault(f"{name}, renders", []).append(Run(**options, folder=folder))
            folder = out / method / "teacher" / str(seed)
            groups.setdefault(f"{name}, teacher's clips", []).append(SetRun(**options, folder=folder, data=data))
    train_all([run for runs in groups.values() for run in runs], args.workers)
    torch.set_num_threads(args.workers)
    config = compose_config(["experiment=quickstart_ode_regression", f"run_dir={out}"])
    source = ROOT / config.teacher.checkpoint
    teachers = [measured(config, "teacher", source, n, out / "teacher" / f"{n}.json", MEASURED) for n in TEACHER_STEPS]
    students = [
        over_seeds([measured_student(run, n, MEASURED) for run in runs], name)
        for name, runs in groups.items()
        for n in STUDENT_STEPS
    ]
    print(table([renders(config, MEASURED), *teachers, *students]))
    return 0


if __name__ == "__main__":
    end_process(main())
