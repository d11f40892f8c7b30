"""Build a role: on the meta device, split, sharded, then filled from a diffusers folder or from a seed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import local_shard, on_all_ranks
from fsdp_cp.sharding import materialise, shard_module
from fsdp_cp.sharding.initialise import initialise
from fsdp_cp.sharding.settings import ShardSettings
from models.additions.base import PREFIX, Chosen, named_additions
from models.additions.registry import additions_of, attach_additions, build_additions
from models.checkpoint_files import TransformerFolder, check_tensors, inspect_transformer, one_line
from models.families.base import Family, LatentShape, Shape, config_of
from models.families.registry import family_of
from models.network import Network
from models.role import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """What a role will be, checked against its files before anything is built."""

    name: str
    family: Family
    config: dict[str, Any]
    """What defines the network, as JSON gives it back: the family's defaults filled in, no notes of diffusers."""
    folder: TransformerFolder | None
    """Where the weights come from; ``None`` for random ones."""
    sharding: ShardSettings
    attention_backend: str = "auto"
    head_groups: int = 1
    additions: Chosen = ()
    """What is attached to the network; see models/additions/."""
    network: nn.Module
    """On the meta device, with its additions, which are not attached yet; never changed."""

    def tokens(self, latent_shape: LatentShape, condition_shapes: Mapping[str, Shape]) -> int:
        """Tokens of a sample of latents ``(C, T, H, W)`` with a condition of these shapes.

        Raises:
            UserError: shapes that the network cannot take.
        """
        setting = f"{self.name}.{'architecture' if self.folder is None else 'checkpoint'}"
        self.family.check_sample(self.config, latent_shape, condition_shapes, setting)
        return self.family.tokens(self.config, latent_shape)


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
            folder.config if folder else dict(architecture or {}), setting if folder else f"{name}.architecture"
        )
        extra = build_additions(additions, chosen, config_of(network))  # refuses what does not fit the network
    if folder is not None:
        check_tensors(folder, {key: tuple(value.shape) for key, value in network.state_dict().items()}, setting)
        shapes = {PREFIX + key: tuple(value.shape) for key, value in extra.state_dict().items()}
        _check_additions(folder, shapes, setting)
    if additions:
        network.additions = extra
    return RolePlan(
        name=name,
        family=chosen,
        config={"_class_name": chosen.class_name} | defining(config_of(network)),
        folder=folder,
        sharding=sharding or ShardSettings(),
        attention_backend=attention_backend,
        head_groups=head_groups,
        additions=additions,
        network=network,
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
    latent_shape: LatentShape,
    condition_shapes: Mapping[str, Shape],
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
        condition_shapes: of each tensor of a sample's condition, by name.
        seed: of the random weights, where there is no checkpoint; the same weights on every mesh.

    Raises:
        UserError: data whose shapes the network cannot take; on every rank, files that have become unreadable since,
            or that hold weights that are not finite.
    """
    network = build_network(
        plan,
        mesh=mesh,
        device=device,
        trainable=trainable,
        precision=precision,
        latent_shape=latent_shape,
        condition_shapes=condition_shapes,
    )
    role = Role(name=plan.name, networks=(network,), trainable=trainable)
    _fill(role, plan, seed)
    return role


def build_network(
    plan: RolePlan,
    *,
    mesh: Mesh,
    device: torch.device,
    trainable: bool,
    precision: str | None = None,
    latent_shape: LatentShape,
    condition_shapes: Mapping[str, Shape],
    allocate: bool = True,
) -> Network:
    """The network of :func:`build_role`, with memory for its weights and nothing in it.

    Args:
        plan, mesh, device, trainable, precision, latent_shape, condition_shapes: of :func:`build_role`.
        allocate: ``False`` leaves it on the meta device, without that memory.

    Raises:
        UserError: data whose shapes the network cannot take.
    """
    tokens = plan.tokens(latent_shape, condition_shapes)
    sharding = replace(plan.sharding, precision=precision or plan.sharding.precision)
    if not trainable:
        sharding = sharding.frozen()
    network, family = deepcopy(plan.network), plan.family
    attach_additions(network, family, mesh)
    if sharding.precision == "fp64":
        nn.Module.to(network, torch.float64)  # diffusers' own `to` warns about modules that it keeps in fp32
    network.requires_grad_(trainable)
    for name in family.never_trained(network):
        network.get_parameter(name).requires_grad_(False)
    family.parallelize(network, mesh, plan.attention_backend, plan.head_groups)
    _shard(network, family, mesh, sharding)
    # Offloaded parameters live in CPU memory, buffers where the network computes.
    if allocate:
        materialise(network, "cpu" if sharding.offload == "cpu" else device)
        family.restore_buffers(network, device)
    return Network(
        family=family,
        config=plan.config,
        module=network,
        precision=sharding.precision,
        tokens=tokens,
        forward_flops=family.forward_flops(plan.config, tokens, condition_shapes),
        tangent_flops=family.tangent_flops(plan.config, tokens, condition_shapes),
    )


def _fill(role: Role, plan: RolePlan, seed: int) -> None:
    """Random weights, or the folder's; what it has not of the additions is drawn."""
    setting = f"{plan.name}.checkpoint"
    if plan.folder is None:
        initialise(role.network, seed=seed, special=role.family.fill_special)
        return
    if plan.additions:
        initialise(role.network.get_submodule("additions"), seed=seed)
    saved = plan.folder.shapes.keys() | plan.folder.additions.keys()
    weights = {name: weight for name, weight in role.weights().items() if name in saved}
    try:
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(plan.folder.path)))
    except CheckpointException as error:  # of all ranks, whichever could not read
        reason = one_line(next(iter(error.failures.values()))[0])
        raise UserError(f"{setting}={plan.folder.path} cannot be read ({reason}); copy it again") from error
    _require_finite(weights, f"{setting}={plan.folder.path}")


def _shard(network: nn.Module, family: Family, mesh: Mesh, settings: ShardSettings) -> None:
    """The blocks are units; what computes in fp32 under bf16 is, too."""
    in_fp32 = family.full_precision_units(network)
    in_fp32 += [addition for addition in additions_of(network).values() if addition.full_precision]
    shard_module(
        network,
        mesh=mesh,
        units=list(family.blocks(network)),
        full_precision_units=in_fp32 if settings.precision == "bf16" else (),
        settings=settings,
    )


def _require_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights with NaN or infinity, which training would spread. Called by all ranks, each looks at its shards.

    Raises:
        UserError: on every rank the same, with the first such tensor.
    """
    mine = sorted(name for name, weight in weights.items() if not local_shard(weight).isfinite().all())
    broken = sorted({name for part in on_all_ranks(lambda: mine) for name in part})
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UserError(f"{where}: {broken[0]}{more} holds numbers that are not finite; copy the checkpoint again")


def build_roles(
    plans: list[RolePlan],
    *,
    trained: tuple[str, ...],
    mesh: Mesh,
    device: torch.device,
    latent_shape: LatentShape,
    condition_shapes: Mapping[str, Shape],
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
            condition_shapes=condition_shapes,
            seed=seed,
        )
        for plan in plans
    }
