"""Random times where networks are experts of ranges of them: one range for all samples of a part of a step's batch.

A forward runs one network, the same on every rank, so the times of a part (``expert_draws``; all of the batch is one by
default) must lie in one range of every role that is evaluated at them. Which range it is one more draw of the method's
own says, whose stream all ranks share; samples draw again from their own streams until they are inside. A range comes
up as often as the method draws from it, and inside it times are distributed as the method has them: over the steps
their distribution is unchanged. That of one part is not, and a gradient varies more from step to step than with each
sample's own range (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fsdp_cp.errors import UserError
from fsdp_cp.rng import StepRandom

if TYPE_CHECKING:
    from models.roles.role import Role


class Times(NamedTuple):
    """Times of rectified flow of a micro-batch."""

    t: Tensor
    """``(B,)``."""
    at: float | None = None
    """Where networks are experts, a time in the range of all of them, which the host knows."""


_TRIES = 10_000
"""After as many draws outside of its range an expert is taken to have no times."""

Draw = Callable[[StepRandom, str, torch.dtype], Sequence[Tensor]]
"""Times of a sample that belong together, ``(B,)`` each on the device of the streams, for a purpose."""


def draw_times(
    draw: Draw,
    random: StepRandom,
    purpose: str,
    dtype: torch.dtype,
    roles: Sequence[Sequence[Role]],
    trains: Role | None = None,
) -> list[Times]:
    """Times as ``draw`` gives them, each in one range of the roles that are evaluated at it.

    Args:
        draw: pure: of the same streams and purpose the same times, whatever was drawn before.
        random: the step's streams.
        purpose: of the draw; those that are drawn again have ``PURPOSE/again_N``.
        dtype: of the times, fp32 or better.
        roles: for each of the times, who is evaluated at it.
        trains: who trains at the last of them, and perhaps some of its networks alone (:attr:`Role.trained_experts`).
    """
    if not any(role.boundaries for group in roles for role in group):
        return [Times(t) for t in draw(random, purpose, dtype)]
    pilot, host = pilot_times(draw, random, purpose, trains), replace(random, device="cpu")
    wanted = [
        _ranges(torch.tensor([time], dtype=torch.float64), group) for time, group in zip(pilot, roles, strict=True)
    ]
    times = list(draw(host, purpose, dtype))
    for attempt in count(1):
        outside = torch.stack([_ranges(t, group) != w for t, group, w in zip(times, roles, wanted, strict=True)])
        again = outside.any(0)
        if not again.any():
            break
        drawn = draw(host, f"{purpose}/again_{attempt}", dtype)
        times = [torch.where(again, new, t) for new, t in zip(drawn, times, strict=True)]
    return [Times(t.to(random.device), at) for t, at in zip(times, pilot, strict=True)]


def expert_of_step(draw: Draw, random: StepRandom, purpose: str, role: Role) -> int:
    """The network of ``role``, which trains, that serves the last of the times that belong together."""
    return role.expert_at(pilot_times(draw, random, purpose, role)[-1]) if role.boundaries else 0


def pilot_times(draw: Draw, random: StepRandom, purpose: str, trains: Role | None = None) -> list[float]:
    """The draw that decides the ranges of a part of the batch: the same on every rank and in each of its micro-batches.

    Raises:
        UserError: where ``trains`` has an expert alone at whose times the method draws none.
    """
    for attempt in range(_TRIES):
        stream = f"{purpose}/range_{attempt}" if attempt else f"{purpose}/range"
        times = [float(t) for t in draw(random.shared, stream, torch.float64)]
        if trains is None or not trains.boundaries or trains.trains_at(times[-1]):
            return times
    raise UserError(
        f"{trains.name}.experts: none of {_TRIES} draws of {purpose} is a time at which the chosen expert serves, so it"
        f" would never be trained; use other times, or {trains.name}.experts=both"
    )


def _ranges(t: Tensor, roles: Sequence[Role]) -> Tensor:
    """Which range of the common refinement each of ``t`` ``(B,)``, on the CPU, lies in; as :meth:`Role.expert_at`."""
    from models.roles.role import ROUNDING

    t = t.double() + ROUNDING
    boundaries = {boundary for role in roles for boundary in role.boundaries}
    return sum(((t < boundary).long() for boundary in boundaries), torch.zeros(t.shape, dtype=torch.long))
