"""Does anything become infinite? ``python -m benchmarks.stability`` trains by every method, in fp32 and in bf16.

The quickstart's recipes (a real teacher, real data) in small batches, one process a run, as many at a time as there
are cores. A run that has ended is not trained again.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from benchmarks.arguments import at_least_1
from benchmarks.distillation import DISTILLING, Run, train_all
from fsdp_cp.errors import UserError

GAN = "dmd2 with a GAN"
METHODS = ("flow_matching", *DISTILLING, GAN)


def run_of(method: str, precision: str, steps: int, out: Path) -> Run:
    """The run of one row."""
    changes = [f"steps={steps}", "batch_size=4", f"precision={precision}", f"checkpoint.every={steps}"]
    if method == GAN:
        changes += ["method.gan_weight_student=0.03", "method.gan_r1_weight=1"]
    if method == "ode_regression":
        changes += ["method.num_trajectories=256"]
    name = method.replace(" ", "_")
    return Run(method=method.split()[0], folder=out / f"{name}_{precision}_{steps}", changes=tuple(changes))


def row(method: str, precision: str, run: Run) -> tuple[bool, str]:
    """Was every value finite? And the line of the table."""
    lines = run.metrics()
    # A value that is not finite is null in the file; so is what a step does not have: perf/mfu, an empty time bucket.
    kept = {key for line in lines for key in line if key.endswith(("/loss", "/grad_norm"))}
    broken = sum(line[key] is None for line in lines for key in kept if key in line)
    skipped = sum(max(line.get(f"{role}/skipped", 0) for line in lines) for role in ("student", "fake"))
    norms = [line["student/grad_norm"] for line in lines if line.get("student/grad_norm") is not None]
    losses = [line["student/loss"] for line in lines if line.get("student/loss") is not None]
    tenth = max(1, len(losses) // 10)
    first, last = (math.fsum(part) / len(part) for part in (losses[:tenth], losses[-tenth:]))
    line = f"| {method} | {precision} | {len(lines)} | {len(losses)} | {broken} | {skipped:.0f} |"
    return not broken and not skipped, f"{line} {max(norms):.3g} | {first:.3g} | {last:.3g} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stability", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least_1, default=1000)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--out", type=Path, default=Path("runs/stability"), help="the runs; kept")
    parser.add_argument("--workers", type=at_least_1, default=os.cpu_count(), help="runs at a time")
    args = parser.parse_args(argv)
    rows = [(method, precision) for method in args.methods for precision in ("fp32", "bf16")]
    runs = [run_of(method, precision, args.steps, args.out.resolve()) for method, precision in rows]
    train_all(runs, args.workers)
    head = (
        "method | compute | steps | student updates | not finite | skipped | largest gradient norm | loss, first tenth"
    )
    print(f"| {head} | last |")
    print("|---|---|---|---|---|---|---|---|---|")
    good = True
    for (method, precision), run in zip(rows, runs, strict=True):
        fine, line = row(method, precision, run)
        good &= fine
        print(line)
    print("\nall finite" if good else "\nFAILED")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
