"""Context-parallel attention next to other libraries: ``python -m benchmarks.cp_attention``.

Each case (tokens x heads) runs in new local gloo processes with one thread each. One pass, or two for short cases,
measures errors and memory. Then each round runs every contender once, in random order, so that noise of the machine
hits all contenders. Slow contenders sit out later rounds. A time is the slowest rank's, as the median over rounds.
Errors are over the tokens of all ranks, relative by norm, against attention written out in float64. *Extra* memory is
rank 0's peak of live storages in forward and backward in addition to inputs, output and gradients. *Kept* memory is
what the graph holds from forward to backward in addition to inputs and output. Neither includes temporary buffers
inside a kernel or gloo. Ratios compare ours with the best correct peer in three ways: our default factorization with
the peers on the same one, our best with their best, and our default with their best.

Exit codes: 0; 1 if ours is wrong or fails. ``benchmarks.gpu`` measures the local kernels.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import math
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.arguments import at_least_1
from benchmarks.attention_peers import Attend, Contender, peers
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.mesh import build_mesh, resolve_mesh
from fsdp_cp.runtime.local_ranks import RankPool
from tests.oracles.long_attention import TOLERANCE, exact_attention, random_inputs

HEAD_DIM = 64
CASES = {1024: (8, 25), 2048: (8, 25), 4096: (8, 22), 8192: (4, 20), 16384: (2, 20)}
"""Heads, and seconds of rounds for each dtype (at least three rounds), by number of tokens."""
LARGEST_RATIO = {3: 1.3, 12: 1.12}
"""Largest allowed time relative to the fastest, by number of rounds. A slower contender (in forward and in forward plus
backward) sits out the later rounds."""
NAMES = ("out", "dq", "dk", "dv")
MIB = 2**20


@dataclass
class Row:
    """Measurements of one contender on one rank."""

    label: str
    ring: int
    ulysses: int
    ours: bool
    failure: str = ""
    errors: list[float] = field(default_factory=list)
    """Errors of out, dq, dk and dv over all ranks; empty after a failure."""
    extra: int = 0
    kept: int = 0
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)


@dataclass
class Summary:
    """Measurements of one contender over all ranks: milliseconds (NaN if not timed) and MiB."""

    label: str
    ring: int
    ulysses: int
    ours: bool
    failure: str
    errors: list[float]
    extra: float
    kept: float
    forward: float
    both: float

    def is_correct(self, dtype: torch.dtype) -> bool:
        return not self.failure and _correct(self.errors, dtype)


def _correct(errors: list[float], dtype: torch.dtype) -> bool:
    return all(error <= TOLERANCE[dtype] for error in errors)


# --- several ranks on the CPU ---


def ours(world: int, heads: int) -> list[Contender]:
    """Return our contenders: the default factorization first, then the others."""
    default = resolve_mesh(world_size=world, cp=world, heads=heads)
    degrees = [n for n in range(1, world + 1) if world % n == 0 and heads % n == 0 and n != default.ulysses]
    names = ["fsdp_cp, default", *("fsdp_cp" for _ in degrees)]
    return [
        Contender(name, world // u, u, _build_ours, ours=True)
        for name, u in zip(names, (default.ulysses, *degrees), strict=True)
    ]


def _build_ours(ring: int, ulysses: int) -> Attend:
    mesh = build_mesh(cp=ring * ulysses, ring=ring, ulysses=ulysses)
    return lambda q, k, v: context_parallel_attention(q, k, v, mesh=mesh, total_tokens=mesh.cp_size * q.shape[1])


def measure(
    world: int, tokens: int, heads: int, seconds: float, failed: dict[str, str]
) -> dict[torch.dtype, list[Row]]:
    """Return this rank's rows by dtype. Contenders in ``failed`` (at another size) are not tried again."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rank, local = dist.get_rank(), tokens // world
    local_tokens = slice(rank * local, (rank + 1) * local)
    q, k, v, grad = random_inputs(4, tokens, heads, HEAD_DIM)
    truth = exact_attention(q[:, local_tokens], k, v, grad[:, local_tokens])
    for x in truth[2:]:
        dist.all_reduce(x)
    truth = [truth[0], truth[1], truth[2][:, local_tokens], truth[3][:, local_tokens]]
    built = [
        (c, None, failed[c.label]) if c.label in failed else (c, *_attempt(lambda c=c: c.build(c.ring, c.ulysses)))
        for c in ours(world, heads) + peers(world, heads)
    ]
    rows = {}
    for dtype in TOLERANCE:
        inputs = [x[:, local_tokens].to(dtype, copy=True).contiguous() for x in (q, k, v, grad)]
        rows[dtype] = _measure_dtype(built, inputs, truth, seconds)
        # Do not retry a failed contender in the next dtype: a failure may take half a minute.
        built = [(*entry[:2], row.failure) for entry, row in zip(built, rows[dtype], strict=True)]
    return rows


