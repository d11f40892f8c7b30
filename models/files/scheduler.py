"""Diffusers scheduler that lets a standard pipeline sample a few-step student at its trained times.

A student that denoises and re-noises at the times ``t_1 = 1 > ... > t_n``, ``x <- (1 - t_{k+1}) x0 + t_{k+1} e'``, is
``FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)`` in diffusers; otherwise the same scheduler takes Euler
steps ``x <- x + (t_{k+1} - t_k) v``. A saved scheduler does not store a list of times. It stores a ``shift`` and a
``shift_terminal``, from which it computes the times for ``n`` steps: evenly spaced from 1 (or as the pipeline passes
them), shifted, then stretched to end at ``shift_terminal``. It represents every shifted evenly spaced list exactly, and
other lists approximately or not at all. A pipeline of two experts chooses one by comparing the scheduler's time with
the boundary, so a time near it must not move across it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_cp.errors import UserError

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler

TOLERANCE = 1e-3
"""Maximum difference from a trained time: one of the 1000 steps into which diffusers divides time."""

_SHIFTS = (0.01, 30.0)
"""Range in which each time grows with the shift. Far above it, diffusers' minimum time of 1/1000 is shifted up too."""
_MARGIN = 1e-5
"""Distance that the scheduler's times keep from a boundary, so that no rounding crosses it."""
_CROSSING = 1000.0
"""Weight of a time's distance from its expert's range: crossing costs more than ``TOLERANCE``."""


def few_step_scheduler(
    times: list[float],
    *,
    stochastic: bool,
    sigmas: list[float] | None = None,
    boundaries: Sequence[float] = (),
    experts: Sequence[int] = (),
) -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler whose ``len(times)`` steps are nearest to ``times``, each within ``TOLERANCE``.

    Each step stays on the side of the ``boundaries`` between the student's experts on which it was trained: ``experts``
    are the positions of the experts of ``times``, which descend and are above 0. With ``stochastic``, steps re-noise;
    otherwise they are Euler steps. ``sigmas`` are the times that the pipeline passes to the scheduler, if any.
    """

    from diffusers import FlowMatchEulerDiscreteScheduler

    def inside(time: float, expert: int) -> float:
        """Return the time nearest to ``time`` that ``expert`` serves."""
        high = boundaries[expert - 1] - _MARGIN if expert else 1.0
        low = boundaries[expert] + _MARGIN if expert < len(boundaries) else 0.0
        return min(max(time, low), high)

    experts = experts or [0] * len(times)
    # Do not stretch a list of one time: the factor would be 0/0.
    terminal = inside(times[-1], experts[-1]) if len(times) > 1 else None

    def with_shift(shift: float) -> tuple[FlowMatchEulerDiscreteScheduler, float]:
        """Return the scheduler and its greatest distance from a trained time, far more where another expert serves."""
        options = {"shift": shift, "shift_terminal": terminal, "stochastic_sampling": stochastic}
        scheduler = FlowMatchEulerDiscreteScheduler(**options)
        scheduler.set_timesteps(len(times), sigmas=sigmas)
        steps = scheduler.sigmas[:-1].tolist()
        crossed = max(abs(time - inside(time, expert)) for time, expert in zip(steps, experts, strict=True))
        return scheduler, max(abs(a - b) for a, b in zip(steps, times, strict=True)) + _CROSSING * crossed

    shift = 1.0
    if len(times) > 2:  # with two, the shift changes nothing
        from scipy.optimize import minimize_scalar

        # Each time grows with the shift, so the greatest distance has one minimum.
        bounds, options = tuple(map(math.log, _SHIFTS)), {"xatol": 1e-9}
        nearest = minimize_scalar(
            lambda x: with_shift(math.exp(x))[1], bounds=bounds, method="bounded", options=options
        )
        shift = math.exp(nearest.x)
    scheduler, off = with_shift(round(shift, 6))
    if off > TOLERANCE:
        raise UserError(
            f"diffusers has no scheduler for a student with the times {', '.join(f'{t:.6g}' for t in times)}"
            f" (the nearest is off by {off:.2g}); pass them as sigmas= to a plain one, as the card of the export does"
        )
    return scheduler
