"""Interface of a method: the roles it needs, the role that trains at a step, and its losses on full latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from distill.methods.common.chunks import CausalRoles, check_same_chunks, chunk_noise, draw_noise, split_chunks
from distill.methods.common.observations import Observations
from fsdp_cp.choices import Checked, NonNegativeFloat, PositiveFloat
from fsdp_cp.errors import UserError
from fsdp_cp.progress import first_rank_log
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.condition import Condition
from models.sample import AUDIO, VIDEO, PartShapes, Sample

if TYPE_CHECKING:
    from distill.methods.common.expert_times import Times
    from models.roles.role import Role
    from models.roles.role_plan import RolePlan

log = first_rank_log(__name__)

Boundaries = Mapping[str, tuple[float, ...]]
"""Times between the experts of each role that has two."""
_SOUND_SETTINGS = {"audio_weight": 1.0, "audio_shift_ratio": None, "audio_guidance_scale": None}
"""Settings of the sound, with the values that models without sound take."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Batch:
    """One micro-batch of this rank. All ranks of a ``cp`` group hold the same one."""

    latents: Sample | None
    """Clean latents, about unit scale. ``None`` if the data set has only captions."""
    condition: Condition
    """Conditions of the B samples, with the null condition of guidance and the empty caption of caption dropout."""
    latent_shapes: PartShapes | None = None
    """Value of :attr:`shapes` if ``latents`` is ``None``."""
    latent_shifts: Mapping[str, float] = field(default_factory=dict)
    """Shifts of the parts' times (:attr:`models.sample.Sample.shifts`) if ``latents`` is ``None``."""
    states: Sample | None = None
    """States ``(B, K, C, T, ...)`` of the teacher on its way to ``latents``, for methods that train on them."""

    @property
    def shapes(self) -> PartShapes:
        return self.latent_shapes if self.latents is None else self.latents.shapes

    @property
    def frames(self) -> int:
        return self.shapes[VIDEO][1]

    def noise(self, random: StepRandom, purpose: str, role: Role | None = None) -> Sample:
        """Draw noise for the samples; for a causal ``role`` chunk by chunk."""
        shifts = self.latent_shifts if self.latents is None else self.latents.shifts
        if role is None:
            return draw_noise(random, purpose, self.shapes, shifts, self.dtype)
        return Sample.cat([*chunk_noise(role, random, purpose, self.shapes, shifts, self.dtype)], dim=2)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of latents, noise and conditions: fp32 or better."""
        return self.condition.dtype


ANY_SAMPLE = Batch(latents=None, condition=Condition({"text": torch.zeros(1)}), latent_shapes={VIDEO: (1, 1, 1, 1)})
"""Batch of one sample without values, whose losses tell which experts a step trains."""


class Loss(NamedTuple):
    """One loss of a micro-batch. ``closure`` runs the forward and returns the mean over the micro-batch."""

    name: str
    closure: Callable[[], Tensor]
    weight: float = 1.0
    at: float | None = None
    """Time that selects the expert that the loss trains, the same for every micro-batch of a part of the batch
    (``expert_draws``) and on every rank; ``None`` for a role of one network."""


@dataclass(kw_only=True)
class PartSettings(Checked):
    """Settings of the parts of a sample other than the video."""

    prefix = "method."

    guidance_scale: float = 5.0
    """Guidance scale ``w`` of the teacher, or of ``method=flow_matching``'s samples: ``u + w (c - u)``; 1 for none."""
    audio_guidance_scale: float | None = None
    """Guidance scale of the audio; null for that of the video."""
    audio_weight: NonNegativeFloat = 1.0
    """Weight of the audio's loss next to the video's, at least 0. With 0, parameters that only the audio's output
    reaches change by weight decay alone."""
    audio_shift_ratio: PositiveFloat | None = None
    """Shift from the video's time to the audio's, > 0: the ratio of their shifts. null for the model's; LTX-2's
    pipeline samples with that alone, so another ratio exports no scheduler."""

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the parts' losses."""
        return {VIDEO: 1.0, AUDIO: self.audio_weight}

    @property
    def guidance(self) -> Guidance:
        """Guidance scale, or one per part."""
        return self._by_part(self.guidance_scale)

    def _by_part(self, video: Guidance) -> Guidance:
        return video if self.audio_guidance_scale is None else {VIDEO: video, AUDIO: self.audio_guidance_scale}

    @property
    def guidance_scales(self) -> dict[str, float | None]:
        """Guidance scales by the names of their settings."""
        return {"guidance_scale": self.guidance_scale, "audio_guidance_scale": self.audio_guidance_scale}

    def check_roles(self, roles: Mapping[str, RolePlan]) -> None:
        """Refuse settings that the planned ``roles``, by name, cannot follow. Settings of a method add their checks."""
        families = [role.family for role in roles.values()]
        for name, scale in self.guidance_scales.items():
            if scale not in (None, 1.0):
                for family in families:
                    family.check_guidance(scale, f"method.{name}")
        if any(AUDIO in family.parts for family in families):
            if not self.audio_weight:
                log.warning(
                    "method.audio_weight=0: parameters that only the audio's output reaches change by decay alone"
                )
            return
        for name, default in _SOUND_SETTINGS.items():
            if (value := getattr(self, name)) != default:
                raise UserError(f"method.{name}={value} is for models that make sound, unlike this one; leave it out")

    @property
    def remedies(self) -> list[str]:
        """Changes of these settings that help a student whose clips collapse, the most promising first
        (docs/trouble.md). A setting without effect is not named."""
        lower = ["lower method.guidance_scale"] if is_guided(self.guidance) else []
        return ["lower optim.student.lr", *lower]

    def check_steps(self, counts: Sequence[int], asked: str) -> None:
        """Refuse numbers of steps that the student cannot take, by default none. ``asked`` quotes the user."""


