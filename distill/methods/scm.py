"""sCM: continuous-time consistency distillation (Lu & Song 2024, arXiv:2410.11081), as rCM uses it (arXiv:2510.08431).

The student's field ``F`` gives ``f(x_t, t) = cos(t) x_t - sin(t) F(x_t, t)``, which training makes constant along the
teacher's trajectories. The derivative of ``f`` along a trajectory, the *tangent*, needs ``dF/dt`` along it: one
forward-mode pass. Causal roles see the clean clip as their history, which no derivative moves, and each chunk has its
own time and tangent norm.

TrigFlow (section 3) is on a rectified-flow network, without retraining it: ``x_t = cos(t) x0 + sin(t) e`` with ``t`` in
[0, pi/2]; dividing by ``k = cos t + sin t`` gives the rectified-flow state at time ``sin(t) / k``. x, e, v, F are
samples, whose parts all have the time t: ``(B,)``, or ``(B, T)`` for a time per latent frame, fp32 or better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Guidance, Loss, guided_velocity
from distill.methods.common.chunks import chunk_draws, clean_history, split_chunks
from distill.methods.common.derivatives import Mode, check_exact, directional_derivative
from distill.methods.common.expert_times import Times, draw_times
from distill.methods.common.few_step import FewStepMethod, FewStepSettings
from distill.methods.common.observations import per_sample_norm, squared_error
from distill.methods.common.schedules import per_sample, widen
from fsdp_cp.choices import NonNegativeInt, PositiveFloat
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.condition import Condition
from models.sample import Sample

if TYPE_CHECKING:
    from models.roles.role import Role

Tangent = Literal["lu_song", "rcm"]


@dataclass(kw_only=True)
class ScmSettings(FewStepSettings):
    """``method=scm``."""

    name: str = "scm"
    times_setting = "mid_times"
    time_mean: float = 0.7
    """Mean of ``log tan t``; rCM: 0.7 for Wan 1.3B, 1.5 for 14B."""
    time_std: PositiveFloat = 1.6
    """Standard deviation of ``log tan t``; > 0."""
    tangent_warmup: NonNegativeInt = 1000
    """Student updates over which the unstable part of the tangent grows from 0 to full size; 0 for no warm-up."""
    tangent: Tangent = "lu_song"
    """Form of the tangent: ``lu_song`` as published, or ``rcm``, rCM's later revision without warm-up of dF/dt."""
    jvp: Mode = "exact"
    """Computation of dF/dt: ``exact`` (forward-mode AD) or ``finite_difference``."""
    jvp_step: PositiveFloat = 2e-4
    """Step of ``finite_difference`` to both sides, in TrigFlow time; > 0. The default has the least error, about 0.1%:
    smaller steps lose precision in diffusers' fp32 times, larger ones miss the fast time embedding."""
    sigma_max: PositiveFloat | None = 80.0
    """Noise level, > 0: the student's sampler starts at ``atan(sigma_max)``; null for pure noise, pi/2. rCM: 80 for Wan
    1.3B, 200 for 14B. rCM's rollouts always start at pure noise (docs/methods/rcm.md)."""
    mid_times: list[float] = field(default_factory=lambda: [1.5, 1.4, 1.0])
    """TrigFlow times of the sampler's further steps, descending. Fewer steps use the first ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        times = self._trig_times()
        if times[-1] <= 0 or any(a <= b for a, b in zip(times, times[1:], strict=False)):
            below = f"below {times[0]:.4f}, where samples begin (method.sigma_max)"
            raise UserError(f"method.mid_times={list(self.mid_times)} must descend from {below}, and stay above 0")

    def _trig_times(self) -> list[float]:
        return [math.pi / 2 if self.sigma_max is None else math.atan(self.sigma_max), *self.mid_times]

    def student_times(self) -> list[float]:
        return [flow_time_of(t) for t in self._trig_times()]


class Scm(FewStepMethod):
    """Continuous-time consistency distillation; the student trains at every step."""

    same_history = knows_experts = True
    check = staticmethod(check_exact)
    settings: ScmSettings

    def student_updates(self, step: int) -> int:
        return step

    def sampling_times(self, steps: int) -> list[float]:
        """Return the first ``steps`` of the student's times, as in rCM's sampler."""
        super().sampling_times(steps)  # refuses more steps than times
        return self.settings.student_times()[:steps]

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        yield self._consistency(step, batch, random, 1.0)

    def _consistency(self, step: int, batch: Batch, random: StepRandom, weight: float) -> Loss:
        times = self._times(batch, random)
        return Loss("scm", lambda: self._consistency_loss(step, batch, times, random, weight), weight, times.at)

    def _draw_time(self, random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
        """Draw TrigFlow times; return them and their rectified-flow times, at which networks are evaluated."""
        z = random.normal(purpose, (), dtype)
        t = torch.atan(torch.exp(self.settings.time_mean + self.settings.time_std * z))
        return [t, flow_time(t)]

    def _consistency_loss(self, step: int, batch: Batch, times: Times, random: StepRandom, weight: float) -> Tensor:
        """Return ``mean (F - sg(F) - g)^2`` at TrigFlow times; only the logged norm uses ``weight``, this loss's."""
        settings, student, (t, at) = self.settings, self.student, times
        noise = batch.noise(random, "scm/noise", student)
        x, clean = add_trig_noise(batch.latents, noise, t), clean_history(student, batch.latents, random, "scm/context")
        with torch.no_grad():
            teacher = trig_field(self.roles["teacher"], x, t, batch.condition, settings.guidance, at, clean=clean)

        def field(x: Sample, t: Tensor) -> Sample:
            return trig_field(student, x, t, batch.condition, at=at, clean=clean)

        # Multiply by cos t sin t after the derivative: as part of its direction, a small factor would make a finite
        # difference's step too small. Both sides of the difference use one expert, also beyond its boundary; a step in
        # flow time is at most as long as in TrigFlow time.
        over = student.has_experts and settings.jvp == "finite_difference"
        with student.reaching(settings.jvp_step) if over else nullcontext():
            derivative = directional_derivative(field, x, t, teacher, mode=settings.jvp, step=settings.jvp_step)
        derivative = per_sample(torch.cos(t) * torch.sin(t), x) * derivative
        prediction = field(x, t)
        warmup = settings.tangent_warmup
        r = min(1.0, self.student_updates(step) / warmup) if warmup else 1.0
        raw = consistency_tangent(prediction.detach(), teacher, derivative, x, t, r, form=settings.tangent)
        g = Sample.cat([chunk.map(normalise_tangent) for chunk in split_chunks(student, raw)], dim=2)
        errors = squared_error(prediction - prediction.detach(), g, t).video
        self.observations.add("tangent_norm", per_sample_norm(raw.video))
        self.observations.add("jvp_norm", per_sample_norm(derivative.video))
        self.observations.add("output_gradient/scm", 2 * weight * per_sample_norm(g.video))
        self.observations.add_by_time("loss", errors, flow_time(t))
        self.observations.add_latents("prediction", trig_denoise(x, prediction, t))
        self.observations.add_latents("data", batch.latents)
        return errors.mean()

    def _times(self, batch: Batch, random: StepRandom) -> Times:
        """Draw TrigFlow times: ``(B,)`` with the flow time that selects the expert, or ``(B, T)`` by chunks."""
        student, teacher = self.student, self.roles["teacher"]
        if student.causal is None:
            evaluated = [(), (student, teacher)]
            (t, _), (_, at) = draw_times(self._draw_time, random, "scm/time", batch.dtype, evaluated, student)
            return Times(t, at)
        return Times(
            chunk_draws(student, batch.frames, lambda name: self._draw_time(random, name, batch.dtype)[0], "scm/time")
        )


