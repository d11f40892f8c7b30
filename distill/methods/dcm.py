"""Discrete consistency distillation (Song et al. 2023, arXiv:2303.01469, algorithm 2), for rectified flows.

On a grid of times from 1 to 0, one Euler step of the teacher leads from each node to the next. The student's prediction
at a node is trained towards its prediction at the next node. The optimum is the map of the Euler sampler on that grid.
Causal roles see the clean clip as their history, and each chunk has its own node.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, guided_velocity
from distill.methods.common.chunks import chunk_integers, clean_history
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.observations import squared_error
from distill.methods.common.schedules import add_noise, denoise, euler_times, part_times
from fsdp_cp.choices import Bounds
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom


@dataclass(kw_only=True)
class DcmSettings(StepListSettings):
    """``method=dcm``."""

    name: str = "dcm"
    grid_steps: Annotated[int, Bounds(least=1, most=10_000)] = 48
    """Number ``K`` of Euler steps of the teacher from noise to data, spaced by ``shift``; 1 to 10000."""
    target: Literal["student", "ema"] = "student"
    """Weights that predict the target at the next node: the ``student``'s, or its EMA (``ema``)."""


class Dcm(FewStepMethod):
    """Discrete consistency with the loss ``mean (x0_theta(x_j) - sg(x0_target(x_{j+1})))^2``, j per chunk if causal."""

    same_history = True
    settings: DcmSettings

    @classmethod
    def check(cls, config: Any) -> None:
        if config.method.target == "ema" and not config.student.ema.enabled:
            raise UserError("method.target=ema needs student.ema.enabled=true; or use method.target=student")

    def loss(self, step: int, batch: Batch, random: StepRandom) -> Tensor:
        settings, student = self.settings, self.student
        node = chunk_integers(student, batch.frames, settings.grid_steps, random, "dcm/node")
        times = euler_times(settings.grid_steps, settings.shift)
        grid = torch.tensor(times, dtype=batch.dtype, device=batch.latents.device)
        t, next_t = grid[node], grid[node + 1]
        noise = batch.noise(random, "dcm/noise", student)
        x, clean = add_noise(batch.latents, noise, t), clean_history(student, batch.latents, random, "dcm/context")
        with torch.no_grad():
            v = guided_velocity(self.roles["teacher"], x, t, batch.condition, settings.guidance, clean=clean)
            next_x = x + (part_times(next_t, x) - part_times(t, x)) * v
            with self.student_average() if settings.target == "ema" else nullcontext():
                # At t = 0, after the last node, this is next_x itself.
                target = denoise(next_x, student.velocity(next_x, next_t, batch.condition, clean=clean), next_t)
        prediction = denoise(x, student.velocity(x, t, batch.condition, clean=clean), t)
        errors = self.total("loss", squared_error(prediction, target, t))
        self.observations.add_by_time("loss", errors, t)
        self.observations.add_latents("prediction", prediction)
        self.observations.add_latents("data", batch.latents)
        return errors.mean()


METHOD = (Dcm, DcmSettings)
