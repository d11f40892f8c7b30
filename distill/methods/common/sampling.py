"""Samplers: Euler and UniPC for a teacher with guidance; re-noising and ODE steps for a few-step student."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from distill.methods.base import Guidance, guided_velocity
from distill.methods.common.expert_times import Times
from distill.methods.common.schedules import add_noise, denoise, euler_times, per_sample
from fsdp_cp.rng import StepRandom
from models.roles.condition import Condition

if TYPE_CHECKING:
    from models.roles.role import Role

Sampler = Literal["euler", "unipc"]
"""Samplers of a teacher."""
StudentSampler = Literal["renoise", "ode"]


def guided_sample(
    role: Role,
    noise: Tensor,
    condition: Condition,
    *,
    sampler: Sampler,
    steps: int,
    shift: float,
    scale: Guidance,
) -> Tensor:
    """Sample clean latents from ``noise`` along the guided velocity.

    Args:
        role: the network.
        noise: ``(B, C, T, H, W)``.
        condition: conditions of the B samples.
        sampler: ``euler`` or ``unipc``.
        steps: number of network calls.
        shift: time shift.
        scale: guidance ``w``.
    """
    if sampler == "unipc":
        return unipc_sample(role, noise, condition, steps=steps, shift=shift, scale=scale)
    return euler_sample(role, noise, condition, times=euler_times(steps, shift), scale=scale)


@torch.no_grad()
def euler_sample(role: Role, noise: Tensor, condition: Condition, *, times: list[float], scale: Guidance) -> Tensor:
    """Integrate the guided velocity by Euler's method from ``times[0]`` to ``times[-1]`` (1 to 0 for a sample).

    Args:
        role: the network.
        noise: state at ``times[0]``, ``(B, C, T, H, W)``.
        condition: conditions of the B samples.
        times: descending times, one more than the steps.
        scale: guidance ``w``.
    """
    x = noise
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        v = guided_velocity(role, x, torch.full((len(x),), t, dtype=x.dtype, device=x.device), condition, scale, t)
        x = x + (t_next - t) * v
    return x


def sample_with_states(
    role: Role,
    noise: Tensor,
    condition: Condition,
    *,
    states: Sequence[float],
    steps: int,
    shift: float,
    scale: Guidance,
) -> tuple[Tensor, Tensor]:
    """Sample by Euler's method; return the states at some times, and the clean latents.

    Args:
        role: the network.
        noise: ``(B, C, T, H, W)``.
        condition: conditions of the B samples.
        states: K times in (0, 1], descending; they are added to the times of the steps.
        steps: number of steps without them.
        shift: time shift.
        scale: guidance ``w``.

    Returns:
        States ``(B, K, C, T, H, W)`` and clean latents ``(B, C, T, H, W)``.
    """
    times = sorted({*euler_times(steps, shift), *states}, reverse=True)
    x, kept = noise, []
    for start, end in pairwise(sorted({1.0, *states, 0.0}, reverse=True)):
        if start in states:
            kept.append(x)
        part = [time for time in times if end <= time <= start]
        x = euler_sample(role, x, condition, times=part, scale=scale)
    return torch.stack(kept, dim=1), x


@torch.no_grad()
def unipc_sample(
    role: Role, noise: Tensor, condition: Condition, *, steps: int, shift: float, scale: Guidance
) -> Tensor:
    """Sample by UniPC of order 2 (Zhao et al. 2023, arXiv:2302.04867, algorithms 5 to 8).

    This uses diffusers' scheduler with Wan's settings, but calls the network at the exact time of its state, as in
    training. diffusers' pipelines truncate ``1000 t`` to an integer for the network. On Gaussians, truncation keeps the
    error above about 0.1% for any number of steps; with exact times it keeps falling (tests/unit/test_samplers.py).

    Args:
        role: the network.
        noise: ``(B, C, T, H, W)``.
        condition: conditions of the B samples.
        steps: number of network calls.
        shift: time shift; Wan: 3 at 480p, 5 at 720p.
        scale: guidance ``w``.
    """
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)  # otherwise steps are looked up by their integer times, which may repeat
    x = noise
    for t, timestep in zip(scheduler.sigmas[:-1].tolist(), scheduler.timesteps, strict=True):
        v = guided_velocity(role, x, torch.full((len(x),), t, dtype=x.dtype, device=x.device), condition, scale, t)
        x = scheduler.step(v, timestep, x).prev_sample
    return x


def rollout(
    student: Role,
    noise: Tensor,
    condition: Condition,
    times: Sequence[float | Times],
    random: StepRandom,
    purpose: str,
    *,
    sampler: str,
) -> Tensor:
    """Sample the few-step student: denoise, move to the next time, and repeat.

    Only the last step has a gradient, if gradients are enabled (backward simulation, Yin et al. 2024b, section 4.5).

    Args:
        student: the network; its last ``x0`` is the sample.
        noise: ``(B, C, T, H, W)``; the first input is the noise times the first time.
        condition: conditions of the B samples.
        times: rectified-flow times, descending, above 0. Each is a number for all samples, or one per sample in the
            dtype of ``noise``.
        random: random streams of the fresh noise.
        purpose: name of the draws: the k-th fresh noise is ``PURPOSE_k``.
        sampler: step to the next time ``t'``: ``renoise`` is ``(1 - t') x0 + t' e`` with fresh noise ``e`` (DMD2);
            ``ode`` is ``x0 + t' v``, Euler's step along the student's velocity (FastGen).
    """
    assert sampler in get_args(StudentSampler), sampler
    steps = [
        time
        if isinstance(time, Times)
        else Times(torch.full((len(noise),), time, dtype=noise.dtype, device=noise.device), time)
        for time in times
    ]
    x = per_sample(steps[0].t, noise) * noise
    for k, (t, at) in enumerate(steps):
        with torch.set_grad_enabled(torch.is_grad_enabled() and k == len(times) - 1):
            v = student.velocity(x, t, condition, at=at)
            x0 = denoise(x, v, t)
        if k == len(times) - 1:
            break
        if sampler == "ode":
            x = x0 + per_sample(steps[k + 1].t, v) * v
        else:
            x = add_noise(x0, random.normal(f"{purpose}_{k + 1}", x.shape[1:], x.dtype), steps[k + 1].t)
    return x0
