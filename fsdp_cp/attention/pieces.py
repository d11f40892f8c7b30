"""Pieces: the tokens of one tile that one ring rank holds. They let sparse attention ignore how ranks share tiles.

A tile whose tokens two ranks hold is two pieces with the number of that tile. Every rank computes the pieces of all
ranks from the token counts, without communication.

Shapes: B batch, H heads of a rank, n true tokens of a ring rank, P slots for pieces, the same on all ring ranks, W
tokens of the largest piece, T tiles.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from fsdp_cp.attention.layout import Layout
from fsdp_cp.measure.fake_world import real_tensors


@dataclass(frozen=True)
class Pieces:
    """Pieces of one ring rank in the order of their tiles, then unused slots. All tensors are on one device."""

    tiles: Tensor
    """Tile of each piece, ``(P,)``; 0 in unused slots."""
    sizes: Tensor
    """Number of tokens of each piece, ``(P,)``; 0 in unused slots."""
    tokens: Tensor
    """True tokens of each piece, ``(P, W)``; 0 after its last token."""
    valid: Tensor
    """Entries of ``tokens`` that are tokens."""
    places: Tensor
    """Index of each true token in the flat ``tokens``, ``(n,)``."""
    slots: Tensor
    """Piece of each position in the padded buffer of the ring rank, pads included; P for a pad."""
    dense: int
    """Number of pieces of dense tiles, which come first."""


@dataclass(frozen=True)
class TilePieces:
    """Pieces of all ring ranks of a layout."""

    of_rank: tuple[Pieces, ...]
    sizes: Tensor
    """Number of tokens of each tile, ``(T,)``, fp64."""
    dense: int
    """Number of tiles of dense segments, which come first."""

    @property
    def slots(self) -> int:
        """Number of slots for pieces on each ring rank."""
        return len(self.of_rank[0].tiles)


@lru_cache(maxsize=64)
def cut(layout: Layout, device: torch.device) -> TilePieces:
    """Return the pieces of a layout with tiles, as tensors on ``device``."""
    assert layout.tiles is not None
    tile_of, dense = layout.tiles.tile_of(layout.segments), layout.tiles.dense_tiles(layout.segments)
    held = []
    for rank in range(layout.ring):
        ranges = [numpy.arange(start, stop) for start, stop in layout.chunk(rank).tokens]
        held.append(tile_of[numpy.concatenate([numpy.arange(0), *ranges])])
    found = [numpy.unique(tiles, return_inverse=True, return_counts=True) for tiles in held]
    slots = max(len(tiles) for tiles, _, _ in found)
    width = max(int(sizes.max(initial=1)) for _, _, sizes in found)

    def on_device(x: Any) -> Tensor:
        with real_tensors():
            return torch.from_numpy(numpy.ascontiguousarray(x)).to(device)

    of_rank = []
    for rank, (tiles, piece_of, sizes) in enumerate(found):
        tokens = numpy.argsort(piece_of, kind="stable")
        unused = (0, slots - len(tiles))
        sizes = numpy.pad(sizes, unused)
        valid = numpy.arange(width) < sizes[:, None]
        table = numpy.zeros((slots, width), dtype=numpy.int64)
        table[valid] = tokens
        places = numpy.empty_like(tokens)
        places[tokens] = numpy.flatnonzero(valid)
        buffer = numpy.full(layout.chunk(rank).padded, slots)
        positions = [numpy.arange(start, stop) for start, stop in layout.chunk(rank).positions]
        buffer[numpy.concatenate([numpy.arange(0), *positions])] = piece_of
        pieces = Pieces(
            tiles=on_device(numpy.pad(tiles, unused)),
            sizes=on_device(sizes),
            tokens=on_device(table),
            valid=on_device(valid),
            places=on_device(places),
            slots=on_device(buffer),
            dense=int((tiles < dense).sum()),
        )
        of_rank.append(pieces)
    total = numpy.bincount(tile_of, minlength=dense + layout.tiles.count).astype(numpy.float64)
    return TilePieces(tuple(of_rank), on_device(total), dense)


def counts(layout: Layout) -> tuple[int, int]:
    """Return the numbers of slots for pieces and of tiles."""
    pieces = cut(layout, torch.device("cpu"))
    return pieces.slots, len(pieces.sizes)


@dataclass(frozen=True)
class Chosen:
    """Key pieces of one chunk that each query piece of the rank attends to. Kernels get it as their mask."""

    queries: Pieces
    keys: Pieces
    allowed: Tensor
    """``(B, H, query slots, key slots)`` bool."""
    most: int
    """Bound of the number of chosen pieces for a query piece of the video."""


@dataclass(frozen=True)
class Choice:
    """Tiles that each query piece of a rank attends to."""

    bits: Tensor
    """``(B, H, P, ceil(T / 8))`` uint8; bit t % 8 of byte t // 8 stands for tile t."""
    kept: int
    """Number of chosen video tiles for each query piece of the video."""
    pieces: TilePieces
    rank: int
    """Ring rank of the queries."""

    def among(self, chunk: int) -> Chosen:
        """Return the choice among the pieces of ring rank ``chunk``."""
        queries, keys = self.pieces.of_rank[self.rank], self.pieces.of_rank[chunk]
        bits = self.bits[..., keys.tiles // 8] >> (keys.tiles % 8).to(torch.uint8)
        allowed = (bits & 1).bool() & (keys.sizes > 0)
        return Chosen(queries, keys, allowed, min(self.kept + self.pieces.dense, self.pieces.slots))


def pack_bits(chosen: Tensor) -> Tensor:
    """Pack bools ``(..., T)`` into bytes ``(..., ceil(T / 8))``, the first in the lowest bit."""
    padded = torch.nn.functional.pad(chosen.to(torch.uint8), (0, -chosen.shape[-1] % 8))
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=chosen.device)
    return (padded.unflatten(-1, (-1, 8)) * powers).sum(-1, dtype=torch.uint8)
