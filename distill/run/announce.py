"""Log lines about roles, mesh and batch before the first step."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from distill.config import Config
from fsdp_cp.launch import rank
from fsdp_cp.sequence import local_token_count
from fsdp_cp.sharding.shard import settings_of
from fsdp_cp.words import counted
from models.roles.role import EXPERTS, Role

if TYPE_CHECKING:
    from distill.train.trainer import Trainer

log = logging.getLogger(__name__)


def announce(trainer: Trainer) -> None:
    """Log the size of every role, the mesh, the tokens per rank, the batch and the number of steps, on rank 0."""
    if rank() != 0:
        return
    roles = trainer.method.roles
    for name, role in roles.items():
        networks = trainer.trained_of(name) or [role]
        count = sum(parameter.numel() for network in networks for parameter in network.parameters())
        log.info("%s: %s parameters, %s", name, f"{count:,}", ", ".join(_traits(roles, role)))
    tokens = next(iter(trainer.roles.values())).tokens
    local = local_token_count(tokens, trainer.mesh.cp_size)
    pads = local * trainer.mesh.cp_size - tokens
    note = f" ({pads} of them pads at the end)" if pads else ""
    log.info("mesh: %s; %d tokens a sample, %d on each rank%s", trainer.mesh.shape, tokens, local, note)
    if trainer.device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        log.warning("CUDA_DEVICE_MAX_CONNECTIONS=1 prevents FSDP's communication from overlapping compute; unset it")
    log.info(
        "%s; %s; %s; output in %s",
        batch_in_words(trainer.config, trainer.batches.batching.micro_batch_size, trainer.mesh.dp_size),
        counted(trainer.config.steps, "step"),
        counted(len(trainer.training_data), "clip" if trainer.config.data.has_clips else "caption"),
        trainer.run_dir,
    )


def batch_in_words(config: Config, micro_batch_size: int, dp_size: int) -> str:
    """Describe how a step's batch is divided over ``dp_size`` data-parallel ranks."""
    micro_batches = counted(config.batch_size // dp_size // micro_batch_size, "micro-batch", "micro-batches")
    parts = f", in {config.expert_draws} parts that draw their experts each" if config.expert_draws > 1 else ""
    ranks = counted(dp_size, "data-parallel rank")
    return f"batch {config.batch_size} = {micro_batches} of {micro_batch_size} on {ranks}{parts}"


def _traits(roles: Mapping[str, Role], role: Role) -> Iterator[str]:
    yield "trained" if role.trainable else "frozen"
    if role.boundaries:
        only = role.trained_experts if role.trainable and len(role.trained_experts) == 1 else ()
        note = "".join(f"; only the one for {EXPERTS[index]} noise is trained" for index in only)
        yield f"two experts, the first for times from {role.boundaries[0]:g}{note}"
    if role.adapters is not None:
        yield f"adapters of rank {role.adapters['rank']} on {_base_in_words(roles, role)}"
    if settings_of(role.networks[0].module).fp8 != "none":
        yield "matrix products of its blocks in fp8"


def _base_in_words(roles: Mapping[str, Role], role: Role) -> str:
    """Name the network under the adapters of ``role``, and the roles that share it."""
    first = role.networks[0]
    shared = [name for name, other in roles.items() if other.networks[0] is first and other is not role]
    frozen = [name for name in shared if not roles[name].trainable]
    if frozen:
        return f"the {frozen[0]}'s network{'s' * bool(role.boundaries)}"
    count = sum(p.numel() for p in first.base_parameters().values())
    networks = "two frozen networks" if role.boundaries else "a frozen network"
    sharing = f", shared with the {' and the '.join(shared)}" if shared else ""
    return f"{networks} of {count:,} parameters{sharing}"
