"""Layout of a split sequence: each token's rank, its position in a padded buffer, and the ranks that attend to it.

The layout follows from the true token counts alone, so ranks exchange no sizes and the host does not wait for the
device. A *chunk* holds the tokens of one ring rank: those of the ``ulysses`` neighboring ranks of its Ulysses group, in
rank order, each rank's tokens padded to the same length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_cp.attention.mask import BlockMask, Range
from fsdp_cp.sequence import local_token_count, local_token_range
from fsdp_cp.tiles import Tiles


@dataclass(frozen=True)
class Chunk:
    """True tokens (without pads) of one ring rank."""

    positions: tuple[Range, ...]
    """Ranges (start, stop) of true tokens in the chunk's padded buffer, in order."""
    tokens: tuple[Range, ...]
    """The same ranges as indices into the full sequence."""
    padded: int
    """Length of the padded buffer."""

    @cached_property  # each attention reads it a dozen times
    def size(self) -> int:
        return sum(stop - start for start, stop in self.positions)

    @cached_property
    def is_whole(self) -> bool:
        return self.size == self.padded

    def take(self, x: Tensor) -> Tensor:
        """Return the true tokens of ``(B, padded, ...)``, as a view if they are one range."""
        return x if self.is_whole else _cut(x, self.positions)

    def put(self, x: Tensor) -> Tensor:
        """Return ``(B, padded, ...)`` with ``x`` ``(B, size, ...)`` at the true tokens and zeros at the pads."""
        if self.is_whole:
            return x
        out = x.new_zeros((x.shape[0], self.padded, *x.shape[2:]))
        offset = 0
        for start, stop in self.positions:  # not added to zeros: other bits may travel as numbers
            out[:, start:stop] = x[:, offset : offset + stop - start]
            offset += stop - start
        return out

    def add_into(self, buffer: Tensor, x: Tensor, start: int) -> None:
        """Add ``x`` in place to the true tokens from ``start`` on in a buffer ``(B, padded, ...)``."""
        first, end = start, start + x.shape[1]
        offset = 0
        for position, stop in self.positions:
            low, high = max(first, offset), min(end, offset + stop - position)
            if high > low:
                shift = position - offset
                buffer[:, low + shift : high + shift] += x[:, low - start : high - start]
            offset += stop - position

    def select(self, mask: Tensor) -> Tensor:
        """Return the columns of a mask ``(B, all tokens)`` that belong to this chunk, ``(B, size)``."""
        return _cut(mask, self.tokens)


