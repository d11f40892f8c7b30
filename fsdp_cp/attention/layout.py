"""Layout of a split sequence: each token's rank, its position in a padded buffer, and the ranks that attend to it.

The layout follows from the true token counts alone, so ranks exchange no sizes and the host does not wait for the
device. A *chunk* holds the tokens of one ring rank: those of the ``ulysses`` neighboring ranks of its Ulysses group, in
rank order, each rank's tokens padded to the same length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fsdp_cp.sequence import local_token_count, local_token_range

Range = tuple[int, int]


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
        if self.is_whole:
            return x
        parts = [x[:, start:stop] for start, stop in self.positions]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) if parts else x[:, :0]

    def put(self, x: Tensor) -> Tensor:
        """Return ``(B, padded, ...)`` with ``x`` ``(B, size, ...)`` at the true tokens and zeros at the pads."""
        if self.is_whole:
            return x
        out = x.new_zeros((x.shape[0], self.padded, *x.shape[2:]))
        offset = 0
        for start, stop in self.positions:
            out[:, start:stop] = x[:, offset : offset + stop - start]
            offset += stop - start
        return out

    def add_into(self, buffer: Tensor, x: Tensor, start: int = 0) -> None:
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
        parts = [mask[:, start:stop] for start, stop in self.tokens]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) if parts else mask[:, :0]


@dataclass(frozen=True)
class Tile:
    """Rectangle of the attention matrix of (query chunk, key chunk) in which every query sees every key."""

    queries: Range
    """Range of the query chunk's true tokens."""
    keys: Range
    """Range of the key chunk's true tokens."""


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
    causal_block: int | None = None
    """Number of tokens in a block. A query sees the keys of its own and earlier blocks; with ``None`` it sees all."""

    def chunk(self, ring_rank: int) -> Chunk:
        return _chunk(self.segments, self.ulysses, self.ring, ring_rank)

    def key_chunk(self, ring_rank: int) -> Chunk:
        return _chunk(self.keys, self.ulysses, self.ring, ring_rank)

    def tiles(self, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
        """Return the rectangles in which queries of one ring rank see keys of another ring rank."""
        return _tiles(self, query_rank, key_rank)

    def alone(self, ring_rank: int) -> bool:
        """Return whether nothing is merged: the ring has one rank, and one tile covers all its queries."""
        if self.ring > 1:
            return False
        tiles = self.tiles(ring_rank, ring_rank)
        return len(tiles) == 1 and tiles[0].queries == (0, self.chunk(ring_rank).size)

    def keys_travel(self, chunk: int, hop: int) -> bool:
        """Return whether a rank at or after the ``hop``-th hop (from 0) of ``chunk``'s K and V attends to them."""
        return any(self.tiles((chunk + i) % self.ring, chunk) for i in range(hop + 1, self.ring))

    def grads_travel(self, chunk: int, hop: int) -> bool:
        """Return whether any rank adds to ``chunk``'s gradients before hop ``hop``, sent by rank chunk + 1 + hop."""
        return any(self.tiles((chunk + i) % self.ring, chunk) for i in range(1, hop + 2))


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


@lru_cache(maxsize=16384)
def _tiles(layout: Layout, query_rank: int, key_rank: int) -> tuple[Tile, ...]:
    queries, keys = layout.chunk(query_rank), layout.key_chunk(key_rank)
    if not queries.size or not keys.size:
        return ()
    block = layout.causal_block
    if block is None:
        return (Tile((0, queries.size), (0, keys.size)),)
    assert len(layout.segments) == 1 and layout.keys == layout.segments, "blocks are counted over one segment"
    ((first_query, end_query),), ((first_key, end_key),) = queries.tokens, keys.tokens
    tiles: list[Tile] = []
    for number in range(first_query // block, (end_query - 1) // block + 1):
        start = max(first_query, number * block) - first_query
        stop = min(end_query, (number + 1) * block) - first_query
        seen = min(end_key, (number + 1) * block) - first_key
        if seen <= 0:
            continue
        if tiles and tiles[-1].keys == (0, seen):  # the previous block already sees all keys: extend its tile
            tiles[-1] = Tile((tiles[-1].queries[0], stop), (0, seen))
        else:
            tiles.append(Tile((start, stop), (0, seen)))
    return tuple(tiles)
