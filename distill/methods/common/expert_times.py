"""Random times for networks with experts: all samples of a part of a step's batch get times of one expert.

A forward runs one expert, the same on every rank. So the times of a part (``expert_draws``; by default the whole batch)
must lie in one range of every role that is evaluated at them. A pilot draw from a stream that all ranks share selects
the range; each sample then redraws from its own stream until its time is inside. Over many steps the distribution of
times is unchanged, since ranges and the times inside them follow the method's distribution. Within one part it is not,
so gradients vary more from step to step than with a separate range per sample (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    """Rectified-flow times of a micro-batch."""

    t: Tensor
    """Times ``(B,)``."""
    at: float | None = None
    """Time in the same range as all of ``t``, known on the host; ``None`` without ranges."""


_TRIES = 10_000
"""Number of pilot draws outside an expert's range after which the expert is considered unreachable."""

Draw = Callable[[StepRandom, str, torch.dtype], Sequence[Tensor]]
"""Function of streams, purpose and dtype that draws one or several times per sample, each ``(B,)``."""


def draw_times(
    draw: Draw,
    random: StepRandom,
    purpose: str,
    dtype: torch.dtype,
    roles: Sequence[Sequence[Role]],
    trains: Role | None = None,
    bounds: Collection[float] = (),
) -> list[Times]:
    """Draw times by ``draw``, a pure function of streams and purpose, each in one range of the ``roles`` that are
    evaluated at it. Redraws are named ``PURPOSE/again_N``. ``trains`` is the role that trains at the last of the times,
    perhaps only some of its experts. ``bounds`` are times that divide ranges too: forwards that run only beyond them
    then run on every rank or on none. A plan takes the latest range, in which all of these forwards run."""
    if not bounds and not any(role.has_experts for group in roles for role in group):
        return [Times(t) for t in draw(random, purpose, dtype)]
    if not random.has_values:
        return [Times(t, at=1.0) for t in draw(random, purpose, dtype)]
    pilot, host = pilot_times(draw, random, purpose, trains), replace(random, device="cpu")
    wanted = [
        _ranges(torch.tensor([time], dtype=torch.float64), group, bounds)
        for time, group in zip(pilot, roles, strict=True)
    ]
    times = list(draw(host, purpose, dtype))
    for attempt in count(1):
        outside = torch.stack(
            [_ranges(t, group, bounds) != w for t, group, w in zip(times, roles, wanted, strict=True)]
        )
        again = outside.any(0)
        if not again.any():
            break
        drawn = draw(host, f"{purpose}/again_{attempt}", dtype)
        times = [torch.where(again, new, t) for new, t in zip(drawn, times, strict=True)]
    return [Times(t.to(random.device), at) for t, at in zip(times, pilot, strict=True)]


def pilot_times(draw: Draw, random: StepRandom, purpose: str, trains: Role | None = None) -> list[float]:
    """Draw the times that select the ranges of a part of the batch, the same on every rank and in every micro-batch."""
    for attempt in range(_TRIES):
        stream = f"{purpose}/range_{attempt}" if attempt else f"{purpose}/range"
        times = [float(t) for t in draw(random.shared, stream, torch.float64)]
        if trains is None or trains.trains_at(times[-1]):
            return times
    never = f"none of {_TRIES} draws of {purpose} is a time at which the chosen expert serves"
    raise UserError(f"{trains.name}.experts: {never}; use other times, or {trains.name}.experts=both")


def _ranges(t: Tensor, roles: Sequence[Role], bounds: Collection[float] = ()) -> Tensor:
    """Return the range of each of ``t`` ``(B,)`` between ``bounds`` and all boundaries of ``roles``, on the CPU."""
    from models.roles.role import ROUNDING

    t = t.double() + ROUNDING
    boundaries = {*bounds, *(boundary for role in roles for boundary in role.boundaries)}
    return sum(((t < boundary).long() for boundary in boundaries), torch.zeros(t.shape, dtype=torch.long))
