"""A method's steps on fake tensors: the run's own code on rank 0 of a world that is not there, and what it held.

Networks are built, split, sharded and called as in training, on a fake process group (fsdp_cp/fake_world.py); only
weights, clips and numbers are missing. Memory is therefore what the same operations allocate, and nothing is a formula
but what no operation shows: the memory that kernels and backends allocate for themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from distill.config import Config
from distill.gradients import accumulate_gradients
from distill.methods import Batch, Method, build_method
from distill.observations import Observations
from distill.optimizers import RoleOptimizer
from distill.planning.watched import HOST, Shapes, WatchedRole, WatchedSharding, build_watched, is_offloaded
from distill.setup import RunPlan
from fsdp_cp.fake_world import fake_world
from fsdp_cp.measure.attributed import AttributedStorages, Peak
from fsdp_cp.measure.phases import phase, phase_now
from fsdp_cp.measure.sharding_memory import has_run
from fsdp_cp.measure.traffic import CollectiveCounter
from fsdp_cp.mesh import mesh_of_shape
from fsdp_cp.reduce import grad_square, scale_grads
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding import activations
from fsdp_cp.sharding.pool import pool_at
from models.condition import Condition
from models.ema import Ema
from models.role import Role


@dataclass
class StepCost:
    """What one step of one role takes on rank 0."""

    flops: float = 0.0
    """Of the networks, backward and tangents counted, recomputation not; of the samples of one data-parallel rank."""
    recomputed: float = 0.0
    """Of forwards that activation checkpointing runs again; without attention where ``selective`` keeps its output."""
    sent: Mapping[tuple[str, str], float] = field(default_factory=Counter)
    """Bytes by kind of collective and group; see :class:`CollectiveCounter`."""
    copied: float = 0.0
    """Bytes of activations that go to the host's memory, and come back (``activation_offload``)."""

    def plus(self, other: StepCost, times: float = 1.0) -> StepCost:
        """The sum with ``times`` as much as ``other``."""
        return StepCost(
            flops=self.flops + times * other.flops,
            recomputed=self.recomputed + times * other.recomputed,
            sent={key: self.sent.get(key, 0) + times * other.sent.get(key, 0) for key in {**self.sent, **other.sent}},
            copied=self.copied + times * other.copied,
        )


@dataclass
class Simulation:
    """What the steps of a run hold, compute and send on rank 0."""

    resting: dict[tuple[str, str], int]
    """Bytes between steps, by role and kind; :data:`HOST` among them."""
    peaks: dict[str, Peak]
    """By phase of a step, e.g. ``"student/dmd/backward"``; labels are of role and kind."""
    steps: dict[str, StepCost]
    """Mean over the run's steps at which a role trains, by role."""
    host: Peak = field(default_factory=lambda: Peak(0, {}))
    """The most in host memory; labels are of role and :data:`HOST`."""
    queries: dict[str, int] = field(default_factory=dict)
    """Elements of the largest attention layer's queries, of all samples and ranks of ``cp``, by phase of a forward that
    has a backward."""

    @property
    def peak_phase(self) -> str:
        """The phase in which most is held."""
        return max(self.peaks, key=lambda name: self.peaks[name].bytes)

    @property
    def peak(self) -> Peak:
        """What is held then."""
        return self.peaks[self.peak_phase]


@dataclass
class _Lengths:
    """How the whole numbers of a step come out, which say how many forwards it runs."""

    shortest: bool = False
    """All at their lower end; else at the upper one."""
    differ: bool = False
    """Was one drawn whose ends differ?"""


