"""Simulation of a method's steps on fake tensors: the training code runs as rank 0 of a fake world.

Memory is counted as these operations allocate it. Formulas cover only what kernels and backends allocate internally.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from distill.config import Config
from distill.evaluate.guard import SEEDS
from distill.evaluate.sampling import TEACHER_STEPS
from distill.methods import Batch, Method, build_method
from distill.methods.common.observations import Observations
from distill.planning.roles import HOST, Watch, busiest_expert, is_offloaded
from distill.run.setup import RunPlan
from distill.train.gradients import accumulate_gradients
from distill.train.optimizers import Trained, averaged, build_training
from fsdp_cp.measure.fake_world import fake_world
from fsdp_cp.measure.memory import LiveStorages, Peak
from fsdp_cp.measure.phases import phase, phase_now
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.reduce import grad_square
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding import activations
from fsdp_cp.sharding.allocations import has_run
from fsdp_cp.sharding.state import resharded
from models.condition import Condition
from models.roles.role import Role
from models.sample import Sample

LOOK = "look"
"""Name of a look of the guard in :attr:`Simulation.steps`: its samples, without their decoding, their
measures and the teacher's clips of the first one."""

SPARSE_EFFICIENCY = 0.45
"""Rate of the kernels of sparse attention as a share of the dense ones'; FastVideo's 29.5 and 13 s of a clip of Wan 14B
on an H200 imply it. Ours are not measured."""


@dataclass
class StepCost:
    """Operations and traffic of one step of one role on rank 0."""

    flops: float = 0.0
    """Operations of the networks for the samples of one data-parallel rank, including backward and tangents, without
    recomputation."""
    recomputed: float = 0.0
    """Operations of forwards that activation checkpointing repeats, without attention if ``selective`` keeps its
    output."""
    sparse: float = 0.0
    """Operations of sparse attention in :attr:`flops` and :attr:`recomputed`."""
    sent: Mapping[tuple[str, str], float] = field(default_factory=Counter)
    """Bytes sent, by kind of collective and group; see :class:`CollectiveCounter`."""
    copied: float = 0.0
    """Bytes of activations that move to host memory and back (``activation_offload``)."""

    @property
    def at_dense_rate(self) -> float:
        """Operations that dense kernels make in the time of all, recomputation included."""
        return self.flops + self.recomputed + self.sparse * (1 / SPARSE_EFFICIENCY - 1)

    def plus(self, other: StepCost, times: float = 1.0) -> StepCost:
        keys = {**self.sent, **other.sent}
        return StepCost(
            flops=self.flops + times * other.flops,
            recomputed=self.recomputed + times * other.recomputed,
            sparse=self.sparse + times * other.sparse,
            sent={key: self.sent.get(key, 0) + times * other.sent.get(key, 0) for key in keys},
            copied=self.copied + times * other.copied,
        )


@dataclass
class Simulation:
    """Memory, operations and traffic of a run's steps on rank 0."""

    resting: dict[tuple[str, str], int]
    """Bytes between steps, by role and kind; :data:`HOST` is a kind."""
    peaks: dict[str, Peak]
    """Peaks by phase of a step, e.g. ``"student/dmd/backward"``; labels are (role, kind)."""
    steps: dict[str, StepCost]
    """Mean cost of the run's steps that train a role, by role, and of the guard's :data:`LOOK`."""
    host: Peak = field(default_factory=lambda: Peak(0, {}))
    """Peak of host memory; labels are (role, :data:`HOST`)."""
    queries: dict[str, int] = field(default_factory=dict)
    """Number of elements of the largest attention layer's queries over all samples and ranks of ``cp``, by phase, for
    forwards that have a backward."""

    @property
    def peak(self) -> Peak:
        return max(self.peaks.values(), key=lambda peak: peak.bytes)


@dataclass
class _Lengths:
    """Values of the random integers of a step, which decide how many forwards it runs."""

    above: int | None = None
    """Distance of all integers from their lower bounds; ``None``: they take the upper ones."""
    spans: set[int] = field(default_factory=set)
    """Distances between different bounds of the integers that a step drew."""


