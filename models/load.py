"""Build a role: on the meta device, split, sharded, then filled from a diffusers folder or from a seed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_cp.errors import UserError
from fsdp_cp.initialise import initialise
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import local_shard, together
from fsdp_cp.shard_settings import ShardSettings
from fsdp_cp.sharding import materialise, shard_module
from models.additions import PREFIX, Chosen, attach_additions, build_additions, named_additions
from models.checkpoint_files import TransformerFolder, check_tensors, inspect_transformer, one_line
from models.families import family_of
from models.role import Role
from models.wan import Wan

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """What a role will be, checked against its files before anything is built."""

    name: str
    family: type[Wan]
    config: dict[str, Any]
    """What defines the network, as JSON gives it back: the family's defaults filled in, no notes of diffusers."""
    folder: TransformerFolder | None
    """Where the weights come from; ``None`` for random ones."""
    sharding: ShardSettings
    attention_backend: str = "auto"
    head_groups: int = 1
    additions: Chosen = ()
    """What is attached to the network; see models/additions.py."""

    def check_sample(self, latent_shape: tuple[int, int, int, int], text_shape: tuple[int, int]) -> int:
        """Tokens of a sample of latents ``(C, T, H, W)`` with text ``(L, D)``.

        Raises:
            UserError: shapes that the network cannot take.
        """
        setting = f"{self.name}.{'architecture' if self.folder is None else 'checkpoint'}"
        wanted = self.family.text_dim(self.config)
        if wanted != text_shape[1]:
            raise UserError(
                f"{setting} takes text embeddings of size {wanted}, but the data's have {text_shape[1]};"
                " use a checkpoint made for this text encoder, or other data.encoders"
            )
        return self.family.tokens(self.config, latent_shape, setting)


def plan_role(
    name: str,
    *,
    checkpoint: str | None,
    architecture: dict[str, Any] | None = None,
    family: str = "wan",
    sharding: ShardSettings | None = None,
    attention_backend: str = "auto",
    head_groups: int = 1,
    additions: Chosen = (),
) -> RolePlan:
    """Check a role's settings; reads headers, builds nothing but a network on the meta device.

    Args:
        name: the role.
        checkpoint: a diffusers pipeline or transformer folder, or ``None`` for random weights.
        architecture: the network's configuration where there is no checkpoint.
        family: the model family.
        sharding: how it will be sharded; plain fp32 by default.
        attention_backend, head_groups: see :func:`fsdp_cp.attention.context_parallel_attention`.
        additions: what is attached to the network.

    Raises:
        UserError: a missing folder, a network that its files do not fit, neither checkpoint nor architecture.
    """
    chosen = family_of(family, name)
    setting = f"{name}.checkpoint"
    if (checkpoint is None) == (architecture is None):
        raise UserError(
            f"{setting} must name a diffusers folder"
            + (
                f", or set {name}.architecture for random weights, not both"
                if architecture is not None
                else f" (or set {name}.architecture for random weights)"
            )
        )
    folder = inspect_transformer(checkpoint, setting) if checkpoint is not None else None
    if architecture is not None:
        chosen.check_keys(architecture, f"{name}.architecture")
    with torch.device("meta"):
        network = chosen.build(
            folder.config if folder else dict(architecture), setting if folder else f"{name}.architecture"
        )
        extra = build_additions(additions, network.config)  # refuses what does not fit the network
    if folder is not None:
        check_tensors(folder, {key: tuple(value.shape) for key, value in network.state_dict().items()}, setting)
        shapes = {PREFIX + key: tuple(value.shape) for key, value in extra.state_dict().items()}
        _check_additions(folder, shapes, setting)
    return RolePlan(
        name=name,
        family=chosen,
        config=defining(network.config),
        folder=folder,
        sharding=sharding or ShardSettings(),
        attention_backend=attention_backend,
        head_groups=head_groups,
        additions=additions,
    )