@dataclass(frozen=True, kw_only=True)
class _Draws(StepRandom):
    """Draws without values; whole numbers as ``lengths`` has them."""

    lengths: _Lengths

    def normal(self, purpose: str, shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(len(self.positions), *shape, dtype=dtype)

    def uniform(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(len(self.positions), dtype=dtype)

    def shared_integer(self, purpose: str, low: int, high: int) -> int:
        self.lengths.differ |= low < high
        return low if self.lengths.shortest else high


@dataclass
class _HostBuffers:
    """Where activations are moved to, while :meth:`watched`."""

    bytes: int = 0
    """Moved since this was last set to 0."""

    @contextmanager
    def watched(self, storages: AttributedStorages) -> Iterator[None]:
        """They have the kind :data:`HOST`, and the role for which they are made."""
        allocate = activations.host_buffer

        def labelled(size: int, pinned: bool) -> Tensor:
            assert isinstance(storages.label, tuple)
            self.bytes += size
            with storages.labelled((storages.label[0], HOST)):
                return allocate(size, pinned)

        with mock.patch.object(activations, "host_buffer", labelled):
            yield


def simulate(config: Config, plan: RunPlan, shapes: Shapes, *, stands_for: str = "cpu") -> Simulation:
    """Run some steps of ``config`` on fake tensors; takes no GPU, weights, clips or process group.

    Args:
        config: the checked configuration.
        plan: of it, for the world that is asked about.
        shapes: of a sample's latents and condition.
        stands_for: device type whose tiles attention's forward-mode derivative takes.

    Raises:
        RuntimeError: there is a process group.
    """
    with fake_world(plan.mesh.world, stands_for) as fakes:
        return run_steps(config, plan, shapes, fakes)


def run_steps(
    config: Config,
    plan: RunPlan,
    shapes: Shapes,
    tensors: AbstractContextManager,
    *,
    every_micro_batch: bool = False,
) -> Simulation:
    """:func:`simulate`'s steps in the process group that there is.

    Args:
        config, plan, shapes: as of :func:`simulate`.
        tensors: a ``FakeTensorMode``; or a context of nothing, and they are real, of random weights, and measured.
        every_micro_batch: run all of a step's, where its cost is else told from one and two.
    """
    mesh = mesh_of_shape(plan.mesh, device_type="cpu")
    storages = AttributedStorages(
        place=phase_now, elsewhere=lambda label: label is not None and label[1] == HOST, fakes=True
    )
    sent, host_buffers, queries = CollectiveCounter(), _HostBuffers(), {}
    method = build_method(config.method, build_watched(plan, shapes, mesh, storages, tensors, queries))
    with tensors, sent, storages, host_buffers.watched(storages):
        run = _Run(config, plan, shapes, method, storages, sent, host_buffers)
        chosen = {name: method.representative_steps(name, config.steps) for name in plan.method.trained_roles}
        chosen = {name: steps for name, steps in chosen.items() if steps}  # a short run may not reach a role
        with _planned_pools(method, storages) as pooled:
            for steps in chosen.values():  # a first forward gathers nothing ahead, and FSDP2 allocates what it keeps
                for step in steps if pooled else list(steps)[:1]:
                    run.step(step, run.batches[: 2 if pooled else 1])
        with ExitStack() as stack:
            for role in {id(role.network): role for role in method.roles.values()}.values():
                # without a first forward there is nothing to watch
                if has_run(role.network):
                    stack.enter_context(WatchedSharding(role, storages))
            storages.reset_peaks()
            resting = {label: size for label, size in storages.by.items() if size}
            costs = {name: run.cost(steps, every_micro_batch) for name, steps in chosen.items()}
            run.sample()
    return Simulation(resting=resting, peaks=storages.peaks, steps=costs, host=storages.away, queries=queries)


@contextmanager
def _planned_pools(method: Method, storages: AttributedStorages) -> Iterator[bool]:
    """Inside, the buffers of collectives are noted of networks that pool them (are there any?); then they are planned.

    Every kind of step must run inside, and a second micro-batch: what is alive at once is not to be seen of fake
    tensors that share memory. The memory is that of the first role that has a part in it.
    """
    networks = {name: role.network for name, role in method.roles.items()}
    pools = {id(pool): (name, pool) for name, each in reversed(networks.items()) if (pool := pool_at(each)) is not None}
    for _, pool in pools.values():
        pool.put_off = True
    yield bool(pools)
    for name, pool in pools.values():
        pool.put_off = False
        with storages.labelled((name, "gathered")):
            pool.end_step()


class _Run:
    """The part of the trainer that allocates: a step of accumulation, clipping, update and average."""

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        shapes: Shapes,
        method: Method,
        storages: AttributedStorages,
        sent: CollectiveCounter,
        host_buffers: _HostBuffers,
    ):
        self.config, self.plan, self.shapes, self.method = config, plan, shapes, method
        self.storages, self.sent, self.host_buffers = storages, sent, host_buffers
        self.lengths = _Lengths()
        self.optimizers: dict[str, RoleOptimizer] = {}
        self.averages: dict[str, Ema] = {}
        self.held: list[RoleOptimizer | Ema] = []
        for name in plan.method.trained_roles:
            role, ema = method.roles[name], getattr(config, name).ema
            with storages.labelled((name, HOST if is_offloaded(role) else "optimizer")):
                self.optimizers[name] = RoleOptimizer(role, getattr(config.optim, name))
            if ema.enabled:
                with storages.labelled((name, HOST if is_offloaded(role) else "ema")):
                    self.averages[name] = Ema(role, decay=ema.decay, gamma=ema.gamma, start=ema.start)
            self._hold(role, config)
        if "student" in self.averages:
            method.student_average = self.averages["student"].swapped_in
        self.accumulation = config.batch_size // plan.mesh.dp // plan.micro_batch_size
        with storages.labelled(("data", "activations")):
            # the trainer has a step's all at once
            self.batches = [self._batch(self.plan.micro_batch_size) for _ in range(self.accumulation)]

    def _hold(self, role: WatchedRole, config: Config) -> None:
        """The states of experts that no step of the simulation runs."""
        ema = getattr(config, role.name).ema
        for network in role.idle:
            expert = Role(name=role.name, networks=(network,), trainable=True)
            host = HOST if is_offloaded(role) else None
            with self.storages.labelled((role.name, host or "optimizer")):
                self.held.append(RoleOptimizer(expert, getattr(config.optim, role.name)))
            if ema.enabled:
                with self.storages.labelled((role.name, host or "ema")):
                    self.held.append(Ema(expert, decay=ema.decay, gamma=ema.gamma, start=ema.start))

    def _batch(self, count: int) -> Batch:
        latent_shape, condition_shapes = self.shapes
        values = {name: torch.zeros(shape) for name, shape in condition_shapes.items() if name.startswith("text")}
        tensors = {name: torch.zeros(count, *shape) for name, shape in condition_shapes.items()}
        trajectory = None
        if self.config.method.name == "ode_regression":
            trajectory = torch.zeros(count, len(self.config.method.step_list), *latent_shape)
        return Batch(
            latents=torch.zeros(count, *latent_shape) if self.config.data.has_clips or trajectory is not None else None,
            condition=Condition(tensors, values, values),
            latent_shape=latent_shape,
            trajectory=trajectory,
        )

    def step(self, step: int, batches: list[Batch]) -> None:
        """One step of the run, on the ``batches`` alone."""
        name = self.method.trained_role(step)
        role = self.method.roles[name]

        def random(i: int) -> StepRandom:
            return self._draws(step, self.plan.micro_batch_size)

        with self.storages.labelled((name, "activations")):
            share = self.plan.micro_batch_size / self.config.batch_size
            accumulate_gradients(self.method, step, batches, share=share, random=random)
            host = is_offloaded(role)  # where the gradients are, these work too
            with phase(f"{name}/clip"), self.storages.labelled((name, HOST if host else "activations")):
                grad_square(role.parameters())
                if self.config.optim.clip is not None:
                    scale_grads(role.parameters(), 0.5)
            with phase(f"{name}/update"):
                with self.storages.labelled((name, HOST if host else "optimizer")):
                    self.optimizers[name].step(1e-5)
                if name in self.averages:
                    with self.storages.labelled((name, HOST if host else "ema")):
                        self.averages[name].update(step)
        self.method.observations = Observations()

    @torch.no_grad()
    def sample(self) -> None:
        """A rank's first samples of each role that the run samples, in as few steps as show what one holds."""
        chosen = self.config.sample
        if not (chosen.at_end or chosen.every):
            return
        clips = max(len(chosen.captions) or chosen.prompts, chosen.report_clips)
        count = min(self.plan.micro_batch_size, -(-clips // self.plan.mesh.dp))
        random = self._draws(0, count)
        for name, steps in (("student", chosen.student_steps), ("teacher", chosen.teacher_steps)):
            if not steps or name not in self.method.roles:
                continue
            with self.storages.labelled((name, "activations")), self.method.student_average():
                with phase(f"sample/{name}", [role.network for role in self.method.roles.values()]):
                    batch = self._batch(count)
                    noise = random.normal("sample/noise", batch.latent_shape)
                    self.method.generate(name, noise, batch.condition, min(2, *steps), random)

    def cost(self, steps: Mapping[int, float], every_micro_batch: bool) -> StepCost:
        """The mean over ``steps`` by their shares, of as many micro-batches as a step has."""
        mean = StepCost()
        for step, share in steps.items():
            mean = mean.plus(self._mean_of_lengths(step, every_micro_batch), share)
        mean.sent = Counter({key: round(size) for key, size in mean.sent.items()})
        return mean

    def _mean_of_lengths(self, step: int, every_micro_batch: bool) -> StepCost:
        """Of one step, over the whole numbers that it draws: what a rollout costs grows evenly with its steps.

        What one micro-batch more computes and sends is the difference of two and one: gradients may be reduced, and
        weights gathered, once a step, however long its rollouts.
        """
        self.lengths.shortest = self.lengths.differ = False
        few = self.batches if every_micro_batch else self.batches[:1]
        longest = self._summed(step, few)
        more = self.accumulation - len(few)
        another = self._summed(step, self.batches[:2]).plus(longest, -1) if more else StepCost()
        mean = longest
        if self.lengths.differ:
            self.lengths.shortest = True
            shortest = self._summed(step, few)
            mean = longest.plus(shortest.plus(longest, -1), 0.5)
            # It is shorter by as much in every micro-batch.
            another = another.plus(shortest.plus(longest, -1), 0.5)
        return mean.plus(another, more)

    def _summed(self, step: int, batches: list[Batch]) -> StepCost:
        roles = self.method.roles.values()
        for role in roles:
            role.flops, role.recomputed = 0, 0.0
        self.sent.by_group.clear()
        self.host_buffers.bytes = 0
        self.step(step, batches)
        return StepCost(
            flops=sum(role.flops for role in roles),
            recomputed=sum(role.recomputed for role in roles),
            sent=Counter(self.sent.by_group),
            copied=self.host_buffers.bytes,
        )

    def _draws(self, step: int, count: int) -> StepRandom:
        return _Draws(seed=0, step=step, positions=range(count), lengths=self.lengths)
