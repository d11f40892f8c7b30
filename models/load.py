"""Build a role: on the meta device, split, sharded, then filled from a diffusers folder or from a seed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import local_shard, on_all_ranks
from fsdp_cp.rng import stream_seed
from fsdp_cp.sharding.initialise import initialise
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, Precision, ShardSettings
from fsdp_cp.sharding.shard import materialise, shard_module
from models.additions.base import additions_of, attach_additions
from models.checkpoint_files import one_line
from models.families.base import LatentShape, Shape
from models.lora.serving import Serving
from models.names import owner
from models.network import Network
from models.role import Role
from models.role_plan import RolePlan, sharing


def _sharding_of(plans: Sequence[RolePlan], trained: Collection[str], precision: Precision | None) -> ShardSettings:
    """How a network of these roles is sharded; they agree in what counts (:func:`distill.setup.plan_run`)."""
    adapted = [plan for plan in plans if plan.lora is not None]
    of = (adapted or plans)[0]
    settings = replace(of.sharding, precision=precision or of.sharding.precision)
    if adapted:  # adapters keep fp32 masters; the base is stored as it computes
        early = any(plan.sharding.gather_early for plan in plans)
        return replace(settings, master_dtype="keep", gather_early=early)
    if of.as_it_is:
        return replace(settings.frozen(), master_dtype="keep")
    return settings if of.name in trained else settings.frozen()


def build_role(
    plan: RolePlan,
    *,
    mesh: Mesh,
    device: torch.device,
    trainable: bool,
    precision: Precision | None = None,
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
    roles = build_roles(
        [plan],
        trained=(plan.name,) if trainable else (),
        mesh=mesh,
        device=device,
        precision=precision,
        latent_shape=latent_shape,
        condition_shapes=condition_shapes,
        seed=seed,
    )
    return roles[plan.name]


def build_roles(
    plans: Sequence[RolePlan],
    *,
    trained: Collection[str],
    mesh: Mesh,
    device: torch.device,
    precision: Precision | None = None,
    latent_shape: LatentShape,
    condition_shapes: Mapping[str, Shape],
    seed: int = 0,
) -> dict[str, Role]:
    """:func:`build_role` for each of ``plans``, by name; those not in ``trained`` are frozen.

    Those that can share a network do (:func:`sharing`).
    """
    built: dict[str, Role] = {}
    for group in sharing(plans, trained):
        networks = []
        for i in range(group[0].experts):
            of_expert = [plan.expert(i) for plan in group]
            network = build_network(
                of_expert,
                trained=trained_with(group, i, trained),
                mesh=mesh,
                device=device,
                precision=precision,
                latent_shape=latent_shape,
                condition_shapes=condition_shapes,
            )
            set_first_values(network, of_expert, seed_of_expert(seed, i))
            networks.append(network)
        for plan in group:
            built[plan.name] = Role(
                name=plan.name,
                networks=tuple(networks),
                boundaries=plan.boundaries,
                trainable=plan.name in trained,
                trained_experts=plan.trained_experts,
                adapters=plan.adapters,
            )
    return {plan.name: built[plan.name] for plan in plans}


def trained_with(plans: Sequence[RolePlan], expert: int, trained: Collection[str]) -> set[str]:
    """Which of the ``trained`` roles train this one of their networks."""
    return {plan.name for plan in plans if plan.name in trained and expert in plan.trained_experts}


def seed_of_expert(seed: int, expert: int) -> int:
    """Of the random weights of a role's networks, which are to differ."""
    return stream_seed(seed, "expert", expert) if expert else seed


def build_network(
    plans: Sequence[RolePlan],
    *,
    trained: Collection[str],
    mesh: Mesh,
    device: torch.device,
    precision: Precision | None = None,
    latent_shape: LatentShape,
    condition_shapes: Mapping[str, Shape],
    allocate: bool = True,
) -> Network:
    """The network of one of the groups of :func:`sharing`, with memory for its weights and nothing in it.

    Args:
        plans: the group; of experts, of one of them.
        trained: names of the roles that train.
        mesh, device, precision, latent_shape, condition_shapes: of :func:`build_role`.
        allocate: ``False`` leaves it on the meta device, without that memory.

    Raises:
        UserError: data whose shapes the network cannot take.
    """
    plan, family = plans[0], plans[0].family
    adapted = [each for each in plans if each.lora is not None]
    tokens = {each.tokens(latent_shape, condition_shapes) for each in plans}
    assert len(tokens) == 1, "one base"
    sharding = _sharding_of(plans, trained, precision)
    network = deepcopy(plan.network)
    for each in plans:
        if each.lora is not None:
            each.lora.inject(network, each.name)
    for each in plans:
        if each.additions:
            attach_additions(network, each.name, deepcopy(each.added), family, mesh, shared=len(plans) > 1)
    if sharding.precision != "bf16" and device.type == "cuda":
        # cuDNN would round fp32 convolutions (the patch embedding) to TF32: losses were .6 % off on an H200.
        torch.backends.cudnn.allow_tf32 = False
    if sharding.precision == "fp64":
        nn.Module.to(network, torch.float64)  # diffusers' own `to` warns about modules that it keeps in fp32
    never, of_base = set(family.never_trained(plan.network)), None if adapted else plan.name
    for name, parameter in network.named_parameters():
        of, public = owner(name)
        parameter.requires_grad_((of or of_base) in trained and public not in never)
    family.parallelize(network, mesh, plan.attention_backend, plan.head_groups)
    serving = Serving(network, family.blocks(network)) if adapted else None
    _shard(network, plans, mesh, sharding)
    # Offloaded parameters live in CPU memory, buffers where the network computes.
    if allocate:
        materialise(network, "cpu" if sharding.offload == "cpu" else device)
        family.restore_buffers(network, device)
    (tokens_of_sample,) = tokens
    return Network(
        family=family,
        config=plan.config,
        module=network,
        precision=sharding.precision,
        tokens=tokens_of_sample,
        forward_flops=family.forward_flops(plan.config, tokens_of_sample, condition_shapes),
        tangent_flops=family.tangent_flops(plan.config, tokens_of_sample, condition_shapes),
        attention_flops=family.attention_flops(plan.config, tokens_of_sample, condition_shapes),
        adapters=tuple(each.name for each in adapted),
        serving=serving,
    )


