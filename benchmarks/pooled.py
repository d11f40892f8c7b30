"""What pooled buffers of collectives hold and allocate: ``python -m benchmarks.pooled``.

DMD2 (teacher, student, fake score) by the real trainer, with samples of student and teacher between some steps, and two
lengths of clips; once with torch's own buffers and once with ``communication_buffers=pooled``. Buffers are watched from
outside of the pool: each must lie where nothing else is alive, and weights must come out the same to the bit. A bound
that is broken ends the run with 1.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.methods import Batch
from distill.methods.dmd2 import Dmd2Settings
from fsdp_cp.local_ranks import RankPool
from fsdp_cp.measure.phases import phase
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.pool import BufferPool, pool_at
from tests.oracles import sharded_run
from tests.oracles.buffers import BufferWatch, union
from tests.oracles.full_tensors import full_tensors
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import RecordingTrainer, make_trainer
from tests.oracles.tiny_wan import ARCHITECTURE, write_checkpoints

WAN = ARCHITECTURE | {"num_layers": 8, "attention_head_dim": 32, "ffn_dim": 512}  # dim 128
FAKE_UPDATES = 2
"""Per update of the student: it trains at steps 0, 3, 6, ... and the fake score at the others."""
SAMPLE_EVERY = 5
SETTLED = 0.005
"""Seconds, before each buffer, in which gloo's threads let go of the ones before, where lifetimes are noted."""
CASES: dict[str, dict[str, Any]] = {
    "2 ranks, dp=2": {"dp_shard": 2},
    "2 ranks, cp=2": {"cp": 2},
    "4 ranks, dp=2 x cp=2": {"dp_shard": 2, "cp": 2},
    "4 ranks, 2 replicas x dp=2": {"dp_replicate": 2, "dp_shard": 2},
    "4 ranks, dp=4, bf16": {"dp_shard": 4, "precision": "bf16"},
}
TINY = ("2 ranks, dp=2",)


# --- on the ranks ---


@dataclass
class Figures:
    """Of one rank."""

    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    """The role that trained, by step."""
    requests: list[int] = field(default_factory=list)
    """Buffers asked for, by step; samples that follow it counted."""
    allocations: list[int] = field(default_factory=list)
    """Those of them that lie outside of the pool."""
    overlaps: int = 0
    outputs: int = 0
    """Of reduce-scatters."""
    outputs_in_pool: int = 0
    plans: int = 0
    held: int = 0
    """Bytes of the pool."""
    in_all: int = 0
    """Bytes of all buffers that were ever asked for."""
    most_alive: int = 0
    """At once."""
    per_kind: int = 0
    """Bytes of one memory that is planned for each kind of step by itself: the most of them."""
    per_network: int = 0
    """Bytes of a pool for each network."""
    passes_together: int = 0
    """Bytes of a pool in which a unit's weights lie in the same place in forward and in backward."""


def train(sizes: dict[str, Any], buffers: str, folder: Path, architecture: dict[str, Any], steps: int) -> Figures:
    """All steps on this rank."""
    method = Dmd2Settings(
        fake_updates_per_student_update=FAKE_UPDATES, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0
    )
    setup = Setup(
        **sizes,
        steps=steps,
        method=method,
        architecture=architecture,
        changes={"all": {"communication_buffers": buffers}},
    )
    sharded_run._mesh.cache_clear()  # a pool is a mesh's, and would know the networks of the run before
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    networks = {name: role.network for name, role in trainer.method.roles.items()}
    pool = pool_at(networks["student"]) or BufferPool()
    data, figures = _two_lengths(trainer), Figures()
    # Torch's own buffers tell the lifetimes; the pool's are watched as they come, with nothing to help it.
    with BufferWatch(networks, patience=0.0 if buffers == "pooled" else SETTLED) as watch:
        watch.in_memory = pool.owns
        for step in range(steps):
            watch.kind = trainer.method.trained_role(step)
            before = watch.requests, watch.outside
            trainer._train_step(data)
            if (step + 1) % SAMPLE_EVERY == 0:
                watch.kind = "samples"
                _sample(trainer)
            figures.trained.append(trainer.method.trained_role(step))
            figures.requests.append(watch.requests - before[0])
            figures.allocations.append(watch.outside - before[1])
    whole = union(watch.traces)
    figures.weights = {name: full_tensors(role.weights()) for name, role in trainer.roles.items()}
    figures.overlaps, figures.outputs, figures.outputs_in_pool = watch.overlaps, watch.outputs, watch.outputs_in_memory
    figures.plans, figures.held = pool.plans, pool.nbytes
    figures.in_all, figures.most_alive = whole.in_all, whole.most_alive
    figures.per_kind = max(trace.held() for trace in watch.traces.values())
    figures.per_network = sum(whole.held(name) for name in networks)
    figures.passes_together = whole.held(passes_apart=False)
    return figures


def _two_lengths(trainer: RecordingTrainer) -> Iterator[list[Batch]]:
    """The trainer's data; two steps of whole clips, two of their first frames, and so on."""
    for step, batches in enumerate(trainer._steps_of_data()):
        if step % 4 < 2:
            yield batches
        else:
            short = [batch.latents[:, :, :2].contiguous() for batch in batches]
            yield [
                replace(batch, latents=latents, latent_shape=tuple(latents.shape[1:]))
                for batch, latents in zip(batches, short, strict=True)
            ]


def _sample(trainer: RecordingTrainer) -> None:
    networks = [role.network for role in trainer.method.roles.values()]
    random = StepRandom(seed=1, step=0, positions=[0, 1])
    condition = trainer.data.condition(["0", "1"])
    for role, steps in (("student", 2), ("teacher", 2)):
        with phase(f"sample/{role}", networks), torch.no_grad():
            noise = random.normal("sample/noise", trainer.data.latent_shape)
            trainer.method.generate(role, noise, condition, steps, random)


