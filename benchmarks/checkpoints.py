"""What does a checkpoint cost? ``python -m benchmarks.checkpoints`` saves and loads a run's state on several ranks.

The state is a student's (weights, AdamW's moments, average) and a fake score's (weights, moments), sharded over the
ranks, in fp32. Measured are the training's wait when a checkpoint is written while it waits and beside it, how much a
loop of matrix products and reductions slows down meanwhile, the time to load, and the bytes on the disk against those
of the tensors.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.arguments import at_least_1
from fsdp_cp.checkpoint import Checkpoints, load, step_folder
from fsdp_cp.local_ranks import run_ranks

WIDTH = 1024
KINDS = {"student": ("weights", "exp_avg", "exp_avg_sq", "ema"), "fake": ("weights", "exp_avg", "exp_avg_sq")}
ROUNDS = 3
"""Of which the fastest counts."""


def state(millions: int) -> dict:
    """Random DTensors by role, kind and layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    return {
        role: {
            kind: {f"layer{i}": distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]) for i in range(layers)}
            for kind in kinds
        }
        for role, kinds in KINDS.items()
    }


def steps(seconds: float) -> float:
    """Steps a second of a loop that computes and reduces, as training does; all ranks do as many."""
    x, done, started = torch.randn(256, 256), 0, time.perf_counter()
    while True:
        for _ in range(20):
            x = torch.tanh(x @ x)
        more = torch.tensor(float(time.perf_counter() - started < seconds))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        done += 1
        if not more:
            return done / (time.perf_counter() - started)


def _measure(folder: Path, millions: int) -> dict[str, float]:
    tensors = state(millions)
    flat = [x for kinds in tensors.values() for layers in kinds.values() for x in layers.values()]
    found: dict[str, list[float]] = {}

    def timed(name: str, work) -> None:
        dist.barrier()
        started = time.perf_counter()
        work()
        found.setdefault(name, []).append(time.perf_counter() - started)

    alone = steps(2.0)
    for round_ in range(ROUNDS):
        waits = Checkpoints(folder / f"waits{round_}", keep=1)
        timed("wait, synchronous", lambda to=waits: to.save(1, tensors, {"step": 1}))
        beside = Checkpoints(folder / f"beside{round_}", keep=1, asynchronous=True)
        timed("wait, asynchronous", lambda to=beside: to.save(1, tensors, {"step": 1}))
        started = time.perf_counter()
        rates = []
        while not _all_done(beside):
            rates.append(steps(0.2))
        beside.wait()
        found.setdefault("written beside the loop in", []).append(time.perf_counter() - started)
        if rates:
            found.setdefault("slowdown", []).append(alone / (sum(rates) / len(rates)))
        timed("load", lambda at=round_: load(step_folder(folder / f"beside{at}", 1), tensors))
    files = list(step_folder(folder / "beside0", 1).iterdir())
    return {name: min(values) for name, values in found.items()} | {
        "ideal": float(sum(x.numel() * x.element_size() for x in flat)),
        "disk": float(sum(file.stat().st_size for file in files)),
    }


def _all_done(checkpoints: Checkpoints) -> bool:
    done = torch.tensor(float(not checkpoints.is_writing()))
    dist.all_reduce(done, op=dist.ReduceOp.MIN)
    return bool(done)


def table(found: dict[str, float]) -> str:
    """Markdown."""
    ratio = found["wait, synchronous"] / found["wait, asynchronous"]
    lines = [
        "| | |",
        "|---|---|",
        f"| training waits, synchronous | {found['wait, synchronous']:.2f} s |",
        f"| training waits, asynchronous (the copy) | {found['wait, asynchronous']:.2f} s, {ratio:.1f} times less |",
        f"| written beside the loop in | {found['written beside the loop in']:.2f} s |",
        f"| the loop is slower meanwhile | {found.get('slowdown', float('nan')):.2f} times |",
        f"| load | {found['load']:.2f} s |",
        f"| bytes of the tensors | {found['ideal'] / 1e6:.1f} MB |",
        f"| bytes on the disk | {found['disk'] / 1e6:.1f} MB, {found['disk'] / found['ideal']:.4f} of them |",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=at_least_1, default=2)
    parser.add_argument("--millions", type=at_least_1, default=20, help="parameters of each of the two roles")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one by default, removed")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = run_ranks(args.ranks, _measure, Path(folder), args.millions, timeout=1800)[0]
    print(f"{args.ranks} ranks, two roles of {args.millions} M parameters, {os.cpu_count()} cores\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