@dataclass(frozen=True, kw_only=True)
class _Draws(StepRandom):
    """Random streams without values; ``lengths`` sets the integers."""

    lengths: _Lengths
    has_values: ClassVar[bool] = False

    def normal(self, purpose: str, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(len(self.positions), *shape, dtype=dtype)

    def uniform(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(len(self.positions), dtype=dtype)

    def shared_integer(self, purpose: str, low: int, high: int) -> int:
        self.lengths.spans |= {high - low} - {0}
        return high if self.lengths.above is None else min(low + self.lengths.above, high)


def simulate(config: Config, plan: RunPlan, *, stands_for: str = "cpu") -> Simulation:
    """Run some steps of ``config`` on fake tensors, without GPU, weights, clips or a process group, with the tile sizes
    of the device type ``stands_for`` in attention's derivative."""
    with fake_world(plan.mesh.world, stands_for) as fakes:
        return run_steps(config, plan, fakes)


def run_steps(
    config: Config, plan: RunPlan, tensors: AbstractContextManager, *, every_micro_batch: bool = False
) -> Simulation:
    """Run the steps of :func:`simulate` in the existing process group. ``tensors`` is a ``FakeTensorMode``, or an empty
    context for real ones. With ``every_micro_batch``, run all of a step, and the longest rollouts; else extrapolate
    from one and two micro-batches, and from the two shortest rollouts."""
    mesh = mesh_of_shape(plan.mesh, device_type="cpu")
    storages = LiveStorages(place=phase_now, elsewhere=lambda label: label is not None and label[1] == HOST, fakes=True)
    sent, watch = CollectiveCounter(), Watch(storages)
    roles = watch.build_roles(plan, mesh, tensors)
    experts = {name: busiest_expert(role, roles.values()) for name, role in roles.items()}
    method = build_method(config.method, {name: role.single(experts[name]) for name, role in roles.items()})
    with tensors, sent, storages:
        run = _Run(config, plan, method, watch, sent)
        # The other experts only take memory, which these references keep alive.
        idle = [
            run.training_of(roles[name], index)
            for name in plan.method.trained_roles
            for index in roles[name].trained_experts
            if index != experts[name]
        ]
        chosen = {name: method.representative_steps(name, config.steps) for name in plan.method.trained_roles}
        chosen = {name: steps for name, steps in chosen.items() if steps}  # a short run may not reach a role
        with mock.patch.object(activations, "host_buffer", run.host_buffer):
            # Warm up: in a first forward FSDP2 prefetches nothing and allocates buffers that it keeps.
            run.lengths.above = 0
            for steps in chosen.values():
                step, run.lengths.spans = next(iter(steps)), set()
                run.costs_of_one[step] = run.measured(step, run.batches[:1]), run.lengths.spans
            with ExitStack() as stack:
                for role in {id(role.network): role for role in method.roles.values()}.values():
                    if has_run(role.network):  # FSDP2 has state to watch only after a first forward
                        stack.enter_context(watch.sharding(role))
                gc.collect()  # cycles of the warm-up would rest until Python happens to find them
                storages.reset_peak()
                resting = {label: size for label, size in storages.by.items() if size}
                costs = {name: run.cost(steps, every_micro_batch) for name, steps in chosen.items()}
                costs |= run.sample()
    del roles, idle
    return Simulation(resting=resting, peaks=storages.peaks, steps=costs, host=storages.away, queries=watch.queries)


class _Run:
    """The part of the trainer that allocates memory: a step with accumulation, clipping, update and EMA."""

    def __init__(self, config: Config, plan: RunPlan, method: Method, watch: Watch, sent: CollectiveCounter):
        self.config, self.plan, self.method, self.watch = config, plan, method, watch
        self.storages, self.sent, self.copied = watch.storages, sent, 0
        self.lengths = _Lengths()
        self.costs_of_one: dict[int, tuple[StepCost, set[int]]] = {}
        """Costs of steps of one micro-batch with the shortest rollout, from the warm-up, whose memory is unusual, and
        :attr:`_Lengths.spans`."""
        self.allocate_host_buffer = activations.host_buffer
        self.trained = {name: self.training_of(method.roles[name], 0) for name in plan.method.trained_roles}
        method.student_average = partial(averaged, [self.trained[name] for name in self.trained if name == "student"])
        self.accumulation = config.batch_size // plan.mesh.dp // plan.micro_batch_size
        with self.storages.labelled(("data", "activations")):
            # The trainer holds all micro-batches of a step at once.
            self.batches = [self._batch(self.plan.micro_batch_size) for _ in range(self.accumulation)]

    def _labelled(self, role: Role, kind: str) -> AbstractContextManager:
        return self.storages.labelled((role.name, HOST if is_offloaded(role) else kind))

    def training_of(self, role: Role, index: int) -> Trained:
        """Return the training state of a network, with labels."""
        with self._labelled(role, "optimizer"):
            trained = build_training(self.config, role, index, name=role.name, updates=self.config.steps)
        for weight in trained.average.weights.values() if trained.average is not None else ():
            self.storages.relabel(weight, (role.name, HOST if is_offloaded(role) else "ema"))
        return trained

    def host_buffer(self, like: Tensor, pinned: bool) -> Tensor:
        """Allocate a host buffer instead of :func:`activations.host_buffer`; count its bytes and label it."""
        self.copied += like.nbytes
        with self.storages.labelled((self.storages.label[0], HOST)):
            return self.allocate_host_buffer(like, pinned)

    def _batch(self, count: int) -> Batch:
        shapes, condition_shapes = self.plan.shapes
        clock = self.method.clock("student")
        values = {name: torch.zeros(shape) for name, shape in condition_shapes.items() if name.startswith("text")}
        tensors = {name: torch.zeros(count, *shape) for name, shape in condition_shapes.items()}
        times = self.method.state_times(self.config.method)

        def zeros(*sizes: int) -> Sample:
            return Sample({part: torch.zeros(*sizes, *shapes[part]) for part in clock}, clock)

        return Batch(
            latents=zeros(count) if self.config.data.has_clips or times else None,
            condition=Condition(tensors, values, values).with_noise(lambda _, shape: torch.zeros(count, *shape)),
            latent_shapes={part: shapes[part] for part in clock},
            latent_shifts=clock,
            states=zeros(count, len(times)) if times else None,
        )

    def step(self, step: int, batches: list[Batch]) -> None:
        name = self.method.trained_role(step)
        role = self.method.roles[name]
        with self.storages.labelled((name, "activations")):
            share = self.plan.micro_batch_size / self.config.batch_size
            random = self._draws(step, self.plan.micro_batch_size)
            accumulate_gradients(self.method, step, batches, share=share, random=lambda i: random)
            # Offloaded gradients are clipped on the host.
            with phase(f"{name}/clip"), self._labelled(role, "activations"):
                grad_square(role.parameters())
            with phase(f"{name}/update"), self._labelled(role, "optimizer"):
                self.trained[name].update(1.0 if self.config.optim.clip_of(name) is None else 0.5)
        self.method.observations = Observations()

    @torch.no_grad()
    def sample(self) -> dict[str, StepCost]:
        """Make a rank's first samples of each role that the run samples. Two steps suffice: all use the same memory.

        Return the cost of a look of the guard, which is a multiple, by the name :data:`LOOK`."""
        chosen, looks, costs = self.config.sample, self.config.guard, {}
        if not (chosen.at_end or chosen.every or looks.every):
            return costs
        of_look = SEEDS * looks.captions if looks.every else 0
        clips = max(len(chosen.captions) or chosen.prompts, chosen.report_clips, of_look)
        count = min(self.plan.micro_batch_size, -(-clips // self.plan.mesh.dp))
        random = self._draws(0, count)
        of_teacher = chosen.teacher_steps or [TEACHER_STEPS] * (looks.every > 0)
        for name, steps in (("student", chosen.student_steps), ("teacher", of_teacher)):
            if not steps or name not in self.method.roles:
                continue
            networks = [role.network for role in self.method.roles.values()]
            with self.storages.labelled((name, "activations")), self.method.student_average():
                with phase(f"sample/{name}"), resharded(networks):
                    batch = self._batch(count)
                    noise = batch.noise(random, "sample/noise")
                    made = self.method.least_steps(name, steps)
                    cost = self.counted(partial(self.method.generate, name, noise, batch.condition, made, random))
            if name == "student" and looks.every:
                batches = -(-of_look // (count * self.plan.mesh.dp))
                costs[LOOK] = StepCost().plus(cost, batches * max(steps) / made)
        return costs

    def cost(self, steps: Mapping[int, float], every_micro_batch: bool) -> StepCost:
        """Return the mean cost of ``steps``, weighted by their shares, with all micro-batches of a step."""
        mean = StepCost()
        for step, share in steps.items():
            mean = mean.plus(self._mean_of_lengths(step, every_micro_batch), share)
        mean.sent = Counter({key: round(size) for key, size in mean.sent.items()})
        return mean

    def _mean_of_lengths(self, step: int, every_micro_batch: bool) -> StepCost:
        """Return the mean cost over the integers that a step draws; it is linear in a rollout's length. One more
        micro-batch costs two minus one, since a step may reduce gradients or gather weights only once; longer rollouts
        add the same to each, so two run with the shortest alone. The next longer rollout shows the peaks of all."""
        few = self.batches if every_micro_batch else self.batches[:1]
        more = self.accumulation - len(few)
        self.lengths.above = 0
        mean, spans = (None, set()) if every_micro_batch else self.costs_of_one.get(step, (None, set()))
        if mean is None or not (more or spans):  # several micro-batches and longer rollouts also show a step's peaks
            self.lengths.spans = spans = set()
            mean = self.measured(step, few)
        another = self.measured(step, self.batches[:2]).plus(mean, -1) if more else StepCost()
        if spans:
            span, self.lengths.above = 1, None
            if len(spans) == 1 and not every_micro_batch:
                (span,), self.lengths.above = spans, 1
            longer = self.measured(step, few).plus(mean, -1)
            mean, another = mean.plus(longer, span / 2), another.plus(longer, span / 2)
        return mean.plus(another, more)

    def measured(self, step: int, batches: list[Batch]) -> StepCost:
        """Run a step on ``batches`` and return its cost."""
        return self.counted(partial(self.step, step, batches))

    def counted(self, work: Callable[[], Any]) -> StepCost:
        """Return the cost of ``work``."""
        roles = self.method.roles.values()
        for role in roles:
            role.flops = role.sparse_flops = 0
        self.watch.recomputed = self.watch.recomputed_sparse = 0.0
        self.sent.by_group.clear()
        self.copied = 0
        work()
        return StepCost(
            flops=sum(role.flops for role in roles),
            recomputed=self.watch.recomputed,
            sparse=self.watch.recomputed_sparse + sum(role.sparse_flops for role in roles),
            sent=Counter(self.sent.by_group),
            copied=self.copied,
        )

    def _draws(self, step: int, count: int) -> StepRandom:
        return _Draws(seed=0, step=step, positions=range(count), lengths=self.lengths)
