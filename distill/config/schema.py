"""Dataclasses of every setting; their YAML is in ``configs/``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import II, MISSING

from distill.config.kinds import Setting, settings_of
from distill.data import DATA
from distill.methods import METHODS, add_installed_methods
from fsdp_cp.choices import check_range
from fsdp_cp.errors import UserError, shown
from fsdp_cp.sharding.settings import ShardSettings
from models.lora.settings import LoraSettings

MOST = 2**20
"""Largest number of samples, ranks or clips: they become lists and loops."""
_ALLOCATOR = re.compile(r"\w+:(\[[^\]\s]+\]|[^\[\],\s]+)(,\w+:(\[[^\]\s]+\]|[^\[\],\s]+))*", re.ASCII)


@dataclass(kw_only=True)
class MeshSettings:
    """``mesh.*``; see fsdp_cp/mesh.py."""

    dp_replicate: int = 1
    """Replicas of the sharded networks (hybrid sharding)."""
    dp_shard: int = -1
    """Data-parallel ranks to shard over; -1 for what is left of the world."""
    cp: int = 1
    """Ranks that share one sample's tokens."""
    ulysses: int | Literal["auto"] = "auto"
    """Degree of the Ulysses all-to-all, a divisor of the heads; ``auto`` is gcd(heads, cp), or cp / ring if set."""
    ring: int | Literal["auto"] = "auto"
    """Degree of ring attention; ``auto`` is cp / ulysses. ring x ulysses is cp."""


@dataclass(kw_only=True)
class AttentionSettings:
    """``attention.*``, of all roles; see docs/library.md."""

    backend: str = "auto"
    """Local attention kernel; ``auto`` takes the best that is there, and the log says which."""
    head_groups: int = 1
    """Overlap the Ulysses all-to-all with attention, over this many groups of a rank's heads."""

    def __post_init__(self) -> None:
        check_range(self, "head_groups", least=1)


@dataclass(kw_only=True)
class EmaSettings:
    """``student.ema.*`` and ``fake.ema.*``."""

    enabled: bool = False
    """Keep an average of the role's weights; samples, report and export use the student's."""
    decay: float | None = 0.99
    """Constant factor of the old average; null for the power schedule."""
    gamma: float = 6.94
    """Exponent of the power schedule (1 - 1/(i+1)) ** (gamma + 1)."""
    start: int = 0
    """Updates of the role before which the average just follows the weights."""

    def __post_init__(self) -> None:
        check_range(self, "decay", least=0, below=1)
        check_range(self, "gamma", "start", least=0)


@dataclass(kw_only=True)
class RoleSettings(ShardSettings):
    """``teacher.*``; docs/configuration.md describes sharding."""

    checkpoint: str | None = None
    """Diffusers pipeline or transformer folder."""
    architecture: dict[str, Any] | None = None
    """Configuration of a network with random weights, where there is no checkpoint."""
    boundary: float | None = None
    """Time in (0, 1) that makes two experts of an ``architecture``: the first serves from this time on. A checkpoint of
    two experts (Wan 2.2 A14B) has its own ``boundary_ratio``."""
    family: str = "wan"
    """Model family: ``wan``, ``ltx``, or one that an installed package names."""
    precision: Literal["fp32", "bf16"] = II("precision")
    """``fp32`` or ``bf16`` compute of this role; the run's when not set."""


@dataclass(kw_only=True)
class TrainedRoleSettings(RoleSettings):
    """``fake.*``, and the base of ``student.*``."""

    ema: EmaSettings = field(default_factory=EmaSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)


@dataclass(kw_only=True)
class StudentSettings(TrainedRoleSettings):
    """``student.*``."""

    experts: Literal["both", "high", "low"] = "both"
    """Experts to train, of a student of two; the other keeps its checkpoint's weights (docs/models.md)."""


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
    schedule: Literal["constant", "cosine"] = "constant"
    """``constant`` or ``cosine`` (towards ``final_lr`` at the role's last update)."""
    warmup: int = 0
    """Updates of this role over which the rate grows linearly, from ``lr / warmup``."""
    final_lr: float = 0.0
    """Rate at the end of ``cosine``, as a share of ``lr``."""
    no_decay: list[str] = field(default_factory=list)
    """Names of parameters without weight decay, as patterns: ``[*.bias,*norm*]``."""
    lr_scale: dict[str, float] | None = None
    """Factors of the rate by pattern of parameter names, ``{patch_embedding.*: 0.1}``; the first match counts."""
    additions_lr: float | None = None
    """Peak rate of what the method adds to the network (``additions.*``: a GAN's heads, the time of the last step, a
    second time), which follows the same schedule; null for ``lr``."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "additions_lr", "eps", "weight_decay", "warmup", "final_lr", least=0)
        check_range(self, "betas", least=0, below=1)
        if len(self.betas) != 2:
            raise UserError(f"betas={shown(self.betas)} must be two numbers")
        if self.lr == 0 and self.additions_lr is not None:  # it is kept as a factor of lr
            raise UserError(f"lr=0 with additions_lr={self.additions_lr}; use lr=1e-20")
        if any(not factor >= 0 for factor in (self.lr_scale or {}).values()):
            raise UserError(f"lr_scale={self.lr_scale} must have factors of at least 0")


@dataclass(kw_only=True)
class OptimSettings:
    """``optim.*``."""

    student: OptimizerSettings = field(default_factory=OptimizerSettings)
    fake: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip: float | None = 10.0
    """Greatest norm of a role's gradient; null for none."""
    max_skipped: int = 10
    """Updates with a non-finite gradient norm in a row (each is skipped) after which the run stops."""

    def __post_init__(self) -> None:
        check_range(self, "clip", above=0)
        check_range(self, "max_skipped", least=1)


