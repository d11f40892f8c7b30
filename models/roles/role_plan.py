"""Plans of roles, checked against their files before anything is built."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_cp.errors import UserError, shown
from fsdp_cp.launch import rank
from fsdp_cp.sharding.settings import TRAINED_ONLY, ShardSettings
from models.additions.base import Addition, Chosen, named_additions
from models.additions.gan_head import GanHead
from models.additions.heads import Heads
from models.additions.time_conditioning import LastStep, SecondTime
from models.causal import CausalSettings, read_causal
from models.condition import FIRST_FRAME
from models.families.base import Family, Shape, config_of
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
from models.lora.saved import refuse_other_base
from models.lora.settings import LoraSettings
from models.owner import PREFIX, is_gate
from models.roles.gates import SET_SPARSITY, SparsePlan, plan_sparse, saved_gates
from models.roles.role import EXPERTS
from models.sample import VIDEO, PartShapes
from models.sparse import SparseSettings

log = logging.getLogger(__name__)

ADDITION_CLASSES: dict[str, type[Addition]] = {
    "gan_head": GanHead, "second_time": SecondTime, "last_step": LastStep, "heads": Heads,
}  # fmt: skip


def build_additions(chosen: Chosen, family: Family, config: Mapping[str, Any]) -> nn.ModuleDict:
    """Build the additions ``chosen`` for a network of ``config``, on the current default device."""
    arguments = chosen if isinstance(chosen, Mapping) else dict.fromkeys(chosen, {})
    return nn.ModuleDict(
        {name: ADDITION_CLASSES[name](family, config, **settings) for name, settings in arguments.items()}
    )


def added_shapes(added: nn.ModuleDict) -> dict[str, Shape]:
    """Return the shapes of the parameters of additions, by public name."""
    return {PREFIX + name: tuple(p.shape) for name, p in added.named_parameters()}


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """Plan of a role, checked against its files before anything is built."""

    name: str
    family: Family
    config: dict[str, Any]
    """Configuration of the network as loaded from JSON, with the family's defaults and without diffusers' own keys."""
    folders: tuple[TransformerFolder, ...]
    """Folder of each network's weights; empty for random weights."""
    boundaries: tuple[float, ...] = ()
    """Times between experts (:class:`models.roles.role.Role`)."""
    trained_experts: tuple[int, ...] = (0,)
    """Positions of the networks that train, if the role trains."""
    as_it_is: bool = False
    """Whether this is a frozen expert that is exported with a trained one: it keeps its checkpoint's precision."""
    sharding: ShardSettings
    attention_backend: str = "auto"
    head_groups: int = 1
    additions: Chosen = ()
    """Additions of each network; see models/additions/."""
    base: tuple[str, str]
    """Family, and folder or configuration, of the weights. Roles with an equal ``base`` can share networks."""
    added: nn.ModuleDict
    """The additions as modules on the meta device; never changed."""
    lora: LoraPlan | None = None
    """Adapters of the role; ``None`` for a role that owns the whole network."""
    training: LoraPlan | None = None
    """Frozen adapter that the role has in training alone, next to its own; ``None`` for none."""
    causal: CausalSettings | None = None
    """Settings of a causal role; ``None`` for a role that attends to all frames."""
    sparse: SparsePlan | None = None
    """Sparse attention of the role; ``None`` for a dense role."""
    trained_frames: int | None = None
    """Number of latent frames of a clip in the training of a causal checkpoint (``causal.json``)."""
    network: nn.Module
    """One of its networks, on the meta device, without adapters and additions; never changed."""

    @property
    def experts(self) -> int:
        """Number of networks."""
        return len(self.boundaries) + 1

    def expert(self, index: int) -> RolePlan:
        """Return the plan with one of its networks only; without adapters if that network does not train."""
        trains, folders = index in self.trained_experts, self.folders[index : index + 1]
        lora, training = (self.lora, self.training) if trains else (None, None)
        alone = replace(self, folders=folders, boundaries=(), trained_experts=(0,), as_it_is=not trains)
        return replace(alone, lora=lora, training=training)

    def tokens(self, shapes: PartShapes, condition_shapes: Mapping[str, Shape]) -> int:
        """Return the number of tokens of the video of a sample with parts and a condition of these shapes."""
        setting = f"{self.name}.{'checkpoint' if self.folders else 'architecture'}"
        for part in self.family.parts.keys() - {VIDEO}:
            if part not in shapes:
                raise UserError(f"{setting} makes video with {part}, but the data have no {part}; use data with {part}")
            if self.causal is not None:
                raise UserError(f"{setting} makes video with {part}, which works without causal; leave causal out")
        self.family.check_sample(self.config, shapes, condition_shapes, setting)
        for folder in self.folders:
            self.family.check_folder(folder.path, condition_shapes, setting)
        if self.sparse is not None:
            given = self.family.given_frames(condition_shapes)
            self.sparse.name_dense(self.name, self.family.token_grid(self.config, shapes), given)
        if self.causal is not None:
            self.causal.chunks(shapes[VIDEO][1], f"{self.name}.causal.")
            if FIRST_FRAME in condition_shapes and self.causal.size(0) != 1:
                raise UserError(f"{self.name}.causal.first_chunk must be 1 with a first frame (data.image), its chunk")
        return self.family.tokens(self.config, shapes)

    @property
    def adapters(self) -> dict[str, Any] | None:
        """Description of the adapters and their base, as JSON; ``None`` without adapters."""
        if self.lora is None:
            return None
        base: dict[str, str | None] = {"path": None, "fingerprint": None}
        if self.folders:
            above = self.folders[0].path.parent if self.boundaries else self.folders[0].path
            base = {"path": str(above.resolve()), "fingerprint": " ".join(map(fingerprint, self.folders))}
        settings, targets = self.lora.settings, list(self.lora.targets)
        return {"rank": settings.rank, "scale": settings.scale, "targets": targets, "base": base}

    @property
    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the role's parameters in each network, by public name: adapters or network, and additions."""
        network = {name: tuple(p.shape) for name, p in self.network.named_parameters()}
        shapes = network if self.lora is None else self.lora.shapes(self.network)
        shapes |= {} if self.sparse is None else self.sparse.shapes
        return shapes | added_shapes(self.added)

    def for_network(self, network: nn.Module, folders: tuple[TransformerFolder, ...]) -> RolePlan:
        """Return the plan for another network of its family, on the meta device, with weights in ``folders``."""
        config = {"_class_name": self.family.class_name} | defining(config_of(network))
        with torch.device("meta"):
            added = build_additions(self.additions, self.family, config_of(network))
        lora, training = (None if one is None else one.for_network(network) for one in (self.lora, self.training))
        sparse = None if self.sparse is None else self.sparse.for_network(self.family, config_of(network))
        bare = replace(self, config=config, folders=folders, network=network, added=added, sparse=sparse)
        return replace(bare, lora=lora, training=training)


