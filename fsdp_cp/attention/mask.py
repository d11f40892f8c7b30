"""Attention masks of causal video networks: which tokens see which, as ranges of tokens instead of a dense matrix.

Tokens come in blocks (frames, or chunks of several frames). Every token of a block sees the same keys, and these are a
few ranges. A mask is therefore a list of rectangles, whose size does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fsdp_cp.errors import UserError
from fsdp_cp.sequence import is_count

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Attention mask as runs of consecutive queries, each with the ranges of keys that it sees.

    Tokens are counted over the whole sequence, over all ranks. Queries without a key give 0.

    Raises:
        UserError: a count below 1, or key ranges that are empty, unsorted, overlapping or outside of the sequence.

    >>> BlockMask((2, 3), (((0, 2),), ((0, 1), (2, 5)))).pairs  # tokens 2 to 4 do not see token 1
    16
    """

    queries: tuple[int, ...]
    """Number of tokens in each run of queries. The runs follow one another and cover the sequence."""
    keys: tuple[tuple[Range, ...], ...]
    """Ranges (start, stop) of the keys that each run sees, sorted and disjoint."""

    def __post_init__(self) -> None:
        if not self.queries or len(self.queries) != len(self.keys) or not all(is_count(n) for n in self.queries):
            given = f"queries={self.queries} and {len(self.keys)} entries of keys"
            raise UserError(f"mask needs runs of at least 1 query and key ranges for each, got {given}")
        for ranges in self.keys:
            ends = (0, *(stop for _, stop in ranges))
            inside = all(end <= start < stop for end, (start, stop) in zip(ends, ranges, strict=False))
            if not inside or ends[-1] > self.tokens:
                raise UserError(f"mask needs sorted, disjoint key ranges within {self.tokens} tokens, got {ranges}")

    @property
    def tokens(self) -> int:
        """Number of tokens in the sequence."""
        return sum(self.queries)

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs in which the query sees the key. A layer's FLOPs are proportional to it."""
        return sum(
            count * sum(stop - start for start, stop in ranges)
            for count, ranges in zip(self.queries, self.keys, strict=True)
        )

    def as_numbers(self) -> list[int]:
        """Return the mask as a flat list, for the operators: for each run its queries, its ranges, starts and stops."""
        numbers: list[int] = []
        for count, ranges in zip(self.queries, self.keys, strict=True):
            numbers += [count, len(ranges), *(bound for pair in ranges for bound in pair)]
        return numbers

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> BlockMask:
        """Invert :meth:`as_numbers`."""
        queries, keys, i = [], [], 0
        while i < len(numbers):
            end = i + 2 + 2 * numbers[i + 1]
            queries.append(numbers[i])
            keys.append(tuple(zip(numbers[i + 2 : end : 2], numbers[i + 3 : end : 2], strict=True)))
            i = end
        return cls(tuple(queries), tuple(keys))


def block_causal(blocks: Sequence[int], *, window: int | None = None, sink: int = 0) -> BlockMask:
    """Return the mask of a sequence of blocks in which a block sees itself and earlier blocks.

    It is the mask of a causal video network (CausVid, Yin et al. 2025).

    Args:
        blocks: number of tokens in each block.
        window: number of earlier blocks that a block sees; ``None`` for all.
        sink: number of first blocks that all later blocks see, in addition to the window.

    Raises:
        UserError: no blocks, a block without tokens, or a negative ``window`` or ``sink``.

    >>> block_causal((4, 4, 2))
    BlockMask(queries=(4, 4, 2), keys=(((0, 4),), ((0, 8),), ((0, 10),)))
    """
    bounds = _bounds(blocks, window, sink)
    return BlockMask(tuple(blocks), tuple(_visible(bounds, i, i + 1, window, sink) for i in range(len(blocks))))


def teacher_forcing(blocks: Sequence[int], *, window: int | None = None, sink: int = 0) -> BlockMask:
    """Return the mask of a sequence ``[clean | noisy]``, both of the same blocks, for teacher forcing.

    Clean block i sees clean blocks up to i. Noisy block i sees clean blocks before i, and itself. ``window`` and
    ``sink`` limit the earlier blocks as in :func:`block_causal`. Noisy block i thus computes the function of a network
    that gets block i as its input and clean blocks as its history (Self Forcing, Huang et al. 2025). Arguments are
    those of :func:`block_causal`; the sequence has twice as many tokens.

    >>> teacher_forcing((4, 2)).keys
    (((0, 4),), ((0, 6),), ((6, 10),), ((0, 4), (10, 12)))
    """
    bounds = _bounds(blocks, window, sink)
    clean, tokens = block_causal(blocks, window=window, sink=sink), bounds[-1]
    noisy = tuple(
        (*_visible(bounds, i, i, window, sink), (tokens + bounds[i], tokens + bounds[i + 1]))
        for i in range(len(blocks))
    )
    return BlockMask((*clean.queries, *clean.queries), (*clean.keys, *noisy))


def _bounds(blocks: Sequence[int], window: Any, sink: Any) -> list[int]:
    """Check the arguments; return the first token of each block, and the number of tokens."""
    if not blocks or not all(is_count(n) for n in blocks):
        raise UserError(f"blocks must be numbers of tokens of at least 1, got {blocks!r}")
    for name, x in (("window", window), ("sink", sink)):
        if not (is_count(x) or (x == 0 and type(x) is int) or (x is None and name == "window")):
            raise UserError(f"{name} must be a number of blocks of at least 0, got {x!r}")
    return [0, *accumulate(blocks)]


def _visible(bounds: list[int], block: int, stop: int, window: int | None, sink: int) -> tuple[Range, ...]:
    """Return the tokens that ``block`` sees among the blocks before ``stop``: the sink, then the window."""
    first = 0 if window is None else max(block - window, 0)
    if first <= sink:
        sink, first = 0, 0
    ranges = ((0, min(sink, stop)), (min(first, stop), stop))
    return tuple((bounds[start], bounds[end]) for start, end in ranges if start < end)
