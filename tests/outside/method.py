"""External method: one step of the student learns two steps of the teacher.

An entry point (``fsdp_cp.methods``) registers it; its YAML is in ``configs/`` next to this file.
"""

from dataclasses import dataclass

import torch

from distill.methods.base import Loss, guided_velocity
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.observations import squared_error
from distill.methods.common.schedules import add_noise, per_sample
from fsdp_cp.errors import UserError


@dataclass(kw_only=True)
class HalvingSettings(StepListSettings):
    """``method=halving``."""

    name: str = "halving"
    interval: float = 0.25
    """Time that one step of the student crosses; above 0, below 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.interval < 1:
            raise UserError(f"method.interval={self.interval} must be above 0 and below 1")


class Halving(FewStepMethod):
    """``mean (v(x_t) - (v_T(x_t) + v_T(x_s)) / 2)^2``, where the teacher's Euler step leads from t to s."""

    required_roles = ("teacher", "student")
    trained_roles = ("student",)
    settings: HalvingSettings

    def trained_role(self, step):
        return "student"

    def losses(self, step, batch, random):
        yield Loss("halving", lambda: self._loss(batch, random), 1.0)

    def _loss(self, batch, random):
        teacher, student, half = self.roles["teacher"], self.roles["student"], self.settings.interval / 2
        t = self.settings.interval + (1 - self.settings.interval) * random.uniform("halving/time", batch.dtype)
        x = add_noise(batch.latents, batch.noise(random, "halving/noise"), t)
        with torch.no_grad():
            first = guided_velocity(teacher, x, t, batch.condition, self.settings.guidance)
            middle = x - per_sample(torch.full_like(t, half), x) * first
            second = guided_velocity(teacher, middle, t - half, batch.condition, self.settings.guidance)
        errors = squared_error(student.velocity(x, t, batch.condition), (first + second) / 2)
        return self.total("loss", errors).mean()


METHOD = (Halving, HalvingSettings)
