"""Regression on a teacher's trajectories (knowledge distillation, Luhman & Luhman 2021, arXiv:2101.02388).

Intermediate states are inputs too, as in CausVid's initialization (Yin et al. 2025, arXiv:2412.07772, section 4.3).
``python -m distill.trajectories`` makes the trajectories before training, so training needs no teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distill.data import ClipDataset
from distill.data.trajectories import NOTED_LATER, TrajectoryClips, TrajectoryFolder
from distill.methods.base import Batch, Loss
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.observations import observe_latents, per_sample_mean
from distill.methods.common.sampling import euler_sample, guided
from distill.methods.common.schedules import denoise, euler_times
from fsdp_cp.choices import check_range
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.roles.condition import Condition

if TYPE_CHECKING:
    from models.roles.role import Role


@dataclass(kw_only=True)
class OdeRegressionSettings(StepListSettings):
    """``method=ode_regression``."""

    name: str = "ode_regression"
    trajectories: str | None = None
    """Path to the folder of trajectories that ``python -m distill.trajectories`` writes; all nodes must share it."""
    num_trajectories: int = 4096
    """Number of trajectories to make and to train on; at least 1."""
    teacher_steps: int = 50
    """Euler steps of a trajectory, spaced by ``shift``, 1 to 10000. The times of ``step_list``, at which its states are
    kept, are inserted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "num_trajectories", least=1, where="method.")
        check_range(self, "teacher_steps", least=1, most=10_000, where="method.")


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
    def check(cls, config: Any) -> None:
        if config.method.trajectories is None:
            raise UserError(
                "method.trajectories is not set; give a folder, and fill it with python -m distill.trajectories and the"
                " same settings"
            )

    @classmethod
    def fingerprints(cls, settings: Any) -> dict[str, str]:
        return {"method.trajectories": TrajectoryFolder(settings.trajectories).content()}

    @classmethod
    def check_files(cls, config: Any) -> None:
        folder = TrajectoryFolder(config.method.trajectories)
        expected = trajectory_settings(config)
        if config.teacher.checkpoint is None:  # then any teacher's trajectories will do
            del expected["teacher.checkpoint"]
        folder.check(expected)
        folder.check_complete(config.method.num_trajectories)

    def training_data(self, data: ClipDataset) -> ClipDataset:
        return TrajectoryClips(TrajectoryFolder(self.settings.trajectories), self.settings.num_trajectories, data)

    def trained_role(self, step: int) -> str:
        return "student"

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        yield Loss("ode_regression", lambda: self._loss(batch, random), 1.0)

    def _loss(self, batch: Batch, random: StepRandom) -> Tensor:
        times = self.settings.student_times()
        # Draw in fp64: fp32 could round a draw just below 1 up to 1, beyond the last state.
        index = (len(times) * random.uniform("ode_regression/step", torch.float64)).long()
        t = torch.tensor(times, dtype=batch.dtype, device=index.device)[index]
        x = batch.trajectory[torch.arange(len(index), device=index.device), index]
        prediction = denoise(x, self.roles["student"].velocity(x, t, batch.condition), t)
        errors = per_sample_mean((prediction - batch.latents).square())
        for i, time in enumerate(times):
            self.observations.add(f"loss/t{time:.4f}", errors, where=index == i)
        observe_latents(self.observations, "prediction", prediction)
        observe_latents(self.observations, "data", batch.latents)
        return errors.mean()


def trajectory_settings(config: Any) -> dict[str, Any]:
    """Return the settings that determine a trajectory and matter to a student that trains on it, by dotted key."""
    names = {
        "method": ("step_list", "teacher_steps", "guidance_scale", "shift"),
        "data": ("name", "path", "encoders", "num_frames", "height", "width", "negative_prompt", *NOTED_LATER),
        "teacher": ("checkpoint",),
    }
    return {
        f"{group}.{key}": getattr(getattr(config, group), key, None) for group, keys in names.items() for key in keys
    }


def _times(settings: OdeRegressionSettings) -> list[float]:
    return sorted({*euler_times(settings.teacher_steps, settings.shift), *settings.step_list}, reverse=True)


def trajectory_evaluations(settings: OdeRegressionSettings) -> int:
    """Return the number of network evaluations of a trajectory (guidance evaluates twice a step)."""
    return (len(_times(settings)) - 1) * (1 if settings.guidance_scale == 1 else 2)


def trajectory(
    teacher: Role, noise: Tensor, condition: Condition, settings: OdeRegressionSettings
) -> tuple[Tensor, Tensor]:
    """Sample the teacher; return its states at the times of ``step_list`` and the clean latents.

    Args:
        teacher: the network.
        noise: state at the first time, ``(B, C, T, H, W)``.
        condition: conditions of the B samples.
        settings: times, steps and guidance.

    Returns:
        States ``(B, K, C, T, H, W)`` and clean latents ``(B, C, T, H, W)``.
    """
    times, velocity = _times(settings), guided(teacher, condition, settings.guidance_scale)
    x, states = noise, []
    for start, end in pairwise([*settings.step_list, 0.0]):
        states.append(x)
        segment = [time for time in times if end <= time <= start]
        x = euler_sample(velocity, x, times=segment)
    return torch.stack(states, dim=1), x