def plan_role(
    name: str,
    *,
    checkpoint: str | None,
    config: str | None = None,
    architecture: dict[str, Any] | None = None,
    boundary: float | None = None,
    family: str = "wan",
    sharding: ShardSettings | None = None,
    attention_backend: str = "auto",
    head_groups: int = 1,
    additions: Chosen = (),
    lora: LoraSettings | None = None,
    saved: Path | None = None,
    training_adapter: Path | None = None,
    experts: str = "both",
    causal: CausalSettings | None = None,
    sparse: SparseSettings | None = None,
) -> RolePlan:
    """Check a role's settings. Reads headers and builds a network on the meta device only.

    ``checkpoint`` is a diffusers pipeline or transformer folder, one file of weights, or ``None`` for random weights of
    ``architecture``. It has its own boundary of experts and ``causal.json``; ``config`` is a folder whose
    ``config.json`` replaces its own. ``lora`` are adapters that the role trains on a frozen network, from the file
    ``saved`` or new; the file ``training_adapter`` has further ones that run in training alone. ``experts``
    that train are ``both``, ``high`` or ``low``.
    """
    chosen = family_of(family, name)
    checkpoint_files = _inspected(name, checkpoint, config, architecture, boundary)
    boundaries, folders = checkpoint_files.boundaries, checkpoint_files.folders
    if architecture is not None:
        chosen.check_keys(architecture, f"{name}.architecture")
    with torch.device("meta"):
        network, *others = _build(name, chosen, folders, architecture)
        added = build_additions(additions, chosen, config_of(network))  # refuses additions that do not fit the network
    paths = [*([saved.parent] if saved is not None else []), *(folder.path for folder in folders)]
    sparse_plan = plan_sparse(name, sparse or SparseSettings(), paths, chosen, config_of(network))
    _check_files(name, folders, [network, *others], added, sparse_plan)
    trained_experts = _trained_experts(name, experts, boundaries, saved or training_adapter)
    adapters = None
    if lora is not None and (lora.enabled or saved is not None):
        adapters = plan_lora(network, chosen, lora, name, saved)
        _check_saved(name, adapters, folders, added, sparse_plan)
    training = None
    if training_adapter is not None:
        training = _plan_training_adapter(name, training_adapter, adapters, network, chosen, folders)
    settings, trained_frames = _causal(name, causal, checkpoint_files, saved, chosen, network)
    if settings is not None and sparse_plan is not None:
        raise UserError(f"{name}.sparse_attention is not for a causal role; leave it or {name}.causal out")
    built = {"_class_name": chosen.class_name} | defining(config_of(network))
    weights = "\n".join(str(folder.path.resolve()) for folder in folders)
    return RolePlan(
        name=name,
        family=chosen,
        config=built,
        base=(chosen.name, weights or json.dumps([built, *boundaries], sort_keys=True)),
        folders=folders,
        boundaries=boundaries,
        trained_experts=trained_experts,
        sharding=sharding or ShardSettings(),
        attention_backend=attention_backend,
        head_groups=head_groups,
        additions=additions,
        added=added,
        lora=adapters,
        training=training,
        causal=settings,
        sparse=sparse_plan,
        trained_frames=trained_frames,
        network=network,
    )


