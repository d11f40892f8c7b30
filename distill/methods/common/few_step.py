"""Base of the methods that train a few-step student: samplers of student and teacher, and their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from distill.methods.base import Batch, Guidance, Method, PartSettings
from distill.methods.common.expert_times import Times
from distill.methods.common.sampling import Line, Sampler, StudentSampler, guided_states, rollout, rollout_chunks
from fsdp_cp.choices import PositiveFloat
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.condition import Condition
from models.sample import Sample

if TYPE_CHECKING:
    from models.roles.role_plan import RolePlan


@dataclass(kw_only=True)
class FewStepSettings(PartSettings):
    """Settings of every method that distills a teacher."""

    times_setting: ClassVar[str] = "step_list"
    """Name of the setting that lists the student's times."""
    guidance_scale_2: float | None = None
    """Guidance scale of the second, low-noise expert of a teacher (Wan 2.2 A14B); null for the first's."""
    shift: PositiveFloat = 5.0
    """Time shift of the teacher's sampler, and of the times that some methods draw; > 0."""
    teacher_shift: PositiveFloat | None = None
    """Time shift of the teacher's sampler alone, > 0; null for ``shift``."""
    teacher_sampler: Sampler = "euler"
    """Sampler of the teacher's clips for comparison: ``euler``, or ``unipc``, which Wan's pipelines use."""
    student_sampler: StudentSampler = "renoise"
    """Sampler of the student, in rollouts, samples and export: ``renoise`` (fresh noise at each step, DMD2) or ``ode``
    (along its own velocity)."""

    @property
    def guidance(self) -> Guidance:
        """Guidance scale of the teacher; one per expert if they differ, and one per part."""
        if self.guidance_scale_2 is None or self.guidance_scale_2 == self.guidance_scale:
            return super().guidance
        return self._by_part((self.guidance_scale, self.guidance_scale_2))

    @property
    def guidance_scales(self) -> dict[str, float | None]:
        return super().guidance_scales | {"guidance_scale_2": self.guidance_scale_2}

    def check_roles(self, roles: Mapping[str, RolePlan]) -> None:
        super().check_roles(roles)
        scale, teacher = self.guidance_scale_2, roles.get("teacher")
        if scale is not None and teacher is not None and not teacher.boundaries:
            hint = "use guidance_scale, or a teacher.checkpoint of two experts"
            raise UserError(f"method.guidance_scale_2={scale} is for the second expert of a teacher; {hint}")

    def check_steps(self, counts: Sequence[int], asked: str) -> None:
        most = len(self.student_times())
        if max(counts) > most:
            raise UserError(f"{asked} must be at most {most}, as many as method.{self.times_setting} has")

    @property
    def sampling_shift(self) -> float:
        return self.shift if self.teacher_shift is None else self.teacher_shift

    def student_times(self) -> list[float]:
        """Return the rectified-flow times of the student's sampler at its full number of steps, descending, above 0."""
        raise NotImplementedError


def check_step_list(name: str, times: Sequence[float]) -> None:
    """Raise ``UserError`` unless the times ``method.NAME`` of a student's steps descend from 1 and stay above 0."""
    if not times or times[0] != 1.0 or times[-1] <= 0 or any(a <= b for a, b in pairwise(times)):
        raise UserError(f"method.{name}={list(times)} must descend from 1.0 and stay above 0")


@dataclass(kw_only=True)
class StepListSettings(FewStepSettings):
    """Settings of methods whose student is sampled at a list of times."""

    step_list: list[float] = field(default_factory=lambda: [1.0, 0.9375, 0.8333, 0.625])
    """Times of the student's steps, already shifted: descending from 1, above 0. One step per time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step_list("step_list", self.step_list)

    def student_times(self) -> list[float]:
        return list(self.step_list)


class FewStepMethod(Method):
    """Method whose student is sampled by denoising at :meth:`FewStepSettings.student_times`."""

    settings: FewStepSettings

    def sampling_times(self, steps: int) -> list[float]:
        """Return ``steps`` of the student's times, evenly spaced over the list and starting with the first."""
        times = self.settings.student_times()
        if not 1 <= steps <= len(times):
            raise UserError(f"the student has {len(times)} times; sample with 1 to {len(times)} steps, not {steps}")
        return [times[i * len(times) // steps] for i in range(steps)]

    @property
    def few_steps(self) -> dict[str, Any] | None:
        student, times = self.student, self.settings.student_times()
        return {
            "times": times,
            "stochastic": self.settings.student_sampler == "renoise",
            "boundaries": list(student.boundaries),
            "experts": [student.expert_at(time) for time in times] if student.boundaries else [],
            **({} if self.settings.audio_shift_ratio is None else {"shifts": dict(self.clock("student"))}),
        }

    def fake_last_step(self, t: torch.Tensor) -> torch.Tensor | None:
        if "last_step" not in self.additions(self.settings).get("fake", ()):
            return None
        return torch.full_like(t, self.settings.student_times()[-1])

    def own_step(self, batch: Batch, times: Sequence[float | Times], random: StepRandom) -> Line:
        """Return the last step to the student's sample ``x_G`` for the captions of ``batch``, with a gradient if
        gradients are enabled."""
        name, sampler, student = self.settings.name, self.settings.student_sampler, self.student
        noise = batch.noise(random, f"{name}/noise")
        with student.kept_gathered():
            return rollout(student, noise, batch.condition, times, random, f"{name}/renoise", sampler=sampler)

    def chunk_times(self, steps: int) -> Callable[[int], Sequence[float]]:
        """Return a function of a chunk's number that returns its times, for a causal student that takes ``steps``."""
        times = self.sampling_times(steps)
        return lambda chunk: times

    def stream(
        self, role: str, noise: Iterable[Sample], condition: Condition, steps: int, random: StepRandom
    ) -> Iterator[Sample]:
        network, settings = self.roles[role], self.settings
        if role != "student":
            how = settings.teacher_sampler, steps, settings.sampling_shift, settings.guidance
            return (chunk[-1] for chunk in guided_states(network, noise, condition, random, *how))
        sampler = settings.student_sampler
        if network.causal is not None:
            chunk_times = self.chunk_times(steps)
            return rollout_chunks(network, noise, condition, chunk_times, random, "sample", sampler=sampler)
        times = self.sampling_times(steps)

        @torch.no_grad()
        def sample(x: Sample) -> Sample:
            with network.kept_gathered():
                return self.whole_clip(x, condition, times, random)

        return map(sample, noise)

    def whole_clip(self, x: Sample, condition: Condition, times: list[float], random: StepRandom) -> Sample:
        """Sample the bidirectional student from noise ``x`` at ``times``, :meth:`sampling_times`."""
        student, sampler = self.student, self.settings.student_sampler
        return rollout(student, x, condition, times, random, "sample/renoise", sampler=sampler).x0
