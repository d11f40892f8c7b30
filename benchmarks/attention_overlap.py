"""Does communication run during attention? ``python -m benchmarks.attention_overlap --out timeline.png``.

Forward and backward of context-parallel attention on local gloo processes of one thread each. What a rank does is
recorded here, around the library: the attention kernel's spans; every message from its issue to its completion, which
a thread of its own waits for (torch's profiler ends a ``gloo:send`` where it is waited for, not where it has left);
and the spans in which the rank had to wait. *Hidden* is the share of the time with any message in flight in which the
kernel was at work. Each row is the fastest of ``--rounds`` steps, the one that other processes disturbed least.

Two links. *gloo*: as it is. Its copies through the kernel take the very cores that compute, so little can be gained.
*held*: each message, once gloo has delivered it, is held back for its bytes / ``--link``, one after another in each
direction, at no cost to any core. That is an emulation: it shows what the order of calls lets overlap, not what a GPU
would reach. *Blocking* is the control: the same, but every message is waited for where it is issued.

Exit codes: 0; 1 if the control shows an overlap, since then the measure is wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_cp.attention import context_parallel_attention, ring, ulysses
from fsdp_cp.attention.cpu_kernels import CpuFlash
from fsdp_cp.local_ranks import RankPool
from fsdp_cp.mesh import build_mesh

WORLD = 4
HEADS, HEAD_DIM = 16, 32
SETUPS = ((4, 1, 1), (1, 4, 1), (1, 4, 4), (2, 2, 2))
"""(ring, ulysses, head_groups)."""
KERNEL = ("kernel, forward", "kernel, backward")
MESSAGES = ("K, V", "dK, dV", "all-to-all")
WAIT = "waiting"

Interval = tuple[float, float]


def _now() -> float:
    return time.perf_counter() * 1e3


@dataclass(frozen=True)
class Span:
    what: str
    start: float
    """ms since the start of the step."""
    stop: float


@dataclass
class Recorder:
    """What one rank does in one step."""

    link: float
    """Bytes per ms that a message is held back by; 0 does not hold it."""
    blocking: bool
    started: float = 0.0
    spans: list[Span] = field(default_factory=list)
    exchanges: dict[int, Message] = field(default_factory=dict)
    """All-to-alls under way, by the address of their result."""
    directions: dict[str, threading.Lock] = field(
        default_factory=lambda: {"out": threading.Lock(), "in": threading.Lock()}
    )

    def add(self, what: str, start: float) -> None:
        self.spans.append(Span(what, start - self.started, _now() - self.started))

    def send(self, what: str, wait: Callable[[], object], size: float, direction: str) -> Message:
        message = Message(self, what, wait, size, direction)
        if self.blocking:
            message.wait()
        return message


class Message:
    """A ``Work`` whose completion is noted when it happens."""

    def __init__(self, recorder: Recorder, what: str, wait: Callable[[], object], size: float, direction: str):
        self.recorder, self.what, self.size, self.direction = recorder, what, size, direction
        self.issued, self.complete, self.error = _now(), wait, None
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        try:
            self.complete()
        except RuntimeError as error:  # a peer is gone: raised where the rank waits
            self.error = error
            return
        if self.recorder.link:
            with self.recorder.directions[self.direction]:
                time.sleep(self.size / self.recorder.link / 1e3)
        self.recorder.add(self.what, self.issued)

    def wait(self) -> None:
        start = _now()
        self.thread.join()
        if self.error is not None:
            raise self.error
        self.recorder.add(WAIT, start)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record the kernel, the ring's hops and the exchanges of this process."""
    forward, backward, hop = CpuFlash.forward, CpuFlash.backward, ring.Ring.start_hop
    begin, finish = ulysses._begin, ulysses._finish

    def timed(kernel: Callable, what: str) -> Callable:
        def call(*args):
            start = _now()
            out = kernel(*args)
            recorder.add(what, start)
            return out

        return call

    def start_hop(self: ring.Ring, send: Tensor | None, receive: Tensor | None, tag: int) -> list[Message]:
        what = MESSAGES[0] if tag == ring._KEYS_TAG else MESSAGES[1]
        sides = [(x, name) for x, name in ((send, "out"), (receive, "in")) if x is not None]
        works = hop(self, send, receive, tag)
        return [recorder.send(what, work.wait, x.nbytes, name) for work, (x, name) in zip(works, sides, strict=True)]

    def begin_exchange(x: Tensor, group: str) -> Tensor:
        result = begin(x, group)
        size = x.nbytes * (x.shape[0] - 1) / x.shape[0]
        recorder.exchanges[result.data_ptr()] = recorder.send(MESSAGES[2], lambda: finish(result), size, "out")
        return result

    def finish_exchange(x: Tensor) -> Tensor:
        recorder.exchanges.pop(x.data_ptr()).wait()
        return x

    CpuFlash.forward, CpuFlash.backward = timed(forward, KERNEL[0]), timed(backward, KERNEL[1])
    ring.Ring.start_hop, ulysses._begin, ulysses._finish = start_hop, begin_exchange, finish_exchange
    try:
        yield
    finally:
        CpuFlash.forward, CpuFlash.backward, ring.Ring.start_hop = forward, backward, hop
        ulysses._begin, ulysses._finish = begin, finish


