"""Plan of a run: all checks that need neither a process group nor data nor networks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from distill.config import Config
from distill.config.checks import divisors, micro_batch_size
from distill.config.errors import group_files
from distill.config.schema import RoleSettings
from distill.config.trained_method import few_steps_in_words
from distill.data.base import ClipDataset
from distill.data.settings import EncodedSettings, VideoFolderSettings
from distill.methods import METHODS, Method
from distill.run.loggers import check_services
from fsdp_cp.attention.kernels.choose import check_backend, choose_kernel
from fsdp_cp.errors import UserError, paths_of_the_user, shown
from fsdp_cp.files.atomic_folder import refuse_input
from fsdp_cp.launch import choose_device, world_size
from fsdp_cp.mesh import MeshShape, resolve_mesh
from fsdp_cp.progress import first_rank_log
from fsdp_cp.sharding.fp8 import linear_layers, require_fp8
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, ShardSettings, require_compiler
from models.families.base import Shape
from models.lora.saved import find_adapters
from models.roles.load import build_roles
from models.roles.role import Role
from models.roles.role_plan import RolePlan, check_together, plan_role
from models.sample import PartShapes

log = first_rank_log(__name__)

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
    method = method or METHODS[config.method.name][0]
    device, runs_here = device_of(config), shapes is None
    check_services(config.log)
    _check_profiled_ranks(config)
    _name_unused_roles(config, method)
    method.check_given(config)
    sharding = {name: _sharding(config, name, method, device) for name in method.roles_needed(config.method)}
    if runs_here and not config.dry_run:  # a dry run may be on another machine
        _check_tools(sharding, device)
    roles = [_plan_role(config, name, method, settings) for name, settings in sharding.items()]
    for role in roles:
        _check_files(config, role, trained=role.name in method.trained_roles)
    check_together(roles, method.trained_roles)
    method.check_roles(config, {role.name: role for role in roles})
    _check_expert_draws(config, roles)
    if runs_here:
        _name_few_step_networks(config, roles, method)
        method.check_files(config, {role.name: role.causal for role in roles})
    first, *others = _shapes_with_tokens(config, roles, shapes)
    if runs_here:
        _check_encoders(config, roles)
    heads = math.gcd(*(role.family.heads(role.config) for role in roles))
    mesh = _mesh(config, sharding, heads)
    stands_for_gpu = config.dry_run and config.device == "cuda" and device.type == "cpu"
    has_device = runs_here and not stands_for_gpu
    _check_attention(config, roles, heads // mesh.ulysses, device if has_device else None)
    return RunPlan(
        run_dir=Path(config.run_dir),
        method=method,
        roles=roles,
        mesh=mesh,
        shapes=first[0],
        tokens=first[1],
        others=others,
        micro_batch_size=micro_batch_size(config, mesh.dp),
    )


def _check_profiled_ranks(config: Config) -> None:
    """Check that the ranks to profile exist."""
    ranks, world = config.profile.ranks, world_of(config)
    if isinstance(ranks, list) and max(ranks) >= world:
        raise UserError(f"profile.ranks={shown(ranks)} must be from 0 to {world - 1}, ranks of this world, or all")


def _name_unused_roles(config: Config, method: type[Method]) -> None:
    """Warn of networks whose role the method does not have."""
    needed = method.roles_needed(config.method)
    used = {*needed, *method.settings_read}
    if any(find_adapters(getattr(config, name).checkpoint) for name in needed):
        used.add("teacher")  # the base of the adapters
    for name in {"teacher", "student", "fake"} - used:
        if getattr(config, name).checkpoint or getattr(config, name).architecture:
            log.warning("method=%s has no role %s: its settings are not used", config.method.name, name)


_FEW_STEPS = {
    "teacher": "not trained at other times; give its teacher",
    "student": "and flow matching takes its few steps away; train an adapter on its base, and add the student's with"
    " python -m models.lora stack, or train the base and distill it again (docs/fine_tuning.md)",
}
"""Fate of a few-step student that is the teacher of a run, or the student of flow matching."""


def _name_few_step_networks(config: Config, roles: Sequence[RolePlan], method: type[Method]) -> None:
    """Warn of a few-step student in a role that it was not trained for, or that does not keep it."""
    named = ("teacher", "student") if config.method.name == "flow_matching" else ("teacher",)
    for role in roles if method.trained_roles else ():
        folders = [folder.path for folder in role.folders[:1]]
        if role.lora is not None and role.lora.saved is not None:
            folders.append(role.lora.saved.file.parent)
        for path in folders if role.name in named else ():
            if words := few_steps_in_words(path):
                text = "%s.checkpoint: %s is a few-step student (%s), %s"
                log.warning(text, role.name, path, words, _FEW_STEPS[role.name])


def _check_tools(sharding: Mapping[str, ShardSettings], device: torch.device) -> None:
    """Check that this machine has the compiler and the packages that the roles' settings need."""
    for name, settings in sharding.items():
        if settings.compile:
            require_compiler(device.type, f"{name}.compile")
        require_fp8(settings, device.type, f"{name}.")


def _check_expert_draws(config: Config, roles: Sequence[RolePlan]) -> None:
    """Check that a batch in several parts has experts to draw."""
    if config.expert_draws > 1 and not any(role.boundaries for role in roles):
        raise UserError(f"expert_draws={config.expert_draws} needs a role with two experts; use expert_draws=1")


