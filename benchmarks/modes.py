"""Mode coverage of students: ``python -m benchmarks.modes`` distills a teacher whose captions leave the color open.

Each caption has eight modes, the colors, with known shares from .3 to .03. The benchmark measures the share of each
color among a student's clips. The teacher is the shipped teacher after more training on such captions. Students train
by the recipes ``experiment=quickstart_METHOD``, for half the steps, and by DMD2 with a GAN. DMD2's students also train
on with a teacher that knows red alone. From there data forcing and DMD2, with the first teacher, have a tenth of the
quickstart's steps to bring the other colors back. Each run is one process, with one run per core in parallel. The
same command resumes an interrupted benchmark. ``--quick`` is a short test of the whole benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from benchmarks.arguments import add_students
from benchmarks.distillation import ROOT, Run, all_settings, claim, clips_of, in_words, train_all
from distill.config import Config, compose_config, load_config
from distill.data.encoders.words import COLORS
from distill.data.shape_measures import detect
from distill.data.shape_scenes import RGB
from distill.evaluate.sampling import sample_captions
from fsdp_cp.errors import UserError
from models.export import main as export

SHARES = (0.3, 0.2, 0.15, 0.12, 0.1, 0.06, 0.04, 0.03)
"""Shares of the colors, in the word table's order. They differ, to show which modes a student loses first."""
RARE = 3
ROLLOUTS = ("method.student_input=rollout", "method.data_forcing=0")
"""Settings that make DMD2 of ``experiment=quickstart_dfd``."""


@dataclass(frozen=True, kw_only=True)
class Student:
    """Recipe of the students of a row: half the recipe's steps, and half its warm-up."""

    changes: tuple[str, ...]
    method: str = "dmd2"
    recipe: str | None = None
    start: str | None = None
    """Row whose student and fake score these students train on; ``None``: they start from the teacher."""
    teacher: str = "teacher"


