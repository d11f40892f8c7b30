"""Effect of projected updates (PDMD): ``python -m benchmarks.projection`` on particles, and ``--students`` on clips.

Particles are moved by DMD between Gaussians, where all scores are known; it takes seconds. ``--students`` trains the
quickstart, then provokes the collapses of docs/trouble.md from its student in three arms: plain, projected, and
``other``, which takes an equal share out of each update, but turns it towards the ``r`` of another sample: a shorter
step alone delays too. ``--rescue`` trains on from where the plain arm raised its alarm, by the recipe, by projected
updates and by data forcing. The same command resumes an interrupted benchmark. ``--quick`` is a short test of it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import train
from benchmarks.arguments import add_students, at_least_1
from benchmarks.distillation import ROOT, Run, train_all
from distill.methods.common import distribution_matching
from distill.methods.common.distribution_matching import project_out
from distill.methods.common.schedules import per_sample
from fsdp_cp.checkpoint.folder import saved_steps, step_folder
from fsdp_cp.errors import UserError
from fsdp_cp.launch import end_process
from models.export import main as export
from models.sample import VIDEO, Sample

COLLAPSES = {
    "frozen": ("optim.fake.lr=0", "method.fake_updates_per_student_update=1"),
    "guidance": ("method.guidance_scale=15",),
    "rates": ("optim.student.lr=6e-3",),
}
"""Settings that provoke each collapse."""
ARMS = {
    "plain": ((), ("train.py",)),
    "projected": (("method.projection=true",), ("train.py",)),
    "other": (("method.projection=true",), ("-m", "benchmarks.projection", "--other")),
}
"""Settings of each arm, and the program that trains it."""
RESCUES = {
    "plain": (),
    "projected": ("method.projection=true",),
    "data forcing": ("method.student_input=clips", "method.data_forcing=0.5"),
}
"""Settings of each way back."""
UPDATES = {"frozen": 40, "guidance": 24, "rates": 12}
"""Updates of the student in each collapse."""
RESCUE_UPDATES, LOOKS = 40, 4
"""Updates of the student on the way back, and between two looks of the guard."""
SHOWN = ("saturation", "flicker", "diversity", "fake_error", "excess")
CASES = {"fake off by 1": (1.0, 400), "exact fake": (0.0, 20)}
"""Length of the fake score's error, and number of updates."""


def particles(d: int, error: float, updates: int, *, projection: bool, seed: int = 0) -> float:
    """Return the distance of the particles' mean from the data's, 0, after ``updates`` of 2,048 particles.

    The data are normal. The fake score is the posterior mean of a normal distribution fitted to the particles, plus an
    error of this length. Particles begin in the data's distribution, with an exact fake score at a distance of 2."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, direction = normal(2048, d), normal(d)
    direction /= direction.norm()
    x += direction * (0.0 if error else 2.0)
    for _ in range(updates):
        t = 0.02 + 0.96 * torch.rand(len(x), 1, generator=generator, dtype=torch.float64)
        x_t = (1 - t) * x + t * normal(len(x), d)

        def posterior(mean: Tensor, variance: Tensor, x_t: Tensor = x_t, t: Tensor = t) -> Tensor:
            gain = (1 - t) * variance / ((1 - t) ** 2 * variance + t**2)
            return mean + gain * (x_t - (1 - t) * mean)

        real = posterior(torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64))
        fake = posterior(x.mean(0), x.var(0)) + error * direction
        update = fake - real
        if projection:
            update = project_out(Sample({VIDEO: update}), Sample({VIDEO: x - fake}))[0].video
        x = x - 0.1 * update / (x - real).abs().mean(1, keepdim=True)
    return float(x.mean(0).norm())


def project_other(d: Sample, r: Sample) -> tuple[Sample, Sample]:
    """Take the share of :func:`project_out` out of ``d``, turning it as that does, but towards the ``r`` of the next
    sample of the micro-batch in place of its own."""
    _, share = project_out(d, r)
    sign = d.map(lambda part, other: (part * other).flatten(1).sum(1).sign(), r)
    kept, _ = project_out(r[torch.arange(len(d)).roll(1)], d)  # the part of the other's r that is orthogonal to d

    def length(x: Sample) -> Sample:
        return x.map(lambda part: part.flatten(1).norm(dim=1).clamp_min(1e-12))

    aside = sign * (share * (share * -1 + 1)).map(Tensor.sqrt) * length(d) / length(kept)
    return d - per_sample(share, d) * d - per_sample(aside, d) * kept, share


def continued(folder: Path, seed: int, begin: Path, steps: int, *changes: str, program: Sequence[str]) -> Run:
    """Return a run of ``steps`` from the exports ``student`` and ``fake`` in ``begin``, at constant rates."""
    words = (
        f"student.checkpoint={begin}/student", f"fake.checkpoint={begin}/fake", "student.ema.enabled=false",
        f"steps={steps}", "optim.student.schedule=constant", "optim.fake.schedule=constant", f"guard.every={LOOKS}",
        "sample.student_steps=[4]", "sample.at_end=false", "export.at_end=false", "checkpoint.at_end=false",
    )  # fmt: skip
    return Run(
        method="dmd2", recipe="quickstart", seed=seed, folder=folder, changes=(*words, *changes), program=tuple(program)
    )


def steps_an_update(collapse: str) -> int:
    """Return the number of steps for each update of the student."""
    return 2 if collapse == "frozen" else 5


def runs_of(out: Path, collapses: Sequence[str], seeds: int, quick: Sequence[str]) -> dict[tuple[str, str, int], Run]:
    """Return the runs after the start of each seed, by collapse, arm and seed. The plain ones keep a checkpoint of each
    look."""
    runs = {}
    for collapse, arm, seed in product(collapses, ARMS, range(seeds)):
        (changes, program), per = ARMS[arm], steps_an_update(collapse)
        kept = (f"checkpoint.every={LOOKS * per}", f"checkpoint.keep={UPDATES[collapse]}") if arm == "plain" else ()
        changes = (*COLLAPSES[collapse], *changes, *kept, *quick)
        folder, begin = out / collapse / arm / str(seed), out / "start" / str(seed) / "exports"
        runs[collapse, arm, seed] = continued(folder, seed, begin, UPDATES[collapse] * per, *changes, program=program)
    return runs


def exported(source: Path, out: Path) -> None:
    """Export student and fake score of a run or of its checkpoint."""
    for role in ("student", "fake"):
        if not (out / role).exists() and export([str(source), str(out / role), "--role", role]):
            raise UserError(f"{source} has no {role} to export")


def ways_back(
    out: Path, runs: dict[tuple[str, str, int], Run], quick: Sequence[str]
) -> dict[tuple[str, str, int], Run]:
    """Return the runs from the first alarm of each plain run, or from its end."""
    found = {}
    for (collapse, arm, seed), run in runs.items():
        if arm == "plain":
            begin = out / "rescue" / collapse / str(seed)
            looked = [i * LOOKS * steps_an_update(collapse) for i, look in enumerate(looks(run)) if look["alarm"]]
            saved = saved_steps(run.folder / "checkpoints")
            exported(step_folder(run.folder / "checkpoints", looked[0] if looked else max(saved)), begin / "exports")
            for way, changes in RESCUES.items():
                found[collapse, way, seed] = continued(
                    begin / way.replace(" ", "_"), seed, begin / "exports", 5 * RESCUE_UPDATES, *changes, *quick,
                    program=("train.py",),
                )  # fmt: skip
    return found


def looks(run: Run) -> list[dict[str, float | None]]:
    """Return the guard's measures at each look, the one before the first step included."""
    found: list[dict[str, float | None]] = []
    for line in run.metrics():
        if "guard/excess" in line:
            found.append({name: line[f"guard/{name}"] for name in (*SHOWN, "alarm")})
    return found