@dataclass
class Step:
    """One forward and backward on one rank; times in ms."""

    length: float
    spans: list[Span]


def measure(setup: tuple[int, int, int], tokens: int, link: float, rounds: int) -> dict[tuple[bool, bool], list[Step]]:
    """On every rank: steps by (held, blocking), taken in turn, the first of each kind dropped."""
    ring_size, ulysses_size, groups = setup
    mesh = build_mesh(cp=WORLD, ring=ring_size, ulysses=ulysses_size, heads=HEADS)
    generator = torch.Generator().manual_seed(mesh.cp_rank)
    shape = (1, tokens // WORLD, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3))
    weight = torch.randn(shape, generator=generator)
    kinds = [(held, blocking) for held in (False, True) for blocking in (False, True)]
    steps: dict[tuple[bool, bool], list[Step]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):
        for held, blocking in kinds:
            recorder = Recorder(link=link if held else 0.0, blocking=blocking)
            dist.barrier()
            recorder.started = _now()
            with recording(recorder):
                out = context_parallel_attention(q, k, v, mesh=mesh, head_groups=groups)
                torch.autograd.grad(out, (q, k, v), weight)
            steps[held, blocking].append(Step(_now() - recorder.started, recorder.spans))
    return {kind: taken[1:] for kind, taken in steps.items()}


def merged(spans: Iterable[Span], *kinds: str) -> list[Interval]:
    """The times in which any of these kinds was on, without overlaps."""
    union: list[Interval] = []
    for start, stop in sorted((s.start, s.stop) for s in spans if s.what in kinds):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return union


def length(union: list[Interval]) -> float:
    return sum(stop - start for start, stop in union)


def common(a: list[Interval], b: list[Interval]) -> float:
    return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in a for begin, end in b)


@dataclass
class Row:
    """The slowest rank's length of a step, and the ranks' mean of the others, in ms."""

    step: float
    kernel: float
    flight: float
    hidden: float
    """Of ``flight``."""
    waited: float


def fastest(ranks: list[list[Step]]) -> list[Step]:
    """All ranks' part in the step whose slowest rank was fastest."""
    return list(min(zip(*ranks, strict=True), key=lambda steps: max(step.length for step in steps)))


def summarize(steps: list[Step]) -> Row:
    kernels = [merged(step.spans, *KERNEL) for step in steps]
    flights = [merged(step.spans, *MESSAGES) for step in steps]
    return Row(
        step=max(step.length for step in steps),
        kernel=statistics.mean(map(length, kernels)),
        flight=statistics.mean(map(length, flights)),
        hidden=statistics.mean(map(common, flights, kernels)),
        waited=statistics.mean(length(merged(step.spans, WAIT)) for step in steps),
    )


def title(setup: tuple[int, int, int]) -> str:
    ring_size, ulysses_size, groups = setup
    return f"ring {ring_size} x ulysses {ulysses_size}" + (f", {groups} head groups" if groups > 1 else "")


