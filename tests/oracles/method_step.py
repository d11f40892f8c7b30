"""Steps of a method on ranks, and loss, clip norm and gradients of plain networks in float64 to compare them with."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distill.methods import METHODS, Batch
from distill.train.gradients import accumulate_gradients
from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import grad_norm
from fsdp_cp.rng import StepRandom
from fsdp_cp.sharding.initialise import copy_own_part
from fsdp_cp.sharding.settings import ShardSettings
from models.lora.settings import LoraSettings
from models.roles.load import build_roles
from models.roles.role import Role
from models.roles.role_plan import plan_role
from tests.oracles.full_tensors import full_tensors
from tests.oracles.plain_run import inject_random_adapters, public_name
from tests.oracles.runs import random_adapter
from tests.oracles.seeded import write_three

SEED = 4
_LAYERS = r".*\.(to_[qkv]|to_out\.0|net\.0\.proj|net\.2)"
"""Layers that get adapters by default, in all families of the tests."""


@dataclass(frozen=True)
class Case:
    """A family, its sizes, and what trains."""

    family: str
    network: Any
    architecture: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    condition: dict[str, tuple[int, ...]]
    settings: Any
    lora: dict[str, LoraSettings] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write random teacher, student and fake score."""
        write_three(folder, lambda: self.network(**self.architecture))
        return folder

    def checkpoint(self, folder: Path, name: str) -> Path:
        """Return the network that a role starts from: with adapters the teacher's."""
        return folder / ("teacher" if name in self.lora else name)

    def roles(self, folder: Path, mesh: Mesh, precision: str = "fp64", size: float = 1.0) -> dict[str, Role]:
        """Return the method's roles, with random adapters and additions of ``size``."""
        kind = METHODS[self.settings.name][0]
        plans = [
            plan_role(
                name,
                checkpoint=str(self.checkpoint(folder, name)),
                family=self.family,
                sharding=ShardSettings(activation_checkpointing="selective"),
                lora=self.lora.get(name),
                additions=kind.additions(self.settings).get(name, ()),
            )
            for name in kind.roles_needed(self.settings)
        ]
        roles = build_roles(
            plans, mesh=mesh, device=torch.device("cpu"), precision=precision, trained=kind.trained_roles,
            shapes=self.shapes, condition_shapes=self.condition,
        )  # fmt: skip
        for name in kind.trained_roles:
            for key, parameter in roles[name].named_parameters().items():
                if "lora_" in key or key.startswith("additions."):
                    copy_own_part(parameter.detach(), size * random_adapter(name, key, parameter.shape), key)
        return roles

    def plain(self, folder: Path, name: str) -> nn.Module:
        """Return the plain network of a role in float64, with peft's adapters."""
        network = self.network.from_pretrained(self.checkpoint(folder, name))
        if name in self.lora:
            inject_random_adapters(network, name, self.lora[name], _LAYERS)
        return nn.Module.to(network, torch.float64)


Step = tuple[Tensor, Tensor | float, dict[str, Tensor], Mapping[str, tuple[float, float]]]
"""Loss, clip norm, gradients and observations."""


def step_on_rank(method: Any, step: int, batch: Batch, mine: Tensor, count: int) -> Step:
    """Return what a step computes of the samples ``mine`` of ``count``, the loss as their share of it. A collective."""
    role = method.roles[method.trained_role(step)]
    random = StepRandom(seed=SEED, step=step, positions=mine.tolist())
    losses = accumulate_gradients(method, step, [batch], share=len(mine) / count, random=lambda _: random)
    value = sum(total * losses.weights[name] for name, total in losses.sums.items())
    norm, named = grad_norm(role.parameters()), role.named_parameters()
    gradients = full_tensors({n: p.grad for n, p in named.items() if p.grad is not None})
    role.network.zero_grad()  # adapters share it
    return value, norm, gradients, method.observations.drain()


def plain_step(
    loss: Tensor, network: nn.Module, further: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a loss of plain networks, with norm and gradients of a network by public name, and of ``further``."""
    named = {public_name(n): p for n, p in network.named_parameters()} | (further or {})
    loss.backward()
    gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
    for parameter in named.values():
        parameter.grad = None
    return loss.detach(), torch.stack([g.norm() for g in gradients.values()]).norm(), gradients


def step_errors(
    ranks: Sequence[tuple[Tensor, Mapping[Hashable, Step]]], wanted: Mapping[Hashable, Sequence[Any]]
) -> dict[tuple[Hashable, str], float]:
    """Return relative errors of loss, clip norm and gradients by step. ``ranks`` have their samples, then the steps."""
    errors = {}
    for key, (loss, norm, gradients, *_) in wanted.items():
        shares = {tuple(mine.tolist()): found[key][0] for mine, found in ranks}
        errors[key, "loss"] = relative_error(sum(shares.values()), loss)
        errors[key, "norm"] = max(relative_error(torch.as_tensor(found[key][1]), norm) for _, found in ranks)
        each = [gradient_errors(found[key][2], gradients) for _, found in ranks]
        errors[key, "gradients"] = max(error for errors_of in each for error in errors_of.values())
    return errors
