"""The configuration: Hydra groups in ``configs/``, typed by the dataclasses here, checked before anything is built."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import II, MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distill.checks import check
from distill.data import CaptionsSettings, MovingShapesSettings, VideoFolderSettings
from distill.methods import METHODS
from fsdp_cp.errors import UserError
from fsdp_cp.shard_settings import ShardSettings

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(kw_only=True)
class MeshSettings:
    """``mesh.*``; see fsdp_cp/mesh.py."""

    dp_replicate: int = 1
    """Replicas of the sharded networks (hybrid sharding)."""
    dp_shard: int = -1
    """Data-parallel ranks to shard over; -1 for what is left of the world."""
    cp: int = 1
    """Ranks that share one sample's tokens."""
    ulysses: Any = "auto"
    """Degree of the Ulysses all-to-all, a divisor of the heads; ``auto`` is gcd(heads, cp), or cp / ring if set."""
    ring: Any = "auto"
    """Degree of ring attention; ``auto`` is cp / ulysses. ring x ulysses is cp."""


@dataclass(kw_only=True)
class AttentionSettings:
    """``attention.*``, of all roles; see docs/attention.md."""

    backend: str = "auto"
    """Local attention kernel; ``auto`` takes the best that is there, and the log says which."""
    head_groups: int = 1
    """Overlap the Ulysses all-to-all with attention, over this many groups of a rank's heads."""


@dataclass(kw_only=True)
class EmaSettings:
    """``student.ema.*``."""

    enabled: bool = False
    """Keep an average of the student; samples, report and export then use it."""
    decay: float | None = 0.99
    """Constant factor of the old average; null for the power schedule."""
    gamma: float = 6.94
    """Exponent of the power schedule (1 - 1/(i+1)) ** (gamma + 1)."""
    start: int = 0
    """Student updates before which the average just follows the weights."""


@dataclass(kw_only=True)
class RoleSettings(ShardSettings):
    """``teacher.*`` and ``fake.*``; how they are sharded is in docs/sharding.md."""

    checkpoint: str | None = None
    """Diffusers pipeline or transformer folder."""
    architecture: Any = None  # an optional dict; typed so, OmegaConf takes no value for it from the command line
    """Configuration of a network with random weights, where there is no checkpoint."""
    family: str = "wan"
    """Model family."""
    precision: str = II("precision")
    """``fp32`` or ``bf16`` compute of this role; the run's when not set."""


@dataclass(kw_only=True)
class StudentSettings(RoleSettings):
    """``student.*``."""

    ema: EmaSettings = field(default_factory=EmaSettings)


@dataclass(kw_only=True)
class OptimizerSettings:
    """``optim.student.*`` and ``optim.fake.*``: AdamW."""

    lr: float = 1e-5
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.0, 0.999])
    """Adam's decay factors."""
    eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    weight_decay: float = 0.01
    """Decoupled: as a share of the rate."""
    schedule: str = "constant"
    """``constant`` or ``cosine`` (towards ``final_lr`` at the role's last update)."""
    warmup: int = 0
    """Updates of this role over which the rate grows linearly, from ``lr / warmup``."""
    final_lr: float = 0.0
    """Rate at the end of ``cosine``, as a share of ``lr``."""
    no_decay: list[str] = field(default_factory=list)
    """Names of parameters without weight decay, as patterns: ``[*.bias,*norm*]``."""
    lr_scale: Any = None  # an optional dict; see RoleSettings.architecture
    """Factors of the rate by pattern of parameter names, ``{patch_embedding.*: 0.1}``; the first match counts."""
    implementation: str = "foreach"
    """``foreach``, ``fused`` (one kernel for the whole update) or ``for_loop`` (least memory)."""


@dataclass(kw_only=True)
class OptimSettings:
    """``optim.*``."""

    student: OptimizerSettings = field(default_factory=OptimizerSettings)
    fake: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip: float | None = 10.0
    """Greatest norm of a role's gradient; null for none."""
    max_skipped: int = 10
    """Updates with a non-finite gradient norm in a row (each is skipped) after which the run stops."""


