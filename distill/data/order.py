"""Data order: the clip at each position of each global batch, a function of seed, epoch and position alone.

So the order is the same on every mesh, and a resumed run needs no stored state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fsdp_cp.rng import permutation


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Split of a global batch into micro-batches of ``micro_batch_size`` samples on each of ``dp_size`` ranks."""

    global_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    parts: int = 1
    """Number of contiguous parts of the batch, with the same samples on every mesh and whole micro-batches each."""

    def __post_init__(self) -> None:
        assert self.global_size % (self.micro_batch_size * self.dp_size * self.parts) == 0

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per step."""
        return self.global_size // (self.micro_batch_size * self.dp_size)

    def positions(self, micro_batch: int) -> list[int]:
        """Return the positions in the global batch of this rank's ``micro_batch``-th micro-batch."""
        first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))

    def part(self, micro_batch: int) -> int:
        """Return the part that the ``micro_batch``-th micro-batch belongs to, on every rank."""
        return micro_batch * self.parts // self.accumulation


_order = lru_cache(maxsize=2)(permutation)


def clip_at(seed: int, clips: int, position: int) -> int:
    """Return the clip at ``position`` of the endless stream of samples, in which each epoch is a new permutation."""
    epoch, offset = divmod(position, clips)
    return _order(seed, "data/order", epoch, clips)[offset]


def clips_of_micro_batches(
    *, seed: int, clips: int, batching: Batching, first_sample: int, steps: int
) -> Iterator[list[int]]:
    """Yield the clips of this rank's micro-batches in ``steps`` steps, after ``first_sample`` earlier samples."""
    for step in range(steps):
        start = first_sample + step * batching.global_size
        for micro_batch in range(batching.accumulation):
            yield [clip_at(seed, clips, start + position) for position in batching.positions(micro_batch)]
