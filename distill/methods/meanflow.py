"""MeanFlow (Geng et al. 2025, arXiv:2505.13447): a student that predicts the mean velocity over an interval.

``u(x_t, r, t) = (x_t - x_r) / (t - r)`` along a trajectory ``dx_t/dt = v``. The student is trained towards
``u = v - (t - r) du/dt`` (eq. 6). Its network gets the second time ``r`` from the addition ``second_time``.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, guided_velocity
from distill.methods.common.derivatives import Mode, check_exact, directional_derivative
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.observations import per_sample_norm, squared_error
from distill.methods.common.sampling import StudentSampler
from distill.methods.common.schedules import add_noise, per_sample, same_time
from distill.methods.flow_matching import TimeDistribution, draw_time
from fsdp_cp.choices import NonNegativeFloat, NonNegativeInt, PositiveFloat, Share
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.additions.time_conditioning import NAME
from models.condition import Condition
from models.sample import Sample


@dataclass(kw_only=True)
class MeanFlowSettings(StepListSettings):
    """``method=meanflow``."""

    name: str = "meanflow"
    velocity: Literal["teacher", "data"] = "teacher"
    """Velocity of the target: the ``teacher``'s with guidance, or ``data``, ``e - x0``, which needs no teacher."""
    time: TimeDistribution = "logit_normal"
    """Distribution of both times before the shift: ``uniform`` or ``logit_normal``."""
    logit_mean: float = -0.8
    """Mean of logit(t), for ``logit_normal``; default: FastGen's for Wan."""
    logit_std: PositiveFloat = 1.6
    """Standard deviation of logit(t), for ``logit_normal``; > 0. Default: FastGen's for Wan."""
    time_shift: PositiveFloat = 1.0
    """Shift of both times, > 0; ``shift`` only affects the teacher's sampler."""
    interval_ratio: Share = 1.0
    """Probability that a sample has r < t, 0 to 1; other samples train the velocity at r = t. Paper: 0.25."""
    tangent_warmup: NonNegativeInt = 2000
    """Student updates over which the derivative in the target grows from 0 to full size; 0 for no warm-up."""
    weight_power: NonNegativeFloat = 1.0
    """Exponent ``p`` of a sample's weight ``1 / (rms + c)^p``, with the rms of its error; 0 for equal weights."""
    weight_floor: PositiveFloat = 10.0
    """Constant ``c`` of the weight ``1 / (rms + c)^p``, > 0. FastGen's 10 makes the weights nearly equal; a small one
    removes the error's size from the gradient."""
    step_list: list[float] = field(default_factory=lambda: [1.0, 0.75, 0.5, 0.25])
    """Starts of the student's intervals, descending from 1; the last interval ends at 0."""
    student_sampler: StudentSampler = "ode"
    """No effect for this method: the student crosses its intervals without noise."""
    jvp: Mode = "exact"
    """Computation of du/dt: ``exact`` (forward-mode AD) or ``finite_difference``."""
    jvp_step: PositiveFloat = 1e-4
    """Step of ``finite_difference`` to both sides, in t; > 0. The default has the least error on the quickstart's
    teacher, 0.2%: smaller steps lose precision in diffusers' fp32 times, larger ones miss the fast time embedding."""


class MeanFlow(FewStepMethod):
    """MeanFlow; the student trains at every step. The loss is ``mean w (u(x_t, r, t) - sg(v - (t - r) du/dt))^2``."""

    check = staticmethod(check_exact)
    settings: MeanFlowSettings

    @classmethod
    def roles_needed(cls, settings: MeanFlowSettings) -> tuple[str, ...]:
        return ("student",) if settings.velocity == "data" else cls.required_roles

    @classmethod
    def additions(cls, settings: MeanFlowSettings) -> dict[str, Chosen]:
        return {"student": (NAME,)}

    @property
    def few_steps(self) -> None:
        """``None``: diffusers has no network with a second time."""
        return

    def loss(self, step: int, batch: Batch, random: StepRandom) -> Tensor:
        settings, student = self.settings, self.student
        # Depends only on the step, the same on every rank: the derivative takes another forward.
        warmup = settings.tangent_warmup
        growth = min(1.0, step / warmup) if warmup else 1.0
        t, r = self._times(random, batch)
        noise = batch.noise(random, "meanflow/noise")
        x = add_noise(batch.latents, noise, t)
        if settings.velocity == "data":
            velocity = noise - batch.latents
        else:
            with torch.no_grad():
                velocity = guided_velocity(self.roles["teacher"], x, t, batch.condition, settings.guidance)
        target = velocity

        def mean(x: Sample, t: Tensor) -> Sample:
            return student.velocity(x, t, batch.condition, r)

        if growth and settings.interval_ratio:
            derivative = directional_derivative(mean, x, t, velocity, mode=settings.jvp, step=settings.jvp_step)
            target = velocity - growth * per_sample(t - r, x) * derivative
            self.observations.add("jvp_norm", per_sample_norm(derivative.video), where=r < t)
        prediction = mean(x, t)
        errors = squared_error(prediction, target).video
        # Log the unweighted errors: the weights hide the error's size in the loss.
        self.observations.add("error/instant", errors, where=r == t)
        self.observations.add("error/interval", errors, where=r < t)
        weights = (errors.detach().sqrt() + settings.weight_floor).pow(-settings.weight_power)
        return (weights * errors).mean()

    def _times(self, random: StepRandom, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return ``t`` and ``r <= t`` ``(B,)``: the greater and the lesser of two draws (section 4.3)."""
        one, other = (
            draw_time(self.settings, self.settings.time_shift, random, purpose, batch.dtype)
            for purpose in ("meanflow/time", "meanflow/second_time")
        )
        t, r = torch.maximum(one, other), torch.minimum(one, other)
        return t, torch.where(random.uniform("meanflow/interval") < self.settings.interval_ratio, r, t)

    def whole_clip(self, x: Sample, condition: Condition, times: list[float], random: StepRandom) -> Sample:
        """Sample the student in steps ``x_r = x_t - (t - r) u(x_t, r, t)`` (algorithm 2)."""
        for time, next_time in pairwise([*times, 0.0]):
            t, r = (same_time(at, x) for at in (time, next_time))
            x = x - (time - next_time) * self.student.velocity(x, t, condition, r)
        return x


METHOD = (MeanFlow, MeanFlowSettings)
