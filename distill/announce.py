"""What the log says once, before the first step."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from distill.config import Config
from distill.trainer import Trainer
from fsdp_cp.launch import rank
from fsdp_cp.measure.diagnostics import connection_advice, group_report, report_table
from fsdp_cp.sequence import local_token_count
from fsdp_cp.sharding.shard import settings_of
from fsdp_cp.words import counted
from models.role import EXPERTS, Role

log = logging.getLogger(__name__)


def _base_in_words(roles: Mapping[str, Role], role: Role) -> str:
    """Whose network it is, of a role with adapters."""
    first = role.networks[0]
    shared = [name for name, other in roles.items() if other.networks[0] is first and other is not role]
    frozen = [name for name in shared if not roles[name].trainable]
    count = sum(p.numel() for p in first.base_parameters().values())
    if frozen:
        return f"the {frozen[0]}'s network{'s' * bool(role.boundaries)}"
    of_others = f", shared with the {' and the '.join(shared)}" if shared else ""
    networks = "two frozen networks of" if role.boundaries else "a frozen network of"
    return f"{networks} {count:,} parameters{of_others}"


def batch_in_words(config: Config, micro_batch_size: int, dp_size: int) -> str:
    """Say how a step's batch is divided over ``dp_size`` data-parallel ranks."""
    micro_batches = counted(config.batch_size // dp_size // micro_batch_size, "micro-batch", "micro-batches")
    parts = f", in {config.expert_draws} parts that draw their experts each" if config.expert_draws > 1 else ""
    ranks = counted(dp_size, "data-parallel rank")
    return f"batch {config.batch_size} = {micro_batches} of {micro_batch_size} on {ranks}{parts}"


def announce(trainer: Trainer) -> None:
    """Log the size of every role, the mesh, the tokens of a rank, the accumulation and the steps. Rank 0 logs."""
    if rank() != 0:
        return
    for name, role in trainer.method.roles.items():
        parts = role.trained_apart().values() if role.trainable else [role]
        count = sum(p.numel() for part in parts for p in part.parameters())
        how = "trained" if role.trainable else "frozen"
        if role.boundaries:
            how += f", two experts of which the first serves from time {role.boundaries[0]:g} on"
            if role.trainable and len(role.trained_experts) == 1:
                how += f"; the one for {EXPERTS[role.trained_experts[0]]} noise alone is trained"
        if role.adapters is not None:
            how += f", adapters of rank {role.adapters['rank']} on {_base_in_words(trainer.method.roles, role)}"
        if settings_of(role.networks[0].module).fp8 != "none":
            how += ", products of its blocks in fp8"
        log.info("%s: %s parameters, %s", name, f"{count:,}", how)
        if trainer.config.log.groups:
            for network in role.networks:
                strategy, report = settings_of(network.module).strategy, report_table(group_report(network.module))
                log.info("%s on rank 0, %s:\n%s", name, strategy, report)
    tokens = next(iter(trainer.roles.values())).tokens
    local = local_token_count(tokens, trainer.mesh.cp_size)
    pads = local * trainer.mesh.cp_size - tokens
    note = f" ({pads} of them pads at the end)" if pads else ""
    log.info("mesh: %s; %d tokens a sample, %d on each rank%s", trainer.mesh.shape, tokens, local, note)
    capability = torch.cuda.get_device_capability(trainer.device) if trainer.device.type == "cuda" else None
    advice = connection_advice(trainer.device.type, capability, trainer.mesh.cp_size, os.environ)
    if advice is not None:
        log.warning(advice)
    log.info(
        "%s; %s; %s; output in %s",
        batch_in_words(trainer.config, trainer.batching.micro_batch_size, trainer.mesh.dp_size),
        counted(trainer.config.steps, "step"),
        counted(len(trainer.training_data), "clip" if trainer.config.data.has_clips else "caption"),
        trainer.run_dir,
    )
