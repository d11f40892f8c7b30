"""Memory, traffic and time of the sharding strategies: ``python -m benchmarks.sharding``.

Trains a small Wan, mostly blocks, with the trainer's steps (AdamW, micro-batches, gradient clipping). Memory and
traffic are exact; ``tests/distributed/test_sharding_memory.py`` compares them with what follows from the parameters'
sizes. Times are of CPU processes over gloo: they show waiting and repeated work, but not the overlap on a GPU.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import at_least_1
from distill.config.schema import OptimizerSettings
from distill.train.optimizers import RoleOptimizer
from fsdp_cp import Mesh, ShardSettings, build_mesh, microbatch
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.reduce import grad_norm
from fsdp_cp.runtime.local_ranks import RankPool
from models.condition import Condition
from models.roles.load import build_role
from models.roles.role_plan import plan_role
from models.sample import Sample
from tests.oracles.sharding_memory import ShardingMemory, storage_bytes
from tests.oracles.tiny_wan import ARCHITECTURE

WAN = ARCHITECTURE | {"num_layers": 8, "attention_head_dim": 32, "ffn_dim": 512}  # dim 128
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Case:
    """Sharding strategy to measure."""

    label: str
    settings: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1

    @property
    def sharding(self) -> ShardSettings:
        return ShardSettings(**self.settings)


REFERENCE = "optim_grads_params"
CASES = (
    Case("no_shard", {"strategy": "no_shard"}),
    Case("optim", {"strategy": "optim"}),
    Case("optim_grads", {"strategy": "optim_grads"}),
    Case(REFERENCE),
    Case("HSDP, 2 replicas", {}, replicas=2),
    Case("+ keep_gathered", {"keep_gathered": True}),
    Case("+ activation_checkpointing=full", {"activation_checkpointing": "full"}),
    Case("+ activation_checkpointing=selective", {"activation_checkpointing": "selective"}),
    Case("+ offload=cpu", {"offload": "cpu"}),
    Case("+ gather_stream=compute", {"gather_stream": "compute"}),
    Case("+ forward_prefetch=2", {"forward_prefetch": 2}),
    Case("+ backward_prefetch=2", {"backward_prefetch": 2}),
    Case("+ gradient_buffers=1", {"gradient_buffers": 1}),
)


@dataclass
class Figures:
    """Figures of one rank, or their maximum over ranks. All except the last four are bytes."""

    parameters: int = 0
    gradients: int = 0
    """Bytes of the shards' gradients at the end of a step."""
    kept: int = 0
    """Bytes of all gradients between two micro-batches."""
    optimizer: int = 0
    peak_gathered: int = 0
    """Peak bytes of gathered parameters."""
    peak_parameters: int = 0
    """Peak bytes of gathered parameters and staging buffers of all-gathers."""
    peak_gradients: int = 0
    buffers: int = 0
    """Peak number of units whose full gradients wait for their reduction."""
    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent, by kind of collective."""
    seconds: float = 0.0


LATENT_SHAPE, TEXT_SHAPE = (4, 3, 8, 8), (5, 10)  # 48 tokens
MIB = 2**20


# --- on the ranks ---


class Training:
    """Role and its optimizer on this rank."""

    def __init__(self, case: Case, mesh: Mesh):
        world = dist.get_world_size()
        plan = plan_role("student", checkpoint=None, architecture=dict(WAN), sharding=case.sharding)
        self.role = build_role(
            plan,
            mesh=mesh,
            device=torch.device("cpu"),
            trainable=True,
            shapes={"video": LATENT_SHAPE},
            condition_shapes={"text": TEXT_SHAPE},
        )
        self.settings = OptimizerSettings(lr=1e-5)
        self.optimizer = RoleOptimizer(self.role, self.settings)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(1, *LATENT_SHAPE, generator=generator)
        self.condition = Condition({"text": torch.randn(1, *TEXT_SHAPE, generator=generator)})
        self.share = 1 / (MICRO_BATCHES * world)

    def step(self, memory: ShardingMemory | None = None, figures: Figures | None = None) -> None:
        """Make one update, and record gradient bytes in ``figures``."""
        network = self.role.network
        for i in range(MICRO_BATCHES):
            last = i == MICRO_BATCHES - 1
            with microbatch(network, is_first=i == 0, is_last=last):
                loss = (
                    self.role.velocity(Sample({"video": self.x}), torch.full((1,), 0.3 + 0.4 * i), self.condition)
                    .video.square()
                    .mean()
                )
                (loss * self.share).backward()
            if memory is not None and not last:
                figures.kept = sum(memory.bytes[k] for k in ("full_gradients", "reduce_inputs", "shard_gradients"))
        grad_norm(self.role.parameters())
        if figures is not None:
            figures.gradients = storage_bytes(p.grad for p in network.parameters())
        self.optimizer.step(self.settings.lr)


def measure(cases: tuple[Case, ...], rounds: int) -> list[Figures]:
    """Return this rank's figures for each case. Timed steps of the cases alternate, so that noise hits all cases."""
    world = dist.get_world_size()
    meshes = {n: build_mesh(dp_replicate=n, dp_shard=world // n) for n in {case.replicas for case in cases}}
    trainings = [Training(case, meshes[case.replicas]) for case in cases]
    measured = []
    for training in trainings:
        training.step()
        figures = Figures(parameters=storage_bytes(training.role.network.parameters()))
        peaks = []
        with ShardingMemory(training.role.network) as memory:
            for _ in range(2):  # take the minimum: gloo's threads may hold a buffer longer than FSDP2 does
                memory.settle("staging", "reduce_inputs")
                memory.reset_peak()
                training.step(memory, figures)
                peak = (memory.peak["gathered"], memory.peak_parameters, memory.peak_gradients)
                peaks.append((*peak, memory.peak_reduce_inputs))
        least = [min(column) for column in zip(*peaks, strict=True)]
        figures.peak_gathered, figures.peak_parameters, figures.peak_gradients, figures.buffers = least
        figures.optimizer = storage_bytes(x for state in training.optimizer.state.values() for x in state.values())
        with CollectiveCounter() as counter:
            training.step()
        figures.calls, figures.sent = dict(counter.calls), dict(counter.bytes)
        measured.append(figures)
    times: list[list[float]] = [[] for _ in cases]
    for i in range(rounds):
        for taken, training in list(zip(times, trainings, strict=True))[:: 1 if i % 2 else -1]:
            dist.barrier()
            started = time.perf_counter()
            training.step()
            dist.barrier()
            taken.append(time.perf_counter() - started)
    for figures, taken in zip(measured, times, strict=True):
        figures.seconds = statistics.median(taken)
    return measured


# --- the report ---


def greatest(ranks: list[Figures]) -> Figures:
    """Return the maximum over ranks of each figure."""
    result = Figures()
    for name, value in vars(result).items():
        values = [getattr(figures, name) for figures in ranks]
        if isinstance(value, dict):
            kinds = sorted({kind for v in values for kind in v})
            setattr(result, name, {kind: max(v.get(kind, 0) for v in values) for kind in kinds})
        else:
            setattr(result, name, max(values))
    return result


def report(world: int, rounds: int) -> None:
    """Print both tables for ``world`` ranks."""
    cases = tuple(case for case in CASES if world > case.replicas)
    with RankPool(world, timeout=600, preload=("torch", "models.roles.load")) as pool:
        ranks = pool.run(measure, cases, rounds)
    rows = [(case, greatest([r[i] for r in ranks])) for i, case in enumerate(cases)]
    reference = next(figures for case, figures in rows if case.label == REFERENCE)
    print(f"\n## {world} ranks, {MICRO_BATCHES} micro-batches a step; MiB of the rank with most\n")
    names = ("parameters", "gradients", "optimizer", "kept", "peak_gradients", "peak_gathered", "peak_parameters")
    print("| strategy | " + " | ".join(name.replace("_", " ") for name in names) + " | gradient buffers |")
    print("|---" * (len(names) + 2) + "|")
    for case, figures in rows:
        cells = " | ".join(f"{getattr(figures, name) / MIB:.2f}" for name in names)
        print(f"| {case.label} | {cells} | {figures.buffers} |")
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    print("\n| strategy | " + " | ".join(f"{k} calls | MiB sent" for k in kinds) + f" | step / {REFERENCE} |")
    print("|---" * (2 * len(kinds) + 2) + "|")
    for case, figures in rows:
        cells = " | ".join(f"{figures.calls.get(k, 0)} | {figures.sent.get(k, 0) / MIB:.2f}" for k in kinds)
        print(f"| {case.label} | {cells} | {figures.seconds / reference.seconds:.2f} |")
    print(f"\n{REFERENCE}: {1000 * reference.seconds:.0f} ms a step (median of {rounds}).", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=at_least_1, nargs="+", default=[4], help="numbers of ranks")
    parser.add_argument("--rounds", type=at_least_1, default=3, help="timed steps of each strategy")
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, gloo, {platform.machine()}, one thread a rank")
    for world in args.world:
        report(world, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
