"""What a method is: which roles it needs, which one trains at a step, and its losses on full latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from distill.data import ClipDataset
from distill.methods.common.observations import Observations
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.roles.condition import Condition

if TYPE_CHECKING:
    from models.roles.role import Role


@dataclass(kw_only=True, frozen=True, slots=True)
class Batch:
    """One micro-batch of this rank; the same on all ranks of a ``cp`` group."""

    latents: Tensor | None
    """``(B, C, T, H, W)``, about unit scale; ``None`` where the data are captions alone."""
    condition: Condition
    """Of the B samples, with what guidance subtracts and what a dropped caption is replaced by."""
    latent_shape: tuple[int, ...] | None = None
    """:attr:`shape`, where there are no ``latents`` to tell it."""
    trajectory: Tensor | None = None
    """``(B, K, C, T, H, W)``: a teacher's states on the way to ``latents``, where the method's data have them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``(C, T, H, W)`` of one sample's latents."""
        return tuple(self.latents.shape[1:]) if self.latents is not None else self.latent_shape

    @property
    def dtype(self) -> torch.dtype:
        """Of latents, noise and conditions: fp32 or better."""
        return self.condition.dtype


class Loss(NamedTuple):
    """One loss of a micro-batch. ``closure`` does all of the work and returns the mean over the micro-batch."""

    name: str
    closure: Callable[[], Tensor]
    weight: float


class Method(ABC):
    """Base of the methods; ``roles`` are on full latents, whatever the mesh."""

    required_roles: ClassVar[tuple[str, ...]]
    """In the order in which they are built; see :meth:`roles_needed`."""
    trained_roles: ClassVar[tuple[str, ...]]
    settings_read: ClassVar[tuple[str, ...]] = ()
    """Roles that are not built, but whose settings the method reads."""

    def __init__(self, settings, roles: Mapping[str, Role]):
        self.settings = settings
        self.roles = roles
        self.observations = Observations()
        """What the losses saw on the way; the trainer drains it at every step and logs it with the role's name."""
        self.student_average: Callable[[], AbstractContextManager[None]] = nullcontext
        """Inside, the student computes with its average, if the trainer keeps one."""

    @classmethod
    def roles_needed(cls, settings: Any) -> tuple[str, ...]:
        """The roles that these settings need, in the order in which they are built."""
        return cls.required_roles

    @classmethod
    def additions(cls, settings: Any) -> dict[str, Chosen]:
        """What is attached to which role's network; see models/additions/."""
        return {}

    @classmethod
    def needs_latents(cls, settings: Any) -> bool:
        """Do the losses need real clips, or are captions enough (``data=captions``)?"""
        return True

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse a configuration (:class:`distill.config.Config`) of other parts that this method cannot work with.

        Raises:
            UserError: naming the setting and a value that works.
        """
        return

    @classmethod
    def fingerprints(cls, settings: Any) -> dict[str, str]:
        """Return fingerprints of the files that ``method.*`` names, by dotted key: a resumed run needs the same."""
        return {}

    @classmethod
    def check_files(cls, config: Any) -> None:
        """Refuse files that only this method reads, before anything is built.

        Raises:
            UserError: naming the setting and a value that works.
        """
        return

    @classmethod
    def check_experts(cls, settings: Any, boundaries: Mapping[str, tuple[float, ...]], trained: str) -> None:
        """Refuse roles of experts that this method cannot train or evaluate.

        Args:
            settings: of the method.
            boundaries: of the roles that are experts of ranges of times, by name.
            trained: which of the student's two train: ``both``, ``high`` or ``low``.

        Raises:
            UserError: naming the role; by default for any.
        """
        for name in boundaries:
            raise UserError(
                f"{name}.checkpoint is a model of two experts, which method={settings.name} does not know; use"
                " method=dmd2, rcm, scm or flow_matching, or a checkpoint of one network"
            )

    def networks(self, step: int, random: StepRandom) -> Mapping[str, int]:
        """Of a trained role of experts, which of its networks each loss of ``step`` trains, by the loss's name.

        By what all ranks share alone (:attr:`StepRandom.shared`), and the same for each micro-batch of a part of the
        batch.
        """
        return {}

    def training_data(self, data: ClipDataset) -> ClipDataset:
        """What the steps read; ``data``, with which samples are made, by default."""
        return data

    @abstractmethod
    def trained_role(self, step: int) -> str:
        """The one role that trains at ``step`` (0-based), the same on every rank."""

    def first_role(self, step: int) -> str:
        """The role whose forward is the first of ``step``; by the settings alone."""
        return "student"

    def representative_steps(self, role: str, steps: int) -> dict[int, float]:
        """Steps that cost together, each by its share, what the mean of a role's steps costs; the largest first.

        Args:
            role: of :attr:`trained_roles`.
            steps: of the run.

        Returns:
            Shares, of sum 1, by step; empty where the role never trains. By default the last step alone: all are alike,
            but for the whole numbers that they draw.
        """
        last = next((step for step in reversed(range(steps)) if self.trained_role(step) == role), None)
        return {} if last is None else {last: 1.0}

    def frozen_roles(self, step: int) -> tuple[str, ...]:
        """Trained roles that a gradient passes through at ``step`` and must not stay in."""
        return ()

    @abstractmethod
    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        """The losses of the role that trains at ``step``, lazily: each gets its own backward, which frees its graph."""

    @abstractmethod
    def evaluations(self, role: str, steps: int) -> int:
        """Network evaluations that :meth:`generate` takes for one clip (guidance evaluates twice a step)."""

    @abstractmethod
    def generate(self, role: str, noise: Tensor, condition: Condition, steps: int, random: StepRandom) -> Tensor:
        """Clean latents from ``noise`` ``(B, C, T, H, W)`` in ``steps`` steps of the sampler that fits the role."""


Guidance = float | tuple[float, float]
"""Scale ``w`` of guidance; of a teacher of two experts one for each, as diffusers' ``guidance_scale`` and
``guidance_scale_2``."""


def guided_velocity(
    role: Role, x: Tensor, t: Tensor, condition: Condition, scale: Guidance, at: float | None = None
) -> Tensor:
    """Classifier-free guidance ``u + w (c - u)`` (Ho & Salimans 2022), both in one call of the network.

    Args:
        role: the network.
        x: ``(B, C, T, H, W)``.
        t: ``(B,)``.
        condition: of the B samples; its ``null`` is what ``u`` is told.
        scale: ``w``; 1 is the conditional velocity, without a second pass.
        at: of :meth:`models.roles.role.Role.network_at`.
    """
    w = scale_at(role, scale, at)
    if w == 1.0:
        return role.velocity(x, t, condition, at=at)
    both = role.velocity(torch.cat([x, x]), torch.cat([t, t]), Condition.cat([condition, condition.null]), at=at)
    conditional, unconditional = both.chunk(2)
    return unconditional + w * (conditional - unconditional)


def scale_at(role: Role, scale: Guidance, at: float | None) -> float:
    """Return the scale of the network of ``role`` which serves the time ``at``; a single network has the first."""
    if not isinstance(scale, tuple):
        return scale
    return scale[role.expert_at(at) if role.boundaries else 0]
