"""Samplers: Euler and UniPC for a teacher with guidance; re-noising and ODE steps for a few-step student.

A causal role is sampled chunk by chunk: a chunk's samplers see the finished chunks through the role's K/V cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from distill.methods.base import Guidance, guided_velocity, scale_at
from distill.methods.common.chunks import context_chunk
from distill.methods.common.expert_times import Times
from distill.methods.common.schedules import add_noise, denoise, euler_times, per_sample
from fsdp_cp.rng import StepRandom
from models.roles.condition import FIRST_FRAME, Condition

if TYPE_CHECKING:
    from models.roles.role import Role

Sampler = Literal["euler", "unipc"]
"""Samplers of a teacher."""
StudentSampler = Literal["renoise", "ode"]
Velocity = Callable[[Tensor, float], Tensor]
"""Velocity of a state ``(B, C, T, H, W)`` at a time that all samples share."""


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
    return integrate(guided(role, condition, scale), noise, sampler=sampler, steps=steps, shift=shift)[-1]


def guided(role: Role, condition: Condition, scale: Guidance) -> Velocity:
    """Return the velocity of ``role`` for the B samples of ``condition``, with guidance ``w = scale``."""

    def velocity(x: Tensor, t: float) -> Tensor:
        return guided_velocity(role, x, torch.full((len(x),), t, dtype=x.dtype, device=x.device), condition, scale, t)

    return velocity


def guided_chunks(
    role: Role,
    noise: Iterable[Tensor],
    condition: Condition,
    random: StepRandom,
    *,
    sampler: Sampler,
    steps: int,
    shift: float,
    scale: float,
) -> Iterator[Tensor]:
    """Sample a role chunk by chunk as :func:`guided_states` does. Yield the clean latents of each chunk."""
    sampling = {"sampler": sampler, "steps": steps, "shift": shift, "scale": scale}
    return (chunk[-1] for chunk in guided_states(role, noise, condition, random, **sampling))


@torch.no_grad()
def guided_states(
    role: Role,
    noise: Iterable[Tensor],
    condition: Condition,
    random: StepRandom,
    *,
    sampler: Sampler,
    steps: int,
    shift: float,
    scale: Guidance,
    states: Sequence[float] = (),
) -> Iterator[list[Tensor]]:
    """Sample a role along the guided velocity, one chunk after another. A chunk is yielded once it is finished.

    With guidance, the caches of the two branches are the two halves of one batch, so that each step is one network
    call. A first frame in the condition is the first chunk, which the new cache holds already; its states lie on the
    line from its noise.

    Args:
        role: the role; a bidirectional one has one chunk, the whole clip.
        noise: ``(B, C, frames of the chunk, H, W)`` for each chunk; read when the chunk begins.
        condition: conditions of the B samples.
        random: random streams of the noise on finished chunks, ``sample/context/CHUNK``, if the role caches them at a
            ``context_time`` above 0.
        sampler: ``euler`` or ``unipc``.
        steps: number of network calls per chunk. One more call adds a finished chunk to the cache.
        shift: time shift.
        scale: guidance ``w``.
        states: as for :func:`integrate`.

    Yields:
        States of the next chunk and its clean latents, each in the shape of its noise.
    """
    how: dict[str, Any] = {"sampler": sampler, "steps": steps, "shift": shift, "states": states}
    if role.causal is None:
        for x in noise:
            yield integrate(guided(role, condition, scale), x, **how)
        return
    w = scale_at(role, scale, None)
    branches = [condition] if w == 1.0 else [condition, condition.null]
    cache = role.cache(Condition.cat(branches))

    def velocity(x: Tensor, t: float) -> Tensor:
        times = torch.full((len(branches) * len(x),), t, dtype=x.dtype, device=x.device)
        v = role.chunk_velocity(x.repeat(len(branches), 1, 1, 1, 1), times, cache)
        if w == 1.0:
            return v
        conditional, unconditional = v.chunk(2)
        return unconditional + w * (conditional - unconditional)

    given, finished = condition.tensors.get(FIRST_FRAME), None
    for i, x in enumerate(noise):
        if i == 0 and given is not None:
            frame = given.to(x.dtype)
            yield [add_noise(frame, x, x.new_full((len(x),), t)) for t in (*states, 0.0)]
            continue
        if finished is not None:
            cache = cache.with_chunk(finished.repeat(len(branches), 1, 1, 1, 1))
        chunk = integrate(velocity, x, **how)
        finished = context_chunk(role.causal, chunk[-1], random, f"sample/context/{i}")
        yield chunk


@torch.no_grad()
def integrate(
    velocity: Velocity, noise: Tensor, *, sampler: Sampler, steps: int, shift: float, states: Sequence[float] = ()
) -> list[Tensor]:
    """Follow ``velocity`` from time 1 to time 0; return the states at some times, and last the clean latents.

    Args:
        velocity: velocity of a state at a time.
        noise: ``(B, C, T, H, W)``.
        sampler: ``euler`` or ``unipc``; with ``states``, ``euler``.
        steps: number of steps without ``states``.
        shift: time shift.
        states: times in (0, 1], descending; they are added to the times of the steps.
    """
    if sampler == "unipc":
        assert not states, "UniPC's steps depend on each other"
        return [unipc_sample(velocity, noise, steps=steps, shift=shift)]
    times, x, kept = sorted({*euler_times(steps, shift), *states}, reverse=True), noise, []
    for t, t_next in pairwise(times):
        if t in states:
            kept.append(x)
        x = x + (t_next - t) * velocity(x, t)
    return [*kept, x]


@torch.no_grad()
def unipc_sample(velocity: Velocity, noise: Tensor, *, steps: int, shift: float) -> Tensor:
    """Sample by UniPC of order 2 (Zhao et al. 2023, arXiv:2302.04867, algorithms 5 to 8).

    This uses diffusers' scheduler with Wan's settings, but calls the network at the exact time of its state, as in
    training. diffusers' pipelines truncate ``1000 t`` to an integer for the network. On Gaussians, truncation keeps the
    error above about 0.1% for any number of steps; with exact times it keeps falling (tests/unit/test_samplers.py).

    Args:
        velocity: velocity of a state at a time.
        noise: ``(B, C, T, H, W)``.
        steps: number of network calls.
        shift: time shift; Wan: 3 at 480p, 5 at 720p.
    """
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)  # otherwise steps are looked up by their integer times, which may repeat
    x = noise
    for t, timestep in zip(scheduler.sigmas[:-1].tolist(), scheduler.timesteps, strict=True):
        x = scheduler.step(velocity(x, t), timestep, x).prev_sample
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
