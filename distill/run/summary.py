"""Summary of a run before its first step, and ``train.py dry_run=true``, which checks a run and starts nothing."""

from __future__ import annotations

import logging
import math

import torch

from distill.config import Config
from distill.run.checkpoint_checks import check_start
from distill.run.setup import RunPlan
from fsdp_cp.errors import counted
from fsdp_cp.launch import rank
from fsdp_cp.sequence import local_token_count
from models.roles.role import EXPERTS
from models.roles.role_plan import RolePlan

log = logging.getLogger(__name__)


def dry_run(config: Config, plan: RunPlan) -> None:
    """Make the checks that follow :func:`distill.run.setup.plan_run`, without a process group, and log the run.

    Raises:
        UserError: see :func:`distill.run.checkpoint_checks.check_start`.
    """
    if rank() != 0:
        return
    if config.device == "cuda" and not torch.cuda.is_available():
        log.warning("device=cuda, but torch sees no GPU here; checking as on the CPU, without checks that need a GPU")
    start = check_start(config, plan, config.checkpoint.resume)
    lines = [
        "dry run: nothing is started or written",
        *summary(config, plan, start.data),
        f"start    {'from scratch' if start.resume_from is None else f'from step {start.step} ({start.resume_from})'}",
        f"disk     {start.space}",
        "all checks passed; a dry run does not decode clips and captions, and plan=true predicts the memory",
    ]
    for line in lines:
        log.info("%s", line)


def summary(config: Config, plan: RunPlan, data: str) -> list[str]:
    """Return the roles, the mesh, the batch and the data of a run as aligned lines.

    Args:
        config: configuration of the run.
        plan: plan of the run.
        data: number of items of the data set, and where they are.
    """
    cells = [_role(plan, role) for role in plan.roles]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for role, (count, *others) in zip(plan.roles, cells, strict=True):
        texts = [count.rjust(widths[0]), *(text.ljust(width) for text, width in zip(others, widths[1:], strict=True))]
        lines.append(f"{role.name:<8} {'  '.join(texts)}".rstrip())
    local = local_token_count(plan.tokens, plan.mesh.cp)
    pads = local * plan.mesh.cp - plan.tokens
    note = f" ({pads} of them padding)" if pads else ""
    micro_batches = counted(config.batch_size // plan.mesh.dp // plan.micro_batch_size, "micro-batch", "micro-batches")
    draws = f", in {config.expert_draws} parts with a draw of the expert each" if config.expert_draws > 1 else ""
    ranks = counted(plan.mesh.dp, "data-parallel rank")
    return [
        *lines,
        f"mesh     {counted(plan.mesh.world, 'rank')}: {plan.mesh}",
        f"sample   latents {'x'.join(map(str, plan.shapes[0]))}, {plan.tokens:,} tokens, {local:,} on a rank{note}",
        f"batch    {config.batch_size} = {micro_batches} of {plan.micro_batch_size} on {ranks}{draws}",
        f"data     {data}",
        f"run      {counted(config.steps, 'step')} in {plan.run_dir}",
    ]


def _role(plan: RunPlan, role: RolePlan) -> tuple[str, ...]:
    """Return a role's number of parameters that train, or are frozen, its precision, strategy and weights."""
    is_trained = role.name in plan.method.trained_roles
    if is_trained:
        count = len(role.trained_experts) * sum(map(math.prod, role.own_shapes.values()))
    else:
        count = role.experts * sum(p.numel() for p in role.network.parameters())
    weights = " and ".join(str(folder.path) for folder in role.folders) or "random weights"
    if role.lora is not None:
        weights = f"adapters of rank {role.lora.settings.rank} on {weights}"
    if role.boundaries:
        weights += f"; two experts, the first for times from {role.boundaries[0]:g}"
        if is_trained and len(role.trained_experts) == 1:
            weights += f"; only the one for {EXPERTS[role.trained_experts[0]]} noise trains"
    return (
        f"{count:,} parameters",
        "trained" if is_trained else "frozen",
        role.sharding.precision + (" with fp8 products" if role.sharding.fp8 != "none" else ""),
        role.sharding.strategy,
        weights,
    )
