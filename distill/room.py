"""What a run's states take, by arithmetic, and whether the disk has room for its checkpoints."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass

from distill.config import Config
from distill.setup import RunPlan
from fsdp_cp.checkpoint import published_steps
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import MeshShape
from models.role_plan import RolePlan, sharing

_ADAM = 8
"""Bytes of AdamW's two moments, fp32."""
_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBytes:
    """One role's states, by arithmetic: activations, gathered units and buffers come on top."""

    parameters: int
    """How many are the role's own: the network's, or its adapters'."""
    rank: int
    """Bytes of weights, optimizer state and average on a rank; of a base that roles share, with one of them."""
    gradients: int
    """Bytes of gradients on a rank while the role trains; 0 for a frozen one. One role trains at a time."""
    checkpoint: int
    """Bytes in a checkpoint, over all ranks; 0 for a frozen role."""


def role_bytes(config: Config, plan: RunPlan, role: RolePlan, shape: MeshShape) -> RoleBytes:
    """The states of ``role``, one of the ``plan``, on a rank of a mesh of ``shape``."""
    trained = role.name in plan.method.trained_roles
    averaged = trained and getattr(config, role.name).ema.enabled
    one = sum(math.prod(each) for each in role.own_shapes.values())
    count = one * (len(role.trained_experts) if trained else role.experts)
    settings = role.sharding
    ranks = shape.world // settings.copies(shape)
    stored = {"keep": 4, "fp32": 4, "bf16": 2}[settings.master_dtype] if trained else _BYTES[settings.precision]
    computed = _BYTES[settings.precision]
    gathered = computed if settings.strategy in ("optim", "optim_grads") else 0  # for the whole step
    held = stored / ranks + gathered
    base = 0.0
    if role.lora is not None and _has_the_base(plan, role):
        base = role.experts * sum(p.numel() for p in role.network.parameters()) * (computed / ranks + gathered)
    gradients = 0.0
    if trained:
        held += (_ADAM + (stored if averaged else 0)) / ranks
        gradients = stored / (1 if settings.strategy in ("no_shard", "optim") else ranks)
    if trained and role.lora is None:  # an expert beside those that train, in fp32
        base = (role.experts - len(role.trained_experts)) * one * (4 / ranks + gathered)
    saved = stored + _ADAM + (stored if averaged else 0) if trained else 0
    return RoleBytes(
        parameters=count,
        rank=round(count * held + base),
        gradients=round(count * gradients),
        checkpoint=count * saved,
    )


def _has_the_base(plan: RunPlan, role: RolePlan) -> bool:
    """Does the base of these adapters count here? It does once, with the role that is nothing else if there is one."""
    group = next(each for each in sharing(plan.roles, plan.method.trained_roles) if role in each)
    return all(other.lora is not None for other in group) and group[0] is role


def check_disk(config: Config, plan: RunPlan, steps: int, resume: str) -> str:
    """Room for what a run adds to its checkpoints: those it keeps, and the one that is being written.

    Args:
        config: of the run.
        plan: of it.
        steps: that it has left.
        resume: ``checkpoint.resume``, as this start takes it.

    Returns:
        The sizes, as a sentence.

    Raises:
        UserError: the disk has no room for them.
    """
    shape = plan.mesh
    size = sum(role_bytes(config, plan, role, shape).checkpoint for role in plan.roles)
    settings, folder = config.checkpoint, plan.run_dir.absolute() / "checkpoints"
    there = len(published_steps(folder)) if resume != "never" else 0
    written = (steps // settings.every if settings.every else 0) + int(settings.at_end and steps > 0)
    new = written
    if settings.keep:
        for_good = 0
        if settings.every and settings.keep_every:
            for_good = steps // math.lcm(settings.every, settings.keep_every)
        new = min(written, max(1, settings.keep + 1 - there) + for_good)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if size * new > free:
        raise UserError(
            f"run_dir={plan.run_dir}: the checkpoints need {size_in_words(size * new)}, and {size_in_words(free)} are"
            " free; use another disk, or checkpoint.keep=1"
        )
    return (
        f"a checkpoint has {size_in_words(size)}; {new} beside the {there} that are there at most"
        f" (checkpoint.keep={settings.keep}, every={settings.every}): {size_in_words(size * new)} of"
        f" {size_in_words(free)} that are free on {existing}"
    )


def size_in_words(count: float) -> str:
    """Bytes, decimal as disks and GPUs are sold: ``1.5 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