def _attempt(call: Callable[[], object]) -> tuple[object, str]:
    """Return the result, and the first line of an error on any rank.

    The libraries fail on all ranks before they communicate. Otherwise, the timeout of the process group ends the case.
    """
    result, failure = None, ""
    try:
        result = call()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    failures: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    return result, next((f for f in failures if f), "")


def _measure_dtype(built: list, inputs: list[Tensor], truth: list[Tensor], seconds: float) -> list[Row]:
    rows, running, is_short = [], [], inputs[0].shape[1] * dist.get_world_size() < 8192
    for contender, attend, failure in built:
        row = Row(contender.label, contender.ring, contender.ulysses, contender.ours, failure)
        rows.append(row)
        if not row.failure:
            result, row.failure = _attempt(lambda attend=attend: _watched(attend, inputs))
        if row.failure:
            continue
        row.kept, row.extra, results = result
        row.errors = _errors(results, truth)
        del result, results
        # Do not time a peer with wrong results.
        if row.ours or _correct(row.errors, inputs[0].dtype):
            running.append((attend, row))
            if is_short:  # take the smaller of two: gloo's threads free a tensor some time after sending it
                kept, extra, _ = _watched(attend, inputs)
                row.kept, row.extra = min(kept, row.kept), min(extra, row.extra)
    gc.collect()
    gc.freeze()  # else a garbage collection walks all modules of the libraries, which takes longer than a round
    start, rounds, go = time.monotonic(), 0, torch.ones(1)
    while go:
        gc.collect()
        # Use a new order each round, the same on all ranks: the previous contender affects the next one's time.
        for i in torch.randperm(len(running), generator=torch.Generator().manual_seed(rounds)).tolist():
            _time_once(*running[i], inputs)
        rounds += 1
        if rounds in LARGEST_RATIO:
            running = _contending(running, LARGEST_RATIO[rounds])
        go.fill_(rounds < 3 or (rounds < 200 and time.monotonic() - start < seconds))
        dist.broadcast(go, src=0)
    return rows


def _contending(running: list, ratio: float) -> list:
    """Drop contenders slower than ``ratio`` times the fastest in both times, by rank 0's clock. Keep our default."""
    times = torch.tensor([[statistics.median(row.forward), statistics.median(row.both)] for _, row in running])
    dist.broadcast(times, src=0)
    near = (times <= ratio * times.min(dim=0).values).any(dim=1)
    return [entry for i, entry in enumerate(running) if near[i] or i == 0]


