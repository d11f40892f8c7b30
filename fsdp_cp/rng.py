"""Random draws that do not depend on the mesh: keyed by seed, purpose, step and position in the global batch.

A sample draws the same numbers whichever rank holds it, so the ranks of a ``cp`` group agree, data-parallel ranks
differ, and a run resumed on another mesh goes on as if nothing had happened. Draws are made on the CPU in fp32
(uniform ones in fp64) and moved, so that every device and precision sees the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def stream_seed(*key: int | str) -> int:
    """The seed of the random stream that belongs to ``key``; the order of its parts counts."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _generator(*key: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(stream_seed(*key))


@dataclass(frozen=True, kw_only=True)
class StepRandom:
    """The random streams of one step, for the samples that this rank holds.

    Every method takes a ``purpose``: two draws with the same purpose in one step are the same numbers, so every loss
    and every rollout step needs a purpose of its own.
    """

    seed: int
    step: int
    positions: Sequence[int]
    """Positions of the samples in the global batch, one per sample of the micro-batch."""
    device: torch.device | str = "cpu"

    def normal(self, purpose: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal, ``(samples, *shape)``."""
        draws = [torch.randn(tuple(shape), generator=self._sample(purpose, p)) for p in self.positions]
        return torch.stack(draws).to(device=self.device, dtype=dtype)

    def uniform(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in [0, 1), ``(samples,)``."""
        draws = [torch.rand((), generator=self._sample(purpose, p), dtype=torch.float64) for p in self.positions]
        return torch.stack(draws).to(device=self.device, dtype=dtype)

    def shared_integer(self, purpose: str, low: int, high: int) -> int:
        """Uniform in ``low`` to ``high`` inclusive; one for the step, the same on every rank.

        Whatever decides how many forward passes run must come from here: ranks that disagree would deadlock.
        """
        return int(torch.randint(low, high + 1, (), generator=_generator(self.seed, purpose, self.step)))

    def _sample(self, purpose: str, position: int) -> torch.Generator:
        return _generator(self.seed, purpose, self.step, position)


def permutation(seed: int, purpose: str, epoch: int, n: int) -> list[int]:
    """A permutation of ``range(n)`` that depends on the arguments alone."""
    return torch.randperm(n, generator=_generator(seed, purpose, epoch)).tolist()
