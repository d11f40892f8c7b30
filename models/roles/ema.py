"""Exponential moving average (EMA) of a role's fp32 masters, with the same sharding."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fsdp_cp.reduce import lerp_, local_shard, local_shards
from models.roles.role import Role


class Ema:
    """EMA of ``role``'s weights: DTensors with the masters' dtype and sharding.

    ``decay`` is the constant factor ``b`` of the old average, or ``None`` for the power schedule ``b = (1 - 1/(i + 1))
    ** (gamma + 1)`` (Karras et al. 2024, eq. 121). Before the update ``start`` the EMA copies the weights.
    """

    def __init__(self, role: Role, *, decay: float | None, gamma: float, start: int):
        self.role, self.decay, self.gamma, self.start = role, decay, gamma, start
        weights = role.weights()
        # In bf16 an average would stand still; the plan of a run refuses it.
        assert all(weight.dtype in (torch.float32, torch.float64) for weight in weights.values())
        self.weights: dict[str, Tensor] = {name: weight.clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Update the EMA after the role's ``update``-th optimizer step (0-based)."""
        i = update - self.start
        b = 0.0 if i < 0 else self.decay if self.decay is not None else (1 - 1 / (i + 1)) ** (self.gamma + 1)
        current = self.role.weights()
        lerp_(local_shards(self.weights.values()), local_shards(current[name] for name in self.weights), 1 - b)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run the role with the EMA weights within this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        current = self.role.weights()
        for name, average in self.weights.items():
            averaged, weight = local_shard(average), local_shard(current[name])
            kept = weight.clone()
            weight.copy_(averaged)
            averaged.copy_(kept)
