"""Dataclasses of all settings; their YAML is in ``configs/``."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple

from omegaconf import II, MISSING

from distill.config.kinds import Setting, walk_settings
from distill.data.settings import DATA
from distill.methods import METHODS, add_installed_methods
from fsdp_cp.choices import Bounds, Checked, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fsdp_cp.errors import UserError, shown
from fsdp_cp.sharding.settings import ShardSettings
from models.causal import CausalSettings
from models.lora.settings import LoraSettings
from models.owner import is_added
from models.sparse import SparseSettings

MOST = 2**20
"""Limit on numbers of samples, ranks or clips, which become lists and loops."""
Number = Annotated[int, Bounds(least=1, most=MOST)]
Decay = Annotated[float, Bounds(least=0, below=1)]
Minutes = Annotated[float, Bounds(least=0.01, most=7 * 24 * 60)]
_ALLOCATOR = re.compile(r"\w+:(\[[^\]\s]+\]|[^\[\],\s]+)(,\w+:(\[[^\]\s]+\]|[^\[\],\s]+))*", re.ASCII)


@dataclass(kw_only=True)
class MeshSettings:
    """``mesh.*``; see fsdp_cp/mesh.py."""

    dp_replicate: int = 1
    """Number of replicas of the sharded networks (hybrid sharding)."""
    dp_shard: int = -1
    """Number of data-parallel ranks to shard over; -1 for the rest of the world."""
    cp: int = 1
    """Number of ranks that share one sample's tokens."""
    ulysses: int | Literal["auto"] = "auto"
    """Degree of the Ulysses all-to-all, a divisor of the heads; ``auto``: cp / ring, or gcd(heads, cp)."""
    ring: int | Literal["auto"] = "auto"
    """Degree of ring attention; ``auto``: cp / ulysses. ring x ulysses is cp."""


@dataclass(kw_only=True)
class AttentionSettings(Checked):
    """``attention.*``, for all roles; see docs/library.md."""

    backend: str = "auto"
    """Local attention kernel; ``auto`` selects the best available one and logs its name."""
    head_groups: PositiveInt = 1
    """Number of head groups per rank over which the Ulysses all-to-all overlaps with attention; at least 1."""


@dataclass(kw_only=True)
class EmaSettings(Checked):
    """``student.ema.*`` and ``fake.ema.*``."""

    enabled: bool = False
    """Keep an exponential moving average (EMA) of the role's weights; samples, report and export use the student's."""
    decay: Decay | None = 0.99
    """Constant weight of the old average per update, 0 to below 1; null for the power schedule."""
    gamma: NonNegativeFloat = 6.94
    """Exponent of the power schedule, (1 - 1/(i+1)) ** (gamma + 1); at least 0."""
    start: NonNegativeInt = 0
    """Number of updates of the role before averaging starts; until then the average equals the weights."""


@dataclass(kw_only=True)
class RoleSettings(ShardSettings):
    """Settings of all roles; docs/configuration.md describes sharding."""

    checkpoint: str | None = None
    """Diffusers folder, its hub name (``owner/name@revision``), or one file in Wan's or Lightricks' own names."""
    config: str | None = None
    """Folder of the ``config.json`` of one file, if its heads are not known."""
    architecture: dict[str, Any] | None = None
    """Configuration of a network with random weights, instead of a checkpoint."""
    boundary: float | None = None
    """Time in (0, 1) that splits an ``architecture`` into two experts; the first serves this and later times. A
    checkpoint with two experts (Wan 2.2 A14B) has its own ``boundary_ratio``."""
    family: str = "wan"
    """Model family: ``wan``, ``ltx``, ``ltx2``, ``hunyuan``, ``minimax_h3``, or one that an installed package adds."""
    precision: Literal["fp32", "bf16"] = II("precision")
    """Precision of this role's compute, ``fp32`` or ``bf16``; the run's ``precision`` if not set."""
    sparse_attention: SparseSettings = field(default_factory=SparseSettings)


@dataclass(kw_only=True)
class TeacherSettings(RoleSettings):
    """``teacher.*``."""

    causal: CausalSettings = field(default_factory=CausalSettings)


@dataclass(kw_only=True)
class TrainedRoleSettings(RoleSettings):
    """``fake.*``, and the base of ``student.*``."""

    checkpoint: str | None = II("teacher.checkpoint")
    """Path to a diffusers pipeline or transformer folder; the teacher's if not set."""
    config: str | None = II("teacher.config")
    """Folder of the ``config.json`` of one file; the teacher's if not set."""
    family: str = II("teacher.family")
    """Model family; the teacher's if not set."""
    ema: EmaSettings = field(default_factory=EmaSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)


