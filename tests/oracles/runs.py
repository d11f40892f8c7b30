"""Miniature runs, and the record of a run: the same for the trainer on ranks and for plain networks."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.config import Config
from distill.config.schema import EmaSettings, OptimizerSettings, OptimSettings
from distill.methods.dcm import DcmSettings
from distill.methods.dmd2 import Dmd2Settings
from distill.methods.flow_matching import FlowMatchingSettings
from distill.methods.meanflow import MeanFlowSettings
from distill.methods.rcm import RcmSettings
from distill.methods.scm import ScmSettings
from fsdp_cp.sharding.settings import ShardSettings
from models.causal import CausalSettings
from models.lora.settings import LoraSettings
from models.sparse import SparseSettings
from tests.oracles.clips import RandomClips
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE

BATCH = 4
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
_TIMES = [1.0, 0.8, 0.5]
METHODS: dict[str, Any] = {
    "dmd2": Dmd2Settings(fake_updates_per_student_update=1, step_list=_TIMES, guidance_scale=3.0, shift=2.0),
    "dmd2, last step": Dmd2Settings(
        fake_updates_per_student_update=2, guidance_scale=3.0, step_list=_TIMES, fake_knows_last_step=True,
        student_sampler="ode",
    ),
    "dmd2, GAN": Dmd2Settings(
        fake_updates_per_student_update=1, guidance_scale=3.0, step_list=_TIMES, fake_knows_last_step=True,
        gan_weight_student=0.3, gan_r1_weight=0.2,
    ),
    "dmd2, own path": Dmd2Settings(
        fake_updates_per_student_update=1, guidance_scale=3.0, step_list=_TIMES, student_sampler="ode", projection=True,
        score_noise="own", score_interval="step", fake_rollout="full", max_error=2.555,
    ),
    "rcm": RcmSettings(
        tangent_warmup=1, consistency_steps=1, student_every=2, guidance_scale=3.0, consistency_weight=0.7
    ),
    "rcm, last step": RcmSettings(
        consistency_steps=0, student_every=2, guidance_scale=3.0, consistency_weight=0.7, fake_knows_last_step=True
    ),
    "scm": ScmSettings(tangent_warmup=2, guidance_scale=3.0),
    "meanflow": MeanFlowSettings(tangent_warmup=2, interval_ratio=0.8, guidance_scale=3.0, step_list=_TIMES),
    "dcm": DcmSettings(grid_steps=6, guidance_scale=3.0, step_list=_TIMES),
    "flow_matching": FlowMatchingSettings(caption_dropout=0.5, shift=3.0),
    "flow_matching, built-in guidance": FlowMatchingSettings(
        caption_dropout=0.0, guidance_scale=1.0, shift=3.0, built_in_guidance=3.0, null="live", anchor_weight=0.5,
        anchor_min_time=0.7, guidance_min_time=0.4,
    ),
}  # fmt: skip
"""Settings with which three steps train every role and pass a warm-up. ode_regression needs files."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run on ``dp_shard x cp x dp_replicate`` ranks."""

    dp_shard: int = 1
    cp: int = 1
    dp_replicate: int = 1
    steps: int = 6
    precision: str = "fp32"
    activation_checkpointing: bool = False
    batch_size: int = BATCH
    micro_batch_size: int = 1
    latent_shape: tuple[int, int, int, int] = LATENT_SHAPE
    audio_shape: tuple[int, int, int] | None = None
    more_shapes: tuple[tuple[int, int, int, int], ...] = ()
    """Latents of clips of other sizes, each as many as of ``latent_shape``."""
    condition_shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: CONDITION_SHAPES)
    architecture: dict[str, Any] = field(default_factory=lambda: ARCHITECTURE)
    """Configuration of the networks in the folder."""
    family: str = "wan"
    """Family of the networks in the folder."""
    method: Any = field(default_factory=lambda: METHODS["dmd2"])
    """Settings of the method."""
    ema: EmaSettings = field(default_factory=EmaSettings)
    """The student's average."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sharding settings by role; those under ``all`` are for every role."""
    lora: dict[str, LoraSettings] = field(default_factory=dict)
    """Adapters on the teacher's network, by role."""
    training_adapter: str | None = None
    """File of the student's training adapter."""
    boundaries: dict[str, float] = field(default_factory=dict)
    """Boundaries of the roles that are two experts."""
    experts: str = "both"
    """Experts of student and fake score that train."""
    expert_draws: int = 1
    causal: CausalSettings | None = None
    """Settings of the causal roles."""
    causal_roles: tuple[str, ...] = ("student", "teacher")
    sparse: dict[str, SparseSettings] = field(default_factory=dict)
    """Sparse attention, by role."""

    @property
    def world_size(self) -> int:
        return self.dp_shard * self.cp * self.dp_replicate

    def sharding(self, role: str) -> ShardSettings:
        """Return the sharding settings of ``role``."""
        chosen = {"activation_checkpointing": self.activation_checkpointing, "precision": self.precision}
        return ShardSettings(**chosen | self.changes.get("all", {}) | self.changes.get(role, {}))


@dataclass
class Trace:
    """Record of a run, step by step."""

    roles: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Full gradients before clipping, by parameter name."""
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Full weights of each trained role at the end, and under ``average of ROLE`` its average."""

    def after(self, step: int) -> "Trace":
        """Return the record of the steps after the first ``step``."""
        return Trace(self.roles[step:], self.losses[step:], self.norms[step:], self.gradients[step:], self.weights)


def random_adapter(role: str, name: str, shape: Sequence[int]) -> Tensor:
    """Return a random matrix for A or B: B's usual zeros would hide errors in A's gradients."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{role}/{name}".encode()))
    return 0.1 * torch.randn(*shape, generator=generator)


def random_clips(setup: Setup) -> RandomClips:
    """Return the data of ``setup`` in its compute dtype, fp32 at least."""
    dtype = torch.float64 if setup.precision == "fp64" else torch.float32
    return RandomClips(setup.latent_shape, setup.condition_shapes, dtype, setup.audio_shape, setup.more_shapes)


def make_config(setup: Setup, folder: Path, run_dir: Path | None = None) -> Config:
    """Return a configuration whose clipping changes every step."""
    settings = OptimizerSettings(lr=1e-4, betas=[0.0, 0.99], weight_decay=0.01)
    config = Config(
        steps=setup.steps,
        batch_size=setup.batch_size,
        expert_draws=setup.expert_draws,
        seed=3,
        run_dir=str(run_dir or folder / "run"),
        method=setup.method,
        optim=OptimSettings(student=settings, fake=settings, clip=0.5),
        data=None,
    )
    config.student.ema = replace(setup.ema)  # a copy: tests change a configuration
    for role in (config.teacher, config.student, config.fake):  # composing would resolve what refers to the teacher
        role.family, role.config = setup.family, None
    return config
