"""Trained networks: AdamW with parameter groups, the learning-rate schedule, averages, and a checkpoint's state."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from distill.config.schema import Config, OptimizerSettings
from distill.methods import Method
from distill.methods.base import ANY_SAMPLE
from fsdp_cp.reduce import local_shards
from fsdp_cp.rng import StepRandom
from models.roles.ema import Ema
from models.roles.role import Role

ENOUGH_TRIES = 10
"""Number of steps after which a network that never had a gradient is a mistake."""


def learning_rate(settings: OptimizerSettings, update: int, updates: int) -> float:
    """Return the rate of the 0-based ``update`` of a role's ``updates``: a linear warm-up from ``lr / warmup``, then
    constant or half a cosine to ``final_lr * lr``."""
    if update < settings.warmup:
        return settings.lr * (update + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (update - settings.warmup) / max(1, updates - settings.warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * cosine)


class RoleOptimizer:
    """AdamW over a role's sharded masters, on each rank's local shards as plain tensors: the update is elementwise, and
    on DTensors torch propagates placements for twenty seconds. Parameters and shards are looked up by name at each
    update, since FSDP2 replaces shards (:func:`fsdp_cp.reduce.local_shards`) and loading parameters. Adam's state,
    sharded alike, is allocated here: a checkpoint before the first update has the same entries."""

    def __init__(self, role: Role, settings: OptimizerSettings):
        self.role, self.settings = role, settings
        named = role.named_parameters()
        self.groups = settings.groups(named, f"optim.{role.name}")
        self.state: dict[str, dict[str, Tensor]] = {}
        """Adam's state by parameter name. Loading into these live tensors restores the state."""
        for name, parameter in named.items():
            self.state[name] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """Make one update with the gradients times ``scale``, at ``lr`` times each group's ``lr_scale``, then clear the
        gradients. A parameter without a gradient keeps its value and its step count."""
        named = self.role.named_parameters()
        for group, names in self.groups.items():
            trained = {name: named[name] for name in names if named[name].grad is not None}
            self._update(lr * group.lr_scale, group.weight_decay, trained, scale)
        self.clear_gradients()

    def _update(self, lr: float, weight_decay: float, named: dict[str, nn.Parameter], scale: float) -> None:
        weights = local_shards(named.values())
        if not weights:
            return
        grads = local_shards(parameter.grad for parameter in named.values() if parameter.grad is not None)
        means, squares = (local_shards(self.state[name][key] for name in named) for key in ("exp_avg", "exp_avg_sq"))
        # The fused kernel reads and writes each tensor once and needs no temporary. It counts steps of empty shards
        # too: a checkpoint must hold the same count on every rank to load on another mesh.
        adamw(
            weights,
            grads,
            means,
            squares,
            [],
            [self.state[name]["step"] for name in named],
            fused=True,
            # The kernel divides gradients by it.
            grad_scale=torch.full((), 1 / scale, dtype=torch.float32, device=weights[0].device) if scale != 1 else None,
            amsgrad=False,
            # Convert to float: an integer 0 raises in torch 2.13.
            beta1=float(self.settings.betas[0]),
            beta2=float(self.settings.betas[1]),
            lr=lr,
            weight_decay=weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def clear_gradients(self) -> None:
        for parameter in self.role.parameters():
            parameter.grad = None


@dataclass(kw_only=True)
class Trained:
    """Trained network with its training state. A role has one such network, or one per trained expert."""

    name: str
    """Name in logs and checkpoints: the role's, or ``ROLE.EXPERT``."""
    role: Role
    index: int
    """Position among the role's networks."""
    single: Role
    """View of the role with only this network."""
    optimizer: RoleOptimizer
    average: Ema | None
    """Exponential moving average of the weights, if the role keeps one."""
    all_updates: int
    """Number of updates of this network in the whole run; ``updates`` are those so far."""
    updates: int = 0
    tried: int = 0
    """Number of steps that trained this network, skipped updates included."""
    moved: int = 0
    """Number of updates whose gradient norm was finite and above 0."""

    @property
    def is_stuck(self) -> bool:
        """Whether enough steps trained this network, and none had a gradient. The first gradients of a student that
        equals its teacher can be 0."""
        return self.tried >= ENOUGH_TRIES and not self.moved and self.optimizer.settings.lr > 0

    @property
    def idleness(self) -> str:
        skipped = self.tried - self.updates
        return f"{skipped} of its {self.tried} updates were skipped, and the others had a gradient of 0"

    def weights(self, *, averaged: bool = False) -> Mapping[str, Tensor]:
        """Return the sharded masters, or their average, by public name."""
        if averaged and self.average is not None:
            return self.average.weights
        return self.single.weights()

    def rate(self) -> float:
        return learning_rate(self.optimizer.settings, self.updates, self.all_updates)

    def update(self, scale: float = 1.0) -> None:
        """Update the weights with the gradients times ``scale``, update the average, and clear the gradients."""
        self.optimizer.step(self.rate(), scale)
        if self.average is not None:
            self.average.update(self.updates)
        self.count(self.updates + 1)

    def count(self, updates: int) -> None:
        """Set the number of updates so far, which the ramp of a sparse role follows."""
        self.updates = updates
        self.single.after_updates(updates)

    def tensors(self) -> dict[str, Any]:
        """Return the live tensors that a checkpoint holds: weights, Adam's state, and the average."""
        tensors: dict[str, Any] = {"weights": self.weights(), "adamw": self.optimizer.state}
        if self.average is not None:
            tensors["ema"] = self.average.weights
        return tensors


def build_trained(config: Config, method: Method) -> dict[str, Trained]:
    """Return the networks that ``method`` trains, by :attr:`Trained.name`, in the order of roles and networks."""
    counts, trained = count_updates(config, method), {}
    for role in (method.roles[name] for name in method.trained_roles):
        for name, index in role.trained_networks.items():
            trained[name] = build_training(config, role, index, name=name, updates=counts[role.name, index])
    return trained


def build_training(config: Config, role: Role, index: int, *, name: str, updates: int) -> Trained:
    """Return the training state of the network of ``role`` at ``index``, which gets ``updates`` updates in the run."""
    single, ema = role.single(index), getattr(config, role.name).ema
    return Trained(
        name=name,
        role=role,
        index=index,
        single=single,
        optimizer=RoleOptimizer(single, getattr(config.optim, role.name)),
        average=Ema(single, decay=ema.decay, gamma=ema.gamma, start=ema.start) if ema.enabled else None,
        all_updates=updates,
    )


def count_updates(config: Config, method: Method) -> Counter[tuple[str, int]]:
    """Return the number of updates that each network gets in this run, by role and position; experts by their draws."""
    counts: Counter[tuple[str, int]] = Counter()
    for step in range(config.steps):
        role = method.roles[method.trained_role(step)]
        if not role.has_experts:
            counts[role.name, 0] += 1
            continue
        streams = (StepRandom(seed=config.seed, step=step, positions=(0,), part=i) for i in range(config.expert_draws))
        losses = (loss for random in streams for loss in method.losses(step, ANY_SAMPLE, random))
        counts.update((role.name, index) for index in {role.expert_at(loss.at) for loss in losses})
    return counts


@contextmanager
def averaged(trained: Iterable[Trained]) -> Iterator[None]:
    """Within this context, the networks compute as their exports: with their averages, where they have one, and without
    a training adapter."""
    with ExitStack() as stack:
        for network in trained:
            stack.enter_context(network.single.as_exported())
            if network.average is not None:
                stack.enter_context(network.average.swapped_in())
        yield