@dataclass(kw_only=True)
class StudentSettings(TrainedRoleSettings):
    """``student.*``."""

    experts: Literal["both", "high", "low"] = "both"
    """Experts to train in a student with two; the other keeps its checkpoint's weights (docs/models.md)."""
    training_adapter: str | None = None
    """Path to a further adapter of the base, which training runs frozen; samples and exports lack
    it (docs/fine_tuning.md)."""
    causal: CausalSettings = field(default_factory=CausalSettings)


class Group(NamedTuple):
    """Settings that the parameters of one group share."""

    weight_decay: float
    lr_scale: float


@dataclass(kw_only=True)
class OptimizerSettings(Checked):
    """``optim.student.*`` and ``optim.fake.*``: AdamW."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""
    betas: list[Decay] = field(default_factory=lambda: [0.0, 0.999])
    """Adam's two decay factors, each 0 to below 1."""
    eps: NonNegativeFloat = 1e-8
    """Term added to the root of Adam's second moment."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule: ``constant``, or ``cosine`` down to ``final_lr`` at the role's last update."""
    warmup: NonNegativeInt = 0
    """Number of updates of this role over which the rate grows linearly, starting at ``lr / warmup``."""
    final_lr: NonNegativeFloat = 0.0
    """Final rate of ``cosine``, as a fraction of ``lr``."""
    no_decay: list[str] = field(default_factory=list)
    """Patterns of parameter names without weight decay, e.g. ``[*.bias,*norm*]``."""
    lr_scale: dict[str, float] | None = None
    """Factors of the rate by pattern of parameter names, e.g. ``{patch_embedding.*: 0.1}``; the first match counts."""
    clip: PositiveFloat | None = None
    """Maximal norm of this role's gradient, > 0; null for ``optim.clip``."""
    additions_lr: NonNegativeFloat | None = None
    """Peak rate of additions to the network (``additions.*``: GAN heads, time of the last step, second time; and the
    gates of sparse attention, ``*.to_gate_compress.*``), on the same schedule; null for ``lr``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2:
            raise UserError(f"betas={shown(self.betas)} must be two numbers")
        if self.lr == 0 and self.additions_lr is not None:  # the optimizer keeps additions_lr as a factor of lr
            raise UserError(f"lr=0 with additions_lr={self.additions_lr}; use lr=1e-20")
        if any(not factor >= 0 for factor in (self.lr_scale or {}).values()):
            raise UserError(f"lr_scale={self.lr_scale} must have factors of at least 0")

    def groups(self, names: Iterable[str], where: str) -> dict[Group, list[str]]:
        """Group parameters, by public name, that share weight decay and learning rate. ``no_decay`` and ``lr_scale``
        are patterns (``fnmatch``: ``*`` is any text, dots included); ``additions_lr`` is the rate of parameters that a
        method added, before ``lr_scale``. ``where`` is the prefix of settings in a message, as ``"optim.student"``."""
        names, scales = list(names), dict(self.lr_scale or {})
        groups: dict[Group, list[str]] = {}
        used: set[str | None] = set()
        for name in names:
            undecayed = [pattern for pattern in self.no_decay if fnmatchcase(name, pattern)]
            scaled = next((pattern for pattern in scales if fnmatchcase(name, pattern)), None)
            used |= {*undecayed, scaled}
            decay = 0.0 if undecayed else self.weight_decay
            scale = 1.0 if scaled is None else float(scales[scaled])
            if self.additions_lr is not None and is_added(name):
                scale *= self.additions_lr / self.lr
            groups.setdefault(Group(decay, scale), []).append(name)
        self._refuse_unused(used, names, where)
        return groups

    def _refuse_unused(self, used: set[str | None], names: Sequence[str], where: str) -> None:
        """Refuse patterns that no parameter took."""
        for key, patterns in (("no_decay", self.no_decay), ("lr_scale", self.lr_scale or {})):
            for pattern in patterns:
                if pattern not in used:
                    why = f"{pattern!r} matches no parameter that the patterns before it leave"
                    raise UserError(f"{where}.{key}: {why}; names are as {names[0]} and {names[-1]}")


@dataclass(kw_only=True)
class OptimSettings(Checked):
    """``optim.*``."""

    student: OptimizerSettings = field(default_factory=OptimizerSettings)
    fake: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip: PositiveFloat | None = 10.0
    """Maximal norm of a role's gradient, > 0; null for no clipping."""
    max_skipped: PositiveInt = 10
    """Number of consecutive updates skipped for a non-finite gradient norm after which the run stops; at least 1."""

    def clip_of(self, role: str) -> float | None:
        """Return the maximal norm of the gradient of ``role``; ``None`` for no clipping."""
        own = getattr(self, role).clip
        return self.clip if own is None else own


