"""Everything that can be refused before a process group, data or a network exists."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path

import torch

from distill.config import Config
from distill.config.checks import micro_batch_size
from distill.config.schema import RoleSettings
from distill.loggers import check_services
from distill.methods import METHODS, Method
from distill.optimizers import parameter_groups
from distill.profiling import check_profile
from fsdp_cp.attention.kernels import check_backend, choose_kernel
from fsdp_cp.errors import UserError, paths_of_the_user, shown
from fsdp_cp.launch import choose_device, rank, world_size
from fsdp_cp.mesh import MeshShape, resolve_mesh
from fsdp_cp.sharding.fp8 import linear_layers, require_fp8
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, TRAINED_ONLY, ShardSettings, require_compiler
from models.families.base import LatentShape, Shape
from models.lora.saved import find_adapters
from models.published import refuse_input
from models.role_plan import RolePlan, plan_role, sharing

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A configuration that fits the world and its checkpoints."""

    run_dir: Path
    method: type[Method]
    roles: list[RolePlan]
    heads: int
    """Greatest common divisor of the query and key/value heads of all roles, which share the mesh."""
    mesh: MeshShape
    micro_batch_size: int
    """Samples per data-parallel rank and forward."""


@paths_of_the_user()
def plan_run(
    config: Config, method: type[Method] | None = None, *, shapes: tuple[LatentShape, Mapping[str, Shape]] | None = None
) -> RunPlan:
    """Check ``config`` against the world and the files it names; ``method`` in the place of its own.

    Args:
        config: the checked configuration.
        method: instead of its own.
        shapes: of a sample's latents and condition, where no data are to be looked at, nor other files of the method.

    Raises:
        UserError: whatever does not fit, in one line.
    """
    check_services(config.log)
    method = method or METHODS[config.method.name][0]
    runs_here = shapes is None
    if runs_here:
        method.check_files(config)
    needed = method.roles_needed(config.method)
    bases = {"teacher"} if any(find_adapters(getattr(config, name).checkpoint) for name in needed) else set()
    for name in {"teacher", "student", "fake"} - {*needed, *method.settings_read, *bases}:
        if (getattr(config, name).checkpoint or getattr(config, name).architecture) and rank() == 0:
            log.warning("method=%s has no role %s: its settings are not used", config.method.name, name)
    device = device_of(config)
    check_profile(config, world=world_of(config))
    sharding = {name: _sharding(config, name, method, device) for name in needed}
    if runs_here and not config.dry_run:  # whose machine need not be the run's
        for name in needed:
            if sharding[name].compile:
                require_compiler(device.type, f"{name}.compile")
            require_fp8(sharding[name], device.type, f"{name}.")
    if runs_here and device.type == "cpu" and rank() == 0:
        for name in [name for name, settings in sharding.items() if settings.offload == "cpu"]:
            log.warning("%s.offload=cpu moves nothing: the device is the CPU", name)
    roles = []
    for name in needed:
        settings = getattr(config, name)
        trained = name in method.trained_roles
        saved = find_adapters(settings.checkpoint)
        of_base = _base_of_adapters(config, name, trained) if saved is not None else settings
        roles.append(
            plan_role(
                name,
                checkpoint=of_base.checkpoint,
                architecture=of_base.architecture,
                boundary=of_base.boundary,
                family=settings.family,
                sharding=sharding[name],
                attention_backend=config.attention.backend,
                head_groups=config.attention.head_groups,
                additions=method.additions(config.method).get(name, ()),
                lora=settings.lora if trained else None,
                saved=saved,
                experts=settings.experts if name == "student" else "both",
            )
        )
        if sharding[name].fp8 != "none":
            network, family = roles[-1].network, roles[-1].family
            in_fp32 = [*family.fp8_excluded(network), *family.full_precision_units(network)]
            linear_layers(family.blocks(network), in_fp32, f"{name}.")
    _check_sharing(roles, method.trained_roles)
    _check_experts(config, method, roles)
    if config.export.at_end:
        for role in roles:
            own = [folder.path for folder in role.folders]
            if role.lora is not None and role.lora.saved is not None:
                own.append(role.lora.saved.file.parent)
            for each in own:
                refuse_input(Path(config.run_dir) / "export", "the run's own", {f"{role.name}.checkpoint": each})
    _check_patterns(config, [role for role in roles if role.name in method.trained_roles])
    patches = {role.family.patch_size(role.config) for role in roles}
    if len(patches) > 1:
        raise UserError(f"the roles have patch sizes {sorted(patches)}; checkpoints on one mesh must share theirs")
    shapes = shapes or config.data.sample_shapes()
    assert len({role.tokens(*shapes) for role in roles}) == 1
    heads = math.gcd(*(role.family.heads(role.config) for role in roles))
    sharded = any(settings.strategy != "no_shard" for settings in sharding.values())
    shape = resolve_mesh(world_size=world_of(config), heads=heads, sharded=sharded, **asdict(config.mesh))
    for name, settings in sharding.items():
        settings.copies(shape, f"{name}.")
    is_of_gpus = config.dry_run and config.device == "cuda" and device.type == "cpu"  # a dry run without its GPUs
    _check_attention(config, roles, heads // shape.ulysses, None if is_of_gpus or not runs_here else device)
    return RunPlan(
        run_dir=Path(config.run_dir),
        method=method,
        roles=roles,
        heads=heads,
        mesh=shape,
        micro_batch_size=micro_batch_size(config, shape.dp),
    )


def device_of(config: Config) -> torch.device:
    """This rank's device; of a dry run the CPU where torch sees no GPU, since its machine need not be the run's.

    Raises:
        UserError: as :func:`fsdp_cp.launch.choose_device`, but in a dry run.
    """
    if not config.dry_run or torch.cuda.is_available():
        return choose_device(config.device)
    return torch.device("cpu")


def world_of(config: Config) -> int:
    """How many ranks the run has; with ``dry_run``, is to have."""
    return config.world if config.world is not None else world_size()


def _sharding(config: Config, name: str, method: type[Method], device: torch.device) -> ShardSettings:
    """How role ``name`` is sharded; refused here, before its files are read."""
    given = getattr(config, name)
    settings = ShardSettings(**{item.name: getattr(given, item.name) for item in fields(ShardSettings)})
    settings.check(device.type, f"{name}.")
    if name in method.trained_roles:
        given.lora.check(f"{name}.lora.")
    # FSDP2 makes the memory of a whole weight once: the forwards without tangents need it as those with them.
    if settings.fp8_gather and name == "student" and getattr(config.method, "jvp", None) == "exact":
        raise UserError(
            f"{name}.fp8_gather=true: method={config.method.name} takes derivatives of the {name} in forward mode, for"
            f" which its weights are gathered as they compute; use {name}.fp8_gather=false"
        )
    if settings.gather_early:
        steps = method(config.method, {})
        first = list(dict.fromkeys(steps.first_role(step) for step in range(config.steps)))
        if name not in first:
            raise UserError(
                f"{name}.gather_early=true: no step of method={config.method.name} begins with a forward of the {name};"
                f" use {first[0]}.gather_early=true"
            )
    if name not in method.trained_roles:
        default = ShardSettings()
        for setting in ("master_dtype", *TRAINED_ONLY):
            if getattr(settings, setting) != getattr(default, setting):
                raise UserError(
                    f"{name}.{setting}={getattr(settings, setting)} is for a role that trains, and with"
                    f" method={config.method.name} the {name} does not; leave it out"
                )
    elif settings.master_dtype != "keep" and has_adapters(given):
        raise UserError(
            f"{name}.master_dtype={settings.master_dtype} with adapters ({name}.lora, {name}.checkpoint): they have"
            f" fp32 masters, and a base is stored as it computes; use {name}.master_dtype=keep"
        )
    elif settings.master_dtype == "bf16" and given.ema.enabled:
        raise UserError(
            f"{name}.master_dtype=bf16 with {name}.ema.enabled=true: an average in bf16 stands still, since it moves"
            f" by less than bf16 can tell; use {name}.master_dtype=keep"
        )
    return settings


def has_adapters(role: RoleSettings) -> bool:
    """Does it train adapters, fresh ones or those of a file?"""
    return role.lora.enabled or find_adapters(role.checkpoint) is not None


def _base_of_adapters(config: Config, name: str, trained: bool) -> RoleSettings:
    """Where the base is, of a role whose checkpoint is a folder of adapters: with the teacher.

    Raises:
        UserError: a role that does not train, or no teacher's network.
    """
    folder = getattr(config, name).checkpoint
    if not trained:
        raise UserError(
            f"{name}.checkpoint={folder} holds adapters alone, and the {name} does not train; give a whole network"
        )
    if find_adapters(config.teacher.checkpoint) or not (config.teacher.checkpoint or config.teacher.architecture):
        raise UserError(
            f"{name}.checkpoint={folder} holds adapters alone; set teacher.checkpoint to the network that they are for"
        )
    return config.teacher


def _check_sharing(roles: Sequence[RolePlan], trained: Collection[str]) -> None:
    """Roles on one base have one network, which is sharded and compiled in one way.

    Raises:
        UserError: settings that differ, by name; modules that one role trains and another adapts.
    """
    for group in sharing(roles, trained):
        for first, other in combinations(group, 2):
            frozen = {first.name, other.name} - set(trained)
            for name in (item.name for item in fields(ShardSettings)):
                if name == "gather_early" or (frozen and name in ("master_dtype", *TRAINED_ONLY)):
                    continue
                one, two = (getattr(role.sharding, name) for role in (first, other))
                if one != two:
                    raise UserError(
                        f"{first.name}.{name}={shown(one)}, but {other.name}.{name}={shown(two)}: these roles share one"
                        f" network ({other.name}.lora), which can have one {name}; set them equal"
                    )
        adapters = [role for role in group if role.lora is not None]
        for role in adapters:
            for other in adapters:
                both = [
                    (name, target)
                    for name in role.lora.train
                    for target in other.lora.targets
                    if target == name or target.startswith(f"{name}.")
                ]
                if both:
                    raise UserError(
                        f"{role.name}.lora.train: {both[0][0]} would be trained whole by the {role.name}, and"
                        f" {both[0][1]} of the shared base has an adapter of the {other.name}; leave one of them out"
                    )


def _check_experts(config: Config, method: type[Method], roles: Sequence[RolePlan]) -> None:
    """
    Raises:
        UserError: experts of ranges of times where the method or a setting knows of none.
    """
    boundaries = {role.name: role.boundaries for role in roles if role.boundaries}
    method.check_experts(config.method, boundaries, config.student.experts)
    if config.expert_draws > 1 and not boundaries:
        raise UserError(
            f"expert_draws={config.expert_draws} is for roles of two experts, and no role of this run has them; leave"
            " it out"
        )
    second = getattr(config.method, "guidance_scale_2", None)
    if second is not None and "teacher" not in boundaries:
        raise UserError(
            f"method.guidance_scale_2={second:g} is of a teacher's second expert, and this teacher is one network;"
            " leave it out"
        )
    for role in roles:
        if role.boundaries and role.sharding.gather_early:
            raise UserError(
                f"{role.name}.gather_early=true: which of its two experts a step begins with is not known before it;"
                f" use {role.name}.gather_early=false"
            )


def _check_patterns(config: Config, roles: Iterable[RolePlan]) -> None:
    """``optim.ROLE.no_decay`` and ``lr_scale`` against the names of the role's parameters."""
    for role in roles:
        settings = getattr(config.optim, role.name)
        if settings.no_decay or settings.lr_scale:
            parameter_groups(role.own_shapes, settings, f"optim.{role.name}")


def _check_attention(config: Config, roles: list[RolePlan], heads: int, device: torch.device | None) -> None:
    """Check ``attention.*`` against the ``heads`` of a rank and every role's head size.

    Args:
        config: the settings.
        roles: all roles.
        heads: attention heads of a rank.
        device: the run's device; ``None`` if this machine does not have it, so that its kernels are not known.
    """
    if heads % config.attention.head_groups:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(
            f"attention.head_groups={config.attention.head_groups} does not divide the {heads} heads of a rank;"
            f" use {fitting}"
        )
    try:
        check_backend(config.attention.backend)
        for role in roles if device is not None else ():
            size, dtype = role.family.head_dim(role.config), COMPUTE_DTYPE[role.sharding.precision]
            masked = role.family.masked_attention
            choose_kernel(config.attention.backend, device=device, dtype=dtype, head_dim=size, masked=masked)
    except ValueError as error:
        raise UserError(f"attention.{error}") from error