def _shapes_with_tokens(config: Config, roles: Sequence[RolePlan], shapes: Shapes | None) -> list[tuple[Shapes, int]]:
    """Return the shapes of each of the data's buckets, or the given ``shapes``, and the tokens of their videos. Check
    that all roles take them."""
    buckets = config.data.bucket_shapes() if shapes is None else [shapes]
    unused = buckets[0][0].keys() - {*roles[0].family.parts}
    if unused:
        log.info("data=%s has %s, which these checkpoints do not make: not used", config.data.name, ", ".join(unused))
    return [(bucket, {role.tokens(*bucket) for role in roles}.pop()) for bucket in buckets]


def _check_encoders(config: Config, roles: Sequence[RolePlan]) -> None:
    """Check that the data's encoders are those of the networks, where shapes alone do not tell."""
    if isinstance(config.data, (VideoFolderSettings, EncodedSettings)):
        folder, _ = config.data.encoding().inspect()
        for role in roles:
            folder.check_network(role.config, f"{role.name}.{'checkpoint' if role.folders else 'architecture'}")


def _mesh(config: Config, sharding: Mapping[str, ShardSettings], heads: int) -> MeshShape:
    """Resolve the mesh for roles of these common ``heads``, and check that each role's copies fit it."""
    sharded = any(settings.strategy != "no_shard" for settings in sharding.values())
    shape = resolve_mesh(world_size=world_of(config), heads=heads, sharded=sharded, **asdict(config.mesh))
    for name, settings in sharding.items():
        settings.copies(shape, f"{name}.")
    return shape


def _plan_role(config: Config, name: str, method: type[Method], sharding: ShardSettings) -> RolePlan:
    """Return the plan of role ``name``, checked against its files."""
    settings, trained = getattr(config, name), name in method.trained_roles
    saved = find_adapters(settings.checkpoint)
    base = settings if saved is None else _base_of_adapters(config, name, trained or not method.trained_roles)
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
        lora=settings.lora if trained or saved else None,
        saved=saved,
        training_adapter=_training_adapter(config) if name == "student" and trained else None,
        experts=method.experts(config, name),
        causal=None if name == "fake" else settings.causal,
        sparse=settings.sparse_attention,
    )
    if sharding.fp8 != "none":
        in_fp32 = [*role.family.fp8_excluded(role.network), *role.family.full_precision_units(role.network)]
        linear_layers(role.family.blocks(role.network), in_fp32, f"{name}.")
    return role


def _training_adapter(config: Config) -> Path | None:
    """Return the file of the adapter that the student has in training alone."""
    if (chosen := config.student.training_adapter) is None:
        return None
    setting = f"student.training_adapter={chosen}"
    if config.method.name != "flow_matching":
        raise UserError(f"{setting} is for method=flow_matching, not {config.method.name}; leave it out")
    for name, without in (("built_in_guidance", 1), ("keep_weight", 0)):
        if (value := getattr(config.method, name)) != without:
            both = f"{setting} and method.{name}={value} both keep the guidance, which the student then has twice"
            raise UserError(f"{both}; set method.{name}={without}, or leave the adapter out")
    if (file := find_adapters(chosen)) is None:
        raise UserError(f"{setting} holds no adapters; give a file or a folder of them")
    return file


def _check_earlier_run(setting: str, checkpoint: str | None) -> None:
    """Check that the export of another experiment, which a role starts from, is there."""
    path = Path(checkpoint or ".")
    experiment = path.parent.parent.name
    if path.parent.name == "export" and not path.exists() and experiment in {f.stem for f in group_files("experiment")}:
        make = f"make it with python train.py experiment={experiment}"
        raise UserError(f"{setting}={checkpoint} is the export of an earlier stage, and is not there; {make}")


def _check_files(config: Config, role: RolePlan, *, trained: bool) -> None:
    """Check that the export does not replace a checkpoint of ``role``, and that each optimizer pattern matches."""
    if config.export.at_end:
        folders = [folder.path for folder in role.folders]
        if role.lora is not None and role.lora.saved is not None:
            folders.append(role.lora.saved.file.parent)
        read = [(f"{role.name}.checkpoint", path) for path in folders]
        if role.training is not None and role.training.saved is not None:
            read.append((f"{role.name}.training_adapter", role.training.saved.file.parent))
        for setting, path in read:
            refuse_input(Path(config.run_dir) / "export", "the run's own", {setting: path})
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


def _base_of_adapters(config: Config, name: str, fits: bool) -> RoleSettings:
    """Return the settings of the network under a role whose checkpoint is a folder of adapters: the teacher's. It
    ``fits`` a role that trains, or that is sampled alone."""
    folder, teacher = getattr(config, name).checkpoint, config.teacher
    if not fits:
        raise UserError(f"{name}.checkpoint={folder} holds only adapters, and does not train; give a whole network")
    if find_adapters(teacher.checkpoint) or not (teacher.checkpoint or teacher.architecture):
        raise UserError(f"{name}.checkpoint={folder} holds only adapters; set teacher.checkpoint to their base")
    return teacher


def _check_attention(config: Config, roles: list[RolePlan], heads: int, device: torch.device | None) -> None:
    """Check ``attention.*`` against the ``heads`` of a rank, and kernels against head sizes if ``device`` is here."""
    if heads % config.attention.head_groups:
        asked = config.attention.head_groups
        fitting = divisors(heads, asked)
        raise UserError(f"attention.head_groups={asked} must divide the {heads} heads of a rank; use {fitting}")
    try:
        check_backend(config.attention.backend)
        for role in roles if device is not None else ():
            size, dtype = role.family.head_dim(role.config), COMPUTE_DTYPE[role.sharding.precision]
            masked = role.family.masked_attention
            choose_kernel(config.attention.backend, device=device, dtype=dtype, head_dim=size, masked=masked)
    except ValueError as error:
        raise UserError(f"attention.{error}") from error