STUDENTS = {
    "dmd2": Student(changes=("steps=1250",)),
    "dmd2 + GAN": Student(changes=("steps=1250", "method.gan_weight_student=0.03")),
    "dmd2 + projection": Student(changes=("steps=1250", "method.projection=true")),
    "rcm": Student(method="rcm", changes=("steps=770", "method.tangent_warmup=300")),
    "scm": Student(method="scm", changes=("steps=1084", "method.tangent_warmup=500")),
    "meanflow": Student(method="meanflow", changes=("steps=1084",)),
    "red": Student(recipe="quickstart_dfd", start="dmd2", teacher="teacher_red", changes=("steps=250", *ROLLOUTS)),
    "red, data forcing": Student(recipe="quickstart_dfd", start="red", changes=()),
    "red, more dmd2": Student(recipe="quickstart_dfd", start="red", changes=ROLLOUTS),
}
STUDENT_STEPS, TEACHER_STEPS = (1, 2, 4), (4, 16)
CLIPS = 512
DATA = f"data.color_shares=[{','.join(map(str, SHARES))}]"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Share of each color, and of clips without a color (``None``), in each student."""

    name: str
    shares: dict[str | None, np.ndarray]
    """Shares by color, each ``(students,)``."""

    def of_decided(self, color: str) -> np.ndarray:
        """Return the shares of ``color`` among the clips that have a color."""
        return self.shares[color] / np.maximum(1 - self.shares[None], 1e-9)

    def distance(self) -> np.ndarray:
        """Return the total variation distance from the known shares, 0 to 1."""
        return sum(abs(self.of_decided(c) - s) for c, s in zip(COLORS, SHARES, strict=True)) / 2

    def rare(self) -> np.ndarray:
        """Return the share of the ``RARE`` rarest colors over their known share; 1 keeps them all."""
        return sum(self.of_decided(c) for c in COLORS[-RARE:]) / sum(SHARES[-RARE:])


def by_chance(clips: int, draws: int = 2000) -> float:
    """Return the expected :meth:`Kept.distance` of ``clips`` clips drawn with the known shares."""
    drawn = np.random.default_rng(0).multinomial(clips, SHARES, size=draws) / clips
    return float(abs(drawn - SHARES).sum(axis=1).mean() / 2)


def measured(config: Config, role: str, folder: Path, steps: int, cache: Path, count: int) -> dict[str | None, float]:
    """Measure the shares in ``count`` clips of the network in ``folder``, or read them from ``cache``."""
    if not cache.exists():
        data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=Path(config.run_dir))
        colors = [color for color, _ in detect(clips_of(config, role, folder, steps, sample_captions(data, count)))]
        shares = {color: colors.count(color) / len(colors) for color in (*COLORS, None)}
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps({color or "": share for color, share in shares.items()}))
    return {color or None: share for color, share in json.loads(cache.read_text()).items()}


def over_students(name: str, measures: Sequence[dict[str | None, float]]) -> Kept:
    """Combine the shares of several students."""
    return Kept(name=name, shares={c: np.array([shares[c] for shares in measures]) for c in (*COLORS, None)})


def cell(values: np.ndarray) -> str:
    """Format the mean and its standard error over students."""
    error = "" if len(values) < 2 else f" ± {values.std(ddof=1) / math.sqrt(len(values)):.3f}"
    return f"{values.mean():.3f}{error}"


def table(rows: Sequence[Kept], count: int) -> str:
    """Return a Markdown table with one line per row."""
    lines = ["| | " + " | ".join(COLORS) + f" | no color | distance | the {RARE} rarest, kept |"]
    lines += ["|---" * (len(COLORS) + 4) + "|"]
    known = " | ".join(f"{share:.3f}" for share in SHARES)
    lines += [f"| known shares | {known} | 0 | {by_chance(count):.3f} by chance | 1 |"]
    for row in rows:
        cells = [*(cell(row.of_decided(c)) for c in COLORS), cell(row.shares[None]), cell(row.distance())]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {cell(row.rare())} |")
    return "\n".join(lines)


def picture(file: Path, rows: Sequence[Kept]) -> None:
    """Draw the shares as stacked bars, with the known shares at the top."""
    names = ["known shares", *(row.name for row in rows)]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(names) + 0.9), layout="constrained")
    left = np.zeros(len(names))
    for color, share in zip(COLORS, SHARES, strict=True):
        widths = np.array([share, *((row.of_decided(color)).mean() for row in rows)])
        axes.barh(names, widths, left=left, color=RGB[color], edgecolor="0.3", linewidth=0.4, label=color)
        left += widths
    for edge in np.cumsum(SHARES)[:-1]:
        axes.axvline(edge, color="0.3", linewidth=0.6, linestyle=":")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the clips that have a color; dotted: where the known shares end")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description=__doc__.splitlines()[0])
    parser.add_argument("--students", nargs="+", default=list(STUDENTS), choices=STUDENTS, metavar="NAME")
    add_students(parser, "runs/modes", "name")
    parser.add_argument("--quick", action="store_true", help="one seed, 6 steps, data forcing and meanflow alone")
    args = parser.parse_args(argv)
    if args.quick:
        args.students, args.seeds = ["red, data forcing", "meanflow"], 1
        args.out = args.out.with_name(args.out.name + "_quick")
    out = args.out.resolve()
    quick, count = (("steps=6", "batch_size=8"), CLIPS // 16) if args.quick else ((), CLIPS)

    def teacher_run(name: str, *changes: str) -> Run:
        folder = out / name
        return Run(method="flow_matching", folder=folder, changes=("student.architecture=null", *changes, *quick))

    def depth(name: str) -> int:
        return 0 if (start := STUDENTS[name].start) is None else 1 + depth(start)

    def run_of(name: str, seed: int) -> Run:
        student, begin = STUDENTS[name], ()
        if student.start is not None:
            start = run_of(student.start, seed).folder
            begin = (f"student.checkpoint={start}/export/student", f"fake.checkpoint={start}/fake")
        folder = out / re.sub(r"\W+", "_", name) / str(seed)
        teacher = f"teacher.checkpoint={out}/{student.teacher}/export/student"
        changes = (DATA, teacher, *begin, *student.changes, *quick)
        return Run(method=student.method, seed=seed, folder=folder, changes=changes, recipe=student.recipe)

    begin = "student.checkpoint=assets/quickstart_teacher"
    train_all([teacher_run("teacher", DATA, begin, "steps=3000", "optim.student.lr=1e-3")], 1)
    exported = out / "teacher" / "export" / "student"
    wanted = list(args.students)
    for name in wanted:  # it grows by the rows that others train on
        if (start := STUDENTS[name].start) not in (None, *wanted):
            wanted.append(start)
    if "red" in wanted:
        red = ("data.color_shares=[1,0,0,0,0,0,0,0]", f"student.checkpoint={exported}")
        train_all([teacher_run("teacher_red", *red, "steps=500", "optim.student.lr=5e-4")], 1)
    starts = {STUDENTS[name].start for name in wanted}
    for wave in range(1 + max(map(depth, wanted))):
        names = [name for name in wanted if depth(name) == wave]
        train_all([run_of(name, seed) for seed in range(args.seeds) for name in names], args.workers)
        for name, seed in product(starts.intersection(names), range(args.seeds)):
            folder = run_of(name, seed).folder
            if not (folder / "fake").exists() and export([str(folder), str(folder / "fake"), "--role", "fake"]):
                return 2
    runs = {name: [run_of(name, seed) for seed in range(args.seeds)] for name in args.students}
    torch.set_num_threads(args.workers)

    config = compose_config(["experiment=quickstart_dmd2", "method.shift=1.0", DATA, f"run_dir={out}"])
    claim(out / "measures", all_settings(config))
    rows = [
        over_students(f"teacher, {in_words(n)}", [measured(config, "teacher", exported, n, out / f"t{n}.json", count)])
        for n in (TEACHER_STEPS[:1] if args.quick else TEACHER_STEPS)
    ]
    for name, students in runs.items():
        for n in STUDENT_STEPS:
            measures = [
                measured(
                    load_config(run.folder / "config.yaml"),
                    "student",
                    run.folder / "export" / "student",
                    n,
                    run.folder / f"modes_{n}.json",
                    count,
                )
                for run in students
            ]
            rows.append(over_students(f"{name}, {in_words(n)}", measures))
    print(table(rows, count))
    picture(out / "modes.png", rows)
    print(f"\npicture: {out / 'modes.png'}")
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
