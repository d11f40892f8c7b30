"""Parity of meshes: ``python -m benchmarks.parity`` prints each mesh's deviation from an oracle.

The trainer runs DMD2 (one fake update per student update) on a tiny Wan, on each mesh. The oracle
(:mod:`tests.oracles.plain_run`) shares only the method's formulas with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.arguments import at_least_1
from tests.oracles.difference import compare
from tests.oracles.plain_run import oracle_trace
from tests.oracles.runs import MESHES, Setup
from tests.oracles.sharded_run import trace_on_ranks
from tests.oracles.tiny_wan import ARCHITECTURE, write_checkpoints


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least_1, default=6)
    args = parser.parse_args(argv)
    print("largest relative difference from plain diffusers networks in one process\n")
    print("| precision | dp_shard x cp | checkpointing | steps | loss | gradient norm | each gradient | each weight |")
    print("|---|---|---|---|---|---|---|---|")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoints(folder, ARCHITECTURE | {"num_layers": 3})
        for precision, steps, bound in (("fp32", args.steps, 1e-5), ("fp64", 1, 1e-6)):
            oracle = oracle_trace(Setup(precision=precision, steps=steps), folder)
            for dp_shard, cp in MESHES:
                for checkpointing in (False, True) if precision == "fp32" else (False,):
                    setup = Setup(
                        dp_shard=dp_shard,
                        cp=cp,
                        precision=precision,
                        steps=steps,
                        activation_checkpointing=checkpointing,
                    )
                    d = compare(trace_on_ranks(setup, folder), oracle)
                    failed |= not d.largest <= bound
                    print(
                        f"| {precision} | {dp_shard} x {cp} | {'on' if checkpointing else 'off'} | {steps} |"
                        f" {d.loss:.1e} | {d.norm:.1e} | {d.gradient:.1e} | {d.weight:.1e} |",
                        flush=True,
                    )
    print("\nFAILED" if failed else "\nall within 1e-5 (fp32) and 1e-6 (fp64)")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
