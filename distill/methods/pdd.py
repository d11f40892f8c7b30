"""Parallel decoding distillation (arXiv:2607.26004): few steps from the teacher's own network, without a fake score.

The student is the teacher's network with one last layer, a *head*, for each interval of a grid of N. From one forward
at the state ``X_n``, head k predicts ``u_n(k)``, the mean velocity over interval k of the teacher's path from there::

    X_k = X_n + sum_{l=n}^{k-1} h_l u_n(l),    loss = |u_n(k) - sg u_k(sg X_k)|^2

``u_k`` is the teacher's mean velocity over interval k, and ``h_l`` the interval's length. A sampler of S steps crosses
``N / S`` intervals at a time with the mean of their heads. Training needs captions alone, and keeps no state from step
to step: it makes ``X_n`` again from keyed noise by the student's own steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from distill.methods.base import Batch, Loss, guided_velocity
from distill.methods.common.few_step import FewStepMethod, FewStepSettings
from distill.methods.common.observations import squared_error
from distill.methods.common.sampling import StudentSampler
from distill.methods.common.schedules import euler_times, same_time
from fsdp_cp.choices import PositiveInt
from fsdp_cp.errors import UserError, shown
from fsdp_cp.rng import StepRandom
from models.additions.base import Chosen
from models.additions.heads import NAME, Grid, Span
from models.condition import Condition
from models.sample import VIDEO, Sample


@dataclass(kw_only=True)
class PddSettings(FewStepSettings):
    """``method=pdd``."""

    name: str = "pdd"
    grid_steps: PositiveInt = 32
    """Number N of intervals of the grid, each with a head; ``shift`` is that of their times."""
    steps: list[PositiveInt] = field(default_factory=lambda: [4])
    """Numbers of sampling steps that the student serves, ascending, e.g. ``[1,2,4]``; each must divide
    ``grid_steps``. A training step draws one of them."""
    blocks: Literal["one", "all"] = "one"
    """Blocks of a sampler's path that a training step trains: ``one``, drawn, after the student's steps to it without
    gradient; or ``all``, each with its own backward."""
    targets: PositiveInt = 2
    """Number of intervals of a block, drawn without repetition, that a loss compares with the teacher; all for a block
    of fewer."""
    solver: Literal["euler", "midpoint"] = "midpoint"
    """Teacher's step over an interval: ``euler``, or ``midpoint``, two calls with an error of higher order."""
    student_sampler: StudentSampler = "ode"
    """Only ``ode``: the student crosses its blocks without noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.student_sampler != "ode":
            raise UserError(
                f"method.student_sampler={self.student_sampler} must be ode: blocks are crossed without noise"
            )
        if not self.steps or self.steps != sorted(set(self.steps)):
            raise UserError(f"method.steps={shown(self.steps)} must be numbers of steps, ascending, as [1,2,4]")
        for steps in self.steps:
            if self.grid_steps % steps:
                hint = f"use a multiple of {steps}, or other method.steps"
                raise UserError(f"method.grid_steps={self.grid_steps} must divide into {steps} blocks; {hint}")

    def check_steps(self, counts: Sequence[int], asked: str) -> None:
        if not {*counts} <= {*self.steps}:
            raise UserError(f"{asked} must be among method.steps={shown(self.steps)}, which the student is trained for")

    def student_times(self) -> list[float]:
        return euler_times(self.steps[-1], self.shift)[:-1]


class Pdd(FewStepMethod):
    """Parallel decoding distillation; the student trains at every step."""

    knows_parts = True
    settings: PddSettings

    @classmethod
    def additions(cls, settings: PddSettings) -> dict[str, Chosen]:
        return {"student": {NAME: {"count": settings.grid_steps}}}

    @classmethod
    def needs_latents(cls, settings: PddSettings) -> bool:
        return False

    @cached_property
    def grid(self) -> Grid:
        settings, parts = self.settings, dict(self.clock("student"))
        return Grid(intervals=settings.grid_steps, shift=settings.shift, parts=parts, steps=settings.steps)

    def least_steps(self, role: str, steps: Sequence[int]) -> int:
        return min(steps) if role == "student" else super().least_steps(role, steps)  # it takes only its own numbers

    @property
    def heads(self) -> dict[str, Any]:
        return asdict(self.grid)

    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        served = self.settings.steps
        steps = served[random.shared_integer("pdd/steps", 0, len(served) - 1)]
        blocks = self.grid.blocks(steps)
        if self.settings.blocks == "one":
            number = random.shared_integer("pdd/block", 0, steps - 1)
            yield Loss("pdd", lambda: self._loss(batch, blocks[: number + 1], steps, random))
            return
        made: list[Sample] = []

        def of_block(block: Span) -> Callable[[], Tensor]:
            """Return the loss of a block, which starts where the loss before it has left ``made``."""
            return lambda: self._loss(batch, [block], steps, random, made)

        for block in blocks:
            yield Loss("pdd", of_block(block), 1 / steps)

    def _loss(
        self, batch: Batch, blocks: list[Span], steps: int, random: StepRandom, made: list[Sample] | None = None
    ) -> Tensor:
        """Return the loss of the last of ``blocks``. The others lead to it from noise, or from the state in ``made``,
        which then receives the state at its end."""
        *earlier, block = blocks
        x, condition = made.pop() if made else batch.noise(random, "pdd/noise"), batch.condition
        with torch.no_grad(), self.student.kept_gathered():
            for other in earlier:
                x = self._cross(x, other, condition)
        targets = self._drawn_targets(block, random)
        ahead = [(block[0], k) for k in targets if k > block[0]]
        spans = [*((k, k + 1) for k in targets), *ahead, *([] if made is None else [block])]
        velocities = dict(zip(spans, self._predicted(x, spans, condition, block[0]), strict=True))
        states = {span[1]: self._moved(x, span, velocities[span].detach()) for span in spans if span[0] == block[0]}
        if made is not None:
            made.append(states[block[1]])
        states[block[0]] = x
        errors = [squared_error(velocities[k, k + 1], self._teacher_mean(states[k], k, condition)) for k in targets]
        each = self.total("loss", sum(errors[1:], errors[0]) / len(errors))
        for count in self.settings.steps:
            self.observations.add(f"loss/{count}_steps", each, torch.full_like(each, count == steps))
        return each.mean()

    def _drawn_targets(self, block: Span, random: StepRandom) -> list[int]:
        """Draw different intervals of ``block``, the same for all samples of a part of the batch."""
        left = list(range(*block))
        count = min(self.settings.targets, len(left))
        return [left.pop(random.shared_integer(f"pdd/target/{block[0]}_{i}", 0, len(left) - 1)) for i in range(count)]

    def _predicted(self, x: Sample, spans: list[Span], condition: Condition, n: int) -> list[Sample]:
        """Return the student's mean velocities over ``spans``, from one forward at the state ``x``, ``X_n``."""
        t = same_time(self.grid.times[VIDEO][n], x)
        return self.student.velocity(x, t, condition, heads=self.grid.mean(*spans)).chunk(len(spans))

    def _moved(self, x: Sample, span: Span, velocity: Sample) -> Sample:
        """Return the state at the end of ``span``, from ``x`` at its start along a mean velocity."""
        return x + velocity * self.grid.lengths(span)

    def _cross(self, x: Sample, block: Span, condition: Condition) -> Sample:
        """Return the state after a step of the student over ``block``."""
        (velocity,) = self._predicted(x, [block], condition, block[0])
        return self._moved(x, block, velocity)

    @torch.no_grad()
    def _teacher_mean(self, x: Sample, k: int, condition: Condition) -> Sample:
        """Return the teacher's mean velocity over interval k, from its start at ``x``."""

        def velocity(x: Sample, clock: float) -> Sample:
            return guided_velocity(self.roles["teacher"], x, same_time(clock, x), condition, self.settings.guidance)

        starts = {part: times[k] for part, times in self.grid.times.items()}
        first = velocity(x, starts[VIDEO])
        if self.settings.solver == "euler":
            return first
        halves = {part: length / 2 for part, length in self.grid.lengths((k, k + 1)).items()}
        # The middle of each part's own interval is at no common time of their clock.
        middles = {part: start + halves[part] for part, start in starts.items()}
        mean = velocity((x + first * halves).on_clock(middles), middles[VIDEO])
        return replace(mean, shifts=x.shifts)

    def sampling_times(self, steps: int) -> list[float]:
        if steps not in self.settings.steps:
            raise UserError(f"the student was trained for method.steps={shown(self.settings.steps)}, not {steps}")
        return self.grid.few_steps(steps)

    def whole_clip(self, x: Sample, condition: Condition, times: list[float], random: StepRandom) -> Sample:
        """Sample the student, which crosses one block at a step."""
        for block in self.grid.blocks(len(times)):
            x = self._cross(x, block, condition)
        return x


METHOD = (Pdd, PddSettings)