def _cut(x: Tensor, ranges: Sequence[Range]) -> Tensor:
    pieces = [x[:, start:stop] for start, stop in ranges] or [x[:, :0]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


class Rectangle(NamedTuple):
    """Rectangle in which every query sees every key: ranges of the true tokens of a query chunk and a key chunk."""

    queries: Range
    keys: Range


@dataclass(frozen=True)
class Layout:
    """Split of the tokens of one sequence over ``ring x ulysses`` ranks.

    Every segment (text, video) is split separately: each rank gets ``ceil(tokens / cp)`` positions, of which the last
    may be pads. The local sequence of a rank concatenates its shares of all segments.
    """

    segments: tuple[int, ...]
    """Number of true tokens in each segment of the queries."""
    keys: tuple[int, ...]
    """Number of true tokens in each segment of keys and values; differs only in cross-attention, on one rank."""
    ulysses: int
    ring: int
    mask: BlockMask | None = None
    """Keys that each query sees, counted over all segments in order; ``None`` if queries see all keys."""
    tiles: Tiles | None = None
    """Tiles of the last segment, a video, in sparse attention (:mod:`fsdp_cp.attention.sparse`)."""

    def as_numbers(self) -> tuple[Any, ...]:
        """Return the arguments of :func:`make_layout`, for operators: lists and numbers."""
        mask = [] if self.mask is None else self.mask.as_numbers()
        tiles = [] if self.tiles is None else self.tiles.as_numbers()
        return [*self.segments], [*self.keys], mask, tiles, self.ulysses, self.ring

    def chunk(self, ring_rank: int) -> Chunk:
        return _chunk(self.segments, self.ulysses, self.ring, ring_rank)

    def key_chunk(self, ring_rank: int) -> Chunk:
        return _chunk(self.keys, self.ulysses, self.ring, ring_rank)

    def rectangles(self, query_rank: int, key_rank: int) -> tuple[Rectangle, ...]:
        """Return the rectangles in which queries of one ring rank see keys of another ring rank."""
        return self._all_rectangles[query_rank, key_rank]

    @cached_property
    def _all_rectangles(self) -> dict[tuple[int, int], tuple[Rectangle, ...]]:
        ranks = range(self.ring)
        return {(i, j): _rectangles(self.mask, self.chunk(i), self.key_chunk(j)) for i, j in product(ranks, ranks)}

    def alone(self, ring_rank: int) -> bool:
        """Return whether nothing is merged: the ring has one rank, and all its queries see all its keys."""
        queries, keys = self.chunk(ring_rank), self.key_chunk(ring_rank)
        everything = Rectangle((0, queries.size), (0, keys.size))
        return self.ring == 1 and self.rectangles(ring_rank, ring_rank) == (everything,)

    def keys_travel(self, chunk: int, hop: int) -> bool:
        """Return whether a rank at or after the ``hop``-th hop (from 0) of ``chunk``'s K and V attends to them."""
        return any(self.rectangles((chunk + i) % self.ring, chunk) for i in range(hop + 1, self.ring))

    def grads_travel(self, chunk: int, hop: int) -> bool:
        """Return whether any rank adds to ``chunk``'s gradients before hop ``hop``, sent by rank chunk + 1 + hop."""
        return any(self.rectangles((chunk + i) % self.ring, chunk) for i in range(1, hop + 2))


@lru_cache(maxsize=1024)
def _chunk(segments: tuple[int, ...], ulysses: int, ring: int, ring_rank: int) -> Chunk:
    cp = ring * ulysses
    positions: list[Range] = []
    tokens: list[Range] = []
    position = 0
    for rank in range(ring_rank * ulysses, (ring_rank + 1) * ulysses):
        base = 0
        for total in segments:
            start, stop = local_token_range(total, cp, rank)
            if stop > start:
                if positions and positions[-1][1] == position and tokens[-1][1] == base + start:
                    positions[-1] = (positions[-1][0], position + stop - start)
                    tokens[-1] = (tokens[-1][0], base + stop)
                else:
                    positions.append((position, position + stop - start))
                    tokens.append((base + start, base + stop))
            position += local_token_count(total, cp)
            base += total
    return Chunk(tuple(positions), tuple(tokens), position)


def _rectangles(mask: BlockMask | None, queries: Chunk, keys: Chunk) -> tuple[Rectangle, ...]:
    """Return the visible rectangles of a query chunk and a key chunk. Rectangles with the same keys are joined."""
    if not queries.size or not keys.size:
        return ()
    if mask is None:
        return (Rectangle((0, queries.size), (0, keys.size)),)
    found: list[Rectangle] = []
    ends: dict[Range, int] = {}  # of key ranges: index of their last rectangle
    first = 0
    for count, ranges in zip(mask.queries, mask.keys, strict=True):
        for start, stop in _held(queries, [(first, first + count)]):
            for columns in _held(keys, ranges):
                last = ends.get(columns)
                if last is not None and found[last].queries[1] == start:
                    found[last] = Rectangle((found[last].queries[0], stop), columns)
                else:
                    ends[columns] = len(found)
                    found.append(Rectangle((start, stop), columns))
        first += count
    return tuple(found)


def _held(chunk: Chunk, ranges: Sequence[Range]) -> list[Range]:
    """Return ranges of the full sequence as ranges of the chunk's true tokens, joined where they touch."""
    held: list[Range] = []
    for first, end in ranges:
        offset = 0
        for start, stop in chunk.tokens:
            low, high = max(first, start) - start + offset, min(end, stop) - start + offset
            if held and held[-1][1] == low:
                held[-1] = (held[-1][0], max(high, low))
            elif low < high:
                held.append((low, high))
            offset += stop - start
    return held


@lru_cache(maxsize=1024)
def make_layout(
    segments: tuple[int, ...],
    keys: tuple[int, ...],
    mask: tuple[int, ...],
    tiles: tuple[int, ...],
    ulysses: int,
    ring: int,
) -> Layout:
    """Return the layout for the numbers of an operator, those of :meth:`Layout.as_numbers`."""
    return Layout(
        segments,
        keys,
        ulysses=ulysses,
        ring=ring,
        mask=BlockMask.from_numbers(mask) if mask else None,
        tiles=Tiles.from_numbers(tiles) if tiles else None,
    )
