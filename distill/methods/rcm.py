"""rCM: score-regularised continuous-time consistency (Zheng et al. 2025, arXiv:2510.08431).

The forward divergence of sCM, on data, keeps the modes; the reverse divergence of DMD, on the student's own samples,
sharpens them. Where the paper's ``p_D`` draws a time, ``u`` uniform is shifted as a rectified-flow time:
``s u / (1 + (s - 1) u)``, the same state as TrigFlow's at ``atan`` of its noise-to-signal ratio.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Loss
from distill.methods.common.distribution_matching import distribution_matching, fake_score_error
from distill.methods.common.expert_times import Draw, Times, draw_times, expert_of_step
from distill.methods.common.observations import observe_by_time, observe_latents, per_sample_norm
from distill.methods.common.schedules import shift_time
from distill.methods.scm import Scm, ScmSettings
from fsdp_cp.choices import check_range
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen


@dataclass(kw_only=True)
class RcmSettings(ScmSettings):
    """``method=rcm``. ``shift`` is also that of ``p_D``: of the score's times and of a random rollout's."""

    name: str = "rcm"
    consistency_steps: int = 1000
    """Steps at first with the consistency loss alone; rCM: 1000 for Wan 1.3B, 0 for 14B."""
    student_every: int = 5
    """After those, the student trains at every so manyth step, the fake score at the others; rCM: 5, 10 for 14B."""
    consistency_weight: float | None = None
    """Weight of the consistency loss beside DMD's 1; null for the published ratio, 50 / sqrt(elements of a sample)."""
    rollout: Literal["random", "fixed"] = "random"
    """Times of the rollouts after the first: ``random`` (drawn from ``p_D``, none above the last) or ``fixed``
    (``mid_times``)."""
    fake_knows_last_step: bool = False
    """As of ``method=dmd2``. With ``rollout=random`` lengths whose last times are the same still share a score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "consistency_steps", least=0, where="method.")
        check_range(self, "consistency_weight", above=0, where="method.")
        if self.student_every < 2:
            raise UserError(
                f"method.student_every={self.student_every} leaves no step to the fake score; use 2 or more,"
                " or method=scm"
            )


class Rcm(Scm):
    """The student alone for ``consistency_steps``; then the student, with both losses, and the fake score in turn."""

    required_roles = ("teacher", "student", "fake")
    trained_roles = ("student", "fake")
    settings: RcmSettings

    @classmethod
    def additions(cls, settings: RcmSettings) -> dict[str, Chosen]:
        return {"fake": ("last_step",)} if settings.fake_knows_last_step else {}

    def trained_role(self, step: int) -> str:
        joint = step - self.settings.consistency_steps
        return "student" if joint < 0 or joint % self.settings.student_every == 0 else "fake"

    def first_role(self, step: int) -> str:
        return "student" if self.trained_role(step) == "fake" else "teacher"

    def student_updates(self, step: int) -> int:
        joint = max(0, step - self.settings.consistency_steps)
        return min(step, self.settings.consistency_steps) + math.ceil(joint / self.settings.student_every)

    def rollout_steps(self, step: int) -> int:
        """Steps of the rollout: 1 to as many as the student's sampler has, in turn with the role's own updates.

        By ``step`` some roles would never see some lengths.
        """
        turns, turn = divmod(step - self.settings.consistency_steps, self.settings.student_every)
        updates = turns if turn == 0 else turns * (self.settings.student_every - 1) + turn - 1
        return updates % len(self.settings.student_times()) + 1

    def representative_steps(self, role: str, steps: int) -> dict[int, float]:
        """One with the longest rollout, one with the shortest, one with none: cost is linear in a rollout's steps."""
        latest: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for step in range(steps):
            if self.trained_role(step) == role:
                length = self.rollout_steps(step) if step >= self.settings.consistency_steps else 0
                latest[length] = step
                counts[length] += 1
        total = counts.total()
        shares = {latest[0]: counts[0] / total} if 0 in counts else {}
        lengths = sorted(counts.keys() - {0})
        if not lengths:
            return shares
        shortest, longest = lengths[0], lengths[-1]
        of_rollouts = total - counts[0]
        mean = sum(length * counts[length] for length in lengths) / of_rollouts
        upper = (mean - shortest) / (longest - shortest) if longest > shortest else 1.0
        rollouts = {latest[longest]: upper * of_rollouts / total}
        if upper < 1:
            rollouts[latest[shortest]] = (1 - upper) * of_rollouts / total
        return rollouts | shares

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        if self.trained_role(step) == "fake":
            yield Loss("fake_score", lambda: self._fake_loss(step, batch, random), 1.0)
            return
        weight = self.settings.consistency_weight
        if weight is None:
            # Theirs is 100 to 1 between sums over elements, with a g of norm 1 and no 1/2 in DMD's.
            weight = 50 / math.prod(batch.shape) ** 0.5
        yield Loss("scm", lambda: self._consistency_loss(step, batch, random, weight), weight)
        if step >= self.settings.consistency_steps:
            yield Loss("dmd", lambda: self._dmd_loss(step, batch, random), 1.0)

    @classmethod
    def check_experts(cls, settings: ScmSettings, boundaries: Mapping[str, tuple[float, ...]], trained: str) -> None:
        if trained != "both":
            raise UserError(
                f"student.experts={trained}: method=rcm's rollouts end at times of both experts; use method=scm or"
                " dmd2, or student.experts=both"
            )

    def networks(self, step: int, random: StepRandom) -> Mapping[str, int]:
        student, fake = self.roles["student"], self.roles["fake"]
        if self.trained_role(step) == "fake":
            return {"fake_score": expert_of_step(self._draw_score_time, random, "rcm/fake_time", fake)}
        found = {"scm": self._consistency_expert(random)}
        if step >= self.settings.consistency_steps:
            found["dmd"] = expert_of_step(self._draw_rollout(step), random, "rcm/rollout_time", student)
        return found

    def _rollout_times(self, step: int, batch: Batch, random: StepRandom) -> list[Times]:
        """As many for every sample of the step, drawn for each of them."""
        steps, student = self.rollout_steps(step), self.roles["student"]
        return draw_times(self._draw_rollout(step), random, "rcm/rollout_time", batch.dtype, [(student,)] * steps)

    def _draw_rollout(self, step: int) -> Draw:
        """Of the rollout of ``step``: 1, and then as ``method.rollout`` says."""
        steps = self.rollout_steps(step)

        def draw(random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
            first = torch.ones(len(random.positions), dtype=dtype, device=random.device)
            if self.settings.rollout == "fixed":
                return [first, *(time * first for time in self.settings.student_times()[1:steps])]
            times = [first]
            for k in range(1, steps):
                drawn = shift_time(random.uniform(f"{purpose}_{k}", dtype), self.settings.shift)
                times.append(torch.minimum(drawn, times[-1]))
            return times

        return draw

    def _draw_score_time(self, random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
        return [shift_time(random.uniform(purpose, dtype), self.settings.shift)]

    def _last_step(self, times: list[Times]) -> Tensor | None:
        """What the fake score is told of samples that were made at ``times``: ``(B,)``."""
        return times[-1].t if self.settings.fake_knows_last_step else None

    def _dmd_loss(self, step: int, batch: Batch, random: StepRandom) -> Tensor:
        times = self._rollout_times(step, batch, random)
        sample = self.own_sample(batch, times, random)
        observe_latents(self.observations, "sample", sample)
        observe_latents(self.observations, "data", batch.latents)
        teacher, fake = self.roles["teacher"], self.roles["fake"]
        loss = distribution_matching(
            sample,
            draw_times(self._draw_score_time, random, "rcm/score_time", batch.dtype, [(teacher, fake)])[0],
            random.normal("rcm/score_noise", batch.shape, batch.dtype),
            batch=batch,
            teacher=teacher,
            fake=fake,
            scale=self.settings.guidance,
            last_step=self._last_step(times),
            observations=self.observations,
        )
        # On F, as the consistency loss's: x_G = cos(t) x_t - sin(t) F at the last time.
        (gradient,) = torch.autograd.grad(loss, sample, retain_graph=True)
        last = times[-1].t
        sin = last / torch.hypot(last, 1 - last)
        self.observations.add("output_gradient/dmd", sin * sample.numel() * per_sample_norm(gradient))
        return loss

    def _fake_loss(self, step: int, batch: Batch, random: StepRandom) -> Tensor:
        """Squared error of x0 over ``sin^2 t``, which is that of F, on the student's samples, without guidance."""
        with torch.no_grad():
            times = self._rollout_times(step, batch, random)
            sample = self.own_sample(batch, times, random)
        fake = self.roles["fake"]
        drawn = draw_times(self._draw_score_time, random, "rcm/fake_time", batch.dtype, [(fake,)])[0]
        noise = random.normal("rcm/fake_noise", batch.shape, batch.dtype)
        errors = fake_score_error(fake, sample, drawn, noise, batch.condition, self._last_step(times))
        t = drawn.t
        # F is linear in v, with the factor 1 / (cos + sin), whose square is t^2 + (1 - t)^2 at the flow time t.
        errors = (t.square() + (1 - t).square()) * errors
        observe_by_time(self.observations, "loss", errors, t)
        return errors.mean()
