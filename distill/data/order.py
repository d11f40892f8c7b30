"""Data order: the bucket of each global batch and the clip at each of its positions, functions of seed and position
alone.

So the order is the same on every mesh, and a resumed run needs no stored state.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

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


@cache
def _orders(bucket: int) -> Callable[[int, int, int], list[int]]:
    """Return the cached permutations of a bucket's clips: a batch needs those of two epochs at most."""
    purpose = f"data/order/{bucket}" if bucket else "data/order"
    return lru_cache(maxsize=2)(lambda seed, epoch, clips: permutation(seed, purpose, epoch, clips))


def clip_at(seed: int, clips: int, position: int, bucket: int = 0) -> int:
    """Return the clip at ``position`` of a bucket's endless stream, in which each epoch is a new permutation."""
    epoch, offset = divmod(position, clips)
    return _orders(bucket)(seed, epoch, clips)[offset]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order of all global batches. Each bucket has an endless stream of its clips, which its batches follow without a
    gap; the batches that all streams fill in one epoch come in a random order."""

    seed: int
    buckets: tuple[int, ...]
    """Number of clips of each bucket."""
    batch_size: int
    """Samples of a global batch."""

    def place(self, first_sample: int) -> tuple[int, int]:
        """Return the bucket of the batch after ``first_sample`` samples, and the batch's position in its stream."""
        number, offset = divmod(first_sample, self.batch_size)  # an offset is left by steps of another batch size
        last = (number + len(self.buckets)) * self.batch_size // sum(self.buckets) + 1
        epoch = bisect_right(range(last), number, key=lambda epoch: sum(self._filled(epoch))) - 1
        bucket, batch = _batches(self, epoch)[number - sum(self._filled(epoch))]
        return bucket, batch * self.batch_size + offset

    def _filled(self, epochs: int) -> list[int]:
        """Return the number of batches of each bucket that its clips fill in so many epochs."""
        return [epochs * clips // self.batch_size for clips in self.buckets]


@lru_cache(maxsize=2)
def _batches(order: Order, epoch: int) -> list[tuple[int, int]]:
    """Return the bucket of each batch of an epoch, and the batch's number in its bucket."""
    numbers = [range(*ends) for ends in zip(order._filled(epoch), order._filled(epoch + 1), strict=True)]
    buckets = [bucket for bucket, some in enumerate(numbers) for _ in some]
    following = [iter(some) for some in numbers]
    shuffled = permutation(order.seed, "data/buckets", epoch, len(buckets))
    return [(bucket, next(following[bucket])) for bucket in (buckets[i] for i in shuffled)]


def clips_of_micro_batches(
    *, seed: int, buckets: Sequence[Sequence[int]], batching: Batching, first_sample: int, steps: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield bucket and clips of this rank's micro-batches in ``steps`` steps, after ``first_sample`` earlier samples.
    ``buckets`` has the clips of each bucket."""
    order = Order(seed=seed, buckets=tuple(map(len, buckets)), batch_size=batching.global_size)
    for step in range(steps):
        bucket, start = order.place(first_sample + step * batching.global_size)
        clips = buckets[bucket]
        for micro_batch in range(batching.accumulation):
            positions = batching.positions(micro_batch)
            yield bucket, [int(clips[clip_at(seed, len(clips), start + p, bucket)]) for p in positions]
