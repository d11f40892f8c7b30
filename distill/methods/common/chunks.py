"""Chunks of a causal role: draws per chunk, and the clean history.

Every draw is keyed by the chunk's position, so a longer clip begins with the draws of a shorter one. A bidirectional
role has one chunk, the whole clip, whose draws have no position in their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distill.methods.common.schedules import add_noise, same_time
from fsdp_cp.errors import UserError, shown
from fsdp_cp.rng import StepRandom
from models.causal import CausalSettings
from models.condition import Condition
from models.sample import VIDEO, PartShapes, Sample, part_name

if TYPE_CHECKING:
    from models.roles.role import Role

CausalRoles = Mapping[str, CausalSettings | None]
"""Causal settings by role; ``None`` for a bidirectional one."""


def draw_noise(
    random: StepRandom,
    purpose: str,
    shapes: PartShapes,
    shifts: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Sample:
    """Draw noise with parts of these ``shapes`` and ``shifts``, named ``PURPOSE`` or ``PURPOSE/PART``."""
    parts = {name: random.normal(part_name(purpose, name), shape, dtype) for name, shape in shapes.items()}
    return Sample(parts, shifts or {})


def noise_like(x: Sample, random: StepRandom, purpose: str) -> Sample:
    """Draw noise of the shapes, shifts and dtype of ``x``, as :func:`draw_noise`."""
    return draw_noise(random, purpose, x.shapes, x.shifts, x.dtype)


def noised(condition: Condition, random: StepRandom) -> Condition:
    """Draw the noise of given frames, ``condition/NAME``: once for all calls with the samples of ``random``."""
    return condition.with_noise(lambda name, shape: random.normal(f"condition/{name}", shape, condition.dtype))


def chunk_noise(
    role: Role, random: StepRandom, purpose: str, shapes: PartShapes, *clock_and_dtype: Any
) -> Iterator[Sample]:
    """Yield the noise of each chunk of ``role``, when asked for, like :func:`draw_noise`; chunk i of a causal role is
    named ``PURPOSE/i``. A bidirectional role gets the noise of the whole clip."""
    if role.causal is None:
        yield draw_noise(random, purpose, shapes, *clock_and_dtype)
        return
    channels, frames, *sizes = shapes[VIDEO]
    for i, count in enumerate(role.causal.chunks(frames)):
        yield draw_noise(random, f"{purpose}/{i}", {VIDEO: (channels, count, *sizes)}, *clock_and_dtype)


def chunk_draws(role: Role, frames: int, draw: Callable[[str], Tensor], purpose: str) -> Tensor:
    """Draw one number per chunk and sample by ``draw``, which gets a name, ``PURPOSE/i`` for chunk i, and returns
    ``(B,)``. Return it for each of T = ``frames`` latent frames, ``(B, T)``; for a bidirectional role ``(B,)``."""
    if role.causal is None:
        return draw(purpose)
    chunks = role.causal.chunks(frames)
    return torch.cat([draw(f"{purpose}/{i}")[:, None].expand(-1, count) for i, count in enumerate(chunks)], dim=1)


def chunk_integers(role: Role, frames: int, count: int, random: StepRandom, purpose: str) -> Tensor:
    """Draw an integer below ``count`` per chunk and sample, as :func:`chunk_draws`."""
    # Draw in fp64: fp32 could round a draw just below 1 up to 1.
    return chunk_draws(role, frames, lambda name: (count * random.uniform(name, torch.float64)).long(), purpose)


def split_chunks(role: Role, x: Sample) -> list[Sample]:
    """Return the chunks of ``x``; for a bidirectional role ``x`` alone."""
    if role.causal is None:
        return [x]
    return [Sample({VIDEO: chunk}) for chunk in x.video.split(role.causal.chunks(x.video.shape[2]), dim=2)]


def context_chunk(causal: CausalSettings, x0: Sample, random: StepRandom, purpose: str) -> Sample:
    """Return ``x0`` at the role's ``context_time``, with the noise ``purpose``."""
    if causal.context_time == 0:
        return x0
    return add_noise(x0, noise_like(x0, random, purpose), same_time(causal.context_time, x0))


def clean_history(role: Role, x0: Sample, random: StepRandom, purpose: str) -> Sample | None:
    """Return the clip ``x0`` as the clean half of teacher forcing sees it, chunk i at ``context_time`` with the noise
    ``PURPOSE/i``; ``None`` for a bidirectional role. The role replaces a given first frame."""
    if role.causal is None:
        return None
    parts = [context_chunk(role.causal, x, random, f"{purpose}/{i}") for i, x in enumerate(split_chunks(role, x0))]
    return Sample.cat(parts, dim=2)


def check_same_chunks(causal: CausalRoles) -> None:
    """Check that teacher (if any) and student see one history: both or neither causal, with equal chunks and time."""
    student = causal["student"] or CausalSettings()
    teacher = causal.get("teacher", student) or CausalSettings()
    for name, theirs, ours in (
        ("chunk", teacher.chunk, student.chunk),
        ("first_chunk", teacher.first_chunk or teacher.chunk, student.first_chunk or student.chunk),
        ("context_time", teacher.context_time, student.context_time),
    ):
        if theirs != ours:
            differ = f"student.causal.{name}={shown(ours)} and teacher.causal.{name}={shown(theirs)}"
            raise UserError(f"{differ}: both see the same history; use the same value")
