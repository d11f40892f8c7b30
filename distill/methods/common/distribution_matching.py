"""Distribution matching (Yin et al. 2024): DMD's loss, and the fake score's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distill.methods.base import Batch, Method, guided_velocity
from distill.methods.common.expert_times import Times, draw_times
from distill.methods.common.few_step import FewStepSettings
from distill.methods.common.observations import per_sample_mean, per_sample_norm, squared_error
from distill.methods.common.phases import CLEAN, Phase
from distill.methods.common.schedules import per_sample
from fsdp_cp.rng import StepRandom
from models.condition import Condition
from models.sample import Sample

if TYPE_CHECKING:
    from models.roles.role import Role


@dataclass(kw_only=True)
class MatchingSettings(FewStepSettings):
    """Settings of every method that matches distributions."""

    projection: bool = False
    """Take the part along ``x_G - x_fake``, which holds most of the fake score's error, out of the student's updates
    (PDMD, arXiv:2609.35768; docs/methods/pdmd.md)."""

    @property
    def remedies(self) -> list[str]:
        return [*super().remedies, *([] if self.projection else ["set method.projection=true"])]


def score_time(method: Method, purpose: str, batch: Batch, random: StepRandom, *roles: str) -> Times:
    """Draw times at which ``roles`` are evaluated, by the method's ``draw_score_time``."""
    scored = [method.roles[name] for name in roles]
    return draw_times(method.draw_score_time, random, purpose, batch.dtype, [scored])[0]


def distribution_matching(
    method: Method,
    sample: Sample,
    times: Times,
    noise: Sample,
    batch: Batch,
    last_step: Tensor | None = None,
    real_sample: Sample | None = None,
    max_error: float | None = None,
    phase: Phase = CLEAN,
) -> Sample:
    """Return ``1/2 mean (x_G - sg(x_G - g))^2`` of each part of ``sample``, ``x_G`` (Yin et al. 2024b, eq. 7 and 8),
    with at most ``max_error`` for the square of each sample and part.

    ``g = (x_fake - x_real) / q`` compares two estimates at ``times``, with ``noise``. ``x_real`` is the teacher's, with
    guidance, of ``real_sample`` where that is given (data forcing). ``x_fake`` is the fake score's, without guidance,
    conditioned on ``last_step`` ``(B,)`` where that is given. With ``projection``, ``g`` has no part along ``x_G -
    x_fake``. In a ``phase`` that ends before 0, ``x_G``, ``x_fake`` and ``x_real`` are samples at its end. Observes
    ``dmd_gradient`` (root mean square of ``g``) and ``dmd_normaliser`` (``q``).
    """
    (t, at), teacher, fake, observations = times, method.roles["teacher"], method.roles["fake"], method.observations
    with torch.no_grad():
        x_t = phase.add_noise(sample, noise, t)
        scored = x_t if real_sample is None else phase.add_noise(real_sample, noise, t)
        guidance = method.settings.guidance
        # Without a name for the velocity: it would stay in memory during the fake score's forward.
        real = phase.estimate(scored, guided_velocity(teacher, scored, t, batch.condition, guidance, at), t)
        estimate = phase.estimate(x_t, fake.velocity(x_t, t, batch.condition, last_step, at=at), t)
        # Normalize per sample: a mean over the batch would make a gradient depend on the other samples of its rank. Use
        # the student's sample where the teacher scores clips too: the clip's own distance from its estimate vanishes at
        # low noise, while the numerator does not.
        q = (sample - real).map(lambda part: per_sample_mean(part.abs()).clamp_min(1e-5))
        difference = estimate - real
        if method.settings.projection:
            difference, share = project_out(difference, sample - estimate)
            observations.add("dmd_projected", share)
        g = difference / per_sample(q, sample)
        observations.add("dmd_gradient", g.map(per_sample_norm))
        observations.add("dmd_normaliser", q)
        target = sample - g
    if max_error is None:
        return (sample - target).map(lambda part: 0.5 * part.square().mean())
    return limited(squared_error(sample, target), max_error).map(lambda part: 0.5 * part.mean())


def limited(errors: Sample, most: float | None) -> Sample:
    """Clamp the errors of each sample and part, ``(B,)``, to at most ``most``. Larger ones have no gradient, unless
    they are not finite."""
    return errors if most is None else errors.map(lambda part: part.clamp_max(most))


def project_out(d: Sample, r: Sample) -> tuple[Sample, Sample]:
    """Return ``d`` without its part along ``r``, ``d - <d, r> / (<r, r> + 1e-8) r`` for each sample and part, and the
    share of ``|d|^2`` that this takes, ``(B,)``."""
    inner, squared = d.map(_inner, r), d.map(_inner, d)
    along = inner / (r.map(_inner, r) + 1e-8)
    return d - per_sample(along, d) * r, inner * along / squared.map(lambda part: part.clamp_min(1e-30))


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).flatten(1).sum(1)


def fake_score_error(
    fake: Role,
    sample: Sample,
    times: Times,
    noise: Sample,
    condition: Condition,
    last_step: Tensor | None = None,
    phase: Phase = CLEAN,
) -> Sample:
    """Return the flow matching error ``mean (v(x_t) - (e - x_G))^2`` of ``sample``, ``x_G``, and ``noise``, ``e``, for
    each sample and part ``(B,)``, without guidance. A ``phase`` that ends before 0 has its own target and weight."""
    t, at = times
    v = fake.velocity(phase.add_noise(sample, noise, t), t, condition, last_step, at=at)
    errors = squared_error(v, phase.velocity(sample, noise, t))
    return errors * phase.weight(sample, t) if phase.end else errors
