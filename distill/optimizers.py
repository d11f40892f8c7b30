"""AdamW of one role, its learning-rate schedule, and its state as a checkpoint sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distill.config import OptimizerSettings
from models.role import Role


def learning_rate(settings: OptimizerSettings, update: int, updates: int) -> float:
    """Rate of the ``update``-th (0-based) of ``updates`` updates of a role.

    Linear warm-up from ``lr / warmup``, then constant, or half a cosine towards ``final_lr * lr``.
    """
    if update < settings.warmup:
        return settings.lr * (update + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = min(1.0, (update - settings.warmup) / max(1, updates - settings.warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * cosine)


class RoleOptimizer:
    """AdamW over a role's sharded masters.

    Adam's state is made at once, not at the first step: a checkpoint written before this role's first update then
    has the same entries as any other, and memory does not grow later.
    """

    def __init__(self, role: Role, settings: OptimizerSettings):
        self.role, self.settings = role, settings
        # betas as floats: an integer 0 raises in torch 2.13.
        betas = (float(settings.betas[0]), float(settings.betas[1]))
        self.adamw = torch.optim.AdamW(
            role.parameters(),
            lr=settings.lr,
            betas=betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            foreach=True,  # torch does not choose it for DTensors by itself, and loops over the parameters
        )
        for parameter in role.parameters():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float) -> None:
        """One update with rate ``lr``; gradients are cleared afterwards."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()

    def clear_gradients(self) -> None:
        """Forget the gradients without an update."""
        self.adamw.zero_grad()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Adam's state by parameter name; the tensors are the live ones, so loading into them restores it."""
        names: dict[Any, str] = {p: name for name, p in self.role.network.named_parameters()}
        return {names[p]: dict(state) for p, state in self.adamw.state.items()}