@dataclass(kw_only=True)
class CheckpointSettings:
    """``checkpoint.*``."""

    every: int = 500
    """Steps between checkpoints; 0 for one at the end alone."""
    keep: int = 2
    """How many to keep; 0 for all."""
    resume: str = "auto"
    """``auto`` (this run's newest), ``never``, a run folder or a step folder."""


@dataclass(kw_only=True)
class LogSettings:
    """``log.*``."""

    every: int = 10
    """Steps between lines of ``metrics.jsonl``."""
    norms_every: int = 0
    """Steps between lines of ``norms.jsonl``: each weight's and gradient's norm, by role; 0 for none."""
    groups: bool = False
    """Print at the start how each role is sharded: units, dtypes, bytes."""
    wandb: bool = False
    """Log to Weights & Biases too (needs the ``wandb`` extra)."""
    tensorboard: bool = False
    """Log to TensorBoard too (needs the ``tensorboard`` extra)."""
    project: str = "fsdp_cp"
    """Project name at Weights & Biases."""


@dataclass(kw_only=True)
class SampleSettings:
    """``sample.*``: clips made during and after training, and the report."""

    every: int = 0
    """Steps between sample clips; 0 for the end alone."""
    prompts: int = 4
    """Clips per set of samples, of captions of the data set."""
    captions: list[str] = field(default_factory=list)
    """Captions to sample instead, one clip of each; the data set must know them."""
    student_steps: list[int] = field(default_factory=lambda: [4])
    """Numbers of steps at which the student is sampled."""
    teacher_steps: list[int] = field(default_factory=list)
    """Numbers of steps at which the teacher is sampled, once, for comparison."""
    report_clips: int = 0
    """Clips per row of ``report.html``; 0 for no report."""


@dataclass(kw_only=True)
class ExportSettings:
    """``export.*``: the student as a diffusers folder, at the end of the run."""

    weights: str = "auto"
    """``raw``, ``ema``, or ``auto``: the average if there is one."""
    dtype: str = "fp32"
    """``fp32`` or ``bf16``."""


