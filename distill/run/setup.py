"""Plan of a run: all checks that need neither a process group nor data nor networks."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from distill.config import Config
from distill.config.checks import micro_batch_size
from distill.config.errors import group_files
from distill.config.schema import RoleSettings
from distill.data import ClipDataset
from distill.methods import METHODS, Method
from distill.run.loggers import check_services
from fsdp_cp.attention.kernels.choose import check_backend, choose_kernel
from fsdp_cp.errors import UserError, paths_of_the_user, shown
from fsdp_cp.files.atomic_folder import refuse_input
from fsdp_cp.launch import choose_device, rank, world_size
from fsdp_cp.mesh import MeshShape, resolve_mesh
from fsdp_cp.sharding.fp8 import linear_layers, require_fp8
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, TRAINED_ONLY, ShardSettings, require_compiler
from models.families.base import Shape
from models.lora.saved import find_adapters
from models.roles.load import build_roles
from models.roles.role import Role
from models.roles.role_plan import RolePlan, plan_role, sharing
from models.sample import VIDEO, PartShapes

log = logging.getLogger(__name__)

_OF_TRAINING = ("master_dtype", *TRAINED_ONLY)
"""Sharding settings that have no effect on a frozen role."""

Shapes = tuple[PartShapes, Mapping[str, Shape]]
"""Shapes of a sample's parts and of its condition's tensors."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Configuration that was checked against the world and the checkpoints."""

    run_dir: Path
    method: type[Method]
    roles: list[RolePlan]
    mesh: MeshShape
    shapes: Shapes
    tokens: int
    others: Sequence[tuple[Shapes, int]] = ()
    """Shapes and tokens of the data's further buckets; ``shapes`` and ``tokens`` are those of the first."""
    micro_batch_size: int
    """Samples per data-parallel rank and forward."""

    def build_roles(self, *, data: ClipDataset | None = None, **options: Any) -> dict[str, Role]:
        """Build the roles for the shapes of ``data``, by default the plan's."""
        shapes, of_condition = self.shapes if data is None else (data.latent_shapes, data.condition_shapes)
        options |= {"shapes": shapes, "condition_shapes": of_condition, "trained": self.method.trained_roles}
        return build_roles(self.roles, **options)


