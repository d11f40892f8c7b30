"""Check whether the disk has room for the checkpoints of a run."""

from __future__ import annotations

import math
import shutil

from distill.config import Config
from distill.run.setup import RunPlan
from fsdp_cp.checkpoint.save_load import published_steps
from fsdp_cp.errors import UserError

_ADAM = 8
"""Bytes per parameter of AdamW's two fp32 moments."""


def checkpoint_bytes(config: Config, plan: RunPlan) -> int:
    """Return the size of one checkpoint in bytes, over all ranks: weights, Adam moments and EMAs of trained roles."""
    total = 0
    for role in plan.roles:
        if role.name in plan.method.trained_roles:
            count = len(role.trained_experts) * sum(math.prod(shape) for shape in role.own_shapes.values())
            stored = 2 if role.sharding.master_dtype == "bf16" else 4
            copies = 2 if getattr(config, role.name).ema.enabled else 1
            total += count * (copies * stored + _ADAM)
    return total


def check_disk(config: Config, plan: RunPlan, steps: int, resume: str) -> str:
    """Check that the disk has room for the checkpoints that a run keeps, and for the one that it is writing.

    Args:
        config: configuration of the run.
        plan: plan of the run.
        steps: number of remaining steps.
        resume: ``checkpoint.resume`` of this start.

    Returns:
        The sizes, as a sentence.

    Raises:
        UserError: too little free space.
    """
    settings, folder = config.checkpoint, plan.run_dir.absolute() / "checkpoints"
    published = len(published_steps(folder)) if resume != "never" else 0
    new = (steps // settings.every if settings.every else 0) + int(settings.at_end and steps > 0)
    if settings.keep:
        for_good = 0
        if settings.every and settings.keep_every:
            for_good = steps // math.lcm(settings.every, settings.keep_every)
        new = min(new, max(1, settings.keep + 1 - published) + for_good)
    size = checkpoint_bytes(config, plan)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if size * new > free:
        raise UserError(
            f"run_dir={plan.run_dir}: checkpoints need {_gigabytes(size * new)} but only {_gigabytes(free)} are free;"
            " use another disk or set checkpoint.keep=1"
        )
    return (
        f"a checkpoint takes {_gigabytes(size)}; the run adds up to {new} to the {published} in {folder}"
        f" (checkpoint.keep={settings.keep}, every={settings.every}): {_gigabytes(size * new)} of {_gigabytes(free)}"
        " free"
    )


def _gigabytes(count: int) -> str:
    """Format bytes as decimal gigabytes, with three digits: ``1.5 GB``."""
    return f"{count / 1e9:.3g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"