def first_alarm(measured: Sequence[dict[str, float | None]]) -> str:
    """Say after how many of the student's updates the guard raised its first alarm."""
    at = next((i for i, look in enumerate(measured) if look["alarm"]), None)
    return "none" if at is None else f"{at * LOOKS}"


def back_inside(measured: Sequence[dict[str, float | None]]) -> str:
    """Say from which of the student's updates on all measures were within their limits, to the end."""
    outside = [i for i, look in enumerate(measured) if look["excess"] is None or look["excess"] > 0]
    first = outside[-1] + 1 if outside else 0
    return "never" if first == len(measured) else f"{first * LOOKS}"


def table(
    runs: dict[tuple[str, str, int], Run], when: str, judge: Callable[[Sequence[dict[str, float | None]]], str]
) -> str:
    """Return a Markdown table of the looks of each run: before, largest and last values."""
    names = [f"{name}: before, largest, last" for name in SHOWN]
    lines = ["", f"| collapse | arm | seed | {when} | {' | '.join(names)} |", "|" + "---|" * (4 + len(SHOWN))]
    for (collapse, arm, seed), run in runs.items():
        measured = looks(run)
        cells = []
        for name in SHOWN:
            values = [math.nan if look[name] is None else look[name] for look in measured]
            cells.append(", ".join(f"{value:.3f}" for value in (values[0], max(values), values[-1])))
        lines.append(f"| {collapse} | {arm} | {seed} | {judge(measured)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.projection", description=__doc__.splitlines()[0])
    parser.add_argument("--students", action="store_true", help="also train students, for hours")
    parser.add_argument("--rescue", action="store_true", help="with --students: train on from each plain alarm")
    parser.add_argument("--collapses", nargs="+", default=list(COLLAPSES), choices=COLLAPSES, metavar="NAME")
    parser.add_argument("--start-steps", type=at_least_1, default=750, help="steps of the quickstart before a collapse")
    add_students(parser, "runs/projection", "arm")
    parser.add_argument("--quick", action="store_true", help="one seed of a frozen fake score, 10 steps")
    args = parser.parse_args(argv)
    print("| particles | d | plain | projected |\n|---|---|---|---|")
    for (name, (error, updates)), d in product(CASES.items(), (2, 64)):
        plain, projected = (particles(d, error, updates, projection=projection) for projection in (False, True))
        print(f"| {name}, {updates} updates | {d} | {plain:.2f} | {projected:.2f} |", flush=True)
    if not (args.students or args.quick):
        return 0
    quick: tuple[str, ...] = ()
    if args.quick:
        args.collapses, args.seeds, args.start_steps, quick = ["frozen"], 1, 6, ("steps=10", "batch_size=4")
        args.out = args.out.with_name(args.out.name + "_quick")
    out, steps = args.out.resolve(), f"steps={args.start_steps}"
    starts = [
        Run(method="dmd2", recipe="quickstart", seed=seed, folder=out / "start" / str(seed), changes=(steps,))
        for seed in range(args.seeds)
    ]
    train_all(starts, args.workers)
    for start in starts:
        exported(start.folder, start.folder / "exports")
    runs = runs_of(out, args.collapses, args.seeds, quick)
    train_all(list(runs.values()), args.workers)
    print(table(runs, "first alarm after", first_alarm))
    if args.rescue or args.quick:
        back = ways_back(out, runs, quick)
        train_all(list(back.values()), args.workers)
        print(table(back, "within limits from", back_inside))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--other"]:
        distribution_matching.project_out = project_other
        end_process(train.main(sys.argv[2:]))
    os.chdir(ROOT)
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