def _build(
    name: str, family: Family, folders: Sequence[TransformerFolder], architecture: dict[str, Any] | None
) -> list[nn.Module]:
    """Build the network of each folder, or the one with random weights."""
    if folders:
        return [family.build(folder.config, f"{name}.checkpoint") for folder in folders]
    return [family.build(dict(architecture or {}), f"{name}.architecture")]


def _plan_training_adapter(
    name: str,
    file: Path,
    adapters: LoraPlan | None,
    network: nn.Module,
    family: Family,
    folders: Sequence[TransformerFolder],
) -> LoraPlan:
    """Return the plan of the adapter in ``file``, checked against its base."""
    where = f"{name}.training_adapter"
    if adapters is None:
        whole = f"{where}={file.parent} is for a {name} that trains adapters, whose export lacks it"
        raise UserError(f"{whole}; set adapters=lora or {name}.lora.rank")
    planned = plan_lora(network, family, LoraSettings(), name, file, setting=where)
    if planned.saved is not None and planned.saved.added:
        added = f"{where}={file.parent} has {min(planned.saved.added)} next to its adapters"
        raise UserError(f"{added}, which is the {name}'s own; give adapters alone")
    refuse_other_base(file, folders, where)
    return planned


def _check_saved(
    name: str,
    adapters: LoraPlan,
    folders: Sequence[TransformerFolder],
    added: nn.ModuleDict,
    sparse: SparsePlan | None,
) -> None:
    """Check that the role has the base, the heads and the gates of the file of its adapters."""
    if adapters.saved is None:
        return
    refuse_other_base(adapters.saved.file, folders, f"{name}.checkpoint", warn=True)
    heads = {key: shape for key, shape in adapters.saved.added.items() if not is_gate(key)}
    gates = {key: shape for key, shape in adapters.saved.added.items() if is_gate(key)}
    where = f"{name}.checkpoint={adapters.saved.file.parent}"
    if heads:
        count = heads[min(heads)][0]
        _check_added(where, name, heads, added_shapes(added), f"use method=pdd with method.grid_steps={count}")
    if gates:
        dense_layers = f"set {name}.sparse_attention.dense_layers to those that it was trained with"
        advice = SET_SPARSITY.format(role=name) if sparse is None else dense_layers
        _check_added(where, name, gates, {} if sparse is None else sparse.shapes, advice)


def _check_added(where: str, name: str, saved: dict[str, Shape], wanted: dict[str, Shape], advice: str) -> None:
    """Refuse ``saved`` tensors next to adapters other than those that the role ``name`` has."""
    if different := {*saved.items()} ^ {*wanted.items()}:
        other = min(different)[0]
        needs = f"the {name} needs {wanted.get(other, 'none')}"
        raise UserError(f"{where} has {other} of shape {saved.get(other)}, but {needs}; {advice}, and use its own base")


def _trained_experts(name: str, experts: str, boundaries: Sequence[float], saved: Path | None) -> tuple[int, ...]:
    """Return the positions of the networks that train."""
    if experts == "both":
        if saved is not None and boundaries:
            raise UserError(f"{name}.experts must be high or low: {saved.parent} holds adapters of one of two experts")
        return tuple(range(len(boundaries) + 1))
    if not boundaries:
        raise UserError(f"{name}.experts={experts} is for a model of two experts, and the {name} is one; leave it out")
    return (EXPERTS.index(experts),)


def _inspected(
    name: str, checkpoint: str | None, config: str | None, architecture: dict[str, Any] | None, boundary: float | None
) -> Checkpoint:
    """Return the files of a role and the boundary of its experts; no files for random weights."""
    if (checkpoint is None) == (architecture is None):
        raise UserError(f"set one of {name}.checkpoint (a diffusers folder) and {name}.architecture (random weights)")
    if boundary is not None and checkpoint is not None:
        raise UserError(f"{name}.boundary is for {name}.architecture; a checkpoint has its own in model_index.json")
    if boundary is not None and not 0 < boundary < 1:
        raise UserError(f"{name}.boundary={boundary:g} must be between 0 and 1")
    if checkpoint is not None:
        return inspect_checkpoint(checkpoint, f"{name}.checkpoint", config=config)
    return Checkpoint((), () if boundary is None else (boundary,))