def both(*args: Any) -> tuple[Figures, Figures, bool]:
    """Figures with torch's own buffers and with pooled ones; are all weights the same to the bit?"""
    sizes, *rest = args
    own, pooled = (train(sizes, buffers, *rest) for buffers in ("default", "pooled"))
    same = all(
        torch.equal(x, pooled.weights[role][name]) for role, named in own.weights.items() for name, x in named.items()
    )
    own.weights, pooled.weights = {}, {}
    return own, pooled, same


# --- the host ---


def host_microseconds(buffers: int = 160, rounds: int = 30) -> tuple[float, float]:
    """CPU time that one buffer takes, from the pool and from torch's allocator: the least of the rounds."""
    pool, kinds = BufferPool(), [[] for _ in range(buffers)]  # type: list[list[Any]]
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    ways: list[Callable[[list[Any]], Tensor]] = [
        lambda kind: pool.allocate(kind, "a unit", (1000,), **options),
        lambda kind: torch.empty(1000, **options),
    ]
    least = [math.inf, math.inf]
    for i in range(rounds + 1):
        for way, allocate in enumerate(ways):
            alive: deque[Tensor] = deque(maxlen=4)
            started = time.process_time()
            for kind in kinds:
                alive.append(allocate(kind))
            alive.clear()
            if i:  # the first round is what the plan is made of
                least[way] = min(least[way], time.process_time() - started)
        pool.end_step()
    assert pool.allocations == buffers, "planned"
    return least[0] / buffers * 1e6, least[1] / buffers * 1e6


# --- the report ---


def faults_of(own: Figures, pooled: Figures, same: bool) -> list[str]:
    """What must hold and does not."""
    found = []
    if not same:
        found.append("weights differ from those with torch's own buffers")
    if pooled.overlaps or pooled.outputs_in_pool:
        found.append(f"{pooled.overlaps} buffers over living ones, {pooled.outputs_in_pool} gradients in the pool")
    if any(pooled.allocations[2:]):
        found.append(f"allocations after the second step: {pooled.allocations}")
    if pooled.requests != own.requests:
        found.append("other requests than with torch's own buffers")
    if not 0 < pooled.held < own.in_all:
        found.append(f"holds {pooled.held} bytes, of {own.in_all} in all and {own.most_alive} at once")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooled", description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="one mesh, a smaller network and fewer steps")
    args = parser.parse_args(argv)
    architecture, steps = (dict(ARCHITECTURE), 6) if args.tiny else (WAN, 20)
    cases = {name: sizes for name, sizes in CASES.items() if name in TINY or not args.tiny}
    print(
        f"torch {torch.__version__}, gloo, {platform.machine()}, one thread a rank; DMD2, three networks of"
        f" {architecture['num_layers']} blocks, {steps} steps of two lengths, samples after every {SAMPLE_EVERY}th; KiB"
        " and calls of the rank with most."
    )
    found: dict[str, list[tuple[Figures, Figures, bool]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoints(Path(folder), architecture)
        for name, sizes in cases.items():
            world = Setup(**sizes).world_size
            with RankPool(world, timeout=1800, preload=("torch", "distill.trainer", "models.load")) as ranks:
                found[name] = ranks.run(both, sizes, Path(folder), architecture, steps)
    print(
        "\n| | buffers asked for in a step | allocated, torch's own | pooled: step 1 | step 2 | all later steps |"
        " times planned | same weights |\n|---|---|---|---|---|---|---|---|"
    )
    for name, ranks_of in found.items():
        own, pooled = ranks_of[0][:2]
        later = max(sum(p.allocations[2:]) for _, p, _ in ranks_of)
        first, second = (max(p.allocations[i] for _, p, _ in ranks_of) for i in (0, 1))
        print(
            f"| {name} | {min(own.requests)} to {max(own.requests)} | all | {first} | {second} | {later} |"
            f" {max(p.plans for _, p, _ in ranks_of)} | {'yes' if all(s for *_, s in ranks_of) else 'NO'} |"
        )
    print(
        "\n| | all buffers | most alive at once | held by the pool | of what is alive | of all |"
        " planned for each kind of step | one place for both passes | a pool for each network |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for name, ranks_of in found.items():
        kib = {
            key: max(getattr(figures[0], key) for figures in ranks_of) / 1024
            for key in ("in_all", "most_alive", "per_network", "per_kind", "passes_together")
        }
        held = max(pooled.held for _, pooled, _ in ranks_of) / 1024
        print(
            f"| {name} | {kib['in_all']:.1f} | {kib['most_alive']:.1f} | {held:.1f} | {held / kib['most_alive']:.3f} |"
            f" {held / kib['in_all']:.3f} | {kib['per_kind']:.1f} | {kib['passes_together']:.1f} |"
            f" {kib['per_network']:.1f} |"
        )
    faults = [f"{name}: {fault}" for name, ranks_of in found.items() for each in ranks_of for fault in faults_of(*each)]
    outputs = sum(own.outputs for own, _, _ in next(iter(found.values()))[:1])
    print(f"\nOutputs of reduce-scatters, which become gradients and are not pooled: {outputs} in {steps} steps.")
    pooled_time, own_time = host_microseconds()
    print(f"Host, CPU time: {pooled_time:.0f} us a buffer from the pool, {own_time:.0f} from torch's allocator.")
    print("\n" + ("\n".join(f"BROKEN: {fault}" for fault in faults) if faults else "all bounds kept"), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