class Method(ABC):
    """Base class of the methods. Roles take and return full latents on every mesh."""

    required_roles: ClassVar[tuple[str, ...]] = ("teacher", "student")
    """Roles in the order in which they are built; see :meth:`roles_needed`."""
    trained_roles: ClassVar[tuple[str, ...]] = ("student",)
    guided_roles: ClassVar[tuple[str, ...]] = ("teacher",)
    """Roles that are sampled with guidance."""
    knows_experts: ClassVar[bool] = False
    """Whether roles of two experts are possible."""
    knows_parts: ClassVar[bool] = False
    """Whether samples with parts other than the video are possible."""
    same_history: ClassVar[bool] = False
    """Whether causal roles are possible, if teacher and student see one history."""
    settings_read: ClassVar[tuple[str, ...]] = ()
    """Roles whose settings the method reads although they are not built."""

    def __init__(self, settings, roles: Mapping[str, Role]):
        self.settings = settings
        self.roles = roles
        self.observations = Observations()
        """Values that the losses observe. The trainer drains and logs them at every step, under the role's name."""
        self.student_average: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the student uses its EMA weights, if the trainer keeps an EMA."""

    @property
    def student(self) -> Role:
        return self.roles["student"]

    @classmethod
    def roles_needed(cls, settings: Any) -> tuple[str, ...]:
        """Return the roles that these settings need, in the order in which they are built."""
        return cls.required_roles

    @classmethod
    def additions(cls, settings: Any) -> dict[str, Chosen]:
        """Return the additions to each role's network, by role; see models/additions/."""
        return {}

    @classmethod
    def experts(cls, config: Any, role: str) -> str:
        """Return which experts of ``role`` train if it has two: ``both``, ``high`` or ``low``."""
        return config.student.experts if role == "student" else "both"

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
    def check_given(cls, config: Any) -> None:
        """Refuse a configuration without a network that only the method's settings need, before roles are planned."""
        return

    @classmethod
    def check_roles(cls, config: Any, roles: Mapping[str, RolePlan]) -> None:
        """Refuse planned ``roles``, by name, that the method or its settings cannot use, before any is built. A method
        changes one of the three checks below, or adds its own here."""
        settings = config.method
        boundaries = {name: role.boundaries for name, role in roles.items() if role.boundaries}
        cls.check_experts(settings, boundaries, config.student.experts)
        cls.check_causal(settings, {name: role.causal for name, role in roles.items()})
        parts = {part for role in roles.values() for part in role.family.parts} - {VIDEO}
        if parts:
            cls.check_parts(settings, sorted(parts))
        settings.check_roles(roles)

    @classmethod
    def check_files(cls, config: Any, causal: CausalRoles) -> None:
        """Refuse files that only this method reads and cannot use, before anything is built."""
        return

    @classmethod
    def check_experts(cls, settings: Any, boundaries: Boundaries, trained: str) -> None:
        """Refuse roles with two experts, by the times between them (``boundaries``) and the student's experts that are
        ``trained`` (``both``, ``high`` or ``low``)."""
        for name in () if cls.knows_experts else boundaries:
            hint = "use method=dmd2, rcm, scm or flow_matching, or a checkpoint of one network"
            raise UserError(f"{name}.checkpoint has two experts, which method={settings.name} does not know; {hint}")

    @classmethod
    def check_parts(cls, settings: Any, parts: Collection[str]) -> None:
        """Refuse samples with ``parts`` other than the video."""
        if cls.knows_parts:
            return
        hint = "use method=dmd2 without GAN, pdd or flow_matching, or a model of video alone"
        raise UserError(f"method={settings.name} does not know {' and '.join(parts)} yet; {hint}")

    @classmethod
    def check_causal(cls, settings: Any, causal: CausalRoles) -> None:
        """Refuse causal roles, by default all. ``causal`` has each role's settings, ``None`` if bidirectional."""
        if cls.same_history:
            return check_same_chunks(causal)
        for name, role in causal.items():
            if role is not None:
                hint = "use method=flow_matching, dcm, scm, ode_regression or self_forcing, or null"
                raise UserError(f"{name}.causal.chunk={role.chunk} is not for method={settings.name}; {hint}")

    def clock(self, role: str) -> Mapping[str, float]:
        """Return the parts of samples of ``role``, with the shifts of their times. The teacher keeps its model's."""
        released, ratio = self.roles[role].family.parts, self.settings.audio_shift_ratio
        return released if ratio is None or role == "teacher" else {**released, AUDIO: ratio}

    def total(self, name: str, errors: Sample) -> Tensor:
        """Return the weighted sum of the parts' ``errors``; observe each of several parts as ``NAME/PART``."""
        if len(errors.parts) > 1:
            for part, values in errors.parts.items():
                self.observations.add(f"{name}/{part}", values)
        return errors.total(self.settings.weights)

    def trained_role(self, step: int) -> str:
        """Return the one role that trains at ``step`` (0-based), the same on every rank; by default the student."""
        return "student"

    def representative_steps(self, role: str, steps: int) -> dict[int, float]:
        """Return steps of a run of ``steps``, the most expensive first, with weights (sum 1) whose mean cost is that of
        all steps that train ``role``; empty if none does. By default the last one: steps differ in drawn integers."""
        last = next((step for step in reversed(range(steps)) if self.trained_role(step) == role), None)
        return {} if last is None else {last: 1.0}

    def frozen_roles(self, step: int) -> tuple[str, ...]:
        """Return the trained roles that backpropagation passes through at ``step`` without training them."""
        return ()

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        """Yield the losses of the role that trains at ``step``, each with its own backward; by default :meth:`loss`.
        Only the closures call roles or read tensors of the batch: a run also lists the losses of :data:`ANY_SAMPLE`."""
        yield Loss(self.settings.name, lambda: self.loss(step, batch, random))

    def loss(self, step: int, batch: Batch, random: StepRandom) -> Tensor:
        """Return the only loss of a method that does not define :meth:`losses`."""
        raise NotImplementedError

    guidance_bands: ClassVar[Sequence[float]] = ()
    """Lower ends of the bands of time, up to 1, in which the guard measures :meth:`guidance_field`."""

    def guidance_field(self, x: Sample, times: Times, condition: Condition) -> Tensor:
        """Compare the student's guidance at the states ``x`` with its base's. Return ``(3, B)``: relative length,
        cosine, and relative length of the difference. Only for a method with :attr:`guidance_bands` and a role
        ``teacher``."""
        raise NotImplementedError

    def fake_last_step(self, t: Tensor) -> Tensor | None:
        """Return the time of the last step of a whole sampling, like ``t``, where the fake score is conditioned on it
        (addition ``last_step``)."""
        return None

    @property
    def few_steps(self) -> dict[str, Any] | None:
        """``times`` of a few-step student and whether its sampler is ``stochastic``, for a scheduler of diffusers that
        samples it so (:meth:`models.families.base.Family.schedulers`); ``None`` without one."""
        return None

    def least_steps(self, role: str, steps: Sequence[int]) -> int:
        """Return the number of steps with which a plan samples ``role``, which a run samples with ``steps``: two
        show the memory of all."""
        return min(2, *steps)

    @property
    def heads(self) -> dict[str, Any] | None:
        """:class:`models.additions.heads.Grid` of a student with heads, as JSON, for its exports; ``None`` without."""
        return None

    def evaluations(self, role: str, steps: int) -> int:
        """Return the number of network evaluations of :meth:`stream` per clip (guidance evaluates twice a step)."""
        steps += self.roles[role].causal is not None  # a finished chunk goes through the network for its keys
        return 2 * steps if role in self.guided_roles and is_guided(self.settings.guidance) else steps

    def generate(self, role: str, noise: Sample, condition: Condition, steps: int, random: StepRandom) -> Sample:
        """Sample whole clips from ``noise``: the chunks of :meth:`stream`, joined."""
        chunks = split_chunks(self.roles[role], noise)
        return Sample.cat([*self.stream(role, chunks, condition, steps, random)], dim=2)

    @abstractmethod
    def stream(
        self, role: str, noise: Iterable[Sample], condition: Condition, steps: int, random: StepRandom
    ) -> Iterator[Sample]:
        """Sample clean latents chunk by chunk, in ``steps`` steps each: yield each chunk once finished. ``noise`` has
        that of each (:func:`distill.methods.common.chunks.chunk_noise`); a bidirectional role has one chunk, the whole
        clip."""


