"""Regression on a teacher's trajectories (knowledge distillation, Luhman & Luhman 2021, arXiv:2101.02388).

Intermediate states are inputs too, as in CausVid's initialization (Yin et al. 2025, arXiv:2412.07772, section 4.3).
``python -m distill.teacher_clips --states`` makes an encoded set with them before training, which needs no teacher.
A causal student sees the set's clip as its history.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.data.settings import EncodedSettings
from distill.methods.base import Batch
from distill.methods.common.chunks import CausalRoles, check_same_chunks, chunk_integers, clean_history
from distill.methods.common.few_step import FewStepMethod, StepListSettings
from distill.methods.common.observations import squared_error
from distill.methods.common.schedules import denoise, widen
from fsdp_cp.errors import UserError
from fsdp_cp.progress import first_rank_log
from fsdp_cp.rng import StepRandom
from models.causal import CausalSettings

log = first_rank_log(__name__)

_POOR = ", a poor target for a causal student, which averages over what it cannot see (docs/causal.md)"


@dataclass(kw_only=True)
class OdeRegressionSettings(StepListSettings):
    """``method=ode_regression``."""

    name: str = "ode_regression"


class OdeRegression(FewStepMethod):
    """Regression ``mean (x0_theta(x_t, t) - x0)^2`` with x_t on the teacher's trajectory to x0, at a t of the step list
    that each sample, or chunk of a causal student, draws."""

    required_roles = ("student",)
    settings_read = ("teacher",)
    settings: OdeRegressionSettings

    @classmethod
    def needs_latents(cls, settings: OdeRegressionSettings) -> bool:
        return False

    @classmethod
    def check_parts(cls, settings: Any, parts: Collection[str]) -> None:
        if settings.audio_shift_ratio is not None:  # stored states are on the clock of the teacher
            ratio = settings.audio_shift_ratio
            raise UserError(f"method.audio_shift_ratio={ratio} does not fit the teacher's states; leave it out")

    @classmethod
    def check_causal(cls, settings: Any, causal: CausalRoles) -> None:
        return

    @classmethod
    def check_files(cls, config: Any, causal: CausalRoles) -> None:
        from distill.data.sets.dataset import states_at

        if not isinstance(config.data, EncodedSettings):
            make = "make a set with python -m distill.teacher_clips --states, and use data=encoded"
            raise UserError(f"data={config.data.name} has no states of a teacher, which this method needs; {make}")
        encoded = config.data.open()
        states_at(encoded, config.method.step_list)
        teacher, student = encoded.about["settings"]["teacher"].get("causal"), causal["student"]
        if teacher is not None and student is not None:
            try:
                check_same_chunks({"teacher": CausalSettings(**teacher), "student": student})
            except UserError as error:
                raise UserError(f"{encoded.where} has states of another teacher: {error}") from None
        kind = "bidirectional" if teacher is None else f"causal (chunk={teacher['chunk']})"
        poor = _POOR if teacher is None and student is not None else ""
        log.info("%s has states of a %s teacher%s", encoded.where, kind, poor)

    @classmethod
    def state_times(cls, settings: OdeRegressionSettings) -> Sequence[float]:
        return settings.step_list

    def loss(self, step: int, batch: Batch, random: StepRandom) -> Tensor:
        times, student = self.settings.student_times(), self.student
        index = chunk_integers(student, batch.frames, len(times), random, "ode_regression/step")
        t = torch.tensor(times, dtype=batch.dtype, device=index.device)[index]
        x = batch.latents.map(
            lambda x0, states: states.gather(1, widen(index, x0).expand_as(x0)[:, None])[:, 0], batch.states
        )
        clean = clean_history(student, batch.latents, random, "ode_regression/context")
        prediction = denoise(x, student.velocity(x, t, batch.condition, clean=clean), t)
        errors = self.total("loss", squared_error(prediction, batch.latents, t))
        for i, time in enumerate(times):
            self.observations.add(f"loss/t{time:.4f}", errors, where=index == i)
        self.observations.add_latents("prediction", prediction)
        self.observations.add_latents("data", batch.latents)
        return errors.mean()


METHOD = (OdeRegression, OdeRegressionSettings)
