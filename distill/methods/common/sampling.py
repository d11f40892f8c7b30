"""Samplers: Euler and UniPC for a teacher with guidance; re-noising and ODE steps for a few-step student."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from distill.methods.base import Guidance, guidance_at, guide, guided_velocity, is_guided
from distill.methods.common.chunks import context_chunk, noise_like
from distill.methods.common.expert_times import Times
from distill.methods.common.schedules import add_noise, denoise, euler_times, part_times, same_time
from fsdp_cp.rng import StepRandom
from models.condition import FIRST_FRAME, Condition
from models.roles.history import Cache
from models.sample import VIDEO, Sample

if TYPE_CHECKING:
    from models.roles.role import Role

Sampler = Literal["euler", "unipc"]
"""Samplers of a teacher."""
StudentSampler = Literal["renoise", "ode"]
Velocity = Callable[[Sample, float], Sample]
"""Velocity of a state at a time that all samples share."""


def guided(role: Role, condition: Condition, guidance: Guidance) -> Velocity:
    """Return the velocity of ``role`` for the B samples of ``condition``, with the scale ``guidance``."""

    def velocity(x: Sample, t: float) -> Sample:
        return guided_velocity(role, x, _for_all(t, x).t, condition, guidance, t)

    return velocity


def guided_states(
    role: Role,
    noise: Iterable[Sample],
    condition: Condition,
    random: StepRandom,
    sampler: Sampler,
    steps: int,
    shift: float,
    guidance: Guidance,
    states: Sequence[float] = (),
) -> Iterator[list[Sample]]:
    """Sample a role along the guided velocity, chunk by chunk (:func:`by_chunks`), and yield the results of
    :func:`integrate`. With guidance, the caches of both branches are halves of one batch: a chunk takes ``steps``
    network calls, and one more to enter the cache."""
    how: dict[str, Any] = {"sampler": sampler, "steps": steps, "shift": shift, "states": states}
    if role.causal is None:
        return (integrate(guided(role, condition, guidance), x, **how) for x in noise)
    w = guidance_at(role, guidance, None)
    branches = [condition, condition.null] if is_guided(w) else [condition]

    def sample(_: int, noise: Sample, cache: Cache) -> list[Sample]:
        def velocity(x: Sample, t: float) -> Sample:
            both = Sample.cat([x] * len(branches))
            v = role.chunk_velocity(both, _for_all(t, both).t, cache)
            return guide(v, w) if is_guided(w) else v

        return integrate(velocity, noise, **how)

    return by_chunks(role.cache(Condition.cat(branches)), noise, random, "sample/context", sample, states)


@torch.no_grad()
def by_chunks(
    cache: Cache,
    noise: Iterable[Sample],
    random: StepRandom,
    purpose: str,
    sample: Callable[[int, Sample, Cache], list[Sample]],
    states: Sequence[float] = (),
) -> Iterator[list[Sample]]:
    """Sample a causal role chunk by chunk, without gradient; yield each once it is finished.

    A finished chunk enters ``cache`` (of the B samples, or of several branches of them) when the next begins, with the
    noise ``PURPOSE/i`` for a ``context_time`` above 0. A first frame in the condition is the first chunk, cached
    already; its states lie on the line from its noise. ``sample`` gets a chunk's number, noise and cache, and returns
    its ``states``, and last its clean latents.
    """
    causal, finished = cache.role.causal, None
    frame = cache.condition.tensors.get(FIRST_FRAME)
    for i, x in enumerate(noise):
        if i == 0 and frame is not None:
            x0 = Sample({VIDEO: frame[: len(x)].to(x.dtype)})
            yield [add_noise(x0, x, _for_all(t, x).t) for t in (*states, 0.0)]
            continue
        if finished is not None:
            cache = cache.with_chunk(Sample.cat([finished] * (len(cache.condition) // len(x))))
        chunk = sample(i, x, cache)
        finished = context_chunk(causal, chunk[-1], random, f"{purpose}/{i}")
        yield chunk


@torch.no_grad()
def integrate(
    velocity: Velocity, noise: Sample, *, sampler: Sampler, steps: int, shift: float, states: Sequence[float] = ()
) -> list[Sample]:
    """Follow ``velocity`` from time 1 to 0; return the states at ``states``, descending in (0, 1], and last the clean
    latents. ``shift`` is that of the video's times. Only ``euler`` takes states, and adds their times."""
    if sampler == "unipc":
        assert not states, "UniPC's steps depend on each other"
        return [unipc_sample(velocity, noise, steps=steps, shift=shift)]
    times, x, kept = sorted({*euler_times(steps, shift), *states}, reverse=True), noise, []
    for t, t_next in pairwise(times):
        if t in states:
            kept.append(x)
        x = x + velocity(x, t) * {part: x.time(part, t_next) - x.time(part, t) for part in x.parts}
    return [*kept, x]


