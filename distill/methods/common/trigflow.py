"""TrigFlow (Lu & Song 2024, arXiv:2410.11081, section 3) on a rectified-flow network, without retraining it.

``x_t = cos(t) x0 + sin(t) e`` with ``t`` in [0, pi/2]; dividing by ``k = cos t + sin t`` gives the rectified-flow
state at time ``sin(t) / k``. x, e, v, F are samples, whose parts all have the time t: ``(B,)``, or ``(B, T)`` for a
time per latent frame, fp32 or better.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distill.methods.base import Guidance, guided_velocity
from distill.methods.common.schedules import per_sample
from models.condition import Condition
from models.sample import Sample

if TYPE_CHECKING:
    from models.roles.role import Role


def add_trig_noise(x0: Sample, noise: Sample, t: Tensor) -> Sample:
    """Return ``x_t = cos(t) x0 + sin(t) e``."""
    return per_sample(torch.cos(t), x0) * x0 + per_sample(torch.sin(t), x0) * noise


def flow_time(t: Tensor) -> Tensor:
    """Return the rectified-flow time ``sin t / (cos t + sin t)`` of the TrigFlow time ``t``."""
    return torch.sin(t) / (torch.cos(t) + torch.sin(t))


def flow_time_of(t: float) -> float:
    """Return :func:`flow_time` of a Python number."""
    return math.sin(t) / (math.cos(t) + math.sin(t))


def trig_field(
    role: Role,
    x: Sample,
    t: Tensor,
    condition: Condition,
    guidance: Guidance = 1.0,
    at: float | None = None,
    *,
    clean: Sample | None = None,
) -> Sample:
    """Return TrigFlow's field ``F = ((cos t - sin t) x_t + v) / k``, ``dx_t/dt`` along the network's trajectory,
    without 0/0 at ``t -> 0``. ``at`` and ``clean`` are a rectified-flow time and state
    (:meth:`models.roles.role.Role.velocity`)."""
    k = per_sample(torch.cos(t) + torch.sin(t), x)
    v = guided_velocity(role, x / k, flow_time(t), condition, guidance, at, clean=clean)
    return (per_sample(torch.cos(t) - torch.sin(t), x) * x + v) / k


def trig_denoise(x: Sample, field: Sample, t: Tensor) -> Sample:
    """Return ``x0 = cos(t) x_t - sin(t) F``."""
    return per_sample(torch.cos(t), x) * x - per_sample(torch.sin(t), x) * field
