"""Build a role: on the meta device, split, sharded, then filled from a diffusers folder or from a seed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import local_shard, on_all_ranks
from fsdp_cp.rng import stream_seed
from fsdp_cp.sharding.initialise import initialise
from fsdp_cp.sharding.settings import Precision
from fsdp_cp.sharding.shard import materialise, settings_of
from models.additions.base import attach_additions
from models.families.base import LatentShape, Shape
from models.files.checkpoint_files import one_line
from models.lora.serving import Serving
from models.roles.names import owner
from models.roles.network import Network
from models.roles.parallelize import parallelize
from models.roles.role import Role
from models.roles.role_plan import RolePlan, sharing


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
    adapted = {role.name: role.lora for role in plans if role.lora is not None}
    (tokens,) = {role.tokens(latent_shape, condition_shapes) for role in plans}  # they have one base
    network = deepcopy(plan.network)
    for name, adapters in adapted.items():
        adapters.inject(network, name)
    for role in plans:
        if role.additions:
            attach_additions(network, role.name, deepcopy(role.added), family, mesh, shared=len(plans) > 1)
    serving = Serving(network, family.blocks(network)) if adapted else None
    parallelize(network, plans, trained=trained, mesh=mesh, precision=precision)
    settings = settings_of(network)
    if settings.precision != "bf16" and device.type == "cuda":
        # cuDNN would round fp32 convolutions (the patch embedding) to TF32: losses were .6 % off on an H200.
        torch.backends.cudnn.allow_tf32 = False
    # Offloaded parameters live in CPU memory, buffers where the network computes.
    if allocate:
        materialise(network, "cpu" if settings.offload == "cpu" else device)
        family.restore_buffers(network, device)
    return Network(
        family=family,
        config=plan.config,
        module=network,
        precision=settings.precision,
        tokens=tokens,
        forward_flops=family.forward_flops(plan.config, tokens, condition_shapes),
        tangent_flops=family.tangent_flops(plan.config, tokens, condition_shapes),
        attention_flops=family.attention_flops(plan.config, tokens, condition_shapes),
        adapters=tuple(adapted),
        serving=serving,
    )


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
