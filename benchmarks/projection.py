"""Effect of projected updates (PDMD): ``python -m benchmarks.projection`` on particles, and ``--students`` on clips.

Particles are moved by DMD between Gaussians, where all scores are known; it takes seconds. ``--students`` trains the
quickstart, then provokes the collapses of docs/trouble.md from its student in three arms: plain, projected, and
``other``, which takes an equal share out of each update, but along the ``r`` of another sample: a shorter step alone
delays too. The same command resumes an interrupted benchmark. ``--quick`` is a short test of all of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
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
UPDATES, LOOKS = 40, 4
"""Updates of the student after the start, and between two looks of the guard."""
SHOWN = ("saturation", "flicker", "diversity", "excess")
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


def runs_of(out: Path, collapses: Sequence[str], seeds: int, quick: Sequence[str]) -> dict[tuple[str, str, int], Run]:
    """Return the runs after the start of each seed, by collapse, arm and seed."""
    runs = {}
    for collapse, arm, seed in product(collapses, ARMS, range(seeds)):
        start, (changes, program) = out / "start" / str(seed), ARMS[arm]
        updates = COLLAPSES[collapse]
        fakes = 1 if collapse == "frozen" else 4
        words = (
            f"student.checkpoint={start}/export/student", f"fake.checkpoint={start}/fake", "student.ema.enabled=false",
            f"steps={UPDATES * (fakes + 1)}", "optim.student.schedule=constant", "optim.fake.schedule=constant",
            f"guard.every={LOOKS}", "sample.student_steps=[4]", "sample.at_end=false",
            "export.at_end=false", "checkpoint.at_end=false",
        )  # fmt: skip
        runs[collapse, arm, seed] = Run(
            method="dmd2",
            recipe="quickstart",
            seed=seed,
            folder=out / collapse / arm / str(seed),
            changes=(*words, *updates, *changes, *quick),
            program=program,
        )
    return runs


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.projection", description=__doc__.splitlines()[0])
    parser.add_argument("--students", action="store_true", help="also train students, for hours")
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
        if not (start.folder / "fake").exists():
            code = export([str(start.folder), str(start.folder / "fake"), "--role", "fake"])
            if code:
                return code
    runs = runs_of(out, args.collapses, args.seeds, quick)
    train_all(list(runs.values()), args.workers)
    print(
        "\n| collapse | arm | seed | first alarm, updates | " + " | ".join(SHOWN) + " |\n|" + "---|" * (4 + len(SHOWN))
    )
    for (collapse, arm, seed), run in runs.items():
        measured = looks(run)
        cells = [f"{measured[0][name]:.3f} to {measured[-1][name]:.3f}" for name in SHOWN]
        print(f"| {collapse} | {arm} | {seed} | {first_alarm(measured)} | {' | '.join(cells)} |")
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
