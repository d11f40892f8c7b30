"""Flow matching (Lipman et al. 2022, eq. 23; Esser et al. 2024): train or fine-tune a teacher on data.

A causal student draws one time per chunk. Its history is clean (teacher forcing), or noisy at the earlier chunks' times
(diffusion forcing, Chen et al. 2024, arXiv:2407.01392). The parallel pass trains what sampling by chunks computes.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Loss, Method, PartSettings, is_guided
from distill.methods.common.chunks import chunk_draws, clean_history
from distill.methods.common.expert_times import Times, draw_times
from distill.methods.common.observations import observe_by_time, observe_latents, squared_error
from distill.methods.common.sampling import Sampler, guided_states
from distill.methods.common.schedules import add_noise
from fsdp_cp.choices import PositiveFloat, Share
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.causal import CausalSettings
from models.condition import Condition
from models.sample import Sample, shift_time

TimeDistribution = Literal["uniform", "logit_normal"]


@dataclass(kw_only=True)
class FlowMatchingSettings(PartSettings):
    """``method=flow_matching``."""

    name: str = "flow_matching"
    time: TimeDistribution = "logit_normal"
    """Distribution of t before the shift: ``logit_normal`` or ``uniform``. ``uniform`` with Wan's ``shift`` trains at
    the times at which Wan is sampled."""
    logit_mean: float = 0.0
    """Mean of logit(t), for ``logit_normal``."""
    logit_std: PositiveFloat = 1.0
    """Standard deviation of logit(t), for ``logit_normal``; > 0."""
    shift: PositiveFloat = 1.0
    """Time shift of training and sampling, > 0; above 1 for more noise. Wan: 3 at 480p, 5 at 720p."""
    weight: Literal["none", "gaussian"] = "none"
    """Weight of the loss at a time t: ``none``, or ``gaussian``, ``exp(-2 (t - 1/2)^2)`` less its value at 1, scaled to
    a mean of 1 over uniform times with this ``shift`` (Self-Forcing, Causal-Forcing, DiffSynth)."""
    caption_dropout: Share = 0.1
    """Probability that a sample trains on the empty caption, which guidance needs; 0 to 1."""
    sampler: Sampler = "euler"
    """Sampler: ``euler``, or ``unipc``, which Wan's pipelines use."""
    history: Literal["clean", "noisy"] = "noisy"
    """Earlier chunks that a causal student sees in training: ``clean`` (teacher forcing, as in sampling), or ``noisy``
    at their own times (diffusion forcing). A bidirectional student has one chunk and no history."""


class FlowMatching(Method):
    """Flow matching with one role, ``student``. The loss is ``mean w(t) (v(x_t, t, c) - (e - x0))^2``."""

    required_roles = ("student",)
    trained_roles = ("student",)
    settings: FlowMatchingSettings

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        times = self._times(batch, random)
        yield Loss("flow_matching", lambda: self._loss(batch, times, random), at=times.at)

    @classmethod
    def check_experts(cls, settings: Any, boundaries: Mapping[str, tuple[float, ...]], trained: str) -> None:
        return

    @classmethod
    def check_parts(cls, settings: Any, parts: Collection[str]) -> None:
        if settings.weight != "none":
            raise UserError(f"method.weight={settings.weight} is for models of video alone; use method.weight=none")

    @classmethod
    def check_causal(cls, settings: Any, causal: Mapping[str, CausalSettings | None]) -> None:
        if settings.history == "clean" and causal["student"] is None:
            raise UserError("method.history=clean is for a causal student; set student.causal.chunk, or use noisy")

    def _draw(self, random: StepRandom, purpose: str, dtype: torch.dtype) -> list[Tensor]:
        return [draw_time(self.settings, self.settings.shift, random, purpose, dtype)]

    def _loss(self, batch: Batch, times: Times, random: StepRandom) -> Tensor:
        x0, student, (t, at) = batch.latents, self.roles["student"], times
        noise = batch.noise(random, "flow_matching/noise", student)
        dropped = random.uniform("flow_matching/caption_dropout") < self.settings.caption_dropout
        condition = Condition.where(dropped, batch.condition.empty, batch.condition)
        clean = None
        if self.settings.history == "clean":
            clean = clean_history(student, x0, random, "flow_matching/context")
        v = student.velocity(add_noise(x0, noise, t), t, condition, at=at, clean=clean)
        errors = self.total("loss", squared_error(v, noise - x0, t))
        observe_by_time(self.observations, "loss", errors, t)
        observe_latents(self.observations, "data", x0)
        return errors.mean() if self.settings.weight == "none" else (gaussian(t, self.settings.shift) * errors).mean()

    def _times(self, batch: Batch, random: StepRandom) -> Times:
        student, purpose = self.roles["student"], "flow_matching/time"
        if student.causal is None:
            return draw_times(self._draw, random, purpose, batch.dtype, [(student,)], student)[0]
        return Times(chunk_draws(student, batch.frames, lambda name: self._draw(random, name, batch.dtype)[0], purpose))

    def evaluations(self, role: str, steps: int) -> int:
        steps += self.roles[role].causal is not None  # a finished chunk goes through the network for its keys
        return 2 * steps if is_guided(self.settings.guidance) else steps

    def stream(
        self, role: str, noise: Iterable[Sample], condition: Condition, steps: int, random: StepRandom
    ) -> Iterator[Sample]:
        s = self.settings
        states = guided_states(self.roles[role], noise, condition, random, s.sampler, steps, s.shift, s.guidance)
        return (chunk[-1] for chunk in states)


def gaussian(t: Tensor, shift: float) -> Tensor:
    """Return the weights of times ``t`` as in ``training_weight`` of Self-Forcing's ``utils/scheduler.py``: 0 at t = 1,
    with the mean 1 over the source's 1000 training times of this shift."""
    nodes = shift_time(torch.arange(1, 1001, dtype=torch.float64) / 1000, shift)
    least = math.exp(-0.5)
    mean = (torch.exp(-2 * (nodes - 0.5).square()) - least).mean().item()
    return (torch.exp(-2 * (t - 0.5).square()) - least) / mean


def draw_time(settings: Any, shift: float, random: StepRandom, purpose: str, dtype: torch.dtype) -> Tensor:
    """Draw times ``(B,)``, fp32 or better, by ``settings.time``, ``logit_mean`` and ``logit_std`` (Esser et al. 2024),
    then shifted."""
    if settings.time == "uniform":
        t = random.uniform(purpose, dtype)
    else:
        t = torch.sigmoid(settings.logit_mean + settings.logit_std * random.normal(purpose, (), dtype))
    return shift_time(t, shift)
