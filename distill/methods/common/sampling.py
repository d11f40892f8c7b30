"""Samplers: Euler and UniPC along a teacher's guided velocity; a student's few steps, re-noised or along its ODE."""

from __future__ import annotations

from collections.abc import Sequence
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
"""Of a teacher."""
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
    """Clean latents from ``noise`` along the guided velocity, as a teacher is sampled.

    Args:
        role: the network.
        noise: ``(B, C, T, H, W)``.
        condition: of the B samples.
        sampler: which.
        steps: calls of the network.
        shift: of the times.
        scale: guidance ``w``.
    """
    if sampler == "unipc":
        return unipc_sample(role, noise, condition, steps=steps, shift=shift, scale=scale)
    return euler_sample(role, noise, condition, times=euler_times(steps, shift), scale=scale)


@torch.no_grad()
def euler_sample(role: Role, noise: Tensor, condition: Condition, *, times: list[float], scale: Guidance) -> Tensor:
    """Euler's method along the guided velocity, from ``times[0]`` to ``times[-1]``: 1 to 0 for a sample.

    Args:
        role: the network.
        noise: ``(B, C, T, H, W)``.
        condition: of the B samples.
        times: descending, one more than the steps.
        scale: guidance ``w``.
    """
    x = noise
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        v = guided_velocity(role, x, torch.full((len(x),), t, dtype=x.dtype, device=x.device), condition, scale, t)
        x = x + (t_next - t) * v
    return x


@torch.no_grad()
def unipc_sample(
    role: Role, noise: Tensor, condition: Condition, *, steps: int, shift: float, scale: Guidance
) -> Tensor:
    """UniPC of order 2 (Zhao et al. 2023, arXiv:2302.04867, algorithms 5 to 8): diffusers' scheduler, set as Wan's is.

    The network is called at the exact time of its state, as in training. diffusers' own loop truncates ``1000 t`` to an
    integer for the network alone. On Gaussians that puts a floor of about 0.1% under the error, however many steps are
    taken; with exact times the error keeps falling (tests/unit/test_samplers.py).

    Args:
        role: the network.
        noise: ``(B, C, T, H, W)``.
        condition: of the B samples.
        steps: calls of the network.
        shift: of the times; Wan: 3 at 480p, 5 at 720p.
        scale: guidance ``w``.
    """
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)  # or the step would be looked up by its time, and equal integers are two steps
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
    """The few-step student's sample: denoise, go to the next time, denoise again.

    The last step carries a gradient where gradients are enabled, the ones before never do (backward simulation, Yin et
    al. 2024b, section 4.5).

    Args:
        student: the network; its ``x0`` is the sample.
        noise: ``(B, C, T, H, W)``; the first input is it times the first time.
        condition: of the B samples.
        times: of rectified flow, descending, above 0; one for all samples, or for each in the dtype of ``noise``.
        random: of the fresh noise.
        purpose: of the draws: the k-th fresh noise is ``PURPOSE_k``.
        sampler: how the next time is reached: ``renoise``, ``(1 - t') x0 + t' e`` with fresh noise ``e`` (DMD2), or
            ``ode``, ``x0 + t' v``, which is Euler's step along the student's own velocity (as in FastGen).
    """
    assert sampler in get_args(StudentSampler), sampler
    each = [
        time
        if isinstance(time, Times)
        else Times(torch.full((len(noise),), time, dtype=noise.dtype, device=noise.device), time)
        for time in times
    ]
    x = per_sample(each[0].t, noise) * noise
    for k, (t, at) in enumerate(each):
        with torch.set_grad_enabled(torch.is_grad_enabled() and k == len(times) - 1):
            v = student.velocity(x, t, condition, at=at)
            x0 = denoise(x, v, t)
        if k == len(times) - 1:
            break
        if sampler == "ode":
            x = x0 + per_sample(each[k + 1].t, v) * v
        else:
            x = add_noise(x0, random.normal(f"{purpose}_{k + 1}", x.shape[1:], x.dtype), each[k + 1].t)
    return x0
