"""``train.py dry_run=true``: what a run would check, hold and write, without a process group or a GPU."""

from __future__ import annotations

import logging

import torch

from distill.announce import batch_in_words
from distill.config import Config
from distill.resume_checks import check_resume, find_sources
from distill.room import check_disk, role_bytes, size_in_words
from distill.setup import RunPlan, world_of
from fsdp_cp.checkpoint import find_resume, read_state
from fsdp_cp.launch import rank
from fsdp_cp.sequence import local_token_count
from fsdp_cp.words import counted
from models.role_plan import RolePlan

log = logging.getLogger(__name__)


def _weights(role: RolePlan) -> str:
    """Where they come from, in words."""
    base = " and ".join(str(folder.path) for folder in role.folders) or "random weights"
    return f"adapters of rank {role.lora.settings.rank} on {base}" if role.lora else f"{base}"


def dry_run(config: Config, plan: RunPlan) -> None:
    """Print what the run of ``config`` would be, after the checks that :func:`distill.setup.plan_run` made.

    Raises:
        UserError: a checkpoint that cannot be resumed, a table of the data that cannot be read, a disk without room.
    """
    if rank() != 0:
        return
    if config.device == "cuda" and not torch.cuda.is_available():
        log.warning(
            "device=cuda, and torch sees no GPU here: checked as on the CPU, without what only a GPU can refuse"
        )
    shape = plan.mesh
    clips = config.data.table_in_words()  # before the resume, as in a run
    resume_from = find_resume(config.checkpoint.resume, plan.run_dir / "checkpoints")
    sources = find_sources(config, plan.roles)
    if resume_from is not None:
        check_resume(config, resume_from, plan.roles, sources)
    latents, _ = config.data.sample_shapes()
    tokens = {role.family.tokens(role.config, latents) for role in plan.roles}.pop()
    log.info("dry run of %s on %s: nothing is started or written", plan.run_dir, counted(world_of(config), "rank"))
    log.info("mesh: %s", shape)
    total, gradients = 0, 0
    for role in plan.roles:
        states = role_bytes(config, plan, role, shape)
        total += states.rank
        gradients = max(gradients, states.gradients)
        log.info(
            "%s: %s, %s parameters, %s, strategy %s, states %s a rank",
            role.name,
            _weights(role),
            f"{states.parameters:,}",
            ("trained" if states.gradients else "frozen")
            + f" in {role.sharding.precision}"
            + (" with fp8 products" if role.sharding.fp8 != "none" else ""),
            role.sharding.strategy,
            size_in_words(states.rank),
        )
    log.info(
        "%s a rank with the gradients of the role that trains; activations, gathered units and buffers come on top",
        size_in_words(total + gradients),
    )
    log.info(
        "latents %s, %d tokens a sample, %d on each rank; %s",
        "x".join(map(str, latents)),
        tokens,
        local_token_count(tokens, shape.cp),
        clips,
    )
    batch = batch_in_words(config, plan.micro_batch_size, shape.dp)
    log.info("%s; %s", batch, counted(config.steps, "step"))
    first = 0 if resume_from is None else read_state(resume_from)["step"]
    log.info("starts %s", "afresh" if resume_from is None else f"from step {first} ({resume_from})")
    log.info("%s", check_disk(config, plan, config.steps - first, config.checkpoint.resume))
    log.info("nothing is wrong with it so far; clips and captions are decoded and encoded by the run itself")
