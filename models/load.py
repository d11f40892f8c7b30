"""Build a role: on the meta device, split, sharded, then filled from a diffusers folder or from a seed."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.sharding import materialise, shard_module
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, ShardSettings
from models.additions.base import PREFIX, Chosen, named_additions
from models.additions.registry import additions_of, attach_additions, build_additions
from models.checkpoint_files import TransformerFolder, check_tensors, fingerprint, inspect_transformer
from models.families.base import Family, LatentShape, Shape, config_of
from models.families.registry import family_of
from models.fill import fill
from models.lora.plan import LoraPlan, plan_lora
from models.lora.serving import Serving
from models.lora.settings import LoraSettings
from models.names import owner
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
    base: tuple[str, str]
    """What tells its weights from others, of family and folder or configuration: roles of equal ones can share them."""
    added: nn.ModuleDict
    """These, on the meta device; never changed."""
    lora: LoraPlan | None = None
    """The role's adapters; without any it has the whole network."""
    network: nn.Module
    """On the meta device, without adapters and additions; never changed."""

    def tokens(self, latent_shape: LatentShape, condition_shapes: Mapping[str, Shape]) -> int:
        """Tokens of a sample of latents ``(C, T, H, W)`` with a condition of these shapes.

        Raises:
            UserError: shapes that the network cannot take.
        """
        setting = f"{self.name}.{'architecture' if self.folder is None else 'checkpoint'}"
        self.family.check_sample(self.config, latent_shape, condition_shapes, setting)
        return self.family.tokens(self.config, latent_shape)

    @property
    def adapters(self) -> dict[str, Any] | None:
        """Of a role with adapters what they are, and on which base, as JSON; a random base is the run's seed's."""
        if self.lora is None:
            return None
        base: dict[str, str | None] = {"path": None, "fingerprint": None}
        if self.folder is not None:
            base = {"path": str(self.folder.path.resolve()), "fingerprint": fingerprint(self.folder)}
        return self.lora.described | {"base": base}

    @property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is the role's own, by public name: its adapters or the network, and its additions."""
        if self.lora is not None:
            own = self.lora.shapes(self.network)
        else:
            own = {name: tuple(p.shape) for name, p in self.network.named_parameters()}
        return own | {PREFIX + name: tuple(p.shape) for name, p in self.added.named_parameters()}

    def of(self, network: nn.Module, folder: TransformerFolder | None) -> RolePlan:
        """The same role of another network of its family, on the meta device, with its weights in ``folder``; it shares
        it with the roles that it shares this one with."""
        config = {"_class_name": self.family.class_name} | defining(config_of(network))
        with torch.device("meta"):
            added = build_additions(self.additions, self.family, config_of(network))
        lora = None if self.lora is None else self.lora.of(network)
        return replace(self, config=config, folder=folder, network=network, added=added, lora=lora)


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
    lora: LoraSettings | None = None,
    saved: Path | None = None,
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
        lora: the adapters that the role trains, on a frozen network.
        saved: the file that these begin with.

    Raises:
        UserError: a missing folder, a network that its files do not fit, neither checkpoint nor architecture, adapters
            that the network cannot have.
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
    adapters = None
    if lora is not None and (lora.enabled or saved is not None):
        adapters = plan_lora(network, chosen, lora, name, saved)
    config = {"_class_name": chosen.class_name} | defining(config_of(network))
    weights = json.dumps(config, sort_keys=True) if folder is None else str(folder.path.resolve())
    return RolePlan(
        name=name,
        family=chosen,
        config=config,
        base=(chosen.name, weights),
        folder=folder,
        sharding=sharding or ShardSettings(),
        attention_backend=attention_backend,
        head_groups=head_groups,
        additions=additions,
        added=extra,
        lora=adapters,
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


def sharing(plans: Sequence[RolePlan], trained: Collection[str]) -> list[list[RolePlan]]:
    """``plans`` by the network that they will have, in the order of their first.

    Roles with adapters on one base share it, and so does a frozen role that is this base: a teacher is the base without
    any adapters. A role that trains its whole network has it alone.

    Args:
        plans: of the roles.
        trained: names of those that train.
    """
    adapted = {plan.base for plan in plans if plan.lora is not None}
    groups: dict[object, list[RolePlan]] = {}
    for plan in plans:
        shares = plan.lora is not None or (plan.name not in trained and not plan.additions and plan.base in adapted)
        groups.setdefault(plan.base if shares else plan.name, []).append(plan)
    return list(groups.values())


def _sharding_of(plans: Sequence[RolePlan], trained: Collection[str], precision: str | None) -> ShardSettings:
    """How a network of these roles is sharded; they agree in what counts (:func:`distill.setup.plan_run`)."""
    adapted = [plan for plan in plans if plan.lora is not None]
    of = (adapted or plans)[0]
    settings = replace(of.sharding, precision=precision or of.sharding.precision)
    if adapted:  # adapters keep fp32 masters; the base is stored as it computes
        early = any(plan.sharding.gather_early for plan in plans)
        return replace(settings, master_dtype="keep", gather_early=early)
    return settings if of.name in trained else settings.frozen()


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
    precision: str | None = None,
    latent_shape: LatentShape,
    condition_shapes: Mapping[str, Shape],
    seed: int = 0,
) -> dict[str, Role]:
    """:func:`build_role` for each of ``plans``, by name; those not in ``trained`` are frozen.

    Those that can share a network do (:func:`sharing`).
    """
    built: dict[str, Role] = {}
    for group in sharing(plans, trained):
        network = build_network(
            group,
            trained=trained,
            mesh=mesh,
            device=device,
            precision=precision,
            latent_shape=latent_shape,
            condition_shapes=condition_shapes,
        )
        roles = [
            Role(name=plan.name, networks=(network,), trainable=plan.name in trained, adapters=plan.adapters)
            for plan in group
        ]
        fill(network, group, roles, seed)
        built |= {role.name: role for role in roles}
    return {plan.name: built[plan.name] for plan in plans}


def build_network(
    plans: Sequence[RolePlan],
    *,
    trained: Collection[str],
    mesh: Mesh,
    device: torch.device,
    precision: str | None = None,
    latent_shape: LatentShape,
    condition_shapes: Mapping[str, Shape],
    allocate: bool = True,
) -> Network:
    """The network of one of the groups of :func:`sharing`, with memory for its weights and nothing in it.

    Args:
        plans: the group.
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