@paths_of_the_user()
def plan_run(config: Config, method: type[Method] | None = None, *, shapes: Shapes | None = None) -> RunPlan:
    """Check ``config``, perhaps for another ``method``, against the world and its files; ``shapes`` replace the
    data's."""
    check_services(config.log)
    method = method or METHODS[config.method.name][0]
    runs_here = shapes is None
    needed = method.roles_needed(config.method)
    saved = {name: find_adapters(getattr(config, name).checkpoint) for name in needed}
    unused = {"teacher", "student", "fake"} - {*needed, *method.settings_read}
    for name in unused - ({"teacher"} if any(saved.values()) else set()):
        if (getattr(config, name).checkpoint or getattr(config, name).architecture) and rank() == 0:
            log.warning("method=%s has no role %s: its settings are not used", config.method.name, name)
    device = device_of(config)
    ranks, world = config.profile.ranks, world_of(config)
    if isinstance(ranks, list) and max(ranks) >= world:
        raise UserError(f"profile.ranks={shown(ranks)} must be from 0 to {world - 1}, ranks of this world, or all")
    sharding = {name: _sharding(config, name, method, device) for name in needed}
    for name in needed if runs_here and not config.dry_run else ():  # a dry run may be on another machine
        if sharding[name].compile:
            require_compiler(device.type, f"{name}.compile")
        require_fp8(sharding[name], device.type, f"{name}.")
    roles = [_plan_role(config, name, method, sharding[name], saved[name]) for name in needed]
    _check_sharing(roles, method.trained_roles)
    boundaries = {role.name: role.boundaries for role in roles if role.boundaries}
    method.check_experts(config.method, boundaries, config.student.experts)
    second = getattr(config.method, "guidance_scale_2", None)
    if second is not None and "teacher" in needed and "teacher" not in boundaries:
        hint = "use guidance_scale, or a teacher.checkpoint of two experts"
        raise UserError(f"method.guidance_scale_2={second} is for the second expert of a teacher; {hint}")
    for name in ("guidance_scale", "guidance_scale_2", "audio_guidance_scale"):
        scale = getattr(config.method, name, None)
        if scale not in (None, 1.0) and not all(role.family.takes_guidance for role in roles):
            why = f"{roles[0].family.name} is distilled for guidance, and has nothing to guide by without a caption"
            raise UserError(f"method.{name}={scale} must be 1: {why}")
    if config.expert_draws > 1 and not boundaries:
        raise UserError(f"expert_draws={config.expert_draws} needs a role with two experts; use expert_draws=1")
    causal = {role.name: role.causal for role in roles}
    method.check_causal(config.method, causal)
    if runs_here:
        method.check_files(config, causal)
    for role in roles:
        _check_files(config, role, saved[role.name], trained=role.name in method.trained_roles)
    patches = {role.family.patch_size(role.config) for role in roles}
    if len(patches) > 1:
        raise UserError(f"the roles have patch sizes {sorted(patches)}; checkpoints on one mesh must share theirs")
    made, *different = {tuple(role.family.parts) for role in roles}
    if different:
        raise UserError(f"the roles make {made} and {different[0]}; checkpoints of one run must make the same parts")
    if others := [part for part in made if part != VIDEO]:
        method.check_parts(config.method, others)
        if not config.method.audio_weight and rank() == 0:
            log.warning("method.audio_weight=0: parameters that only the audio's output reaches change by decay alone")
    else:
        for name, default in (("audio_weight", 1.0), ("audio_shift_ratio", None), ("audio_guidance_scale", None)):
            if (value := getattr(config.method, name, default)) != default:
                raise UserError(f"method.{name}={value} is for models that make sound, unlike this one; leave it out")
    shapes, *others = [shapes] if shapes else config.data.bucket_shapes()
    unused = shapes[0].keys() - {*made}
    if unused and rank() == 0:
        log.info("data=%s has %s, which these checkpoints do not make: not used", config.data.name, ", ".join(unused))
    tokens, *of_others = [{role.tokens(*one) for role in roles}.pop() for one in (shapes, *others)]
    heads = math.gcd(*(role.family.heads(role.config) for role in roles))
    sharded = any(settings.strategy != "no_shard" for settings in sharding.values())
    shape = resolve_mesh(world_size=world_of(config), heads=heads, sharded=sharded, **asdict(config.mesh))
    for name, settings in sharding.items():
        settings.copies(shape, f"{name}.")
    has_device = runs_here and not (config.dry_run and config.device == "cuda" and device.type == "cpu")
    _check_attention(config, roles, heads // shape.ulysses, device if has_device else None)
    return RunPlan(
        run_dir=Path(config.run_dir),
        method=method,
        roles=roles,
        mesh=shape,
        shapes=shapes,
        tokens=tokens,
        others=list(zip(others, of_others, strict=True)),
        micro_batch_size=micro_batch_size(config, shape.dp),
    )


def _plan_role(
    config: Config, name: str, method: type[Method], sharding: ShardSettings, saved: Path | None
) -> RolePlan:
    """Return the plan of role ``name``, checked against its files; ``saved`` is its adapter file, if it has one."""
    settings, trained = getattr(config, name), name in method.trained_roles
    base = settings if saved is None else _base_of_adapters(config, name, trained)
    _check_earlier_run(f"{name}.checkpoint", base.checkpoint)
    role = plan_role(
        name,
        checkpoint=base.checkpoint,
        config=base.config,
        architecture=base.architecture,
        boundary=base.boundary,
        family=settings.family,
        sharding=sharding,
        attention_backend=config.attention.backend,
        head_groups=config.attention.head_groups,
        additions=method.additions(config.method).get(name, ()),
        lora=settings.lora if trained else None,
        saved=saved,
        experts=settings.experts if name == "student" else "both",
        causal=None if name == "fake" else settings.causal,
    )
    if sharding.fp8 != "none":
        in_fp32 = [*role.family.fp8_excluded(role.network), *role.family.full_precision_units(role.network)]
        linear_layers(role.family.blocks(role.network), in_fp32, f"{name}.")
    return role


def _check_earlier_run(setting: str, checkpoint: str | None) -> None:
    """Check that the export of another experiment, which a role starts from, is there."""
    path = Path(checkpoint or ".")
    experiment = path.parent.parent.name
    if path.parent.name == "export" and not path.exists() and experiment in {f.stem for f in group_files("experiment")}:
        make = f"make it with python train.py experiment={experiment}"
        raise UserError(f"{setting}={checkpoint} is the export of an earlier stage, and is not there; {make}")


def _check_files(config: Config, role: RolePlan, saved: Path | None, *, trained: bool) -> None:
    """Check that the export does not replace a checkpoint of ``role``, and that each optimizer pattern matches."""
    if config.export.at_end:
        folders = [folder.path for folder in role.folders] + ([saved.parent] if saved is not None else [])
        for path in folders:
            refuse_input(Path(config.run_dir) / "export", "the run's own", {f"{role.name}.checkpoint": path})
    optimizer = getattr(config.optim, role.name, None)
    if trained and (optimizer.no_decay or optimizer.lr_scale):
        optimizer.groups(role.own_shapes, f"optim.{role.name}")


def device_of(config: Config) -> torch.device:
    """Return this rank's device. A dry run on a machine without a GPU uses the CPU, since the run may be elsewhere."""
    if not config.dry_run or torch.cuda.is_available():
        return choose_device(config.device)
    return torch.device("cpu")


def world_of(config: Config) -> int:
    """Return the number of ranks of the run: ``world`` of a dry run or a plan, or this process's world size."""
    return config.world if config.world is not None else world_size()


def _sharding(config: Config, name: str, method: type[Method], device: torch.device) -> ShardSettings:
    role = getattr(config, name)
    settings = role if name in method.trained_roles else role.frozen()  # drop training settings without effect
    settings.check(device.type, f"{name}.")
    # FSDP2 allocates one buffer per gathered weight, so forwards without tangents use the dtype of those with tangents.
    if settings.fp8_gather and name == "student" and getattr(config.method, "jvp", None) == "exact":
        jvp = f"method={config.method.name} takes derivatives, which need weights in the compute dtype"
        raise UserError(f"{name}.fp8_gather=true: {jvp}; use {name}.fp8_gather=false")
    if name in method.trained_roles:
        if settings.master_dtype != "keep" and has_adapters(role):
            dtype = f"{name}.master_dtype={settings.master_dtype}"
            raise UserError(f"{dtype} is not for adapters, whose masters are fp32; use keep")
        if settings.master_dtype == "bf16" and role.ema.enabled:
            small = "EMA updates are smaller than bf16 can represent"
            raise UserError(f"{name}.ema needs fp32 masters: {small}; set {name}.master_dtype=keep")
    return settings


def has_adapters(role: RoleSettings) -> bool:
    return role.lora.enabled or find_adapters(role.checkpoint) is not None


def _base_of_adapters(config: Config, name: str, trained: bool) -> RoleSettings:
    """Return the settings of the network under a role whose checkpoint is a folder of adapters: the teacher's."""
    folder, teacher = getattr(config, name).checkpoint, config.teacher
    if not trained:
        raise UserError(f"{name}.checkpoint={folder} holds only adapters, and does not train; give a whole network")
    if find_adapters(teacher.checkpoint) or not (teacher.checkpoint or teacher.architecture):
        raise UserError(f"{name}.checkpoint={folder} holds only adapters; set teacher.checkpoint to their base")
    return teacher


def _check_sharing(roles: Sequence[RolePlan], trained: Collection[str]) -> None:
    """Check that roles on one base network shard and compile it alike."""
    for group in sharing(roles, trained):
        for first, other in combinations(group, 2):
            # A frozen role has no training settings to compare.
            free = () if {first.name, other.name} <= {*trained} else _OF_TRAINING
            for name in (item.name for item in fields(ShardSettings) if item.name not in free):
                one, two = (getattr(role.sharding, name) for role in (first, other))
                if one != two:
                    differ = f"{first.name}.{name}={shown(one)}, but {other.name}.{name}={shown(two)}"
                    raise UserError(f"{differ}: these roles share one network ({other.name}.lora); set them equal")


def _check_attention(config: Config, roles: list[RolePlan], heads: int, device: torch.device | None) -> None:
    """Check ``attention.*`` against the ``heads`` of a rank, and kernels against head sizes if ``device`` is here."""
    if heads % config.attention.head_groups:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        asked = config.attention.head_groups
        raise UserError(f"attention.head_groups={asked} must divide the {heads} heads of a rank; use {fitting}")
    try:
        check_backend(config.attention.backend)
        for role in roles if device is not None else ():
            size, dtype = role.family.head_dim(role.config), COMPUTE_DTYPE[role.sharding.precision]
            masked = role.family.masked_attention
            choose_kernel(config.attention.backend, device=device, dtype=dtype, head_dim=size, masked=masked)
    except ValueError as error:
        raise UserError(f"attention.{error}") from error
