"""DMD2: improved distribution matching distillation (Yin et al. 2024, arXiv:2405.14867), for rectified flows.

The loss pushes the student's samples along the difference of two scores: the frozen teacher's (with guidance) and that
of a *fake* network, which trains on the student's samples throughout. A multi-step student trains on inputs that its
own sampler makes (backward simulation, section 4.5). This needs only captions. With real clips, a GAN can be added; its
discriminator is a few small heads on the fake score's features (section 4.3).

Data-forcing distillation (arXiv:2606.18478, equations 8 to 10) is the same with the student's input made from a real
clip, and in some batches the teacher's score of this clip instead of the sample's.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.methods.base import Batch, Boundaries, Loss
from distill.methods.common.chunks import CausalRoles
from distill.methods.common.distribution_matching import (
    MatchingSettings,
    distribution_matching,
    fake_score_error,
    limited,
    score_time,
)
from distill.methods.common.expert_times import Times
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.phases import CLEAN, Phase
from distill.methods.common.schedules import add_noise, denoise, same_time
from fsdp_cp.choices import NonNegativeFloat, PositiveFloat, PositiveInt, Share
from fsdp_cp.errors import UserError
from fsdp_cp.progress import first_rank_log
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.sample import Sample, shift_time

log = first_rank_log(__name__)

_R1_SIGMA = 0.1
"""Standard deviation of the noise that the R1 penalty adds to the discriminator's real inputs."""


