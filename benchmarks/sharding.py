"""Memory, traffic and time of the sharding strategies, compared with the ideal: ``python -m benchmarks.sharding``.

Trains a small Wan, mostly blocks, with the trainer's steps (AdamW, micro-batches, gradient clipping). Memory and
traffic are exact, and have bounds that follow from the parameter sizes; the exit code is 1 if a bound is broken. Times
are of CPU processes over gloo: they show waiting and repeated work, but not the overlap on a GPU.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import at_least_1
from benchmarks.sharding_bounds import (
    CASES,
    MICRO_BATCHES,
    REFERENCE,
    WAN,
    Case,
    Figures,
    broken,
    expected,
    greatest,
    sizes_of,
)
from benchmarks.sharding_memory import ShardingMemory, storage_bytes
from distill.config.schema import OptimizerSettings
from distill.train.optimizers import RoleOptimizer
from distill.train.trainer import Trainer
from fsdp_cp import Mesh, build_mesh, microbatch
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.reduce import grad_norm
from fsdp_cp.runtime.local_ranks import RankPool
from models.condition import Condition
from models.roles.load import build_role
from models.roles.role_plan import plan_role
from tests.oracles.runs import Setup, make_config
from tests.oracles.sharded_run import make_trainer
from tests.oracles.tiny_wan import ARCHITECTURE, write_checkpoints

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
            latent_shape=LATENT_SHAPE,
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
        self.role.gather_early()
        for i in range(MICRO_BATCHES):
            last = i == MICRO_BATCHES - 1
            with microbatch(network, is_first=i == 0, is_last=last):
                loss = self.role.velocity(self.x, torch.full((1,), 0.3 + 0.4 * i), self.condition).square().mean()
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


@dataclass
class Idle:
    """Bytes on this rank in a step of three networks."""

    others: dict[str, int]
    """Peak gathered bytes of each idle role at the start of another role's forward."""
    after: int = 0
    """Gathered bytes of all roles after the backward passes of a step."""
    fake_gradients: int = 0
    """Peak gradient bytes of the fake score in a student step."""
    student_gradients: int = 0
    teacher_gradients: int = 0


def measure_three(strategies: dict[str, str], folder: Path) -> Idle:
    """Measure a student step and a fake-score step of DMD2 in the trainer, after one warm-up step of each."""
    changes = {name: {"strategy": strategy} for name, strategy in strategies.items()}
    setup = Setup(dp_shard=dist.get_world_size(), changes=changes)
    trainer = make_trainer(setup, folder, make_config(setup, folder))
    trainer._update = lambda *args: Trainer._update(trainer, *args)
    data = trainer._steps_of_data()
    for _ in range(2):
        trainer._train_step(data)
    roles = trainer.method.roles
    idle = Idle(others=dict.fromkeys(roles, 0))
    memory = {name: ShardingMemory(role.network) for name, role in roles.items()}

    def gathered(name: str) -> int:
        memory[name].settle("staging")
        return memory[name].bytes["gathered"] + memory[name].bytes["staging"]

    def update(*args: Any) -> None:
        idle.after = max(idle.after, sum(gathered(name) for name in roles))
        Trainer._update(trainer, *args)

    def begins(running: str) -> None:
        for name in roles:
            if name != running:
                idle.others[name] = max(idle.others[name], gathered(name))

    trainer._update = update
    hooks = [
        role.network.register_forward_pre_hook(lambda *_, name=name: begins(name), prepend=True)
        for name, role in roles.items()
    ]
    with memory["teacher"], memory["student"], memory["fake"]:
        trainer._train_step(data)  # the student's
        idle.fake_gradients = memory["fake"].peak_gradients
        memory["student"].reset_peak()
        trainer._train_step(data)  # the fake score's
        idle.student_gradients = memory["student"].peak_gradients
        idle.teacher_gradients = memory["teacher"].peak_gradients
    for hook in hooks:
        hook.remove()
    return idle


# --- the report ---


