"""Random draws that do not depend on the mesh: keyed by seed, purpose, step and position in the global batch.

A sample draws the same numbers on every rank. So the ranks of a ``cp`` group agree, data-parallel ranks differ, and a
run can resume on another mesh. Numbers are drawn on the CPU in fp32 (uniform ones in fp64) and then moved, so that
they are the same for every device and precision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor


def stream_seed(*key: int | str) -> int:
    """Return the seed of the random stream with this ``key``. The order of the key's parts matters."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(*key: int | str) -> torch.Generator:
    """Return the random stream with this ``key``."""
    return torch.Generator().manual_seed(stream_seed(*key))


_NO_SAMPLE = -1
"""Position that no sample has; no sample has a smaller one either."""


@dataclass(frozen=True, kw_only=True)
class StepRandom:
    """Random streams of one step, for the samples that this rank holds.

    Every method takes a ``purpose``. Two draws with the same purpose in one step return the same numbers, so every loss
    and every rollout step needs a different purpose.
    """

    seed: int
    step: int
    positions: Sequence[int]
    """Positions of the samples in the global batch, one per sample of the micro-batch."""
    device: torch.device | str = "cpu"
    part: int = 0
    """Index of the batch's part that the samples belong to. Each part has separate draws that its samples share."""
    has_values: ClassVar[bool] = True
    """Whether draws have values; those of a plan have shapes alone."""

    @property
    def shared(self) -> StepRandom:
        """Streams of one sample outside of the batch, on the CPU: the same on every rank, different in each part."""
        return replace(self, positions=(_NO_SAMPLE - self.part,), device="cpu")

    def normal(self, purpose: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw standard normal numbers, ``(samples, *shape)``."""
        return self._moved([torch.randn(tuple(shape), generator=g) for g in self._streams(purpose)], dtype)

    def uniform(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw uniform numbers in [0, 1), ``(samples,)``."""
        return self._moved([torch.rand((), generator=g, dtype=torch.float64) for g in self._streams(purpose)], dtype)

    def _streams(self, purpose: str) -> list[torch.Generator]:
        return [stream(self.seed, purpose, self.step, position) for position in self.positions]

    def _moved(self, samples: list[Tensor], dtype: torch.dtype) -> Tensor:
        drawn = torch.stack(samples).to(dtype)
        if torch.device(self.device).type == "cuda":
            drawn = drawn.pin_memory()  # its copy joins the device's queue; for other memory the host would wait
        return drawn.to(self.device, non_blocking=True)

    def shared_integer(self, purpose: str, low: int, high: int) -> int:
        """Draw one integer from ``low`` to ``high`` inclusive for this part of the batch, the same on every rank.

        A draw that decides how many forwards run must use it: ranks that disagree would deadlock.
        """
        part = ("part", self.part) if self.part else ()  # part 0 draws the same as a batch without parts
        return int(torch.randint(low, high + 1, (), generator=stream(self.seed, purpose, self.step, *part)))


def permutation(seed: int, purpose: str, epoch: int, n: int) -> list[int]:
    """Return a permutation of ``range(n)`` that depends only on the arguments."""
    return torch.randperm(n, generator=stream(seed, purpose, epoch)).tolist()
