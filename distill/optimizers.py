"""AdamW of one role: its groups of parameters, its learning-rate schedule, and its state as a checkpoint sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distill.config import OptimizerSettings
from fsdp_cp.errors import UserError
from models.additions.base import PREFIX
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


class Group(NamedTuple):
    """What the parameters of one group share."""

    weight_decay: float
    lr_scale: float


def parameter_groups(names: Iterable[str], settings: OptimizerSettings, where: str) -> dict[Group, list[str]]:
    """Which parameters share weight decay and learning rate.

    By name, not by anything that hangs on the tensors: names are the same before sharding and after it, and in a
    checkpoint.

    Args:
        names: of the role's parameters.
        settings: ``no_decay`` and ``lr_scale`` are patterns of names (``fnmatch``: ``*`` is any text, dots included);
            ``additions_lr`` is the rate of those that a method added, before ``lr_scale``.
        where: the settings' prefix in a message, e.g. ``"optim.student"``.

    Raises:
        UserError: a pattern that no name matches, or that earlier patterns leave nothing to.
    """
    names, scales = list(names), dict(settings.lr_scale or {})
    groups: dict[Group, list[str]] = {}
    used: set[str] = set()
    for name in names:
        undecayed = [pattern for pattern in settings.no_decay if fnmatchcase(name, pattern)]
        scaled = next((pattern for pattern in scales if fnmatchcase(name, pattern)), None)
        used |= {*undecayed, scaled}
        decay = 0.0 if undecayed else settings.weight_decay
        scale = 1.0 if scaled is None else float(scales[scaled])
        if settings.additions_lr is not None and name.startswith(PREFIX):
            scale *= settings.additions_lr / settings.lr
        groups.setdefault(Group(decay, scale), []).append(name)
    for key, patterns in (("no_decay", settings.no_decay), ("lr_scale", scales)):
        for pattern in patterns:
            if pattern not in used:
                taken = any(fnmatchcase(name, pattern) for name in names)
                why = "comes after patterns that match all it does" if taken else "matches no parameter"
                raise UserError(f"{where}.{key}: {pattern!r} {why}; names are as {names[0]} and {names[-1]}")
    return groups


class RoleOptimizer:
    """AdamW over a role's sharded masters.

    Adam's state is made at once, not at the first step: a checkpoint written before this role's first update then
    has the same entries as any other, and memory does not grow later.

    Raises:
        UserError: see :func:`parameter_groups`.
    """

    def __init__(self, role: Role, settings: OptimizerSettings):
        self.role, self.settings = role, settings
        named = role.named_parameters()
        groups = parameter_groups(named, settings, f"optim.{role.name}")
        # betas as floats: an integer 0 raises in torch 2.13.
        betas = (float(settings.betas[0]), float(settings.betas[1]))
        self.adamw = torch.optim.AdamW(
            [{"params": [named[name] for name in names], **group._asdict()} for group, names in groups.items()],
            lr=settings.lr,
            betas=betas,
            eps=settings.eps,
            # One of them always: for DTensors torch would choose to loop over the parameters.
            foreach=settings.implementation == "foreach",
            fused=settings.implementation == "fused",
        )
        for parameter in role.parameters():
            # The fused kernel counts steps on the parameters' device, the others on the CPU.
            device = parameter.device if settings.implementation == "fused" else torch.device("cpu")
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float) -> None:
        """One update with rate ``lr``, times each group's ``lr_scale``; gradients are cleared afterwards."""
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.adamw.step()
        self.adamw.zero_grad()

    def clear_gradients(self) -> None:
        """Forget the gradients without an update."""
        self.adamw.zero_grad()

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Adam's state by parameter name; the tensors are the live ones, so loading into them restores it."""
        names: dict[Any, str] = {p: name for name, p in self.role.named_parameters().items()}
        return {names[p]: dict(state) for p, state in self.adamw.state.items()}
