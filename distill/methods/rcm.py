"""rCM: score-regularized continuous-time consistency (Zheng et al. 2025, arXiv:2510.08431).

sCM's forward divergence, on data, keeps the modes. DMD's reverse divergence, on the student's own samples, sharpens
them. The paper's ``p_D`` is a shifted uniform ``u`` in rectified-flow time here, ``s u / (1 + (s - 1) u)``: the same
state as TrigFlow's at ``atan`` of its noise-to-signal ratio.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Boundaries, Loss
from distill.methods.common.distribution_matching import (
    MatchingSettings,
    distribution_matching,
    fake_score_error,
    score_time,
)
from distill.methods.common.expert_times import Times, draw_times
from distill.methods.common.observations import per_sample_norm
from distill.methods.scm import Scm, ScmSettings
from fsdp_cp.choices import NonNegativeInt, PositiveFloat
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.sample import VIDEO, shift_time


@dataclass(kw_only=True)
class RcmSettings(ScmSettings, MatchingSettings):
    """``method=rcm``. ``shift`` also shifts ``p_D``: the times of the scores and of random rollouts."""

    name: str = "rcm"
    consistency_steps: NonNegativeInt = 1000
    """Number of initial steps with only the consistency loss; at least 0. rCM: 1000 for Wan 1.3B, 0 for 14B."""
    student_every: int = 5
    """Period in steps after ``consistency_steps``: the student trains once, then the fake score; at least 2. rCM: 5 for
    Wan 1.3B, 10 for 14B."""
    consistency_weight: PositiveFloat | None = None
    """Weight of the consistency loss relative to DMD's, > 0; null for the published ratio,
    50 / sqrt(elements of a sample)."""
    rollout: Literal["random", "fixed"] = "random"
    """Times of a rollout after the first: ``random`` (falling draws from ``p_D``) or ``fixed`` (``mid_times``)."""
    fake_knows_last_step: bool = False
    """Condition the fake score on the time of the student's last step, as in ``method=dmd2``. With ``rollout=random``,
    rollouts of different lengths but equal last times still share a score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.student_every < 2:
            every = f"method.student_every={self.student_every}"
            raise UserError(f"{every} leaves no step to the fake score; use 2 or more, or method=scm")

    @property
    def remedies(self) -> list[str]:
        return ["raise method.student_every", *super().remedies]


