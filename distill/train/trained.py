"""Trained network with its optimizer, learning rate, average and count of updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distill.config import Config
from distill.config.schema import OptimizerSettings
from distill.methods import Method
from distill.train.optimizers import RoleOptimizer, learning_rate
from fsdp_cp.reduce import scale_grads
from fsdp_cp.rng import StepRandom
from models.roles.ema import Ema
from models.roles.role import Role


@dataclass(kw_only=True)
class Trained:
    """Trained network with its training state. A role has one such network, or one per trained expert."""

    name: str
    """Name in logs and checkpoints: the role's, or ``ROLE.EXPERT``."""
    role: Role
    """Role that the network serves."""
    index: int
    """Position among the role's networks."""
    single: Role
    """View of the role with only this network."""
    settings: OptimizerSettings
    """``optim.ROLE``."""
    optimizer: RoleOptimizer
    average: Ema | None
    """Exponential moving average of the weights, if the role keeps one."""
    all_updates: int
    """Number of updates of this network in the whole run."""
    updates: int = 0
    """Number of updates so far."""

    def weights(self, *, averaged: bool = False) -> Mapping[str, Tensor]:
        """Return the sharded masters, or their average, by public name."""
        if averaged and self.average is not None:
            return self.average.weights
        return self.single.weights()

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return learning_rate(self.settings, self.updates, self.all_updates)

    def update(self, scale: float | None = None) -> None:
        """Update the weights with the gradients times ``scale``, update the average, and clear the gradients."""
        if scale is not None:
            scale_grads(self.single.parameters(), scale)
        self.optimizer.step(self.rate())
        if self.average is not None:
            self.average.update(self.updates)
        self.updates += 1

    def tensors(self) -> dict[str, Any]:
        """Return the live tensors that a checkpoint holds: weights, Adam's state, and the average."""
        tensors: dict[str, Any] = {"weights": self.weights(), "adamw": self.optimizer.state()}
        if self.average is not None:
            tensors["ema"] = self.average.weights
        return tensors

    @property
    def adapter_folder(self) -> str:
        """Name of the export folder of the network's adapters: ``ROLE_lora``, or ``ROLE_lora_EXPERT``."""
        role, _, expert = self.name.partition(".")
        return f"{role}_lora_{expert}" if expert else f"{role}_lora"


def build_trained(config: Config, method: Method) -> dict[str, Trained]:
    """Return the networks that ``method`` trains, by :attr:`Trained.name`, in the order of roles and networks."""
    counts, trained = count_updates(config, method), {}
    for role in (method.roles[name] for name in method.trained_roles):
        settings, ema = getattr(config.optim, role.name), getattr(config, role.name).ema
        for name, index in role.trained_networks.items():
            single = role.single(index)
            trained[name] = Trained(
                name=name,
                role=role,
                index=index,
                single=single,
                settings=settings,
                optimizer=RoleOptimizer(single, settings),
                average=Ema(single, decay=ema.decay, gamma=ema.gamma, start=ema.start) if ema.enabled else None,
                all_updates=counts[role.name, index],
            )
    return trained


def count_updates(config: Config, method: Method) -> Counter[tuple[str, int]]:
    """Return the number of updates that each network gets in this run, by role and position.

    For experts, count the steps whose random draw selects the expert.
    """
    counts: Counter[tuple[str, int]] = Counter()
    for step in range(config.steps):
        role = method.roles[method.trained_role(step)]
        if not role.has_experts:
            counts[role.name, 0] += 1
            continue
        streams = (StepRandom(seed=config.seed, step=step, positions=(), part=i) for i in range(config.expert_draws))
        networks = {index for draws in streams for index in method.networks(step, draws).values()}
        counts.update((role.name, index) for index in networks)
    return counts


@contextmanager
def averaged(trained: Iterable[Trained]) -> Iterator[None]:
    """Within this context, the networks compute with their averages, where they have one."""
    with ExitStack() as stack:
        for network in trained:
            if network.average is not None:
                stack.enter_context(network.average.swapped_in())
        yield