@dataclass(kw_only=True)
class CheckpointSettings:
    """``checkpoint.*``."""

    every: int = 500
    """Steps between checkpoints; 0 for one at the end alone."""
    keep: int = 2
    """Number of newest checkpoints to keep; 0 for all."""
    keep_every: int = 0
    """Keep those whose step is a multiple of this for good, too; 0 for none."""
    asynchronous: bool = True
    """Write while training goes on, from a copy in the host's memory; where that has no room, training waits."""
    at_end: bool = True
    """Save one after the last step; without it the run cannot continue from there."""
    resume: str = "auto"
    """``auto`` (this run's newest), ``never``, a run folder or a step folder."""
    accept: list[str] = field(default_factory=list)
    """Settings whose files or data may differ from those that the checkpoint was made with, as
    ``[teacher.checkpoint]``."""

    def __post_init__(self) -> None:
        check_range(self, "every", "keep", "keep_every", least=0)


@dataclass(kw_only=True)
class LogSettings:
    """``log.*``."""

    every: int = 10
    """Steps between lines of ``metrics.jsonl``."""
    norms_every: int = 0
    """Steps between lines of ``norms.jsonl``: each weight's and gradient's norm, by role; 0 for none."""
    mesh_check: bool = False
    """Before training, compute the first step of each trained role on this mesh and on another one, with all ranks on
    its ``cp`` axis (``dp_shard`` where this mesh is that one); log and report show both losses and gradient norms."""
    wandb: bool = False
    """Log to Weights & Biases too (needs the ``wandb`` extra)."""
    tensorboard: bool = False
    """Log to TensorBoard too (needs the ``tensorboard`` extra)."""
    project: str = "fsdp_cp"
    """Project name at Weights & Biases."""

    def __post_init__(self) -> None:
        check_range(self, "every", least=1)
        check_range(self, "norms_every", least=0)


