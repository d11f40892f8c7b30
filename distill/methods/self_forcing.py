"""Self-forcing (Huang et al. 2025, arXiv:2506.08009): DMD2 on whole clips that a causal student makes chunk by chunk.

A chunk is denoised along the step list up to an *exit* step. Its prediction is the chunk, which enters the student's
cache as the history of the next one. The scores are bidirectional and see the whole clip, as in :mod:`dmd2`.

Gradients pass through the exit steps alone, and the cache is constant. So ``x_G`` depends on the weights through one
forward per chunk, and the gradient can be *replayed*: roll out without gradient, take ``dL/dx_G`` once, then compute
the exit step of one chunk after another with a graph, each with its own backward. One chunk's graph is alive at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Loss
from distill.methods.common.chunks import CausalRoles, chunk_noise
from distill.methods.common.few_step import check_step_list
from distill.methods.common.sampling import LastStep, rollout_chunks
from distill.methods.dmd2 import Dmd2, Dmd2Settings
from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom
from models.condition import FIRST_FRAME
from models.sample import VIDEO, Sample


@dataclass(kw_only=True)
class SelfForcingSettings(Dmd2Settings):
    """``method=self_forcing``."""

    name: str = "self_forcing"
    exit: Literal["shared", "each"] = "shared"
    """Exit steps of a rollout: one draw for all chunks (``shared``), or one for ``each`` chunk."""
    step_list_first: list[float] | None = None
    """Times of the first chunk's steps, like ``step_list``; null for ``step_list``. Its exit is drawn separately.
    Causal Forcing++ takes 4 steps here and 1 or 2 after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.student_input != "rollout":
            raise UserError(f"method.student_input={self.student_input}: self-forcing trains on rollouts; use rollout")
        if self.own_query:
            raise UserError(f"method.{self.own_query}: chunks end at steps of their own; use fresh and all")
        first = self.step_list_first
        if first is not None:
            check_step_list("step_list_first", first)
        if self.fake_knows_last_step and (self.exit == "each" or first is not None):
            hint = "use method.exit=shared and method.step_list_first=null"
            raise UserError(f"method.fake_knows_last_step=true needs one last step for all chunks; {hint}")


class SelfForcing(Dmd2):
    """DMD2 with a causal student that is rolled out chunk by chunk."""

    settings: SelfForcingSettings

    @classmethod
    def check_causal(cls, settings: SelfForcingSettings, causal: CausalRoles) -> None:
        if causal["student"] is None:
            raise UserError("method=self_forcing is for a causal student; set student.causal.chunk, or use method=dmd2")
        for name, role in causal.items():
            if name != "student" and role is not None:
                whole = "method=self_forcing compares scores of whole clips; give a bidirectional one"
                raise UserError(f"{name}.causal.chunk={role.chunk}: {whole}")

    def chunk_times(self, steps: int) -> Callable[[int], Sequence[float]]:
        times, first = self.sampling_times(steps), self.settings.step_list_first
        return lambda chunk: times if chunk or first is None else first

    def _exit_times(self, shared: list[float], random: StepRandom, *, full: bool) -> Callable[[int], Sequence[float]]:
        """Return a function of a chunk's number that returns its times up to the exit step, by default ``shared``, the
        same on every rank and in every micro-batch of a part of the batch. Times of a ``full`` rollout have no exit."""
        settings = self.settings

        def times(chunk: int) -> Sequence[float]:
            if chunk == 0 and settings.step_list_first is not None:
                chosen, purpose = settings.step_list_first, "self_forcing/exit_first"
            elif settings.exit == "each":
                chosen, purpose = settings.student_times(), f"self_forcing/exit/{chunk}"
            else:
                return shared
            if full:
                return chosen
            return chosen[: random.shared_integer(purpose, 1, len(chosen))]

        return times

    def _rollout(
        self, batch: Batch, times: list[float], random: StepRandom, last_steps: list[LastStep] | None = None
    ) -> Sample:
        student, settings = self.student, self.settings
        kind = settings.fake_rollout if last_steps is None else settings.rollout  # the student alone replays its steps
        times_of = self._exit_times(times, random, full="full" in (kind, settings.rollout))
        with torch.no_grad(), student.kept_gathered():
            chunks = rollout_chunks(
                student,
                chunk_noise(student, random, "self_forcing/noise", batch.shapes, {}, batch.dtype),
                batch.condition,
                times_of,
                random,
                "self_forcing",
                sampler=settings.student_sampler,
                last_steps=last_steps,
            )
            return Sample.cat([*chunks], dim=2)

    def _student_losses(self, batch: Batch, times: list[float], random: StepRandom) -> Iterator[Loss]:
        sizes = self.student.causal.chunks(batch.frames)
        replay: list[tuple[LastStep, Tensor]] = []
        """Exit steps of the chunks that are still to be replayed, and ``dL/dx_G`` of these chunks."""

        def rollout_loss() -> Tensor:
            steps: list[LastStep] = []
            clip = self._rollout(batch, times, random, steps).video.requires_grad_()
            loss = self._sample_loss(Sample({VIDEO: clip}), batch, times, random)
            loss.backward()
            # A given first frame is a chunk without an exit step.
            replay.extend(zip(steps, clip.grad.split(sizes, dim=2)[-len(steps) :], strict=True))
            return loss.detach()

        def replayed(value: Callable[[], Tensor]) -> Tensor:
            """Return a loss with this value, and with the gradient of the next chunk."""
            loss = value()
            step, gradient = replay.pop(0)
            inner = (step.x0().video * gradient).sum()
            return loss + (inner - inner.detach())

        def nothing() -> Tensor:
            return torch.zeros((), dtype=batch.dtype, device=batch.condition.device)

        first = int(FIRST_FRAME in batch.condition.tensors)
        for chunk in range(first, len(sizes)):
            value = rollout_loss if chunk == first else nothing
            yield Loss("dmd", partial(replayed, value))


METHOD = (SelfForcing, SelfForcingSettings)
