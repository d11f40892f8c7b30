"""A run in miniature, and what one notes of it: the same for the trainer on ranks and for plain networks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distill.config import Config, OptimizerSettings
from distill.config.schema import OptimSettings
from distill.methods.dmd2 import Dmd2Settings
from fsdp_cp.sharding.settings import ShardSettings
from models.lora.settings import LoraSettings
from tests.oracles.clips import RandomClips
from tests.oracles.tiny_wan import ARCHITECTURE, CONDITION_SHAPES, LATENT_SHAPE

BATCH = 4
MESHES = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run: mesh sizes, precision and so on. ``dp_shard x cp x dp_replicate`` ranks."""

    dp_shard: int = 1
    cp: int = 1
    dp_replicate: int = 1
    steps: int = 6
    precision: str = "fp32"
    activation_checkpointing: bool = False
    batch_size: int = BATCH
    micro_batch_size: int = 1
    latent_shape: tuple[int, int, int, int] = LATENT_SHAPE
    condition_shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: CONDITION_SHAPES)
    architecture: dict[str, Any] = field(default_factory=lambda: ARCHITECTURE)
    """Of the networks in the folder."""
    family: str = "wan"
    """Theirs."""
    method: Any = field(
        default_factory=lambda: Dmd2Settings(
            fake_updates_per_student_update=1, step_list=[1.0, 0.8, 0.5], guidance_scale=3.0, shift=2.0
        )
    )
    """Settings of the method; DMD2 in miniature by default."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of how a role is sharded, by role; under ``all`` those of every role."""
    lora: dict[str, LoraSettings] = field(default_factory=dict)
    """Adapters on the teacher's network, by role."""
    boundaries: dict[str, float] = field(default_factory=dict)
    """Of roles that are two experts."""
    expert_draws: int = 1

    @property
    def world_size(self) -> int:
        return self.dp_shard * self.cp * self.dp_replicate

    def sharding(self, role: str) -> ShardSettings:
        """How ``role`` is sharded."""
        chosen = {"activation_checkpointing": self.activation_checkpointing, "precision": self.precision}
        return ShardSettings(**chosen | self.changes.get("all", {}) | self.changes.get(role, {}))


@dataclass
class Trace:
    """What a run did, step by step."""

    roles: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Full gradients before clipping, by parameter name."""
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Full weights of each trained role at the end."""


def random_adapter(role: str, name: str, shape: Sequence[int]) -> Tensor:
    """A weight of an adapter; of B too, whose own first values, zero, would hide errors in A's gradients."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{role}/{name}".encode()))
    return 0.1 * torch.randn(*shape, generator=generator)


def random_clips(setup: Setup) -> RandomClips:
    """The data of ``setup``, in the dtype in which it computes, fp32 at least."""
    dtype = torch.float64 if setup.precision == "fp64" else torch.float32
    return RandomClips(setup.latent_shape, setup.condition_shapes, dtype)


def make_config(setup: Setup, folder: Path) -> Config:
    """In miniature, with clipping that bites."""
    settings = OptimizerSettings(lr=1e-4, betas=[0.0, 0.99], weight_decay=0.01)
    return Config(
        steps=setup.steps,
        batch_size=setup.batch_size,
        expert_draws=setup.expert_draws,
        seed=3,
        run_dir=str(folder / "run"),
        method=setup.method,
        optim=OptimSettings(student=settings, fake=settings, clip=0.5),
        data=None,
    )