@dataclass(kw_only=True)
class ProfileSettings:
    """``profile.*``: where the time and the memory of some steps go; see docs/running.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step to profile, as ``[20,22]``, counted from 1 as in ``metrics.jsonl``; empty for none."""
    ranks: list[int] | Literal["all"] = field(default_factory=lambda: [0])
    """Ranks that are profiled, as ``[0,8]``, or ``all``: a trace each in ``RUN_DIR/profile``."""
    memory: bool = False
    """Record the CUDA allocator's work in these steps, too; on the CPU there is none."""

    def __post_init__(self) -> None:
        if self.steps and (len(self.steps) != 2 or not 1 <= self.steps[0] <= self.steps[1]):
            raise UserError(f"steps={shown(self.steps)} must be the first and the last step, as [20,22]")
        ranks = self.ranks
        if ranks != "all" and (not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)):
            raise UserError(f"ranks={shown(ranks)} must be ranks from 0 on, each once, as [0,8], or all")


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
    images: list[str] = field(default_factory=list)
    """Images for ``captions``, in their order, where images condition: files, of videos the first frame; empty for
    those of the data set."""
    student_steps: list[int] = field(default_factory=lambda: [4])
    """Numbers of steps at which the student is sampled."""
    teacher_steps: list[int] = field(default_factory=list)
    """Numbers of steps at which the teacher is sampled, once, for comparison."""
    report_clips: int = 0
    """Clips per row of ``report.html``; 0 for no report."""

    def __post_init__(self) -> None:
        check_range(self, "every", least=0)
        check_range(self, "prompts", "student_steps", "teacher_steps", least=1, most=MOST)
        check_range(self, "report_clips", least=0, most=MOST)
        if not self.student_steps:
            raise UserError("student_steps=[] must have a number of steps")
        for name in ("student_steps", "teacher_steps"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UserError(f"{name}={shown(getattr(self, name))} has a number twice; leave one out")


@dataclass(kw_only=True)
class ExportSettings:
    """``export.*``: the student as a diffusers folder, at the end of the run."""

    at_end: bool = True
    """Write it; ``python -m models.export`` makes one of a checkpoint at any time."""
    weights: Literal["auto", "raw", "ema"] = "auto"
    """``raw``, ``ema``, or ``auto``: the average if there is one."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """``fp32`` or ``bf16``."""


@dataclass(kw_only=True)
class TimeoutSettings:
    """``timeout.*``: minutes that a rank waits for the others before the run ends; see docs/running.md."""

    start: float = 60.0
    """Until each trained role's first step is done, and while samples, checkpoints and the end are made."""
    step: float = 10.0
    """In every later step."""

    def __post_init__(self) -> None:
        check_range(self, "start", "step", least=0.01, most=7 * 24 * 60)
        if self.step > self.start:
            raise UserError(f"step={self.step} must be at most timeout.start={self.start}: first steps take longer")


@dataclass(kw_only=True)
class PlanningSettings:
    """``planning.*``, of ``plan=true``; see docs/planning.md."""

    hardware: str | None = None
    """GPU that is planned for, a file of configs/hardware: ``h20``, ``h100``, ...; null for memory alone."""
    model: str | None = None
    """Published network of roles that have no checkpoint, ``wan2_1_t2v_14b`` for example; brought by ``model=``."""


@dataclass(kw_only=True)
class Config:
    """All settings of a run."""

    steps: int = MISSING
    """Optimizer steps of all roles together; a resumed run with more steps continues."""
    seed: int = 0
    """Seed for the data order and every random draw. Results do not depend on the mesh."""
    batch_size: int = MISSING
    """Samples per step over all ranks."""
    micro_batch_size: int | None = None
    """Samples per data-parallel rank and forward; null for one forward a step, or one per part of ``expert_draws``."""
    expert_draws: int = 1
    """Parts of a batch. Each part draws the experts that it runs, and the length of DMD2's rollout, for roles of two
    experts (Wan 2.2 A14B; docs/models.md)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """``fp32`` or ``bf16`` compute; masters, reductions and optimizer state are fp32 unless a role says so."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``, ``cpu`` or ``cuda``; ``auto`` is the CPU without a GPU, and refuses one that torch cannot use."""
    cuda_allocator: str | None = None
    """``PYTORCH_CUDA_ALLOC_CONF``, e.g. ``expandable_segments:True``; null leaves torch's own, or the environment's."""
    run_dir: str | None = None
    """Folder of all output; ``runs/EXPERIMENT`` when not set."""
    dry_run: bool = False
    """Run all checks, print memory and files of the run, and end, without a process group. ``plan`` goes first."""
    plan: bool | Literal["suggest"] = False
    """``true``: predict memory, operations and traffic of a rank on fake tensors, write ``RUN_DIR/plan.html``, and end.
    ``suggest``: look for settings that fit ``planning.hardware``, and end."""
    world: int | None = None
    """Number of ranks to check or plan for, with ``dry_run`` or ``plan``; this process's world when null."""
    mesh: MeshSettings = field(default_factory=MeshSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    teacher: RoleSettings = field(default_factory=RoleSettings)
    student: StudentSettings = field(default_factory=StudentSettings)
    fake: TrainedRoleSettings = field(default_factory=TrainedRoleSettings)
    method: Any = MISSING
    optim: OptimSettings = field(default_factory=OptimSettings)
    data: Any = MISSING
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    export: ExportSettings = field(default_factory=ExportSettings)
    timeout: TimeoutSettings = field(default_factory=TimeoutSettings)
    planning: PlanningSettings = field(default_factory=PlanningSettings)

    def __post_init__(self) -> None:
        check_range(self, "steps", "expert_draws", least=1)
        check_range(self, "seed", least=0)
        check_range(self, "batch_size", "micro_batch_size", "world", least=1, most=MOST)
        if self.cuda_allocator is not None and not _ALLOCATOR.fullmatch(self.cuda_allocator):
            raise UserError(
                f"cuda_allocator={self.cuda_allocator} must be name:value, with commas between, as"
                " expandable_segments:True"
            )


add_installed_methods()
SETTINGS: dict[str, list[Setting]] = {}
"""Every setting by its dotted key; several methods or data sets may have one of the same name."""
for _prefix, _owner in (
    ("", Config),
    *(("method.", settings) for _, settings in METHODS.values()),
    *(("data.", settings) for settings in DATA.values()),
):
    for _key, _setting in settings_of(_owner, _prefix):
        SETTINGS.setdefault(_key, []).append(_setting)
