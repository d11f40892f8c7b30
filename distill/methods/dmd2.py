"""DMD2: improved distribution matching distillation (Yin et al. 2024, arXiv:2405.14867), for rectified flows.

The student's samples are pushed along the difference of two scores: the frozen teacher's (with guidance) and that of
a *fake* network which is trained all along on the student's own samples. The multi-step student is trained on the
inputs that its own sampler makes (backward simulation, section 4.5 there).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distill.methods.base import Batch, Loss, Method, euler_sample, guided_velocity
from distill.schedules import add_noise, denoise, euler_times, shift_time
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom


@dataclass(kw_only=True)
class Dmd2Settings:
    """``method=dmd2``."""

    name: str = "dmd2"
    fake_updates_per_student_update: int = 5
    """Fake-score updates that follow each student update; at least 1."""
    step_list: list[float] = field(default_factory=lambda: [1.0, 0.9375, 0.8333, 0.625])
    """The student's times, after any shift: descending from 1. Its length is the number of steps."""
    guidance_scale: float = 5.0
    """``w`` of ``u + w (c - u)`` on the teacher; 1 is none."""
    shift: float = 5.0
    """Shift of the times at which the scores are compared, of the fake score's, and of the teacher's sampler. > 0."""
    min_time: float = 0.02
    """Least time (before the shift) at which the scores are compared."""
    max_time: float = 0.98
    """Greatest time (before the shift) at which the scores are compared."""

    def __post_init__(self) -> None:
        if self.fake_updates_per_student_update < 1:
            raise UserError(
                f"method.fake_updates_per_student_update={self.fake_updates_per_student_update} must be at least 1"
            )
        times = list(self.step_list)
        if (
            not times
            or times[0] != 1.0
            or times[-1] <= 0
            or any(a <= b for a, b in zip(times, times[1:], strict=False))
        ):
            raise UserError(f"method.step_list={times} must descend from 1.0 and stay above 0")
        if self.shift <= 0:
            raise UserError(f"method.shift={self.shift} must be above 0")
        if not 0 <= self.min_time < self.max_time <= 1:
            raise UserError(
                f"method.min_time={self.min_time} must be below method.max_time={self.max_time}, both in [0, 1]"
            )


class Dmd2(Method):
    """The student and the fake score in turn: the student trains when ``step % (n + 1) == 0``."""

    required_roles = ("teacher", "student", "fake")
    trained_roles = ("student", "fake")
    settings: Dmd2Settings

    def trained_role(self, step: int) -> str:
        return "fake" if step % (self.settings.fake_updates_per_student_update + 1) else "student"

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        # One rollout length for the step, the same on every rank and micro-batch: it decides how many forwards run.
        steps = random.shared_integer("dmd2/rollout_length", 1, len(self.settings.step_list))
        times = list(self.settings.step_list)[:steps]
        if self.trained_role(step) == "student":
            yield Loss("dmd", lambda: self._student_loss(batch, times, random), 1.0)
        else:
            yield Loss("fake_score", lambda: self._fake_loss(batch, times, random), 1.0)

    def _rollout(self, noise: Tensor, text: Tensor, times: list[float], random: StepRandom) -> Tensor:
        """The student's sample after ``times``; the last step carries a gradient where gradients are enabled."""
        student = self.roles["student"]
        x = noise
        for k, time in enumerate(times):
            t = torch.full((len(x),), time, dtype=x.dtype, device=x.device)
            with torch.set_grad_enabled(torch.is_grad_enabled() and k == len(times) - 1):
                x0 = denoise(x, student.velocity(x, t, text), t)
            if k < len(times) - 1:
                fresh = random.normal(f"dmd2/renoise_{k + 1}", x.shape[1:], x.dtype)
                x = add_noise(x0, fresh, torch.full_like(t, times[k + 1]))
        return x0

    def _student_loss(self, batch: Batch, times: list[float], random: StepRandom) -> Tensor:
        """``1/2 mean (x_G - sg(x_G - g))^2`` with ``g = (x_fake - x_real) / q`` (Yin et al. 2024b, eq. 7 and 8)."""
        shape, dtype = batch.latents.shape[1:], batch.latents.dtype
        sample = self._rollout(random.normal("dmd2/noise", shape, dtype), batch.text, times, random)
        with torch.no_grad():
            span = self.settings.max_time - self.settings.min_time
            t = shift_time(self.settings.min_time + span * random.uniform("dmd2/time", dtype), self.settings.shift)
            x_t = add_noise(sample, random.normal("dmd2/score_noise", shape, dtype), t)
            v_real = guided_velocity(
                self.roles["teacher"], x_t, t, batch.text, batch.null_like_text(), self.settings.guidance_scale
            )
            real = denoise(x_t, v_real, t)
            fake = denoise(x_t, self.roles["fake"].velocity(x_t, t, batch.text), t)
            # Per sample: a mean over the batch would make a gradient depend on the other samples of its rank.
            q = (sample - real).abs().flatten(1).mean(1).clamp_min(1e-5).view(-1, *([1] * len(shape)))
            target = sample - (fake - real) / q
        return 0.5 * (sample - target).square().mean()

    def _fake_loss(self, batch: Batch, times: list[float], random: StepRandom) -> Tensor:
        """Flow matching on the student's samples: ``mean (v(x_t) - (e - x_G))^2``, no guidance."""
        shape, dtype = batch.latents.shape[1:], batch.latents.dtype
        with torch.no_grad():
            sample = self._rollout(random.normal("dmd2/noise", shape, dtype), batch.text, times, random)
        t = shift_time(random.uniform("dmd2/fake_time", dtype), self.settings.shift)
        noise = random.normal("dmd2/fake_noise", shape, dtype)
        v = self.roles["fake"].velocity(add_noise(sample, noise, t), t, batch.text)
        return (v - (noise - sample)).square().mean()

    def sampling_times(self, steps: int) -> list[float]:
        """The student's times for ``steps`` at most as many as it was trained for, spread evenly over its list."""
        times = list(self.settings.step_list)
        if not 1 <= steps <= len(times):
            raise UserError(
                f"the student was trained for {len(times)} steps; sample with 1 to {len(times)}, not {steps}"
            )
        return [times[i * len(times) // steps] for i in range(steps)]

    def evaluations(self, role: str, steps: int) -> int:
        return steps if role == "student" or self.settings.guidance_scale == 1 else 2 * steps

    def generate(
        self, role: str, noise: Tensor, text: Tensor, null_text: Tensor, steps: int, random: StepRandom
    ) -> Tensor:
        if role == "student":
            with torch.no_grad():
                return self._rollout(noise, text, self.sampling_times(steps), random)
        times = euler_times(steps, self.settings.shift)
        return euler_sample(self.roles[role], noise, text, null_text, times=times, scale=self.settings.guidance_scale)
