"""What a method is: which roles it needs, which one trains at a step, and its losses on full latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fsdp_cp.rng import StepRandom
from models.role import Role


@dataclass(kw_only=True, frozen=True, slots=True)
class Batch:
    """One micro-batch of this rank; the same on all ranks of a ``cp`` group."""

    latents: Tensor
    """``(B, C, T, H, W)``, about unit scale."""
    text: Tensor
    """Caption embeddings, ``(B, L, D)``."""
    null_text: Tensor
    """Embedding of the empty or negative caption, ``(L, D)``."""

    def null_like_text(self) -> Tensor:
        """``null_text`` for every sample, ``(B, L, D)``."""
        return self.null_text.expand_as(self.text)


class Loss(NamedTuple):
    """One loss of a micro-batch. ``closure`` does all of the work and returns the mean over the micro-batch."""

    name: str
    closure: Callable[[], Tensor]
    weight: float


class Method(ABC):
    """Base of the methods; ``roles`` are on full latents, whatever the mesh."""

    required_roles: ClassVar[tuple[str, ...]]
    """In the order in which they are built."""
    trained_roles: ClassVar[tuple[str, ...]]
    first_role: ClassVar[str] = "student"
    """The role whose forward is the first of every step."""

    def __init__(self, settings, roles: Mapping[str, Role]):
        self.settings = settings
        self.roles = roles

    @abstractmethod
    def trained_role(self, step: int) -> str:
        """The one role that trains at ``step`` (0-based), the same on every rank."""

    @abstractmethod
    def losses(self, step: int, batch: Batch, random: StepRandom) -> Iterator[Loss]:
        """The losses of the role that trains at ``step``, lazily: each gets its own backward, which frees its graph."""

    @abstractmethod
    def evaluations(self, role: str, steps: int) -> int:
        """Network evaluations that :meth:`generate` takes for one clip (guidance evaluates twice a step)."""

    @abstractmethod
    def generate(
        self, role: str, noise: Tensor, text: Tensor, null_text: Tensor, steps: int, random: StepRandom
    ) -> Tensor:
        """Clean latents from ``noise`` ``(B, C, T, H, W)`` in ``steps`` steps of the sampler that fits the role."""


def guided_velocity(role: Role, x: Tensor, t: Tensor, text: Tensor, null_text: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance ``u + w (c - u)`` (Ho & Salimans 2022), both in one call of the network.

    Args:
        role: the network.
        x: ``(B, C, T, H, W)``.
        t: ``(B,)``.
        text: ``(B, L, D)``.
        null_text: ``(B, L, D)``.
        scale: ``w``; 1 is the conditional velocity, without a second pass.
    """
    if scale == 1.0:
        return role.velocity(x, t, text)
    both = role.velocity(torch.cat([x, x]), torch.cat([t, t]), torch.cat([text, null_text]))
    conditional, unconditional = both.chunk(2)
    return unconditional + scale * (conditional - unconditional)


@torch.no_grad()
def euler_sample(
    role: Role, noise: Tensor, text: Tensor, null_text: Tensor, *, times: list[float], scale: float
) -> Tensor:
    """Euler's method along the guided velocity, from ``times[0] = 1`` to ``times[-1] = 0``.

    Args:
        role: the network.
        noise: ``(B, C, T, H, W)``.
        text, null_text: ``(B, L, D)``.
        times: descending, one more than the steps.
        scale: guidance ``w``.
    """
    x = noise
    for t, t_next in zip(times[:-1], times[1:], strict=True):
        v = guided_velocity(role, x, torch.full((len(x),), t, dtype=x.dtype, device=x.device), text, null_text, scale)
        x = x + (t_next - t) * v
    return x
