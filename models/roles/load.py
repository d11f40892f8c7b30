"""Construction of roles: build on the meta device, split, shard, then fill from a diffusers folder or a seed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_cp.attention.kernels.choose import prepare_kernels
from fsdp_cp.errors import UserError, one_line
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import full_tensor, local_shard, on_all_ranks
from fsdp_cp.rng import stream_seed
from fsdp_cp.sharding.initialise import copy_own_part, initialise
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, Precision
from fsdp_cp.sharding.shard import materialise, settings_of
from models.additions.base import attach_additions
from models.families.base import Shape
from models.lora.serving import Serving, training_adapter
from models.lora.videox import base_names
from models.owner import PREFIX, is_added, owner
from models.roles.gates import attach_gates
from models.roles.network import Network
from models.roles.parallelize import parallelize
from models.roles.role import Role
from models.roles.role_plan import RolePlan, sharing
from models.sample import VIDEO, PartShapes
from models.sparse import SparseRoles, keep_sparse_roles


def build_role(plan: RolePlan, *, trainable: bool, **options: Any) -> Role:
    """Build ``plan`` alone, by :func:`build_roles`; not ``trainable`` it is stored in its compute dtype."""
    return build_roles([plan], trained=(plan.name,) if trainable else (), **options)[plan.name]


def build_roles(
    plans: Sequence[RolePlan],
    *,
    trained: Collection[str],
    mesh: Mesh,
    device: torch.device,
    precision: Precision | None = None,
    shapes: PartShapes,
    condition_shapes: Mapping[str, Shape],
    seed: int = 0,
    fill: Callable[[Network, Sequence[RolePlan]], None] | None = None,
) -> dict[str, Role]:
    """Build the roles of ``plans`` on ``mesh``, by name. Each rank reads or draws only its own shards.

    Roles that can share a network do (:func:`sharing`). A mistake raises a ``UserError`` on every rank.

    Args:
        plans: plans from :func:`plan_role`.
        trained: names of the roles that train. Others are frozen: stored in their compute dtype, without gradients.
        precision: replaces the plans' precision; the only way to use ``"fp64"``.
        shapes, condition_shapes: shape of each part of a sample, and of each tensor of its condition, by name.
        seed: seed of random weights without a checkpoint; weights do not depend on the mesh.
        fill: allocates the weights of a network on the meta device, which serves these plans, instead of loading them.
    """
    built: dict[str, Role] = {}
    _prepare_kernels(plans, device, precision)
    for group in sharing(plans, trained):
        networks = []
        for i in range(group[0].experts):
            plans_of_expert = [plan.expert(i) for plan in group]
            trained_here = {plan.name for plan in group if plan.name in trained and i in plan.trained_experts}
            network = _build_network(plans_of_expert, trained_here, mesh, precision, shapes, condition_shapes)
            if network.precision != "bf16" and device.type == "cuda":
                # cuDNN would round fp32 convolutions (the patch embedding) to TF32: losses were .6 % off on an H200.
                torch.backends.cudnn.allow_tf32 = False
            if fill is None:
                _load_network(network, plans_of_expert, device, seed_of_expert(seed, i))
            else:
                fill(network, plans_of_expert)
            networks.append(network)
        for plan in group:
            known_frames = None if plan.name in trained else plan.trained_frames
            built[plan.name] = Role(
                name=plan.name,
                networks=tuple(networks),
                boundaries=plan.boundaries,
                trainable=plan.name in trained,
                trained_experts=plan.trained_experts,
                adapters=plan.adapters,
                causal=plan.causal,
                sparse=None if plan.sparse is None else plan.sparse.settings,
                trained_frames=known_frames or shapes[VIDEO][1],
            )
    return {plan.name: built[plan.name] for plan in plans}


def _prepare_kernels(plans: Sequence[RolePlan], device: torch.device, precision: Precision | None) -> None:
    """Prepare the attention kernels of all roles, before a network takes memory."""
    for plan in plans:
        if not plan.family.masked_attention:  # the kernels that need it take no masks
            dtype, head_dim = COMPUTE_DTYPE[precision or plan.sharding.precision], plan.family.head_dim(plan.config)
            prepare_kernels(plan.attention_backend, device=device, dtype=dtype, head_dim=head_dim)


def _load_network(network: Network, plans: Sequence[RolePlan], device: torch.device, seed: int) -> None:
    """Allocate the weights of a network on the meta device, and load or draw them."""
    # Offloaded parameters live in CPU memory, but buffers on the compute device.
    is_offloaded = settings_of(network.module).offload == "cpu"
    materialise(network.module, "cpu" if is_offloaded else device)
    network.family.restore_buffers(network.module, device)
    set_first_values(network, plans, seed)


def seed_of_expert(seed: int, expert: int) -> int:
    """Return the seed of an expert's random weights; experts must differ."""
    return stream_seed(seed, "expert", expert) if expert else seed


