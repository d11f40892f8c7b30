"""Chunks of a causal role: draws per chunk, and the noise on the history.

Every draw is keyed by the chunk's position, so a longer clip begins with the draws of a shorter one. A bidirectional
role has one chunk, the whole clip, whose draws have no position in their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distill.methods.common.schedules import add_noise
from fsdp_cp.rng import StepRandom

if TYPE_CHECKING:
    from models.causal import CausalSettings
    from models.roles.role import Role


def chunk_noise(
    role: Role, random: StepRandom, purpose: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """Yield the noise of each chunk of ``role``, ``(B, C, frames of the chunk, H, W)``, drawn when it is asked for.

    Args:
        role: the role; a bidirectional one gets the noise of the whole clip.
        random: random streams of the B samples.
        purpose: name of the draws: chunk i of a causal role has ``PURPOSE/i``.
        shape: ``(C, T, H, W)`` of a sample.
        dtype: dtype of the noise.
    """
    if role.causal is None:
        yield random.normal(purpose, shape, dtype)
        return
    channels, frames, *sizes = shape
    for i, count in enumerate(role.causal.chunks(frames)):
        yield random.normal(f"{purpose}/{i}", (channels, count, *sizes), dtype)


def chunk_times(causal: CausalSettings, frames: int, draw: Callable[[str], Tensor], purpose: str) -> Tensor:
    """Draw one time per chunk and sample, and return the times of the latent frames, ``(B, T)``.

    Args:
        causal: settings of the role.
        frames: number of latent frames, T.
        draw: draws the times ``(B,)`` of one chunk by name.
        purpose: name of the draws: chunk i has ``PURPOSE/i``.
    """
    chunks = causal.chunks(frames)
    times = [draw(f"{purpose}/{i}")[:, None].expand(-1, count) for i, count in enumerate(chunks)]
    return torch.cat(times, dim=1)


def context_chunk(causal: CausalSettings, x0: Tensor, random: StepRandom, purpose: str) -> Tensor:
    """Return ``x0`` ``(B, C, T, H, W)`` at the role's ``context_time``, with the noise ``purpose``."""
    if causal.context_time == 0:
        return x0
    noise = random.normal(purpose, x0.shape[1:], x0.dtype)
    return add_noise(x0, noise, x0.new_full((len(x0),), causal.context_time))


def context_frames(causal: CausalSettings, x0: Tensor, random: StepRandom, purpose: str) -> Tensor:
    """Return the clip ``x0`` as the clean half of teacher forcing sees it: chunk by chunk at ``context_time``.

    Chunk i has the noise ``PURPOSE/i``. The role replaces a first frame that the condition gives.
    """
    parts = x0.split(causal.chunks(x0.shape[2]), dim=2)
    return torch.cat([context_chunk(causal, part, random, f"{purpose}/{i}") for i, part in enumerate(parts)], dim=2)