Guidance = float | tuple[float, float] | Mapping[str, Any]
"""Guidance scale ``w``; or one per expert of a teacher with two, like diffusers' ``guidance_scale`` and
``guidance_scale_2``; or one of these per part."""


def guided_velocity(
    role: Role,
    x: Sample,
    t: Tensor,
    condition: Condition,
    guidance: Guidance,
    at: float | None = None,
    *,
    clean: Sample | None = None,
) -> Sample:
    """Return the velocity ``u + w (c - u)`` of classifier-free guidance (Ho & Salimans 2022), in one network call, or
    the conditional alone if ``guidance``, ``w``, is 1. ``u`` gets the ``null`` of ``condition``. The rest is as in
    :meth:`models.roles.role.Role.velocity`."""
    w = guidance_at(role, guidance, at)
    if not is_guided(w):
        return role.velocity(x, t, condition, at=at, clean=clean)
    branches = Condition.cat([condition, condition.null])
    history = None if clean is None else Sample.cat([clean, clean])
    return guide(role.velocity(Sample.cat([x, x]), torch.cat([t, t]), branches, at=at, clean=history), w)


def guide(both: Sample, w: Any) -> Sample:
    """Return ``u + w (c - u)`` for the velocities of 2B samples: the conditions', then those of their ``null``."""
    conditional, unconditional = both.chunk(2)
    return unconditional + w * (conditional - unconditional)


def is_guided(guidance: Guidance) -> bool:
    """Return whether any guidance scale differs from 1, so that both branches are needed."""
    if isinstance(guidance, Mapping):
        return any(map(is_guided, guidance.values()))
    return guidance != 1.0


def guidance_at(role: Role, guidance: Guidance, at: float | None) -> Any:
    """Return the guidance scale of the expert of ``role`` that serves the time ``at``, or one per part."""
    if isinstance(guidance, Mapping):
        return {part: guidance_at(role, scale, at) for part, scale in guidance.items()}
    return guidance[role.expert_at(at)] if isinstance(guidance, tuple) else guidance
