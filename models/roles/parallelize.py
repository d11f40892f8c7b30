"""Steps that parallelize a network, in execution order."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from fsdp_cp.mesh import Mesh
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, Precision, ShardSettings
from fsdp_cp.sharding.shard import shard_module
from models.additions.base import additions_of
from models.owner import owner
from models.roles.role_plan import RolePlan


def parallelize(
    network: nn.Module,
    roles: Sequence[RolePlan],
    *,
    trained: Collection[str],
    mesh: Mesh,
    precision: Precision | None = None,
) -> None:
    """Split the tokens of ``network`` over ``mesh.cp`` and shard its parameters, in place.

    The blocks are FSDP units; under bf16, modules that compute in fp32 are separate units. The ``network`` is on the
    meta device, with the adapters and additions of ``roles``, some of them ``trained``. ``precision`` replaces theirs.
    """
    family, settings = roles[0].family, _shard_settings(roles, trained, precision)
    if settings.precision == "fp64":
        nn.Module.to(network, torch.float64)  # diffusers' own `to` warns about modules that it keeps in fp32
    adapted, never = any(role.lora is not None for role in roles), {*family.never_trained(roles[0].network)}
    additions = [addition for role in roles for addition in additions_of(network, role.name).values()]
    never.update(*(addition.freezes for addition in additions))
    for name, parameter in network.named_parameters():  # the base trains only with a role that has no adapters on it
        role, public = owner(name)
        parameter.requires_grad_((role or (None if adapted else roles[0].name)) in trained and public not in never)

    # Split tokens, and exchange them in attention
    family.parallelize(network, mesh, roles[0].attention_backend, roles[0].head_groups)

    blocks = list(family.blocks(network))
    full_precision: list[nn.Module] = []
    if settings.precision == "bf16":
        full_precision += family.full_precision_units(network)
        full_precision += additions
        if adapted:
            _store_base_in_compute_dtype(network, full_precision, COMPUTE_DTYPE[settings.precision])
    added = {name.rpartition(".")[0] for name, _ in network.named_parameters() if owner(name)[0] is not None}

    # Convert layers to fp8, then wrap blocks for activation memory and compilation, then shard
    shard_module(
        network,
        mesh=mesh,
        units=blocks,
        full_precision_units=full_precision,
        fp8_excluded=[*family.fp8_excluded(network), *map(network.get_submodule, added)],  # adapters are small
        # A step's losses use different parameters: a GAN head, or the blocks after it
        reduce_unused=any("gan_head" in role.added for role in roles) and settings.reduces_over_copies(mesh.shape),
        settings=settings,
    )


def _shard_settings(roles: Sequence[RolePlan], trained: Collection[str], precision: Precision | None) -> ShardSettings:
    """Return the sharding settings of a network of ``roles``, whose settings agree."""
    adapted = [role for role in roles if role.lora is not None]
    role = (adapted or roles)[0]
    settings = replace(role.sharding, precision=precision or role.sharding.precision)
    if adapted:  # adapters keep fp32 masters; the base is stored in its compute dtype
        return replace(settings, master_dtype="keep")
    if role.as_it_is:
        return replace(settings.frozen(), master_dtype="keep")
    return settings if role.name in trained else settings.frozen()


def _store_base_in_compute_dtype(network: nn.Module, full_precision: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Store the frozen base in 2 bytes a parameter; it needs no fp32 masters."""
    kept = {parameter for unit in full_precision for parameter in unit.parameters()}
    for name, parameter in network.named_parameters():
        if owner(name)[0] is None and parameter not in kept:
            parameter.data = parameter.data.to(dtype)