def report(world: int, rounds: int) -> bool:
    """Print both tables for ``world`` ranks, and return whether all bounds hold."""
    cases = tuple(case for case in CASES if world > case.replicas)
    with RankPool(world, timeout=600, preload=("torch", "distill.train.trainer", "models.roles.load")) as pool:
        ranks = pool.run(measure, cases, rounds)
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoints(Path(folder), ARCHITECTURE | {"num_layers": 3})
            mixed = {"teacher": REFERENCE, "student": "optim_grads", "fake": "optim"}
            three = [
                (strategies, pool.run(measure_three, strategies, Path(folder)))
                for strategies in (dict.fromkeys(mixed, REFERENCE), mixed)
            ]
    rows = [(case, greatest([r[i] for r in ranks]), expected(case, world)) for i, case in enumerate(cases)]
    faults = [f"{case.label}: {fault}" for case, figures, ideal in rows for fault in broken(figures, ideal)]
    sizes = sizes_of(world)
    reference = next(figures for case, figures, _ in rows if case.label == REFERENCE)
    print(f"\n## {world} ranks\n")
    print(
        f"{sizes.full / MIB:.2f} MiB of parameters ({sizes.full / world / MIB:.2f} a rank), {sizes.units - 1} blocks of"
        f" {sizes.block / MIB:.2f} and {sizes.root / MIB:.2f} outside of them; {MICRO_BATCHES} micro-batches a step."
        " MiB of the rank with most; in brackets what must be: the first"
        " three equal it, the others are at most that.\n"
    )
    print(
        "| strategy | parameters | gradients | optimizer state | all gradients between micro-batches | peak gradients |"
        " peak gathered | and staging | gradient buffers |\n|---|---|---|---|---|---|---|---|---|"
    )
    pair = lambda a, b: f"{a / MIB:.2f} ({b / MIB:.2f})"  # noqa: E731
    names = ("parameters", "gradients", "optimizer", "kept", "peak_gradients", "peak_gathered", "peak_parameters")
    for case, figures, ideal in rows:
        cells = " | ".join(pair(getattr(figures, name), getattr(ideal, name)) for name in names)
        print(f"| {case.label} | {cells} | {figures.buffers} ({ideal.buffers}) |")
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    print("\n| strategy | " + " | ".join(f"{k} calls | MiB sent" for k in kinds) + f" | step / {REFERENCE} |")
    print("|---|---|---|---|---|---|---|---|")
    for case, figures, ideal in rows:
        cells = " | ".join(
            f"{figures.calls.get(k, 0)} ({ideal.calls[k]}) | {pair(figures.sent.get(k, 0), ideal.sent[k])}"
            for k in kinds
        )
        print(f"| {case.label} | {cells} | {figures.seconds / reference.seconds:.2f} |")
    print(f"\n{REFERENCE}: {1000 * reference.seconds:.0f} ms a step (median of {rounds}).")
    print("\nThree networks, a student step and a fake-score step of DMD2; KiB of the rank with most:\n")
    print("| teacher, student, fake | idle roles gathered | after the gradients | gradients of idle trained roles |")
    print("|---|---|---|---|")
    for strategies, idles in three:
        others = max(max(idle.others.values()) for idle in idles)
        after = max(idle.after for idle in idles)
        gradients = max(max(i.fake_gradients, i.student_gradients, i.teacher_gradients) for i in idles)
        print(
            f"| {', '.join(strategies.values())} | {others / 1024:.1f} | {after / 1024:.1f} | {gradients / 1024:.1f} |"
        )
        if after or gradients or (others and set(strategies.values()) == {REFERENCE}):
            faults.append(f"an idle role holds more than its shards: {others}, {after}, {gradients} bytes")
    print("\n" + ("\n".join(f"BROKEN: {fault}" for fault in faults) if faults else "all bounds kept"), flush=True)
    return not faults


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding", description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=at_least_1, nargs="+", default=[4], help="numbers of ranks")
    parser.add_argument("--rounds", type=at_least_1, default=3, help="timed steps of each strategy")
    args = parser.parse_args(argv)
    print(f"torch {torch.__version__}, gloo, {platform.machine()}, one thread a rank")
    kept = [report(world, args.rounds) for world in args.world]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
