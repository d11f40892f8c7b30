"""``train.py dry_run=true``: check all that a run checks, without a process group or a GPU, and write nothing."""

from __future__ import annotations

import logging

import torch

from distill.config import Config
from distill.run.announce import batch_in_words
from distill.run.disk_space import check_disk
from distill.run.resume_checks import check_resume, find_sources
from distill.run.setup import RunPlan, world_of
from fsdp_cp.checkpoint.save_load import find_resume, read_state
from fsdp_cp.launch import rank
from fsdp_cp.sequence import local_token_count
from fsdp_cp.words import counted

log = logging.getLogger(__name__)


def dry_run(config: Config, plan: RunPlan) -> None:
    """Make the checks that follow :func:`distill.run.setup.plan_run`, and log a summary of the run.

    Raises:
        UserError: a checkpoint that cannot be resumed, an unreadable data table, or too little disk space.
    """
    if rank() != 0:
        return
    if config.device == "cuda" and not torch.cuda.is_available():
        log.warning("device=cuda, but torch sees no GPU here; checking as on the CPU, without checks that need a GPU")
    clips = config.data.table_in_words()  # before the check of the checkpoint, as in a run
    resume_from = find_resume(config.checkpoint.resume, plan.run_dir / "checkpoints")
    sources = find_sources(config, plan.roles)
    if resume_from is not None:
        check_resume(config, resume_from, plan.roles, sources)
    latents, _ = config.data.sample_shapes()
    tokens = plan.roles[0].family.tokens(plan.roles[0].config, latents)
    log.info("dry run of %s on %s: starting and writing nothing", plan.run_dir, counted(world_of(config), "rank"))
    log.info("mesh: %s", plan.mesh)
    for role in plan.roles:
        weights = " and ".join(str(folder.path) for folder in role.folders) or "random weights"
        log.info(
            "%s: %s%s, %s parameters, %s in %s%s, strategy %s",
            role.name,
            f"adapters of rank {role.lora.settings.rank} on " if role.lora else "",
            weights,
            f"{role.experts * sum(p.numel() for p in role.network.parameters()):,}",
            "trained" if role.name in plan.method.trained_roles else "frozen",
            role.sharding.precision,
            " with fp8 products" if role.sharding.fp8 != "none" else "",
            role.sharding.strategy,
        )
    log.info(
        "latents %s, %d tokens a sample, %d on each rank; %s",
        "x".join(map(str, latents)),
        tokens,
        local_token_count(tokens, plan.mesh.cp),
        clips,
    )
    batch = batch_in_words(config, plan.micro_batch_size, plan.mesh.dp)
    log.info("%s; %s", batch, counted(config.steps, "step"))
    first = 0 if resume_from is None else read_state(resume_from)["step"]
    log.info("starts from %s", "scratch" if resume_from is None else f"step {first} ({resume_from})")
    log.info("%s", check_disk(config, plan, config.steps - first, config.checkpoint.resume))
    log.info("all checks passed; a dry run does not decode clips and captions, and plan=true predicts the memory")