@dataclass(kw_only=True)
class CheckpointSettings(Checked):
    """``checkpoint.*``."""

    every: NonNegativeInt = 500
    """Number of steps between checkpoints; 0 for only one at the end."""
    keep: NonNegativeInt = 2
    """Number of newest checkpoints to keep; 0 for all."""
    keep_every: NonNegativeInt = 0
    """Permanently keep checkpoints whose step is a multiple of this; 0 for none."""
    asynchronous: bool = True
    """Write checkpoints during training, from a copy in host memory; training waits if the copy does not fit."""
    at_end: bool = True
    """Save a checkpoint after the last step; without it the run cannot continue from there."""
    resume: str = "auto"
    """Checkpoint to resume: ``auto`` (this run's newest), ``never``, a run folder or a step folder."""
    accept: list[str] = field(default_factory=list)
    """Settings whose files or data may differ from the checkpoint's, e.g. ``[teacher.checkpoint]``."""


@dataclass(kw_only=True)
class LogSettings(Checked):
    """``log.*``."""

    every: PositiveInt = 10
    """Number of steps between lines of ``metrics.jsonl``; at least 1."""
    print_every: PositiveInt | None = None
    """Number of steps between lines of the console and of ``log.txt``, at logged steps; null for 10 in a run of more
    than 100 steps, else 1."""
    norms_every: NonNegativeInt = 0
    """Number of steps between lines of ``norms.jsonl``, the norms of each weight and gradient by role; 0 for none."""
    wandb: bool = False
    """Also log to Weights & Biases (needs the ``wandb`` extra)."""
    tensorboard: bool = False
    """Also log to TensorBoard (needs the ``tensorboard`` extra)."""
    project: str = "fsdp_cp"
    """Project name in Weights & Biases."""


@dataclass(kw_only=True)
class ProfileSettings:
    """``profile.*``: time and memory of chosen steps; see docs/running.md."""

    steps: list[int] = field(default_factory=list)
    """First and last step to profile, e.g. ``[20,22]``, counted from 1 as in ``metrics.jsonl``; empty for none."""
    ranks: list[int] | Literal["all"] = field(default_factory=lambda: [0])
    """Ranks to profile, e.g. ``[0,8]``, or ``all``. Each writes a trace into ``RUN_DIR/profile``."""
    memory: bool = False
    """Also record the CUDA allocator in these steps; no effect on the CPU."""

    def __post_init__(self) -> None:
        if self.steps and (len(self.steps) != 2 or not 1 <= self.steps[0] <= self.steps[1]):
            raise UserError(f"steps={shown(self.steps)} must be the first and the last step, as [20,22]")
        ranks = self.ranks
        if ranks != "all" and (not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)):
            raise UserError(f"ranks={shown(ranks)} must be ranks from 0 on, each once, as [0,8], or all")


@dataclass(kw_only=True)
class SampleSettings(Checked):
    """``sample.*``: clips made during and after training, and the report."""

    every: NonNegativeInt = 0
    """Number of steps between sample clips; 0 for only at the end."""
    at_end: bool = True
    """Sample after the last step, and write the report if ``report_clips`` is above 0."""
    prompts: Number = 4
    """Number of clips per set of samples, with captions from the data set; at least 1."""
    captions: list[str] = field(default_factory=list)
    """Captions to sample instead, one clip each; the data set must contain them."""
    images: list[str] = field(default_factory=list)
    """Paths to images, or to videos for their first frame, in the order of ``captions``, for image-to-video models: one
    of each caption, with ``data.image=both`` two; empty for the data set's images."""
    student_steps: list[Number] = field(default_factory=lambda: [4])
    """Numbers of sampling steps of the student; one set of samples for each."""
    teacher_steps: list[Number] = field(default_factory=list)
    """Numbers of sampling steps of the teacher, which is sampled once for comparison."""
    report_clips: Annotated[int, Bounds(least=0, most=MOST)] = 0
    """Number of clips per row of ``report.html``; 0 for no report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.student_steps:
            raise UserError("student_steps=[] must have a number of steps")


@dataclass(kw_only=True)
class GuardSettings(Checked):
    """``guard.*``: looks at fixed clips of the student, and an alarm when they collapse; see docs/trouble.md."""

    every: NonNegativeInt = 0
    """Number of the student's updates between looks; 0 for none. There is one before the first step."""
    action: Literal["warn", "stop", "keep"] = "warn"
    """Answer to an alarm, in addition to ``guard/alarm`` in the metrics: a warning (``warn``), or the end of the run
    (``stop``). ``keep`` warns and keeps the best checkpoint, for ``models.export --checkpoint best``."""
    captions: Annotated[int, Bounds(least=2, most=MOST)] = 8
    """Number of captions, of ``sample.captions`` or the data set's, with two clips each; at least 2."""