def _shard(network: nn.Module, plans: Sequence[RolePlan], mesh: Mesh, settings: ShardSettings) -> None:
    """The blocks are units; what computes in fp32 under bf16 is, too."""
    family, in_fp32 = plans[0].family, []
    if settings.precision == "bf16":
        in_fp32 += family.full_precision_units(network)
        for each in plans:
            extra = additions_of(network, each.name).values()
            in_fp32 += [addition for addition in extra if addition.full_precision]
        if any(each.lora is not None for each in plans):
            _store_base_as_it_computes(network, in_fp32, COMPUTE_DTYPE[settings.precision])
    # Adapters and copies of what is trained whole are small, and as exact as what trains them.
    own = {name.rpartition(".")[0] for name, _ in network.named_parameters() if owner(name)[0] is not None}
    shard_module(
        network,
        mesh=mesh,
        units=list(family.blocks(network)),
        full_precision_units=in_fp32,
        fp8_excluded=[*family.fp8_excluded(network), *map(network.get_submodule, own)],
        settings=settings,
    )


def _store_base_as_it_computes(network: nn.Module, in_fp32: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Nobody trains it, so it needs no fp32 masters: 2 bytes a parameter."""
    kept = {parameter for unit in in_fp32 for parameter in unit.parameters()}
    for name, parameter in network.named_parameters():
        if owner(name)[0] is None and parameter not in kept:
            parameter.data = parameter.data.to(dtype)


def set_first_values(network: Network, plans: Sequence[RolePlan], seed: int) -> None:
    """Set the first values of a network: from diffusers folders, or from a seed. A collective.

    Args:
        network: with memory.
        plans: of its roles; for experts, of the one that ``network`` is.
        seed: of random weights, and of additions and adapters that the folders do not hold.

    Raises:
        UserError: on every rank, files that cannot be read, or weights that are not finite.
    """
    family, module = network.family, network.module
    if not plans[0].folders:
        # By public names: the base of adapters is the network of the same seed without any.
        initialise(
            module,
            seed=seed,
            special=family.fill_special,
            stream=lambda name: None if ".lora_" in name else owner(name)[1],
        )
    else:
        base = {} if network.adapters else network.base_parameters()
        _load(network.base_parameters(), plans[0])
        for plan in plans:
            if plan.additions:
                initialise(module.get_submodule(f"additions.{plan.name}"), seed=seed)
            if plan.additions or plan.lora is not None:  # additions that were saved, copies of what is trained whole
                own = network.named_parameters(plan.name)
                _load({name: weight for name, weight in own.items() if name not in base}, plan)
    for plan in plans:
        if plan.lora is not None:
            plan.lora.fill(module, plan.name, seed)
            if plan.lora.saved is not None:
                own = network.named_parameters(plan.name)
                _require_finite(own, f"{plan.name}.checkpoint={plan.lora.saved.file.parent}")


def _load(weights: Mapping[str, Tensor], plan: RolePlan) -> None:
    """Load those of ``weights`` that the plan's folder holds. A collective.

    Raises:
        UserError: on every rank, files that cannot be read, or weights that are not finite.
    """
    (folder,) = plan.folders
    saved = folder.shapes.keys() | folder.additions.keys()
    wanted = {folder.stored.get(name, name): weight.detach() for name, weight in weights.items() if name in saved}
    where = f"{plan.name}.checkpoint={folder.path}"
    if not wanted:
        return
    try:
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder.path)))
    except CheckpointException as error:  # from all ranks, whichever could not read
        reason = one_line(next(iter(error.failures.values()))[0])
        raise UserError(f"{where} cannot be read ({reason}); copy it again") from error
    _require_finite(wanted, where)


def _require_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights with NaN or infinity, which training would spread. Called by all ranks; each checks its shards.

    Raises:
        UserError: on every rank the same, with the first such tensor.
    """
    mine = sorted(name for name, weight in weights.items() if not local_shard(weight).isfinite().all())
    broken = sorted({name for part in on_all_ranks(lambda: mine) for name in part})
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UserError(f"{where}: {broken[0]}{more} holds numbers that are not finite; copy the checkpoint again")