def consistency_tangent(
    prediction: Sample, teacher: Sample, derivative: Sample, x: Sample, t: Tensor, r: float, *, form: str
) -> Sample:
    """Return ``g = cos t df/dt`` along the teacher's trajectory (Lu & Song 2024, eq. 6), not yet normalized, from the
    student's ``F``, the teacher's, and ``derivative``, ``cos t sin t dF/dt``. ``r`` is the warm-up factor (section
    4.2); at 1 both forms are equal."""
    cos, sin = torch.cos(t), torch.sin(t)
    if form == "rcm":
        scale = cos * torch.sqrt(1 - (r * sin).square())
        return per_sample(-scale, x) * (prediction - teacher) - (per_sample(r * cos * sin, x) * x + derivative)
    return per_sample(-cos.square(), x) * (prediction - teacher) - r * (per_sample(cos * sin, x) * x + derivative)


def normalise_tangent(g: Tensor) -> Tensor:
    """Return ``sqrt(N) g / (||g|| + 0.1)``, with the norm over each sample's (or chunk's) N elements (Lu & Song 2024,
    section 4.2). Without the root, the gradient of the mean would shrink with the resolution, below Adam's epsilon."""
    norm = g.flatten(1).norm(dim=1)
    return g * widen(g[0].numel() ** 0.5 / (norm + 0.1), g)


def add_trig_noise(x0: Sample, noise: Sample, t: Tensor) -> Sample:
    """Return ``x_t = cos(t) x0 + sin(t) e``."""
    return per_sample(torch.cos(t), x0) * x0 + per_sample(torch.sin(t), x0) * noise


def flow_time(t: Tensor) -> Tensor:
    """Return the rectified-flow time ``sin t / (cos t + sin t)`` of the TrigFlow time ``t``."""
    return torch.sin(t) / (torch.cos(t) + torch.sin(t))


def flow_time_of(t: float) -> float:
    """Return :func:`flow_time` of a Python number."""
    return math.sin(t) / (math.cos(t) + math.sin(t))


def trig_field(
    role: Role,
    x: Sample,
    t: Tensor,
    condition: Condition,
    guidance: Guidance = 1.0,
    at: float | None = None,
    *,
    clean: Sample | None = None,
) -> Sample:
    """Return TrigFlow's field ``F = ((cos t - sin t) x_t + v) / k``, ``dx_t/dt`` along the network's trajectory,
    without 0/0 at ``t -> 0``. ``at`` and ``clean`` are a rectified-flow time and state
    (:meth:`models.roles.role.Role.velocity`)."""
    k = per_sample(torch.cos(t) + torch.sin(t), x)
    v = guided_velocity(role, x / k, flow_time(t), condition, guidance, at, clean=clean)
    return (per_sample(torch.cos(t) - torch.sin(t), x) * x + v) / k


def trig_denoise(x: Sample, field: Sample, t: Tensor) -> Sample:
    """Return ``x0 = cos(t) x_t - sin(t) F``."""
    return per_sample(torch.cos(t), x) * x - per_sample(torch.sin(t), x) * field


METHOD = (Scm, ScmSettings)
