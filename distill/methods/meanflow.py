"""MeanFlow (Geng et al. 2025, arXiv:2505.13447): a student that predicts the mean velocity over an interval.

``u(x_t, r, t) = (x_t - x_r) / (t - r)`` along a trajectory ``dx_t/dt = v``; so ``u = v - (t - r) du/dt`` (eq. 6 there),
which is what the student is trained towards. Its network gets the second time ``r`` by the addition ``second_time``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Loss, guided_velocity
from distill.methods.common.derivatives import Mode, check_exact, directional_derivative
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.observations import per_sample_mean, per_sample_norm
from distill.methods.common.sampling import StudentSampler
from distill.methods.common.schedules import add_noise, per_sample
from distill.methods.flow_matching import TimeDistribution, draw_time
from fsdp_cp.choices import check_range
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.additions.time_conditioning import NAME
from models.roles.condition import Condition


@dataclass(kw_only=True)
class MeanFlowSettings(StepListSettings):
    """``method=meanflow``."""

    name: str = "meanflow"
    velocity: Literal["teacher", "data"] = "teacher"
    """``v`` of the target: the ``teacher``'s, guided, or that of the ``data``, ``e - x0``, without any teacher."""
    time: TimeDistribution = "logit_normal"
    """Distribution of both times before the shift: ``uniform`` or ``logit_normal``."""
    logit_mean: float = -0.8
    """Mean of logit(t), for ``logit_normal``; FastGen's for Wan, as the deviation."""
    logit_std: float = 1.6
    """Standard deviation of logit(t), for ``logit_normal``; > 0."""
    time_shift: float = 1.0
    """Shift of both times; ``shift`` is that of the teacher's sampler alone. > 0."""
    interval_ratio: float = 1.0
    """Probability of a sample with r < t; the others train the velocity at r = t. 0 to 1; the paper's: .25."""
    tangent_warmup: int = 2000
    """Student updates over which the derivative in the target grows from 0 to its full size; 0 for none."""
    weight_power: float = 1.0
    """``p`` of a sample's weight ``1 / (rms + c)^p``, rms of its error; 0 for equal weights."""
    weight_floor: float = 10.0
    """``c`` of that weight; > 0. At FastGen's 10 the weights are nearly equal; a small one divides the error out."""
    step_list: list[float] = field(default_factory=lambda: [1.0, 0.75, 0.5, 0.25])
    """Where the student's intervals begin, descending from 1; the last one ends at 0."""
    student_sampler: StudentSampler = "ode"
    """Without effect: the student crosses its intervals, without noise."""
    jvp: Mode = "exact"
    """How du/dt is computed: ``exact`` by forward-mode AD, or ``finite_difference``."""
    jvp_step: float = 1e-4
    """Step of ``finite_difference`` in t, both ways; > 0. Below, the rounding of fp32 times (diffusers casts them)
    grows, above, the error of the fast time embedding: the default is the best on the quickstart's teacher, .2% off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "time_shift", "logit_std", "weight_floor", "jvp_step", above=0, where="method.")
        check_range(self, "tangent_warmup", "weight_power", least=0, where="method.")
        check_range(self, "interval_ratio", least=0, most=1, where="method.")


class MeanFlow(FewStepMethod):
    """``mean w (u(x_t, r, t) - sg(v - (t - r) du/dt))^2``; the student trains at every step.

    The student's intervals begin at the times of ``step_list``; the last one ends at 0.
    """

    required_roles = ("teacher", "student")
    trained_roles = ("student",)
    settings: MeanFlowSettings

    @classmethod
    def roles_needed(cls, settings: MeanFlowSettings) -> tuple[str, ...]:
        return ("student",) if settings.velocity == "data" else cls.required_roles

    @classmethod
    def additions(cls, settings: MeanFlowSettings) -> dict[str, Chosen]:
        return {"student": (NAME,)}

    @classmethod
    def check(cls, config: Any) -> None:
        check_exact(config)

    def trained_role(self, step: int) -> str:
        return "student"

    def first_role(self, step: int) -> str:
        return "student" if self.settings.velocity == "data" else "teacher"

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        yield Loss("meanflow", lambda: self._loss(step, batch, random), 1.0)

    def _loss(self, step: int, batch: Batch, random: StepRandom) -> Tensor:
        settings, student = self.settings, self.roles["student"]
        # Decided by the step alone: the derivative is a forward more.
        warmup = settings.tangent_warmup
        growth = min(1.0, step / warmup) if warmup else 1.0
        t, r = self._times(random, batch)
        noise = random.normal("meanflow/noise", batch.shape, batch.dtype)
        x = add_noise(batch.latents, noise, t)
        target = velocity = self._velocity(batch, noise, x, t)
        if growth and settings.interval_ratio:
            derivative = directional_derivative(
                lambda x, t: student.velocity(x, t, batch.condition, r),
                (x, t),
                (velocity, torch.ones_like(t)),
                mode=settings.jvp,
                step=settings.jvp_step,
            )
            target = velocity - growth * per_sample(t - r, x) * derivative
            self.observations.add("jvp_norm", per_sample_norm(derivative), where=r < t)
        prediction = student.velocity(x, t, batch.condition, r)
        errors = per_sample_mean((prediction - target).square())
        # The loss itself says little: with p = 1 every sample's is below 1 by construction.
        self.observations.add("error/instant", errors, where=r == t)
        self.observations.add("error/interval", errors, where=r < t)
        weights = (errors.detach().sqrt() + settings.weight_floor).pow(-settings.weight_power)
        return (weights * errors).mean()

    def _times(self, random: StepRandom, batch: Batch) -> tuple[Tensor, Tensor]:
        """``t`` and ``r <= t`` ``(B,)``: the greater and the lesser of two draws (section 4.3)."""
        one, other = (
            draw_time(self.settings, self.settings.time_shift, random, purpose, batch.dtype)
            for purpose in ("meanflow/time", "meanflow/second_time")
        )
        t, r = torch.maximum(one, other), torch.minimum(one, other)
        return t, torch.where(random.uniform("meanflow/interval") < self.settings.interval_ratio, r, t)

    @torch.no_grad()
    def _velocity(self, batch: Batch, noise: Tensor, x: Tensor, t: Tensor) -> Tensor:
        if self.settings.velocity == "data":
            return noise - batch.latents
        scale = self.settings.guidance_scale
        return guided_velocity(self.roles["teacher"], x, t, batch.condition, scale)

    @torch.no_grad()
    def generate(self, role: str, noise: Tensor, condition: Condition, steps: int, random: StepRandom) -> Tensor:
        """As for the other methods; the student steps ``x_r = x_t - (t - r) u(x_t, r, t)`` (algorithm 2)."""
        if role != "student":
            return super().generate(role, noise, condition, steps, random)
        x = noise
        for time, next_time in pairwise([*self.sampling_times(steps), 0.0]):
            t, r = (torch.full((len(x),), at, dtype=x.dtype, device=x.device) for at in (time, next_time))
            x = x - (time - next_time) * self.roles[role].velocity(x, t, condition, r)
        return x
