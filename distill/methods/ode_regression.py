"""Regression on a teacher's trajectories (knowledge distillation, Luhman & Luhman 2021, arXiv:2101.02388).

Intermediate states are inputs too, as in CausVid's initialization (Yin et al. 2025, arXiv:2412.07772, section 4.3).
``python -m distill.teacher_clips --states`` makes an encoded set with them before training, which needs no teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.data import ClipDataset, EncodedSettings
from distill.methods.base import Batch, Loss
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.observations import observe_latents, per_sample_mean
from distill.methods.common.schedules import denoise
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom


@dataclass(kw_only=True)
class OdeRegressionSettings(StepListSettings):
    """``method=ode_regression``."""

    name: str = "ode_regression"


class OdeRegression(FewStepMethod):
    """Regression ``mean (x0_theta(x_t, t) - x0)^2`` with x_t on the teacher's trajectory to x0.

    Each sample draws its t from the step list.
    """

    required_roles = ("student",)
    trained_roles = ("student",)
    settings_read = ("teacher",)
    settings: OdeRegressionSettings

    @classmethod
    def needs_latents(cls, settings: OdeRegressionSettings) -> bool:
        return False

    @classmethod
    def check_files(cls, config: Any) -> None:
        from distill.data.sets.dataset import states_at

        if not isinstance(config.data, EncodedSettings):
            raise UserError(
                f"data={config.data.name} has no states of a teacher, on which method=ode_regression trains; make a set"
                " with python -m distill.teacher_clips --states, and use data=encoded"
            )
        states_at(config.data.open(), config.method.step_list)

    def training_data(self, data: ClipDataset) -> ClipDataset:
        return data.with_states(self.settings.step_list)

    def trained_role(self, step: int) -> str:
        return "student"

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        yield Loss("ode_regression", lambda: self._loss(batch, random), 1.0)

    def _loss(self, batch: Batch, random: StepRandom) -> Tensor:
        times = self.settings.student_times()
        # Draw in fp64: fp32 could round a draw just below 1 up to 1, beyond the last state.
        index = (len(times) * random.uniform("ode_regression/step", torch.float64)).long()
        t = torch.tensor(times, dtype=batch.dtype, device=index.device)[index]
        x = batch.states[torch.arange(len(index), device=index.device), index]
        prediction = denoise(x, self.roles["student"].velocity(x, t, batch.condition), t)
        errors = per_sample_mean((prediction - batch.latents).square())
        for i, time in enumerate(times):
            self.observations.add(f"loss/t{time:.4f}", errors, where=index == i)
        observe_latents(self.observations, "prediction", prediction)
        observe_latents(self.observations, "data", batch.latents)
        return errors.mean()
