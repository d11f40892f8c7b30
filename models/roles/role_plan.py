"""What a role will be, checked against its files before anything is built."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.sharding.settings import ShardSettings
from models.additions.base import PREFIX, Addition, Chosen, named_additions
from models.additions.gan_head import GanHead
from models.additions.time_conditioning import LastStep, SecondTime
from models.families.base import Family, LatentShape, Shape, config_of
from models.families.registry import family_of
from models.files.checkpoint_files import (
    Checkpoint,
    TransformerFolder,
    check_tensors,
    defining,
    fingerprint,
    inspect_checkpoint,
)
from models.lora.plan import LoraPlan, plan_lora
from models.lora.settings import LoraSettings
from models.roles.role import EXPERTS

log = logging.getLogger(__name__)

ADDITIONS: dict[str, type[Addition]] = {"gan_head": GanHead, "second_time": SecondTime, "last_step": LastStep}


def build_additions(chosen: Chosen, family: Family, config: Mapping[str, Any]) -> nn.ModuleDict:
    """Build the additions ``chosen`` for a network of ``config``, on the current default device."""
    arguments = chosen if isinstance(chosen, Mapping) else dict.fromkeys(chosen, {})
    return nn.ModuleDict({name: ADDITIONS[name](family, config, **given) for name, given in arguments.items()})


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """What a role will be, checked against its files before anything is built."""

    name: str
    family: Family
    config: dict[str, Any]
    """What defines the network, as JSON gives it back: the family's defaults filled in, no notes of diffusers."""
    folders: tuple[TransformerFolder, ...]
    """Where the weights come from, of each network; none for random ones."""
    boundaries: tuple[float, ...] = ()
    """Of experts, of one configuration, the times between them (:class:`models.roles.role.Role`)."""
    trained_experts: tuple[int, ...] = (0,)
    """Where it trains, which of its networks do."""
    as_it_is: bool = False
    """An expert beside one that trains, which is exported with it: held as exactly as its checkpoint has it."""
    sharding: ShardSettings
    attention_backend: str = "auto"
    head_groups: int = 1
    additions: Chosen = ()
    """What is attached to each network; see models/additions/."""
    base: tuple[str, str]
    """What tells its weights from others, of family and folder or configuration: roles of equal ones can share them."""
    added: nn.ModuleDict
    """These, on the meta device; never changed."""
    lora: LoraPlan | None = None
    """The role's adapters; without any it has the whole network."""
    network: nn.Module
    """One of its networks, on the meta device, without adapters and additions; never changed."""

    @property
    def experts(self) -> int:
        """How many networks it has."""
        return len(self.boundaries) + 1

    def expert(self, index: int) -> RolePlan:
        """The same role of one of its networks alone; without its adapters where that one does not train."""
        lora = self.lora if index in self.trained_experts else None
        beside = index not in self.trained_experts
        folders = self.folders[index : index + 1]
        return replace(self, folders=folders, boundaries=(), trained_experts=(0,), lora=lora, as_it_is=beside)

    @property
    def setting(self) -> str:
        """What its networks come from, as users set it."""
        return f"{self.name}.{'checkpoint' if self.folders else 'architecture'}"

    def tokens(self, latent_shape: LatentShape, condition_shapes: Mapping[str, Shape]) -> int:
        """Tokens of a sample of latents ``(C, T, H, W)`` with a condition of these shapes.

        Raises:
            UserError: shapes that the network cannot take.
        """
        self.family.check_sample(self.config, latent_shape, condition_shapes, self.setting)
        return self.family.tokens(self.config, latent_shape)

    @property
    def adapters(self) -> dict[str, Any] | None:
        """Of a role with adapters what they are, and on which base, as JSON; a random base is the run's seed's."""
        if self.lora is None:
            return None
        base: dict[str, str | None] = {"path": None, "fingerprint": None}
        if self.folders:
            above = self.folders[0].path.parent if self.boundaries else self.folders[0].path
            base = {"path": str(above.resolve()), "fingerprint": " ".join(map(fingerprint, self.folders))}
        return self.lora.described | {"base": base}

    @property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is the role's own in each network, by public name: its adapters or the network, and its
        additions."""
        if self.lora is not None:
            own = self.lora.shapes(self.network)
        else:
            own = {name: tuple(p.shape) for name, p in self.network.named_parameters()}
        return own | {PREFIX + name: tuple(p.shape) for name, p in self.added.named_parameters()}

    def of(self, network: nn.Module, folders: tuple[TransformerFolder, ...]) -> RolePlan:
        """The same role of another network of its family, on the meta device, with its weights in ``folders``; it
        shares it with the roles that it shares this one with."""
        config = {"_class_name": self.family.class_name} | defining(config_of(network))
        with torch.device("meta"):
            added = build_additions(self.additions, self.family, config_of(network))
        lora = None if self.lora is None else self.lora.of(network)
        return replace(self, config=config, folders=folders, network=network, added=added, lora=lora)


def plan_role(
    name: str,
    *,
    checkpoint: str | None,
    architecture: dict[str, Any] | None = None,
    boundary: float | None = None,
    family: str = "wan",
    sharding: ShardSettings | None = None,
    attention_backend: str = "auto",
    head_groups: int = 1,
    additions: Chosen = (),
    lora: LoraSettings | None = None,
    saved: Path | None = None,
    experts: str = "both",
) -> RolePlan:
    """Check a role's settings; reads headers, builds nothing but a network on the meta device.

    Args:
        name: the role.
        checkpoint: a diffusers pipeline or transformer folder, or ``None`` for random weights.
        architecture: the network's configuration where there is no checkpoint.
        boundary: makes it two experts there, the first of which serves from this time on; a checkpoint has its own.
        family: the model family.
        sharding: how it will be sharded; plain fp32 by default.
        attention_backend, head_groups: see :func:`fsdp_cp.attention.context_parallel_attention`.
        additions: what is attached to the network.
        lora: the adapters that the role trains, on a frozen network.
        saved: the file that these begin with.
        experts: which of two train, where the role does: ``both``, ``high`` or ``low``.

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
    found = inspect_checkpoint(checkpoint, setting) if checkpoint is not None else Checkpoint((), ())
    boundaries = found.boundaries
    if boundary is not None:
        if checkpoint is not None:
            raise UserError(
                f"{name}.boundary={boundary:g} is for {name}.architecture; a checkpoint of two experts has its boundary"
                " in model_index.json (boundary_ratio)"
            )
        if not 0 < boundary < 1:
            raise UserError(f"{name}.boundary={boundary:g} must be between 0 and 1")
        boundaries = (boundary,)
    if architecture is not None:
        chosen.check_keys(architecture, f"{name}.architecture")
    with torch.device("meta"):
        if found.folders:
            network, *others = (chosen.build(folder.config, setting) for folder in found.folders)
        else:
            network, others = chosen.build(dict(architecture or {}), f"{name}.architecture"), []
        extra = build_additions(additions, chosen, config_of(network))  # refuses what does not fit the network
    _check_experts([network, *others], f"{setting}={checkpoint}")
    shapes = {PREFIX + key: tuple(value.shape) for key, value in extra.state_dict().items()}
    for folder in found.folders:
        check_tensors(folder, {key: tuple(value.shape) for key, value in network.state_dict().items()}, setting)
        _check_additions(folder, shapes, setting)
    if saved is not None and boundaries and experts == "both":
        raise UserError(
            f"{name}.checkpoint={saved.parent} holds adapters of one network, and its base is two experts; give"
            f" {name}.experts=high or low, whose they are"
        )
    adapters = None
    if lora is not None and (lora.enabled or saved is not None):
        adapters = plan_lora(network, chosen, lora, name, saved)
    config = {"_class_name": chosen.class_name} | defining(config_of(network))
    weights = "\n".join(str(folder.path.resolve()) for folder in found.folders)
    if not found.folders:
        weights = json.dumps([config, *boundaries], sort_keys=True)
    return RolePlan(
        name=name,
        family=chosen,
        config=config,
        base=(chosen.name, weights),
        folders=found.folders,
        boundaries=boundaries,
        trained_experts=_trained_experts(name, boundaries, experts),
        sharding=sharding or ShardSettings(),
        attention_backend=attention_backend,
        head_groups=head_groups,
        additions=additions,
        added=extra,
        lora=adapters,
        network=network,
    )


def _trained_experts(name: str, boundaries: tuple[float, ...], chosen: str) -> tuple[int, ...]:
    """
    Raises:
        UserError: one of two where there is one network.
    """
    if chosen == "both":
        return tuple(range(len(boundaries) + 1))
    if not boundaries:
        raise UserError(f"{name}.experts={chosen} is for a model of two experts, and the {name} is one; leave it out")
    return (EXPERTS.index(chosen),)


def _check_experts(networks: Sequence[nn.Module], where: str) -> None:
    """Experts must be of one configuration.

    Raises:
        UserError: naming what differs.
    """
    first, *others = (defining(config_of(network)) for network in networks)
    for other in others:
        if other != first:
            keys = [key for key in sorted(first.keys() | other.keys()) if first.get(key) != other.get(key)]
            raise UserError(
                f"{where}: its two experts differ in {', '.join(keys)}; experts must be alike but in weights"
            )


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