class Rcm(Scm):
    """Consistency for ``consistency_steps``; then the student, with both losses, and the fake score take turns."""

    required_roles = ("teacher", "student", "fake")
    trained_roles = ("student", "fake")
    same_history = False
    settings: RcmSettings

    @classmethod
    def additions(cls, settings: RcmSettings) -> dict[str, Chosen]:
        return {"fake": ("last_step",)} if settings.fake_knows_last_step else {}

    def trained_role(self, step: int) -> str:
        joint = step - self.settings.consistency_steps
        return "student" if joint < 0 or joint % self.settings.student_every == 0 else "fake"

    def student_updates(self, step: int) -> int:
        joint = max(0, step - self.settings.consistency_steps)
        return min(step, self.settings.consistency_steps) + math.ceil(joint / self.settings.student_every)

    def rollout_steps(self, step: int) -> int:
        """Return the length of the rollout, which cycles with the updates of the role that trains: if it cycled with
        ``step``, some roles would never see some lengths."""
        turns, turn = divmod(step - self.settings.consistency_steps, self.settings.student_every)
        updates = turns if turn == 0 else turns * (self.settings.student_every - 1) + turn - 1
        return updates % len(self.settings.student_times()) + 1

    def representative_steps(self, role: str, steps: int) -> dict[int, float]:
        """Return steps with the longest, the shortest and no rollout: the cost is linear in a rollout's length."""
        first, own = self.settings.consistency_steps, [n for n in range(steps) if self.trained_role(n) == role]
        lengths = {step: self.rollout_steps(step) if step >= first else 0 for step in own}
        latest = {length: step for step, length in lengths.items()}
        rollouts = [length for length in lengths.values() if length]
        counts: dict[int, float] = {0: len(own) - len(rollouts)}
        if rollouts:
            shortest, longest = min(rollouts), max(rollouts)
            upper = sum(length - shortest for length in rollouts) / max(1, longest - shortest)
            counts |= {longest: upper, shortest: len(rollouts) - upper}
        return {latest[length]: count / len(own) for length, count in sorted(counts.items(), reverse=True) if count}

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        if self.trained_role(step) == "fake":
            rollout = self._rollout_times(step, batch, random)
            times = score_time(self, "rcm/fake_time", batch, random, "fake")
            yield Loss("fake_score", lambda: self._fake_loss(batch, rollout, times, random), at=times.at)
            return
        weight = self.settings.consistency_weight
        if weight is None:
            # rCM's ratio is 100 to 1 between sums over elements, with a g of norm 1 and no 1/2 in DMD's loss.
            weight = 50 / math.prod(batch.shapes[VIDEO]) ** 0.5
        yield self._consistency(step, batch, random, weight)
        if step >= self.settings.consistency_steps:
            rollout = self._rollout_times(step, batch, random)
            yield Loss("dmd", lambda: self._dmd_loss(batch, rollout, random), at=rollout[-1].at)

    @classmethod
    def check_experts(cls, settings: ScmSettings, boundaries: Boundaries, trained: str) -> None:
        if trained != "both":
            both = "method=rcm's rollouts end at times of both experts"
            raise UserError(f"student.experts={trained}: {both}; use method=scm or dmd2, or student.experts=both")

    def _rollout_times(self, step: int, batch: Batch, random: StepRandom) -> list[Times]:
        """Draw the rollout's times. All samples of a step get the same number of times, drawn per sample."""
        steps, student = self.rollout_steps(step), self.student
        draw = partial(self._draw_rollout, steps)
        return draw_times(draw, random, "rcm/rollout_time", batch.dtype, [(student,)] * steps)

    def _draw_rollout(self, steps: int, random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
        times = [torch.ones(len(random.positions), dtype=dtype, device=random.device)]
        if self.settings.rollout == "fixed":
            return [*times, *(time * times[0] for time in self.settings.student_times()[1:steps])]
        for k in range(1, steps):
            drawn = shift_time(random.uniform(f"{purpose}_{k}", dtype), self.settings.shift)
            times.append(torch.minimum(drawn, times[-1]))
        return times

    def draw_score_time(self, random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
        return [shift_time(random.uniform(purpose, dtype), self.settings.shift)]

    def _last_step(self, times: list[Times]) -> Tensor | None:
        return times[-1].t if self.settings.fake_knows_last_step else None

    def _dmd_loss(self, batch: Batch, times: list[Times], random: StepRandom) -> Tensor:
        sample = self.own_step(batch, times, random).x0
        self.observations.add_latents("sample", sample)
        self.observations.add_latents("data", batch.latents)
        at = score_time(self, "rcm/score_time", batch, random, "teacher", "fake")
        noise = batch.noise(random, "rcm/score_noise")
        loss = self.total("dmd", distribution_matching(self, sample, at, noise, batch, self._last_step(times)))
        # Observe the gradient on F, like the consistency loss's: x_G = cos(t) x_t - sin(t) F at the last time.
        (gradient,) = torch.autograd.grad(loss, sample.video, retain_graph=True)
        last = times[-1].t
        sin = last / torch.hypot(last, 1 - last)
        self.observations.add("output_gradient/dmd", sin * gradient.numel() * per_sample_norm(gradient))
        return loss

    def _fake_loss(self, batch: Batch, rollout: list[Times], times: Times, random: StepRandom) -> Tensor:
        """Return the squared error of F (that of x0 over ``sin^2 t``) on the student's samples, without guidance."""
        with torch.no_grad():
            sample = self.own_step(batch, rollout, random).x0
        noise, last = batch.noise(random, "rcm/fake_noise"), self._last_step(rollout)
        errors, t = fake_score_error(self.roles["fake"], sample, times, noise, batch.condition, last).video, times.t
        # F is linear in v with the factor 1 / (cos + sin); its square is t^2 + (1 - t)^2 at the flow time t.
        errors = (t.square() + (1 - t).square()) * errors
        self.observations.add_by_time("loss", errors, t)
        return errors.mean()


METHOD = (Rcm, RcmSettings)