@dataclass(kw_only=True)
class ExportSettings:
    """``export.*``: the student as a diffusers folder, at the end of the run."""

    at_end: bool = True
    """Export the student after the last step; ``python -m models.export`` exports a checkpoint at any time."""
    weights: Literal["auto", "raw", "ema"] = "auto"
    """Weights to export: ``raw``, ``ema``, or ``auto`` (the EMA if the run keeps one)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the exported weights: ``fp32`` or ``bf16``."""


@dataclass(kw_only=True)
class TimeoutSettings(Checked):
    """``timeout.*``: minutes that a rank waits for the others before the run ends; see docs/running.md."""

    start: Minutes = 60.0
    """Minutes until each trained role's first step is done, and during samples, checkpoints and the end of the run."""
    step: Minutes = 10.0
    """Minutes in every later step; at most ``start``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step > self.start:
            raise UserError(f"step={self.step} must be at most timeout.start={self.start}: first steps take longer")


@dataclass(kw_only=True)
class PlanningSettings:
    """``planning.*``, for ``plan=true``; see docs/planning.md."""

    hardware: str | None = None
    """GPU to plan for, a file of configs/hardware: ``h20``, ``h100``, ...; null to plan memory only."""
    model: str | None = None
    """Published network for roles without a checkpoint, e.g. ``wan2_1_t2v_14b``; ``model=`` sets it."""


@dataclass(kw_only=True)
class Config(Checked):
    """All settings of a run."""

    steps: PositiveInt = MISSING
    """Optimizer steps, over all roles. A resumed run with more steps continues."""
    seed: NonNegativeInt = 0
    """Seed of data order and random draws. Results do not depend on the mesh."""
    batch_size: Number = MISSING
    """Number of samples per step, over all ranks."""
    micro_batch_size: Number | None = None
    """Number of samples per data-parallel rank and forward; null for one forward per step or part of it."""
    expert_draws: PositiveInt = 1
    """Number of parts of a batch for roles with two experts (Wan 2.2 A14B). Each part draws the expert that it runs and
    the length of DMD2's rollout (docs/models.md)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of compute, ``fp32`` or ``bf16``; masters, reductions, Adam: fp32 if a role sets no other."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: ``auto``, ``cpu`` or ``cuda``. ``auto`` takes a GPU if present, and fails if torch cannot use it."""
    cuda_allocator: str | None = None
    """Value of ``PYTORCH_CUDA_ALLOC_CONF``, e.g. ``expandable_segments:True``; null keeps the environment's."""
    run_dir: str | None = None
    """Path to the folder of all output; ``runs/EXPERIMENT`` if not set."""
    dry_run: bool = False
    """Run all checks, print the run's memory and files, and exit; no process group. ``plan`` takes precedence."""
    plan: bool | Literal["suggest"] = False
    """``true``: predict a rank's memory, operations and traffic on fake tensors, write ``RUN_DIR/plan.html`` and exit.
    ``suggest``: search for settings that fit ``planning.hardware`` and exit."""
    world: Number | None = None
    """Number of ranks for ``dry_run`` or ``plan``; null for this process's world."""
    mesh: MeshSettings = field(default_factory=MeshSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    student: StudentSettings = field(default_factory=StudentSettings)
    fake: TrainedRoleSettings = field(default_factory=TrainedRoleSettings)
    method: Any = MISSING
    optim: OptimSettings = field(default_factory=OptimSettings)
    data: Any = MISSING
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    export: ExportSettings = field(default_factory=ExportSettings)
    timeout: TimeoutSettings = field(default_factory=TimeoutSettings)
    planning: PlanningSettings = field(default_factory=PlanningSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_allocator is not None and not _ALLOCATOR.fullmatch(self.cuda_allocator):
            example = "name:value, with commas between, as expandable_segments:True"
            raise UserError(f"cuda_allocator={self.cuda_allocator} must be {example}")


add_installed_methods()
OWNERS: list[tuple[str, type]] = [
    ("", Config),
    *(("method.", settings) for _, settings in METHODS.values()),
    *(("data.", settings) for settings in DATA.values()),
]
"""Prefix and dataclass of all settings."""
SETTINGS: dict[str, list[Setting]] = {}
"""All settings by dotted key. Several methods or data sets may share a key."""
for _prefix, _owner in OWNERS:
    for _key, _setting in walk_settings(_owner, _prefix):
        SETTINGS.setdefault(_key, []).append(_setting)