def _build_network(
    plans: Sequence[RolePlan],
    trained: Collection[str],
    mesh: Mesh,
    precision: Precision | None,
    shapes: PartShapes,
    condition_shapes: Mapping[str, Shape],
) -> Network:
    """Build the network of one group of :func:`sharing`, for experts one of them, on the meta device."""
    plan, family = plans[0], plans[0].family
    adapted = {role.name: role.lora for role in plans if role.lora is not None}
    for role in plans:
        role.tokens(shapes, condition_shapes)  # refuses data that the network cannot take
    network = deepcopy(plan.network)
    for name, adapters in adapted.items():
        adapters.inject(network, name)
    for role in plans:
        if role.training is not None:
            role.training.inject(network, training_adapter(role.name))
        if role.additions:
            attach_additions(network, role.name, deepcopy(role.added), family, mesh, shared=len(plans) > 1)
    sparse = {role.name: role.sparse for role in plans if role.sparse is not None}
    for name, plan_of_gates in sparse.items():
        attach_gates(network, name, plan_of_gates)
    keep_sparse_roles(network, SparseRoles(sparse, trained))
    serving = Serving(network, family.blocks(network)) if adapted else None
    parallelize(network, plans, trained=trained, mesh=mesh, precision=precision)
    return Network(
        family=family,
        config=plan.config,
        module=network,
        mesh=mesh,
        precision=settings_of(network).precision,
        adapters=tuple(adapted),
        serving=serving,
    )


def set_first_values(network: Network, plans: Sequence[RolePlan], seed: int) -> None:
    """Initialize an allocated network from the folders of ``plans`` or from a seed. A collective.

    ``seed`` is also that of additions and adapters that the folders do not hold. A mistake raises on every rank.
    """
    family, module = network.family, network.module
    if not plans[0].folders:
        # Draw by public names, so that a base with adapters equals the network of the same seed without them.
        initialise(
            module, seed=seed, special=family.fill_special, stream=lambda n: None if ".lora_" in n else owner(n)[1]
        )
    else:
        base = {} if network.adapters else network.base_parameters()
        _load(network.base_parameters(), plans[0])
        for plan in plans:
            if plan.additions or plan.sparse is not None:  # drawn, then replaced by those that the folder holds
                initialise(module, seed=seed, stream=partial(_stream_of_added, plan.name))
                parameters = network.named_parameters(plan.name)
                _load({name: weight for name, weight in parameters.items() if name not in base}, plan)
    for plan in plans:
        _fill_adapters(network, plan, seed)


def _fill_adapters(network: Network, plan: RolePlan, seed: int) -> None:
    """Draw or read the adapters that the role trains, with the heads and gates in their file, and read those that run
    in training alone. A collective."""
    if plan.lora is not None:
        plan.lora.fill(network.module, plan.name, seed)
        if plan.lora.saved is not None:
            _fill_added(network, plan)
            parameters = network.named_parameters(plan.name)
            _require_finite(parameters, f"{plan.name}.checkpoint={plan.lora.saved.file.parent}")
    if plan.training is not None and plan.training.saved is not None:
        filled = plan.training.fill(network.module, training_adapter(plan.name), seed)
        _require_finite(filled, f"{plan.name}.training_adapter={plan.training.saved.file.parent}")


def _fill_added(network: Network, plan: RolePlan) -> None:
    """Set heads and gates to those in the adapters' file, a head to the difference of its last layer from the base's. A
    collective."""
    assert plan.lora is not None and plan.lora.saved is not None
    own, base = network.named_parameters(plan.name), network.base_parameters()
    layers = base_names(plan.lora.saved.last_layers)
    for name, values in plan.lora.saved.read_added().items():
        values = values.float()
        if name in layers:
            values = values - full_tensor(base[layers[name]].detach()).cpu().float()
        copy_own_part(own[name].detach(), values, name)


def _stream_of_added(role: str, name: str) -> str | None:
    """Return the random stream of the module ``name`` if ``role`` added it to its network: the others keep their
    values."""
    owned_by, public = owner(f"{name}.weight")
    return public.removeprefix(PREFIX).removesuffix(".weight") if owned_by == role and is_added(public) else None


def _load(weights: Mapping[str, Tensor], plan: RolePlan) -> None:
    """Load those of ``weights`` that the plan's folder holds. A collective."""
    (folder,) = plan.folders
    saved = folder.shapes.keys() | folder.additions.keys()
    wanted = {folder.stored.get(name, name): weight.detach() for name, weight in weights.items() if name in saved}
    where = f"{plan.name}.checkpoint={folder.path}"
    if not wanted:
        return
    try:
        dcp.load(wanted, storage_reader=_reader(folder.path))
    except CheckpointException as error:  # raised on all ranks if any rank cannot read
        reason = one_line(next(iter(error.failures.values()))[0])
        raise UserError(f"{where} cannot be read ({reason}); copy it again") from error
    _require_finite(wanted, where)


def _reader(path: Path) -> HuggingFaceStorageReader:
    """Return the reader of a folder, or of one file (by torch's private ``fs``): its folder may hold other networks."""
    reader = HuggingFaceStorageReader(str(path.parent if path.is_file() else path))
    if path.is_file():
        vars(reader.fs)["ls"] = lambda _: [str(path)]
    return reader


def _require_finite(weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights with NaN or infinity, which training would spread. A collective; each rank checks its shards."""
    mine = sorted(name for name, weight in weights.items() if not local_shard(weight).isfinite().all())
    broken = sorted({name for names in on_all_ranks(lambda: mine) for name in names})
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UserError(f"{where}: {broken[0]}{more} holds numbers that are not finite; copy the checkpoint again")