def _causal(
    name: str, settings: CausalSettings | None, checkpoint: Checkpoint, saved: Path | None, family: Family, network
) -> tuple[CausalSettings | None, int | None]:
    """Return a role's causal settings and the latent frames in training, of the adapters' file or the checkpoint."""
    settings, trained_frames, where = settings or CausalSettings(), None, f"{name}.causal."
    folders = [*([saved.parent] if saved is not None else []), *(folder.path for folder in checkpoint.folders)]
    for folder in folders:
        if (file := read_causal(folder, f"{name}.checkpoint={folder}")) is not None:
            settings, trained_frames = settings.merged(file[0], where, folder), file[1]
            break
    if not settings.enabled:
        if settings != CausalSettings():
            raise UserError(f"{where}chunk is not set, so the other {where}* have no effect; set it, or leave them out")
        return None, None
    setting = f"{where}chunk={settings.chunk}"
    family.check_causal(config_of(network), setting)
    if checkpoint.boundaries:
        raise UserError(f"{setting}: a model of two experts (A14B) cannot be causal; use one network")
    return settings, trained_frames


def _check_files(
    role: str,
    folders: Sequence[TransformerFolder],
    networks: Sequence[nn.Module],
    added: nn.ModuleDict,
    sparse: SparsePlan | None,
) -> None:
    """Check that experts have one configuration, and that the folders hold their tensors; additions and gates may be
    missing."""
    setting = f"{role}.checkpoint"
    first, *others = (defining(config_of(network)) for network in networks)
    for other in others:
        if other != first:
            keys = [key for key in sorted(first.keys() | other.keys()) if first.get(key) != other.get(key)]
            raise UserError(f"{setting}={folders[0].path.parent}: its two experts must not differ in {', '.join(keys)}")
    expected = added_shapes(added)
    chosen = named_additions(expected)
    for folder in folders:
        of_network = {key: tuple(value.shape) for key, value in networks[0].state_dict().items()}
        check_tensors(folder, of_network | saved_gates(role, folder, sparse), setting)
        saved = named_additions(folder.additions)
        shapes = {key: shape for key, shape in folder.additions.items() if named_additions([key]) <= chosen}
        wanted = {key: shape for key, shape in expected.items() if named_additions([key]) <= saved}
        check_tensors(replace(folder, shapes=shapes), wanted, setting)
        if saved - chosen and rank() == 0:
            unused = ", ".join(sorted(saved - chosen))
            log.warning("%s=%s: its additions %s are not used", setting, folder.path, unused)


def sharing(plans: Sequence[RolePlan], trained: Collection[str]) -> list[list[RolePlan]]:
    """Group ``plans`` by the network that they use, in the order of each group's first plan.

    Roles with adapters on one base share it. So does a frozen role whose network is this base: a teacher is the base
    without adapters. A role in ``trained`` that trains its whole network does not share it.
    """
    adapted = {plan.base for plan in plans if plan.lora is not None}
    alone = {plan.name for plan in plans if plan.additions or plan.sparse is not None}
    groups: dict[object, list[RolePlan]] = {}
    for plan in plans:
        shares = plan.lora is not None or (plan.base in adapted and plan.name not in {*trained, *alone})
        groups.setdefault(plan.base if shares else plan.name, []).append(plan)
    return list(groups.values())


def check_together(plans: Sequence[RolePlan], trained: Collection[str]) -> None:
    """Refuse roles that one run cannot have: on one mesh they exchange samples, and perhaps share networks."""
    patches = {plan.family.patch_size(plan.config) for plan in plans}
    if len(patches) > 1:
        raise UserError(f"the roles have patch sizes {sorted(patches)}; checkpoints on one mesh must share theirs")
    made, *different = {tuple(plan.family.parts) for plan in plans}
    if different:
        raise UserError(f"the roles make {made} and {different[0]}; checkpoints of one run must make the same parts")
    for group in sharing(plans, trained):
        for first, other in combinations(group, 2):
            _check_alike(first, other, trained)


def _check_alike(first: RolePlan, other: RolePlan, trained: Collection[str]) -> None:
    """Check that two roles on one base network shard and compile it alike."""
    # A frozen role has no training settings to compare.
    free = () if {first.name, other.name} <= {*trained} else ("master_dtype", *TRAINED_ONLY)
    for item in fields(ShardSettings):
        one, two = getattr(first.sharding, item.name), getattr(other.sharding, item.name)
        if item.name not in free and one != two:
            differ = f"{first.name}.{item.name}={shown(one)}, but {other.name}.{item.name}={shown(two)}"
            raise UserError(f"{differ}: these roles share one network ({other.name}.lora); set them equal")