@dataclass(kw_only=True)
class Dmd2Settings(StepListSettings, MatchingSettings):
    """``method=dmd2``."""

    name: str = "dmd2"
    fake_updates_per_student_update: PositiveInt = 5
    """Fake-score updates after each student update; at least 1."""
    min_time: float = 0.02
    """Smallest time of the scores, in comparison and training; from 0 to below ``max_time``."""
    max_time: float = 0.98
    """Largest time of the scores, in comparison and training; at most 1."""
    time_limits: Literal["clamp", "draw"] = "clamp"
    """Use of ``min_time`` and ``max_time``: ``clamp`` times after the shift, or bound the ``draw`` before the shift."""
    rollout: Literal["random", "full"] = "random"
    """Number of student steps in a rollout, the last with a gradient: ``full``, or ``random`` (from 1 to all, equal for
    all samples of a step or of a part of its batch, ``expert_draws``)."""
    fake_rollout: Literal["as_student", "full"] = "as_student"
    """Rollouts that the fake score trains on: like the student's (``as_student``), or ``full``."""
    score_noise: Literal["fresh", "own"] = "fresh"
    """Noise of the student's scores: ``fresh``, or its ``own``, by the rollout's last step (docs/methods/pdmd.md)."""
    score_interval: Literal["all", "step"] = "all"
    """Times of the student's scores: ``all``, or uniform ones within the rollout's last ``step``, without shift."""
    max_error: PositiveFloat | None = None
    """Largest squared error, > 0, of each sample and part in both losses; larger ones have no gradient. PDMD: 5."""
    phased: bool = False
    """Train one of a student's two experts (``student.experts``) in its range of times: ``high``, then ``low`` (phased
    DMD; docs/methods/phased_dmd.md)."""
    student_input: Literal["rollout", "clips"] = "rollout"
    """Input of the student's last step in training: what its own steps make (``rollout``), or a real clip noised to the
    time of that step (``clips``), one of ``step_list``."""
    data_forcing: Share = 0.0
    """Probability that the teacher scores a batch's real clips in the place of the student's samples, at the same times
    and with the same noise; 0 to 1. One draw for a step."""
    fake_knows_last_step: bool = False
    """Condition the fake score on the time of the student's last step. Not in the paper, where one score covers all
    rollout lengths and their errors may cancel (docs/methods/dmd2.md)."""
    gan_weight_student: NonNegativeFloat = 0.0
    """Weight of the student's GAN loss; 0 for no GAN. Published: 1e-3 to 5e-3 (DMD2), 0.03 (FastGen)."""
    gan_weight_head: PositiveFloat = 1e-2
    """Weight of the discriminator's loss relative to the fake score's, > 0; it trains the heads and the fake score."""
    gan_r1_weight: NonNegativeFloat = 0.0
    """Weight of the approximate R1 penalty in the discriminator's loss (Lin et al. 2025, arXiv:2501.08316), or 0."""
    gan_blocks: list[int] | None = None
    """Indices of the fake score's blocks that the discriminator reads, ascending; null for three blocks, in the middle,
    at three quarters and at the end, as in FastGen."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_time < self.max_time <= 1:
            times = f"method.min_time={self.min_time} must be below method.max_time={self.max_time}"
            raise UserError(f"{times}, both in [0, 1]")
        whole = "full" in (self.rollout, self.fake_rollout)
        if self.fake_knows_last_step and (whole or len(self.step_list) == 1):
            hint = "leave it out, or use random rollouts for both roles and a method.step_list of several times"
            raise UserError(f"method.fake_knows_last_step=true: every rollout has the same last step; {hint}")
        if self.data_forcing and self.gan:
            data = f"method.data_forcing={self.data_forcing}, which has no discriminator"
            raise UserError(f"method.gan_weight_student={self.gan_weight_student} must be 0 with {data}")
        self._check_path()

    def _check_path(self) -> None:
        """Check that what acts on the student's own path has one."""
        on_a_path = self.student_sampler == "ode" and self.student_input == "rollout" and not self.data_forcing
        if self.own_query and not on_a_path:
            needs = "method.student_sampler=ode, method.student_input=rollout and method.data_forcing=0"
            raise UserError(f"method.{self.own_query} compares scores on the path of a rollout: it needs {needs}")
        if self.phased and (not on_a_path or self.own_query or self.gan or self.fake_knows_last_step):
            needs = "method.student_sampler=ode, rollouts, fresh noise, and neither GAN nor fake_knows_last_step"
            raise UserError(f"method.phased=true needs {needs}")

    @property
    def own_query(self) -> str | None:
        """Setting that compares scores where the student's last step passes, if any."""
        if self.score_noise == "own":
            return "score_noise=own"
        return "score_interval=step" if self.score_interval == "step" else None

    def border(self, boundary: float) -> float | None:
        """Return the time at which the high expert's steps end: the first of the low one's, below ``boundary``. A time
        that equals it is the high one's."""
        from models.roles.role import ROUNDING

        return next((time for time in self.step_list if time + ROUNDING < boundary), None)

    def score_range(self, border: float, *, high: bool) -> tuple[float, float]:
        """Return the least and the largest time of the scores in a phase."""
        return (border + self.min_time, self.max_time) if high else (self.min_time, min(border, self.max_time))

    @property
    def gan(self) -> bool:
        return self.gan_weight_student > 0

    @property
    def remedies(self) -> list[str]:
        faster = "raise method.fake_updates_per_student_update"
        if self.gan:
            last = ["lower method.gan_weight_student"]
        else:
            refused = self.data_forcing or self.phased or self.own_query
            last = [] if refused else ["train on with method.data_forcing"]
        return [faster, *super().remedies, *last]


def check_phase(settings: Dmd2Settings, boundaries: Boundaries, trained: str) -> None:
    """Refuse roles that do not fit phased DMD; see :meth:`distill.methods.base.Method.check_experts`."""
    if "student" not in boundaries or trained == "both":
        hint = "set student.experts=high, then low, and a student.checkpoint of two experts"
        raise UserError(f"method.phased=true trains one expert of a student with two; {hint}")
    border = settings.border(boundaries["student"][0])
    if border is None:
        steps = f"method.step_list={list(settings.step_list)}"
        raise UserError(f"{steps} has no time below the student's boundary {boundaries['student'][0]:g}; add one")
    least, largest = settings.score_range(border, high=trained == "high")
    if least >= largest or least == border:  # at the border itself the fake score's target is infinite
        times = f"method.min_time={settings.min_time} and method.max_time={settings.max_time}"
        raise UserError(f"{times} leave the {trained} phase, with the border {border:g}, no times of scores")
    if trained == "low" and boundaries.get("fake", (1.0,))[0] <= border:
        raise UserError(f"fake.checkpoint has a boundary up to the border {border:g} of the phases; use the student's")
    steps = [time for time in settings.step_list if (time > border) == (trained == "high")]
    log.info("phased DMD: the %s expert trains the steps %s; the border is %g", trained, steps, border)