def defining(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a network's configuration tells it from others.

    diffusers notes in it which values were not given, as a list made of a set: in another order in every process. A
    state that held it could not be resumed.
    """
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in config.items()
        if not key.startswith("_") or key == "_class_name"
    }


def _check_additions(folder: TransformerFolder, expected: dict[str, tuple[int, ...]], setting: str) -> None:
    """Those of the chosen additions that ``folder`` holds must fit; the others begin as a seed draws them."""
    saved, chosen = named_additions(folder.additions), named_additions(expected)
    found = {key: shape for key, shape in folder.additions.items() if named_additions([key]) <= chosen}
    wanted = {key: shape for key, shape in expected.items() if named_additions([key]) <= saved}
    check_tensors(replace(folder, shapes=found), wanted, setting)
    if saved - chosen and rank() == 0:
        log.warning("%s=%s: its additions %s are not used", setting, folder.path, ", ".join(sorted(saved - chosen)))


def build_role(
    plan: RolePlan,
    *,
    mesh: Mesh,
    device: torch.device,
    trainable: bool,
    precision: str | None = None,
    latent_shape: tuple[int, int, int, int],
    text_shape: tuple[int, int],
    seed: int = 0,
) -> Role:
    """Build ``plan`` on ``mesh``; every rank reads, or draws, its own shards only.

    Args:
        plan: from :func:`plan_role`.
        mesh: the mesh.
        device: this rank's device.
        trainable: a frozen role holds no gradients and no masters: it is stored as it computes.
        precision: instead of the plan's; ``"fp64"`` is only to be had so.
        latent_shape: ``(C, T, H, W)`` of a sample.
        text_shape: ``(L, D)`` of a caption's embedding.
        seed: of the random weights, where there is no checkpoint; the same weights on every mesh.

    Raises:
        UserError: data whose shapes the network cannot take; on every rank, files that have become unreadable since,
            or that hold weights that are not finite.
    """
    setting = f"{plan.name}.checkpoint"
    tokens = plan.check_sample(latent_shape, text_shape)
    sharding = replace(plan.sharding, precision=precision or plan.sharding.precision)
    precision = sharding.precision
    if not trainable:
        stored = "bf16" if precision == "bf16" else "keep"
        sharding = replace(sharding, master_dtype=stored, activation_checkpointing="none", keep_operators=[])
    with torch.device("meta"):
        network = plan.family.build(plan.config, setting)
        attach_additions(network, plan.additions, plan.config, mesh)
    if precision == "fp64":
        torch.nn.Module.to(network, torch.float64)  # diffusers' own `to` warns about modules that it keeps in fp32
    network.requires_grad_(trainable)
    plan.family.parallelize(network, mesh, plan.attention_backend, plan.head_groups)
    in_fp32 = plan.family.full_precision_units(network)
    if plan.additions:
        in_fp32 = [*in_fp32, *(addition for addition in network.additions.values() if addition.full_precision)]
    shard_module(
        network,
        mesh=mesh,
        units=plan.family.units(network),
        full_precision_units=in_fp32 if precision == "bf16" else (),
        settings=sharding,
    )
    # Offloaded parameters live in CPU memory, buffers where the network computes.
    materialise(network, "cpu" if sharding.offload == "cpu" else device)
    plan.family.restore_buffers(network, device)
    role = Role(
        name=plan.name,
        family=plan.family,
        config=plan.config,
        network=network,
        trainable=trainable,
        precision=precision,
        tokens=tokens,
        text_tokens=text_shape[0],
    )
    if plan.folder is None:
        initialise(network, seed=seed, special=plan.family.fill_special)
        return role
    if plan.additions:
        initialise(network.additions, seed=seed)
    saved = plan.folder.shapes.keys() | plan.folder.additions.keys()
    weights = {name: weight for name, weight in role.weights().items() if name in saved}
    try:
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(plan.folder.path)))
    except CheckpointException as error:  # of all ranks, whichever could not read
        reason = one_line(next(iter(error.failures.values()))[0])
        raise UserError(f"{setting}={plan.folder.path} cannot be read ({reason}); copy it again") from error
    _require_finite(weights, f"{setting}={plan.folder.path}")
    return role


def _require_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights with NaN or infinity, which training would spread. Called by all ranks, each looks at its shards.

    Raises:
        UserError: on every rank the same, with the first such tensor.
    """
    mine = sorted(name for name, weight in weights.items() if not local_shard(weight).isfinite().all())
    broken = sorted({name for part in together(lambda: mine) for name in part})
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UserError(f"{where}: {broken[0]}{more} holds numbers that are not finite; copy the checkpoint again")


def build_roles(
    plans: list[RolePlan],
    *,
    trained: tuple[str, ...],
    mesh: Mesh,
    device: torch.device,
    latent_shape: tuple[int, int, int, int],
    text_shape: tuple[int, int],
    seed: int,
) -> dict[str, Role]:
    """:func:`build_role` for each of ``plans``; those not in ``trained`` are frozen."""
    return {
        plan.name: build_role(
            plan,
            mesh=mesh,
            device=device,
            trainable=plan.name in trained,
            latent_shape=latent_shape,
            text_shape=text_shape,
            seed=seed,
        )
        for plan in plans
    }