def _errors(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Return the errors over the tokens of all ranks, relative by norm."""
    squares = [[(x - y).square().sum(), y.square().sum()] for x, y in zip(results, truth, strict=True)]
    total = torch.tensor(squares)
    dist.all_reduce(total)
    return (total[:, 0] / total[:, 1]).sqrt().tolist()


def _leaves(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in inputs[:3]]


def _watched(attend: Attend, inputs: list[Tensor]) -> tuple[int, int, list[Tensor]]:
    """Return the bytes kept for backward, the peak bytes, and output and gradients."""
    leaves, size = _leaves(inputs), inputs[0].nbytes
    with LiveStorages() as live:
        out = attend(*leaves)
        time.sleep(0.02)
        kept = live.bytes - size
        grads = torch.autograd.grad(out, leaves, inputs[3])
        return kept, live.peak_bytes - (1 + len(grads)) * size, [out.detach(), *grads]


def _time_once(attend: Attend, row: Row, inputs: list[Tensor]) -> None:
    leaves = _leaves(inputs)
    dist.barrier()
    start = time.perf_counter()
    out = attend(*leaves)
    row.forward.append(time.perf_counter() - start)
    dist.barrier()
    start = time.perf_counter()
    torch.autograd.grad(out, leaves, inputs[3])
    row.both.append(row.forward[-1] + time.perf_counter() - start)


def summarise(ranks: list[list[Row]]) -> list[Summary]:
    """Combine the rows of all ranks, which have the same contenders in the same order."""
    summaries = []
    for rows in zip(*ranks, strict=True):
        first = rows[0]
        forward, both = (
            statistics.median([max(times) * 1e3 for times in zip(*series, strict=True)] or [math.nan])
            for series in ([row.forward for row in rows], [row.both for row in rows])
        )
        memory = (first.extra / MIB, first.kept / MIB)
        what = (first.label, first.ring, first.ulysses, first.ours, first.failure, first.errors)
        summaries.append(Summary(*what, *memory, forward, both))
    return summaries


WAYS = ("same factorisation", "best against best", "default against best")


def against_peers(rows: list[Summary], dtype: torch.dtype) -> dict[str, dict[str, tuple[float, str]]]:
    """Return, for times and memory, the ratio of ours to the best correct peer and that peer, in each of three ways."""
    mine = [row for row in rows if row.ours and not row.failure]
    able = [row for row in rows if not row.ours and row.is_correct(dtype)]
    ratios = {}
    for name in ("forward", "both", "extra") if mine else ():
        alike = [row for row in able if (row.ring, row.ulysses) == (mine[0].ring, mine[0].ulysses)]
        best = min(mine, key=lambda row, name=name: _sortable(getattr(row, name)))
        ratios[name] = {}
        for way, ours, others in zip(WAYS, (mine[0], best, mine[0]), (alike, able, able), strict=True):
            peer = min(others, key=lambda row, name=name: _sortable(getattr(row, name)), default=None)
            if peer and getattr(peer, name) > 0:
                ratios[name][way] = (getattr(ours, name) / getattr(peer, name), peer.label)
    return ratios


def _sortable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def compare(worlds: list[int], sizes: list[int]) -> bool:
    """Print the tables, and return whether ours is always correct."""
    correct, refused = True, {}
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    titles = {"forward": "forward", "both": "forward + backward", "extra": "extra memory"}
    preload = ("torch", "diffusers.models.attention_dispatch", "yunchang", "fsdp_cp.attention")
    for world, tokens in itertools.product(worlds, sizes):
        with RankPool(world, timeout=900, preload=preload) as pool:
            heads, seconds = CASES[tokens]
            failed = {label: why for (at, label), why in refused.items() if at == world}
            start = time.monotonic()
            ranks = pool.run(measure, world, tokens, heads, seconds, failed)
            print(f"\n## {world} ranks, {tokens} tokens ({time.monotonic() - start:.0f} s)")
            for dtype in TOLERANCE:
                rows = summarise([rank[dtype] for rank in ranks])
                case = f"{world} ranks, {tokens} tokens x {heads} heads x {HEAD_DIM}, {str(dtype).split('.')[1]}"
                _print_rows(case, rows, dtype, len(ranks[0][dtype][0].forward))
                correct &= all(row.is_correct(dtype) for row in rows if row.ours)
                refused |= {(world, row.label): row.failure for row in rows if row.failure}
                for name, ways in against_peers(rows, dtype).items():
                    cells = ", ".join(f"{way} {ratio:.2f} ({peer})" for way, (ratio, peer) in ways.items())
                    print(f"- {titles[name]}: {cells}")
                    for way, (ratio, peer) in ways.items():
                        ratios.setdefault((titles[name], way), []).append((ratio, f"{case}, against {peer}"))
    print("\n## Does not run\n\n| ranks | contender (ring x ulysses) | why |\n|---|---|---|")
    for (world, label), failure in refused.items():
        print(f"| {world} | {label} | {failure[:160].replace('|', '/')} |")
    print("\n## Ratios of ours to the best correct peer, over all cases\n")
    print("| what | way | median | worst | where | above 1.05 |\n|---|---|---|---|---|---|")
    for (name, way), pairs in ratios.items():
        values, (worst, where) = [ratio for ratio, _ in pairs], max(pairs)
        above = f"{sum(ratio > 1.05 for ratio in values)} of {len(values)}"
        print(f"| {name} | {way} | {statistics.median(values):.2f} | {worst:.2f} | {where} | {above} |")
    print(f"\nOurs is {'correct throughout' if correct else 'WRONG OR FAILS: see the rows in bold'}", flush=True)
    return correct


def _print_rows(case: str, rows: list[Summary], dtype: torch.dtype, rounds: int) -> None:
    print(f"\n### {case} ({rounds} rounds)\n")
    names = " | ".join(("forward ms", "forward + backward ms", *NAMES, "extra MiB", "kept MiB"))
    print(f"| contender (ring x ulysses) | {names} |\n|---|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (not row.ours, math.isnan(row.both), row.both)):
        if row.failure and not row.ours:
            continue  # listed once, at the end
        if row.failure:
            print(f"| **{row.label}** | {row.failure} | | | | | | | |")
            continue
        errors = " | ".join(f"{e:.1e}" if e <= TOLERANCE[dtype] else f"**{e:.1e} wrong**" for e in row.errors)
        times = "| | |" if math.isnan(row.both) else f"| {row.forward:.1f} | {row.both:.1f} |"
        print(f"| {row.label} {times} {errors} | {row.extra:.2f} | {row.kept:.2f} |")
    print(flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cp_attention", description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=at_least_1, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--tokens", type=int, nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="1k and 2k tokens only")
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread a rank\n")
    return 0 if compare(args.world, args.tokens[:2] if args.quick else args.tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