@torch.no_grad()
def unipc_sample(velocity: Velocity, noise: Sample, *, steps: int, shift: float) -> Sample:
    """Sample by UniPC of order 2 (Zhao et al. 2023, arXiv:2302.04867, algorithms 5 to 8) in ``steps`` network calls, by
    diffusers' scheduler with Wan's settings, but at the exact time of each state, as in training. diffusers' pipelines
    truncate ``1000 t`` to an integer, which on Gaussians keeps the error above about 0.1% for any number of steps; with
    exact times it keeps falling (tests/unit/test_samplers.py)."""
    from diffusers import UniPCMultistepScheduler

    def scheduler(part: str) -> UniPCMultistepScheduler:
        kind = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        made = UniPCMultistepScheduler(**kind, flow_shift=shift * noise.shift(part))  # shifts compose
        made.set_timesteps(steps)
        made.set_begin_index(0)  # otherwise steps are looked up by their integer times, which may repeat
        return made

    schedulers = {part: scheduler(part) for part in noise.parts}
    x = noise
    for i, t in enumerate(schedulers[VIDEO].sigmas[:-1].tolist()):
        x = velocity(x, t).map(lambda v, x, s, i=i: s.step(v, s.timesteps[i], x).prev_sample, x, schedulers)
    return x


class Line(NamedTuple):
    """Straight line of a step: the student's estimate of the clean sample, and its velocity."""

    x0: Sample
    v: Sample

    def at(self, time: float) -> Sample:
        """Return the point of the line at ``time``, that of the video; at 1 its noise."""
        return self.x0 + self.v * {part: self.v.time(part, time) for part in self.v.parts}


def rollout(
    student: Role,
    noise: Sample,
    condition: Condition,
    times: Sequence[float | Times],
    random: StepRandom,
    purpose: str,
    *,
    sampler: StudentSampler,
) -> Line:
    """Sample the few-step student: denoise, move to the next time, and repeat. Return its last step, which alone has a
    gradient, if enabled (backward simulation, Yin et al. 2024b, section 4.5). The ``times`` descend and are above 0,
    each for all samples or one per sample in the dtype of ``noise``; the rest is as in :func:`last_input`."""
    steps = [time if isinstance(time, Times) else _for_all(time, noise) for time in times]

    def velocity(x: Sample, step: Times) -> Sample:
        return student.velocity(x, step.t, condition, at=step.at)

    x = last_input(velocity, noise, steps, random, purpose, sampler=sampler)
    v = velocity(x, steps[-1])
    return Line(denoise(x, v, steps[-1].t), v)


@torch.no_grad()
def last_input(
    velocity: Callable[[Sample, Times], Sample],
    noise: Sample,
    steps: Sequence[Times],
    random: StepRandom,
    purpose: str,
    *,
    sampler: StudentSampler,
) -> Sample:
    """Return the input ``x_t`` of the last of a few-step student's ``steps``, without gradient. The first is the noise
    times the first time. The step to the next time ``t'`` is ``(1 - t') x0 + t' e`` with fresh noise ``e``, the k-th
    named ``PURPOSE_k`` (``renoise``, DMD2), or ``x0 + t' v``, Euler's along its velocity (``ode``, FastGen)."""
    x = part_times(steps[0].t, noise) * noise
    for k, (step, (next_t, _)) in enumerate(pairwise(steps), start=1):
        v = velocity(x, step)
        x0 = denoise(x, v, step.t)
        if sampler == "ode":
            x = x0 + part_times(next_t, v) * v
        else:
            x = add_noise(x0, noise_like(x, random, f"{purpose}_{k}"), next_t)
    return x


class LastStep(NamedTuple):
    """Last step of a chunk, with input ``x_t``, times ``(B,)`` and earlier chunks, to compute again with a gradient."""

    x: Sample
    t: Tensor
    cache: Cache

    def x0(self) -> Sample:
        """Return the student's prediction, which is the chunk. Its graph reaches the network, not the cache."""
        return denoise(self.x, self.cache.role.chunk_velocity(self.x, self.t, self.cache), self.t)


def rollout_chunks(
    student: Role,
    noise: Iterable[Sample],
    condition: Condition,
    times: Callable[[int], Sequence[float]],
    random: StepRandom,
    purpose: str,
    *,
    sampler: StudentSampler,
    last_steps: list[LastStep] | None = None,
) -> Iterator[Sample]:
    """Sample a causal few-step student by :func:`by_chunks`, each chunk as :func:`rollout` samples a clip, at ``times``
    of its number. The k-th fresh noise of chunk i is named ``PURPOSE/renoise/i_k``, that on its finished latents
    ``PURPOSE/context/i``. ``last_steps`` receives the last step of each."""

    def sample(i: int, noise: Sample, cache: Cache) -> list[Sample]:
        def velocity(x: Sample, step: Times) -> Sample:
            return student.chunk_velocity(x, step.t, cache)

        steps = [_for_all(time, noise) for time in times(i)]
        x = last_input(velocity, noise, steps, random, f"{purpose}/renoise/{i}", sampler=sampler)
        last = LastStep(x, steps[-1].t, cache)
        if last_steps is not None:
            last_steps.append(last)
        return [last.x0()]

    cache = student.cache(condition, training=last_steps is not None)
    return (x0 for (x0,) in by_chunks(cache, noise, random, f"{purpose}/context", sample))


def _for_all(time: float, noise: Sample) -> Times:
    return Times(same_time(time, noise), time)