@dataclass(kw_only=True)
class Config:
    """Everything that a run is told."""

    steps: int = MISSING
    """Optimizer steps in all, of whichever role; a longer value on resume goes on."""
    seed: int = 0
    """Of the data order and every random draw; the same on every mesh."""
    batch_size: int = MISSING
    """Samples per step over all ranks."""
    micro_batch_size: int | None = None
    """Samples per data-parallel rank and forward; null for one forward a step."""
    precision: str = "fp32"
    """``fp32`` or ``bf16`` compute; masters, reductions and optimizer state are fp32 unless a role says so."""
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""
    cuda_allocator: str | None = None
    """``PYTORCH_CUDA_ALLOC_CONF``, e.g. ``expandable_segments:True``; null leaves torch's own, or the environment's."""
    run_dir: str | None = None
    """Folder of all output; ``runs/EXPERIMENT`` when not set."""
    mesh: MeshSettings = field(default_factory=MeshSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    teacher: RoleSettings = field(default_factory=RoleSettings)
    student: StudentSettings = field(default_factory=StudentSettings)
    fake: RoleSettings = field(default_factory=RoleSettings)
    method: Any = MISSING
    optim: OptimSettings = field(default_factory=OptimSettings)
    data: Any = MISSING
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    export: ExportSettings = field(default_factory=ExportSettings)


DATA = {
    "moving_shapes": MovingShapesSettings,
    "video_folder": VideoFolderSettings,
    "captions": CaptionsSettings,
}


def _register() -> None:
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, (_, settings) in METHODS.items():
        store.store(group="method", name=f"{name}_schema", node=settings)
    for name, settings in DATA.items():
        store.store(group="data", name=f"{name}_schema", node=settings)


def compose_config(overrides: list[str]) -> Config:
    """Compose the YAML groups with command-line overrides (Hydra's grammar) into a checked :class:`Config`.

    Raises:
        UserError: an unknown key (with the nearest known one), a value of another type, a bad combination.
    """
    _register()
    for override in overrides:
        key, _, value = override.partition("=")
        if key.startswith("~"):
            raise UserError(f"{override}: a setting cannot be deleted; use {key[1:]}=VALUE")
        if (CONFIGS / key).is_dir() and not re.match("[A-Za-z_]", value.replace("null", "")):
            raise UserError(f"{override} names no file of configs/{key}; use {_choices(key)}")
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("config", overrides=overrides, return_hydra_config=True)
        experiment = composed.hydra.runtime.choices.get("experiment")
        OmegaConf.set_struct(composed, False)
        composed.pop("hydra")
        unknown = next(_unknown_keys(composed, ""), None)
        if unknown is not None:
            raise UserError(_no_such_setting(unknown, overrides))
        if composed.run_dir is None:
            composed.run_dir = f"runs/{experiment}"
        config: Config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from error
        raise UserError(_explain(error, overrides)) from error
    for group, chosen, known in (
        ("method", config.method, {name: settings for name, (_, settings) in METHODS.items()}),
        ("data", config.data, DATA),
    ):
        if known.get(chosen.name) is not type(chosen):
            raise UserError(f"{group}.name={chosen.name} is not the {group} that was chosen; use {group}=NAME instead")
    check(config)
    return config


def load_config(path: Path) -> Config:
    """The configuration that a run wrote as ``config.yaml``.

    Raises:
        UserError: no such file, or one that this version does not understand.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the folder of a run")
    try:
        loaded = OmegaConf.load(path)
        typed = OmegaConf.merge(OmegaConf.structured(Config), loaded)
        typed.method = OmegaConf.merge(OmegaConf.structured(METHODS[loaded.method.name][1]), loaded.method)
        typed.data = OmegaConf.merge(OmegaConf.structured(DATA[loaded.data.name]), loaded.data)
        return OmegaConf.to_object(typed)
    except (OmegaConfBaseException, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a configuration of this version ({str(error).splitlines()[0]})") from error


def _explain(error: Exception, overrides: list[str]) -> str:
    """Hydra's and OmegaConf's messages as one line with the nearest key that exists."""
    text = str(error.__cause__ or error) if "Could not override" not in str(error) else str(error)
    match = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' (?:is )?not in", text)
    if match:
        key = match.group(1)
        full = next((o.split("=")[0].lstrip("+~") for o in overrides if o.split("=")[0].endswith(key)), key)
        return _no_such_setting(full, overrides)
    option = re.search(r"(?:Could not find|In .*: Could not find) '([^']+)'", text)
    if option:
        group, _, name = option.group(1).partition("/")
        near = difflib.get_close_matches(name, _names(group), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"there is no {group}={name}{hint}; use {_choices(group)}"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("object_type")]
    return " ".join(lines)


def _no_such_setting(key: str, overrides: list[str]) -> str:
    near = difflib.get_close_matches(key, _known_keys(overrides), n=1, cutoff=0.5)
    return f"there is no setting {key}" + (f"; did you mean {near[0]}?" if near else "; see python train.py --help")


def _names(group: str) -> list[str]:
    return sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


def _choices(group: str) -> str:
    """The files of a group, as in a sentence; of many the first."""
    names = _names(group)
    if len(names) > 8:
        return f"{', '.join(names[:6])} or another of the {len(names)} in configs/{group}"
    return " or ".join(names) or "another group"


def _unknown_keys(node: DictConfig, prefix: str) -> Iterator[str]:
    """Keys that ``+key=value`` put beside the fields of a dataclass; OmegaConf would drop them silently."""
    settings = OmegaConf.get_type(node)
    for key in node:
        if is_dataclass(settings) and key not in {f.name for f in fields(settings)}:
            yield f"{prefix}{key}"
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _unknown_keys(child, f"{prefix}{key}.")


def _known_keys(overrides: list[str]) -> list[str]:
    """Every dotted key under the groups that the overrides choose."""
    groups = [o for o in overrides if re.match(r"(experiment|method|data)=\w+$", o)]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("config", overrides=groups)
    except (HydraException, OmegaConfBaseException):
        return []
    keys: list[str] = []

    def collect(node: DictConfig, prefix: str) -> None:
        for key in node:
            keys.append(f"{prefix}{key}")
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
                collect(child, f"{prefix}{key}.")

    collect(composed, "")
    return keys
