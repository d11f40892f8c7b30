"""The configuration: Hydra groups in ``configs/``, typed by the dataclasses here, checked before anything is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import II, MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from distill.checks import check
from distill.command_line import hydra_overrides
from distill.config_errors import CONFIGS, choices, explain, no_such_setting
from distill.data import CaptionsSettings, MovingShapesSettings, VideoFolderSettings
from distill.methods import METHODS
from distill.setting_kinds import known_settings
from fsdp_cp.errors import UserError
from fsdp_cp.shard_settings import ShardSettings


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
    additions_lr: float | None = None
    """Peak rate of what the method adds to the network (``additions.*``: a GAN's heads, the time of the last step, a
    second time), which follows the same schedule; null for ``lr``."""
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
    at_end: bool = True
    """Save one after the last step; without it the run cannot be gone on with from there."""
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
    at_end: bool = True
    """Sample after the last step, and write the report if ``report_clips`` asks for one."""
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

    at_end: bool = True
    """Write it; ``python -m models.export`` makes one of a checkpoint at any time."""
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
    dry_run: bool = False
    """Check all that a run would, print what it would hold and write, and end, without a process group."""
    world: int | None = None
    """With ``dry_run``: the number of ranks to check for, which need not be there; this process's world when null."""
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


SETTINGS = known_settings(
    {"": [Config], "method.": [settings for _, settings in METHODS.values()], "data.": list(DATA.values())}
)
"""Every setting by its dotted key; of methods and data sets there may be several of a name."""


@cache
def _register() -> None:
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for name, (_, settings) in METHODS.items():
        store.store(group="method", name=f"{name}_schema", node=settings)
    for name, settings in DATA.items():
        store.store(group="data", name=f"{name}_schema", node=settings)


def compose_config(words: list[str]) -> Config:
    """Compose the YAML groups with command-line overrides into a checked :class:`Config`.

    The words are in Hydra's grammar, but strings need no quotes (distill/command_line.py).

    Raises:
        UserError: an unknown key (with the nearest known one), a value of another type, a bad combination.
    """
    _register()
    for word in words:
        key, equals, value = word.partition("=")
        group = key.lstrip("+~")
        if equals and group and (CONFIGS / group).is_dir():
            if key != group:
                raise UserError(f"{word}: {group} is chosen without a sign before it; use {group}={value or 'NAME'}")
            # A name with a path or an ending in it would be a file elsewhere, or another run_dir.
            if value == "null" or not re.fullmatch(r"[A-Za-z_]\w*", value):
                raise UserError(f"{word} names no file of configs/{group}; use {choices(group)}")
    overrides = hydra_overrides(words, SETTINGS)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("config", overrides=overrides, return_hydra_config=True)
        experiment = composed.hydra.runtime.choices.get("experiment")
        OmegaConf.set_struct(composed, False)
        composed.pop("hydra")
        unknown = next(_unknown_keys(composed, ""), None)
        if unknown is not None:
            raise UserError(no_such_setting(unknown, words, SETTINGS))
        if composed.run_dir is None:
            composed.run_dir = f"runs/{experiment}"
        config: Config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from error
        raise UserError(explain(error, words, overrides, SETTINGS)) from error
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
    except UserError:
        raise
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = " ".join(str(error).split("\n    full_key")[0].split())[:200]
        raise UserError(f"{path} is not a configuration of this version ({reason}); give another run") from error
    except RecursionError as error:
        raise UserError(f"{path} is not a configuration ({error}); give another run") from error


def _unknown_keys(node: DictConfig, prefix: str) -> Iterator[str]:
    """Keys that ``+key=value`` put beside the fields of a dataclass; OmegaConf would drop them silently."""
    settings = OmegaConf.get_type(node)
    for key in node:
        if is_dataclass(settings) and key not in {f.name for f in fields(settings)}:
            yield f"{prefix}{key}"
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing():
            yield from _unknown_keys(child, f"{prefix}{key}.")