def draw(path: str, timelines: dict[tuple[int, int, int], Step], caption: str) -> None:
    """One panel per setup: what the rank computes, what is in flight, where it waits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = dict(
        zip((*KERNEL, *MESSAGES, WAIT), ("#4c78a8", "#2f4b6e", "#f2a541", "#d1603d", "#7a9e5f", "#c9c9c9"), strict=True)
    )
    lanes = {"kernel": KERNEL, **{what: (what,) for what in MESSAGES}, WAIT: (WAIT,)}
    names = {"kernel": "attention kernel", WAIT: "rank waits", **{what: f"{what} in flight" for what in MESSAGES}}
    shown = {
        setup: [lane for lane, kinds in lanes.items() if lane == WAIT or merged(step.spans, *kinds)]
        for setup, step in timelines.items()
    }
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(10, 0.7 + 0.36 * sum(map(len, shown.values())) + 0.75 * len(timelines)),
        sharex=True,
        layout="constrained",
        gridspec_kw={"height_ratios": [len(lanes) for lanes in shown.values()]},
    )
    for axis, (setup, step) in zip(axes, timelines.items(), strict=True):
        for row, lane in enumerate(shown[setup]):
            for what in lanes[lane]:
                bars = [(start, stop - start) for start, stop in merged(step.spans, what)]
                axis.broken_barh(bars, (row - 0.38, 0.76), facecolor=colours[what], edgecolor="white", linewidth=0.4)
        axis.set_yticks(range(len(shown[setup])), [names[lane] for lane in shown[setup]])
        axis.invert_yaxis()
        axis.set_title(title(setup), loc="left", fontsize=10, fontweight="bold")
        axis.grid(axis="x", linewidth=0.4, alpha=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[-1].set_xlabel("ms since the start of the step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[what]) for what in KERNEL]
    axes[0].legend(handles, ("forward", "backward"), loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    figure.suptitle(caption, fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help=f"of the whole sequence, a multiple of {WORLD}")
    parser.add_argument("--link", type=float, default=100.0, help="MB/s of the held link, each rank and direction")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each kind")
    parser.add_argument("--out", help="draw the timeline of rank 0 here (PNG)")
    args = parser.parse_args()
    if args.tokens < WORLD or args.tokens % WORLD or args.link <= 0 or args.rounds < 1:
        parser.error(f"--tokens must be a multiple of {WORLD}, --link above 0, --rounds at least 1")
    with RankPool(WORLD, timeout=1800, preload=("torch", "fsdp_cp")) as pool:
        taken = {setup: pool.run(measure, setup, args.tokens, args.link * 1e3, args.rounds) for setup in SETUPS}
    best = {
        (setup, kind): fastest([rank[kind] for rank in ranks]) for setup, ranks in taken.items() for kind in ranks[0]
    }
    rows = {key: summarize(steps) for key, steps in best.items()}
    # Forward: two products of 2 S^2 H D; backward five.
    rate = 14 * args.tokens**2 * HEADS * HEAD_DIM / WORLD / rows[SETUPS[0], (False, False)].kernel / 1e6
    machine = f"{os.cpu_count()} cores ({platform.machine()}), load {os.getloadavg()[0]:.0f}, torch {torch.__version__}"
    print(
        f"{args.tokens} tokens x {HEADS} heads of {HEAD_DIM}, fp32, forward + backward;"
        f" {WORLD} gloo ranks of one thread on {machine}\n"
        f"kernel {rate:.0f} GFLOP/s a rank; held link {args.link:g} MB/s = {rate * 1e3 / args.link:.0f} FLOP/byte"
        " (an H20 over NVLink: 148 TFLOP/s / 450 GB/s = 329)\n"
    )
    print("| ring x ulysses | link | messages | step ms | kernel ms | in flight ms | of it hidden | waited ms |")
    print("|---|---|---|---|---|---|---|---|")
    for (setup, (held, blocking)), row in rows.items():
        print(
            f"| {title(setup)} | {'held' if held else 'gloo'} | {'blocking' if blocking else 'as shipped'}"
            f" | {row.step:.0f} | {row.kernel:.0f} | {row.flight:.0f} | {row.hidden / row.flight:.0%}"
            f" | {row.waited:.0f} |"
        )
    if args.out:
        caption = f"Rank 0 of {WORLD}, forward and backward, {args.tokens} tokens, link held to {args.link:g} MB/s"
        draw(args.out, {setup: best[setup, (True, False)][0] for setup in SETUPS}, caption)
    return int(any(row.hidden > 0.01 * row.flight for (_, (_, blocking)), row in rows.items() if blocking))


if __name__ == "__main__":
    raise SystemExit(main())
