"""Interface of a method: the roles it needs, the role that trains at a step, and its losses on full latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from distill.methods.common.chunks import split_chunks
from distill.methods.common.observations import Observations
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.condition import Condition

if TYPE_CHECKING:
    from models.causal import CausalSettings
    from models.roles.role import Role


@dataclass(kw_only=True, frozen=True, slots=True)
class Batch:
    """One micro-batch of this rank. All ranks of a ``cp`` group hold the same one."""

    latents: Tensor | None
    """Clean latents ``(B, C, T, H, W)``, about unit scale. ``None`` if the data set has only captions."""
    condition: Condition
    """Conditions of the B samples, with the null condition of guidance and the empty caption of caption dropout."""
    latent_shape: tuple[int, ...] | None = None
    """Value of :attr:`shape` if ``latents`` is ``None``."""
    states: Tensor | None = None
    """States ``(B, K, C, T, H, W)`` of the teacher on its way to ``latents``, for methods that train on them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(C, T, H, W)`` of one sample's latents."""
        return tuple(self.latents.shape[1:]) if self.latents is not None else self.latent_shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of latents, noise and conditions: fp32 or better."""
        return self.condition.dtype


ANY_SAMPLE = Batch(latents=None, condition=Condition({"text": torch.zeros(1)}), latent_shape=(1, 1, 1, 1))
"""Batch of one sample without values, whose losses tell which experts a step trains."""


class Loss(NamedTuple):
    """One loss of a micro-batch. ``closure`` runs the forward and returns the mean over the micro-batch."""

    name: str
    closure: Callable[[], Tensor]
    weight: float = 1.0
    at: float | None = None
    """Time that selects the expert that the loss trains, the same for every micro-batch of a part of the batch
    (``expert_draws``) and on every rank; ``None`` for a role of one network."""


class Method(ABC):
    """Base class of the methods. Roles take and return full latents on every mesh."""

    required_roles: ClassVar[tuple[str, ...]]
    """Roles in the order in which they are built; see :meth:`roles_needed`."""
    trained_roles: ClassVar[tuple[str, ...]]
    settings_read: ClassVar[tuple[str, ...]] = ()
    """Roles whose settings the method reads although they are not built."""

    def __init__(self, settings, roles: Mapping[str, Role]):
        self.settings = settings
        self.roles = roles
        self.observations = Observations()
        """Values that the losses observe. The trainer drains and logs them at every step, under the role's name."""
        self.student_average: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the student uses its EMA weights, if the trainer keeps an EMA."""

    @classmethod
    def roles_needed(cls, settings: Any) -> tuple[str, ...]:
        """Return the roles that these settings need, in the order in which they are built."""
        return cls.required_roles

    @classmethod
    def additions(cls, settings: Any) -> dict[str, Chosen]:
        """Return the additions to each role's network, by role; see models/additions/."""
        return {}

    @classmethod
    def needs_latents(cls, settings: Any) -> bool:
        """Return whether the losses need real clips; otherwise captions are enough (``data=captions``)."""
        return True

    @classmethod
    def state_times(cls, settings: Any) -> Sequence[float]:
        """Return the times of the teacher's states that the losses need (:attr:`Batch.states`); empty for none."""
        return ()

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ``UserError`` for a setting of :class:`distill.config.Config` that does not fit the method."""
        return

    @classmethod
    def fingerprints(cls, settings: Any) -> dict[str, str]:
        """Return fingerprints of the files that ``method.*`` names, by dotted key. A resumed run needs the same."""
        return {}

    @classmethod
    def check_files(cls, config: Any, causal: Mapping[str, CausalSettings | None]) -> None:
        """Raise ``UserError`` for files that only this method reads and cannot use, before anything is built.

        It gets ``causal`` like :meth:`check_causal`.
        """
        return

    @classmethod
    def check_experts(cls, settings: Any, boundaries: Mapping[str, tuple[float, ...]], trained: str) -> None:
        """Check that this method can train and evaluate the roles that have two experts.

        ``boundaries`` are the times between the experts of each such role. ``trained`` are the student's experts that
        train: ``both``, ``high`` or ``low``.

        Raises:
            UserError: a role that the method cannot handle; by default, any role with experts.
        """
        for name in boundaries:
            raise UserError(
                f"{name}.checkpoint is a model of two experts, which method={settings.name} does not know; use"
                " method=dmd2, rcm, scm or flow_matching, or a checkpoint of one network"
            )

    @classmethod
    def check_causal(cls, settings: Any, causal: Mapping[str, CausalSettings | None]) -> None:
        """Check that this method can train and evaluate the roles that are causal.

        ``causal`` has the causal settings of each role of the plan, by role; ``None`` for a bidirectional role.

        Raises:
            UserError: a role that the method cannot handle; by default, any causal role.
        """
        for name, role in causal.items():
            if role is not None:
                raise UserError(
                    f"{name}.causal.chunk={role.chunk}: method={settings.name} does not know causal roles yet; use"
                    f" method=flow_matching, dcm, scm, ode_regression or self_forcing, or {name}.causal.chunk=null"
                )

    @abstractmethod
    def trained_role(self, step: int) -> str:
        """Return the one role that trains at ``step`` (0-based), the same on every rank."""

    def first_role(self, step: int) -> str:
        """Return the role that runs the first forward of ``step``. It may depend only on ``step`` and the settings."""
        return "student"

    def representative_steps(self, role: str, steps: int) -> dict[int, float]:
        """Return steps of a run of ``steps`` whose weighted mean cost is that of all steps that train ``role``.

        Weights by step have the sum 1, the most expensive step first. They are empty if the role never trains. By
        default only the last step counts: steps differ only in the integers that they draw.
        """
        last = next((step for step in reversed(range(steps)) if self.trained_role(step) == role), None)
        return {} if last is None else {last: 1.0}

    def frozen_roles(self, step: int) -> tuple[str, ...]:
        """Return the trained roles that backpropagation passes through at ``step`` without training them."""
        return ()

    @abstractmethod
    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        """Yield the losses of the role that trains at ``step``. Each gets its own backward, which frees its graph.

        Only the closures call roles or read tensors of the batch. A run also lists the losses of :data:`ANY_SAMPLE`.
        """

    @property
    def few_steps(self) -> dict[str, Any] | None:
        """``times`` of a few-step student and whether its sampler is ``stochastic``, for a scheduler of diffusers that
        samples it so (:func:`models.files.scheduler.few_step_scheduler`); ``None`` without one."""
        return None

    @abstractmethod
    def evaluations(self, role: str, steps: int) -> int:
        """Return the number of network evaluations of :meth:`stream` per clip (guidance evaluates twice a step)."""

    def generate(self, role: str, noise: Tensor, condition: Condition, steps: int, random: StepRandom) -> Tensor:
        """Sample whole clips from ``noise`` ``(B, C, T, H, W)``: the chunks of :meth:`stream`, joined."""
        chunks = split_chunks(self.roles[role], noise)
        return torch.cat([*self.stream(role, chunks, condition, steps, random)], dim=2)

    @abstractmethod
    def stream(
        self, role: str, noise: Iterable[Tensor], condition: Condition, steps: int, random: StepRandom
    ) -> Iterator[Tensor]:
        """Sample clean latents chunk by chunk: yield each chunk ``(B, C, frames of the chunk, H, W)`` once finished.

        ``noise`` has the noise of each chunk (:func:`distill.methods.common.chunks.chunk_noise`). A bidirectional role
        has one chunk, the whole clip. ``steps`` is the number of steps of the role's sampler per chunk.
        """


Guidance = float | tuple[float, float]
"""Guidance scale ``w``, or one per expert of a teacher with two, like diffusers' ``guidance_scale`` and
``guidance_scale_2``."""


def guided_velocity(
    role: Role,
    x: Tensor,
    t: Tensor,
    condition: Condition,
    guidance: Guidance,
    at: float | None = None,
    *,
    clean: Tensor | None = None,
) -> Tensor:
    """Return the velocity ``u + w (c - u)`` of classifier-free guidance (Ho & Salimans 2022), in one network call.

    Args:
        role: the network.
        x: noisy latents ``(B, C, T, H, W)``.
        t: times ``(B,)``, or ``(B, T)`` for a time per latent frame.
        condition: conditions of the B samples; ``u`` gets its ``null``.
        guidance: ``w``. If it is 1, only the conditional velocity is computed.
        at: time that selects the expert (:meth:`models.roles.role.Role.network_at`).
        clean: history of a causal role (:meth:`models.roles.role.Role.velocity`), the same for ``c`` and ``u``.
    """
    w = guidance_at(role, guidance, at)
    if w == 1.0:
        return role.velocity(x, t, condition, at=at, clean=clean)
    branches, history = Condition.cat([condition, condition.null]), None if clean is None else torch.cat([clean, clean])
    return guide(role.velocity(torch.cat([x, x]), torch.cat([t, t]), branches, at=at, clean=history), w)


def guide(both: Tensor, w: float) -> Tensor:
    """Return ``u + w (c - u)`` for the velocities ``(2B, ...)`` of the conditions, then of their ``null``."""
    conditional, unconditional = both.chunk(2)
    return unconditional + w * (conditional - unconditional)


def guidance_at(role: Role, guidance: Guidance, at: float | None) -> float:
    """Return the guidance scale of the expert of ``role`` that serves the time ``at``."""
    return guidance[role.expert_at(at)] if isinstance(guidance, tuple) else guidance