class Dmd2(FewStepMethod):
    """DMD2. Student and fake score take turns: the student trains at ``step % (n + 1) == 0``."""

    required_roles = ("teacher", "student", "fake")
    trained_roles = ("student", "fake")
    settings: Dmd2Settings

    @classmethod
    def additions(cls, settings: Dmd2Settings) -> dict[str, Chosen]:
        chosen = {"gan_head": {"blocks": settings.gan_blocks}} if settings.gan else {}
        if settings.fake_knows_last_step:
            chosen["last_step"] = {}
        return {"fake": chosen} if chosen else {}

    @classmethod
    def check_parts(cls, settings: Dmd2Settings, parts: Collection[str]) -> None:
        if settings.gan:
            super().check_parts(settings, parts)

    @classmethod
    def experts(cls, config: Any, role: str) -> str:
        return config.student.experts if role == "fake" and config.method.phased else super().experts(config, role)

    @classmethod
    def needs_latents(cls, settings: Dmd2Settings) -> bool:
        return settings.gan or settings.student_input == "clips" or settings.data_forcing > 0

    @classmethod
    def check(cls, config: Any) -> None:
        fake = config.fake
        if config.method.gan and fake.fp8_gather and (fake.shard_ranks or config.mesh.dp_replicate > 1):
            # The losses use different parameters, and their gradients are summed over copies: zeros for the others.
            raise UserError("fake.fp8_gather=true cannot send the gradients of zeros of a GAN with copies; use false")

    @classmethod
    def check_files(cls, config: Any, causal: CausalRoles) -> None:
        from_teacher = config.student.checkpoint in (None, config.teacher.checkpoint)
        if config.method.data_forcing and from_teacher:
            hint = "give student.checkpoint=RUN/export/student of a run of method=dmd2"
            log.warning("method.data_forcing failed in the paper for a student that starts from the teacher; %s", hint)

    def trained_role(self, step: int) -> str:
        return "fake" if step % (self.settings.fake_updates_per_student_update + 1) else "student"

    def frozen_roles(self, step: int) -> tuple[str, ...]:
        return ("fake",) if self.settings.gan and self.trained_role(step) == "student" else ()

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        role = self.trained_role(step)
        kind = self.settings.rollout if role == "student" else self.settings.fake_rollout
        rollout = self._rollout_times(random, whole="full" in (kind, self.settings.rollout))
        if role == "student":
            yield from self._student_losses(batch, rollout, random)
            return
        last = self._last_step(batch, rollout)
        made: list[Sample] = []

        def sample() -> Sample:
            """Return the samples of one or two losses: the first makes them, the last takes them away."""
            if made:
                return made.pop()
            with torch.no_grad():
                clips = self._rollout(batch, rollout, random)
            made.extend([clips] * self.settings.gan)
            return clips

        if self.settings.gan:
            at_gan, weight = score_time(self, "dmd2/gan_time", batch, random, "fake"), self.settings.gan_weight_head
            yield Loss("gan", lambda: self._head_loss(batch, sample(), at_gan, last, random), weight, at_gan.at)
        # This loss is last because its backward reaches every block: FSDP ends the step with it.
        times = self._phase_times("dmd2/fake_time", batch, random, "fake")
        yield Loss("fake_score", lambda: self._fake_loss(batch, sample(), times, last, random), at=times.at)

    @classmethod
    def check_experts(cls, settings: Dmd2Settings, boundaries: Boundaries, trained: str) -> None:
        if boundaries and settings.own_query:
            hint = "use fresh and all, or checkpoints of one network"
            raise UserError(f"method.{settings.own_query} does not choose between two experts; {hint}")
        if settings.phased:
            check_phase(settings, boundaries, trained)
        for boundary in boundaries.get("student", ()):
            if settings.rollout == "full" and trained != "low":
                unseen = f"the student at its last time alone, never its expert for times from {boundary:g} on"
                raise UserError(f"method.rollout=full trains {unseen}; use random, or a student of one network")
            if trained != "high" and settings.step_list[-1] >= boundary:
                unseen = f"no time below {boundary:g}, so the student's second expert would never be trained"
                raise UserError(f"method.step_list={list(settings.step_list)} has {unseen}; add one")

    def _rollout_times(self, random: StepRandom, *, whole: bool) -> list[float]:
        """Return the rollout's times, the same on every rank and in all micro-batches of a part of the batch: up to a
        time of an expert that trains, the last of them for a ``whole`` rollout."""
        times, student = self.settings.student_times(), self.student
        lengths = range(1, len(times) + 1)
        if student.has_experts:
            lengths = [n for n in lengths if student.trains_at(times[n - 1])]
        chosen = len(lengths) if whole else random.shared_integer("dmd2/rollout_length", 1, len(lengths))
        return times[: lengths[chosen - 1]]

    def _rollout(self, batch: Batch, times: list[float], random: StepRandom) -> Sample:
        """Return the student's samples ``x_G``. Their last step has a gradient if gradients are enabled."""
        if self.settings.student_input == "rollout":
            step, end = self.own_step(batch, times, random), self.phase.end
            return step.at(end) if end else step.x0
        last = times[-1]
        t = same_time(last, batch.latents)
        x = add_noise(batch.latents, batch.noise(random, "dmd2/noise"), t)
        return denoise(x, self.student.velocity(x, t, batch.condition, at=last), t)

    def _last_step(self, batch: Batch, times: list[float]) -> Tensor | None:
        """Return the times ``(B,)`` of the samples' last steps, if the fake score is conditioned on them."""
        if not self.settings.fake_knows_last_step:
            return None
        return torch.full((len(batch.condition),), times[-1], dtype=batch.dtype, device=batch.condition.device)

    def _student_losses(self, batch: Batch, times: list[float], random: StepRandom) -> Iterator[Loss]:
        def loss() -> Tensor:
            if self.settings.score_noise == "fresh":
                return self._sample_loss(self._rollout(batch, times, random), batch, times, random)
            step = self.own_step(batch, times, random)
            return self._sample_loss(step.x0, batch, times, random, step.at(1.0).detach())

        yield Loss("dmd", loss, at=times[-1])

    def _sample_loss(
        self,
        sample: Sample,
        batch: Batch,
        rollout: list[float],
        random: StepRandom,
        noise: Sample | None = None,
    ) -> Tensor:
        """Return the DMD loss of ``sample``, ``x_G``, at the end of a ``rollout`` of these times, plus the weighted GAN
        loss. Scores are compared with ``noise``, by default fresh."""
        self.observations.add_latents("sample", sample)
        if batch.latents is not None:
            self.observations.add_latents("data", batch.latents)
        clips = batch.latents if self._forces_data(random) else None
        times, last = self._score_times(batch, rollout, random), self._last_step(batch, rollout)
        noise = batch.noise(random, "dmd2/score_noise") if noise is None else noise
        limit, phase = self.settings.max_error, self.phase
        with self._high_experts("teacher", "fake"):
            errors = distribution_matching(self, sample, times, noise, batch, last, clips, limit, phase)
        loss = self.total("dmd", errors)
        if not self.settings.gan:
            return loss
        t, at = score_time(self, "dmd2/gan_time", batch, random, "fake")
        x_t = add_noise(sample, batch.noise(random, "dmd2/gan_noise"), t)
        gan = F.softplus(-self.roles["fake"].logits(x_t, t, batch.condition, last, at=at)).mean(1)
        self.observations.add("dmd", loss.expand(len(gan)))
        self.observations.add("gan", gan)
        return loss + self.settings.gan_weight_student * gan.mean()

    @property
    def phase(self) -> Phase:
        """Phase in which scores are compared: one that ends at the border while the high expert trains. A plan, which
        simulates one expert as one network, has none."""
        student = self.student
        if not (self.settings.phased and student.has_experts and 0 in student.trained_experts):
            return CLEAN
        return Phase(self.settings.border(student.boundaries[0]))

    def _phase_times(self, purpose: str, batch: Batch, random: StepRandom, *roles: str) -> Times:
        """Draw times at which ``roles`` are evaluated; in the high phase, their high experts serve all of them."""
        if not self.phase.end:
            return score_time(self, purpose, batch, random, *roles)
        return Times(*self.draw_score_time(random, purpose, batch.dtype), at=1.0)

    @contextmanager
    def _high_experts(self, *roles: str) -> Iterator[None]:
        """In the high phase, let the high experts of ``roles`` serve times down to the border, below their boundary."""
        end = self.phase.end
        with ExitStack() as stack:
            for role in (self.roles[name] for name in roles) if end else ():
                stack.enter_context(role.reaching(max(0.0, max(role.boundaries, default=0.0) - end)))
            yield

    def _score_times(self, batch: Batch, rollout: list[float], random: StepRandom) -> Times:
        """Draw the times at which the student's scores are compared."""
        if self.settings.score_interval == "all":
            return self._phase_times("dmd2/time", batch, random, "teacher", "fake")
        start, end = rollout[-1], [*self.settings.step_list, 0.0][len(rollout)]
        return Times(end + (start - end) * random.uniform("dmd2/time", batch.dtype))

    def _forces_data(self, random: StepRandom) -> bool:
        """Return whether the teacher scores the real clips at this step, the same for the whole batch."""
        if not self.settings.data_forcing:
            return False
        coin = replace(random, part=0).shared.uniform("dmd2/data_forcing", torch.float64)
        forced = random.has_values and bool(coin < self.settings.data_forcing)
        self.observations.add("data_forced", torch.full((1,), float(forced), dtype=torch.float64, device=random.device))
        return forced

    def draw_score_time(self, random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
        """Draw uniform times and shift them, within [``min_time``, ``max_time``] by ``time_limits``; in a phase, only
        those within its range."""
        settings, t = self.settings, random.uniform(purpose, dtype)
        student = self.student
        if settings.phased and student.has_experts:
            border, high = settings.border(student.boundaries[0]), 0 in student.trained_experts
            low, top = (shift_time(t, 1 / settings.shift) for t in settings.score_range(border, high=high))
            return [shift_time(low + (top - low) * t, settings.shift)]
        if settings.time_limits == "draw":
            return [shift_time(settings.min_time + (settings.max_time - settings.min_time) * t, settings.shift)]
        return [shift_time(t, settings.shift).clamp(settings.min_time, settings.max_time)]

    def _head_loss(self, batch: Batch, sample: Sample, times: Times, last: Tensor | None, random: StepRandom) -> Tensor:
        """Return ``mean softplus(D(x_t^G)) + mean softplus(-D(x_t)) + w mean (D(x_t) - D(x_t + sigma e))^2``, over all
        logits. ``x_t`` are the clips, noised to the times of their captions' samples, with their ``last`` steps."""
        t, at = times
        inputs = [
            add_noise(x, batch.noise(random, purpose), t)
            for x, purpose in ((sample, "dmd2/gan_noise"), (batch.latents, "dmd2/gan_real_noise"))
        ]
        if self.settings.gan_r1_weight:
            disturbance = batch.noise(random, "dmd2/gan_r1_noise")
            inputs.append(inputs[1] + _R1_SIGMA * disturbance)
        n = len(inputs)
        logits = self.roles["fake"].logits(
            Sample.cat(inputs), t.repeat(n), batch.condition.repeat(n), None if last is None else last.repeat(n), at=at
        )
        student, real, *disturbed = logits.chunk(n)
        self.observations.add("logit_student", student.mean(1))
        self.observations.add("logit_real", real.mean(1))
        self.observations.add("gan_accuracy", torch.cat([student < 0, real > 0]).double().mean(1))
        loss = (F.softplus(student) + F.softplus(-real)).mean(1)
        if disturbed:
            r1 = (real - disturbed[0]).square().mean(1)
            self.observations.add("gan_r1", r1)
            loss = loss + self.settings.gan_r1_weight * r1
        return loss.mean()

    def _fake_loss(self, batch: Batch, sample: Sample, times: Times, last: Tensor | None, random: StepRandom) -> Tensor:
        """Return ``mean (v(x_t) - (e - x_G))^2``: flow matching on the student's samples, without guidance."""
        noise = batch.noise(random, "dmd2/fake_noise")
        fake, phase = self.roles["fake"], self.phase
        with self._high_experts("fake"):
            errors = fake_score_error(fake, sample, times, noise, batch.condition, last, phase)
        errors = self.total("loss", limited(errors, self.settings.max_error))
        self.observations.add_by_time("loss", errors, times.t)
        return errors.mean()


METHOD = (Dmd2, Dmd2Settings)
