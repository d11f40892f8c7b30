"""Tiles of a video's tokens: boxes of frames, rows and columns, between which sparse attention chooses.

Only the last tile of an axis is partial. On a ring of several ranks, tokens are put in tile order once, where the
network splits them. Then a rank holds almost only whole tiles. Attention is exact in either order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from fsdp_cp.errors import UserError
from fsdp_cp.measure.fake_world import real_tensors
from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import is_count


@dataclass(frozen=True)
class Tiles:
    """Tiles of one video, and the order of its tokens.

    Raises:
        UserError: ``grid`` or ``tile`` is not three integers of at least 1.
    """

    grid: tuple[int, int, int]
    """Number of tokens along each axis: frames, rows, columns."""
    tile: tuple[int, int, int] = (4, 4, 4)
    """Number of tokens of a tile along each axis."""
    is_ordered: bool = False
    """Whether the split sequence is in tile order; otherwise in raster order."""
    given: int = 0
    """Number of dense rows before the video in the same sequence, as those of a given first frame. The ``grid`` leaves
    them out."""

    def __post_init__(self) -> None:
        for name, sizes in (("grid", self.grid), ("tile", self.tile)):
            if not isinstance(sizes, tuple) or len(sizes) != 3 or not all(map(is_count, sizes)):
                raise UserError(f"{name} must be a tuple of three ints >= 1 (frames, rows, columns), got {sizes!r}")

    @property
    def tokens(self) -> int:
        """Number of tokens of the sequence: of the video, and rows before it."""
        return self.given + math.prod(self.grid)

    @property
    def width(self) -> int:
        """Number of tokens of a whole tile."""
        return math.prod(self.tile)

    @property
    def count(self) -> int:
        """Number of tiles of the video."""
        return math.prod(-(-size // step) for size, step in zip(self.grid, self.tile, strict=True))

    def dense_tiles(self, segments: Sequence[int]) -> int:
        """Return the number of tiles of the dense rows before the video, each of :attr:`width` consecutive rows."""
        return sum(-(-rows // self.width) for rows in self._dense_rows(segments))

    def _dense_rows(self, segments: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of dense rows before the video: of each segment, and those of the video's own one."""
        return (*segments[:-1], self.given)

    def pairs(self, segments: Sequence[int], kept: int) -> tuple[int, int]:
        """Return the pairs of (query, key) tokens in the fine attention, and of tiles in the coarse one.

        Each pair costs ``4 x heads x head size`` operations in a forward. Tiles count with their mean size.
        """
        dense = sum(self._dense_rows(segments))
        video = sum(segments) - dense
        tiles = self.dense_tiles(segments) + self.count
        fine = dense * (dense + video) + video * dense + round(video * video * kept / self.count)
        return fine, tiles * tiles

    def on(self, mesh: Mesh) -> Tiles:
        """Return these tiles in the order that suits ``mesh``: tile order on a ring of several ranks."""
        return replace(self, is_ordered=mesh.context.ring_size > 1)

    def order(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the raster index of each token of the split sequence, ``(tokens,)``."""
        return _on_device(self, torch.device(device))[0]

    def reorder(self, x: Tensor, dim: int) -> Tensor:
        """Put the video's tokens along ``dim``, in raster order, into the order of the split sequence."""
        return x.index_select(dim, self.order(x.device)) if self.is_ordered else x

    def restore(self, x: Tensor, dim: int) -> Tensor:
        """Put the tokens along ``dim`` back into raster order, the inverse of :meth:`reorder`."""
        return x.index_select(dim, _on_device(self, x.device)[1]) if self.is_ordered else x

    def tile_of(self, segments: Sequence[int]) -> numpy.ndarray:
        """Return the tile of each token of the split sequence: segments of dense rows, given rows, then the video.

        Tiles of the dense segments come first. No tile spans two segments.
        """
        parts, first = [], 0
        for rows in self._dense_rows(segments):
            parts.append(first + numpy.arange(rows) // self.width)
            first += -(-rows // self.width)
        video = _raster_tiles(self.grid, self.tile)
        order = _orders(self)[0][self.given :] - self.given
        parts.append(first + video[order])
        return numpy.concatenate(parts)

    def as_numbers(self) -> list[int]:
        """Return the tiles as a flat list, for operators."""
        return [*self.grid, *self.tile, int(self.is_ordered), self.given]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Tiles:
        """Invert :meth:`as_numbers`."""
        t, h, w, *tile, is_ordered, given = map(int, numbers)
        return cls((t, h, w), (tile[0], tile[1], tile[2]), bool(is_ordered), given)


def _raster_tiles(grid: tuple[int, ...], tile: tuple[int, ...]) -> numpy.ndarray:
    """Return the tile of each token in raster order."""
    t, h, w = (numpy.arange(size) // step for size, step in zip(grid, tile, strict=True))
    high, wide = (-(-size // step) for size, step in zip(grid[1:], tile[1:], strict=True))
    return ((t[:, None, None] * high + h[:, None]) * wide + w).ravel()


@lru_cache(maxsize=64)
def _orders(tiles: Tiles) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the permutation of :meth:`Tiles.order` and its inverse."""
    order = numpy.arange(tiles.tokens)
    if tiles.is_ordered:
        order[tiles.given :] = tiles.given + numpy.argsort(_raster_tiles(tiles.grid, tiles.tile), kind="stable")
    return order, numpy.argsort(order)


@lru_cache(maxsize=64)
def _on_device(tiles: Tiles, device: torch.device) -> tuple[Tensor, Tensor]:
    with real_tensors():
        order, inverse = (torch.from_numpy(x).to(device) for x in _orders(tiles))
    return order, inverse


@dataclass(frozen=True)
class Sparse:
    """Sparse attention of one video (VSA, Video Sparse Attention, Zhang et al. 2025): its tiles, and how many are kept.

    Make it by :func:`sparse_tiles`. A new ``kept`` compiles no new graph.
    """

    tiles: Tiles
    kept: Tensor
    """Number of video tiles that a tile of queries attends to: int64, without dimensions, on the CPU."""

    def __post_init__(self) -> None:
        x: Any = self.kept
        if not isinstance(x, Tensor) or (x.dtype, x.device.type, x.ndim) != (torch.int64, "cpu", 0):
            raise UserError("kept must be an int64 tensor without dimensions on the CPU; use sparse_tiles(...)")


def sparse_tiles(tiles: Tiles, sparsity: float) -> Sparse:
    """Return sparse attention that leaves out the share ``sparsity`` of the video's tiles; at least one is kept.

    Raises:
        UserError: ``sparsity`` is not a number in [0, 1).
    """
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise UserError(f"sparsity must be a number in [0, 1), got {sparsity!r}")
    # FastVideo's formula, with its rounding: .7 of 10 tiles keeps 4.
    return Sparse(tiles, torch.tensor(min(max(math.ceil((1 - sparsity) * tiles.count), 1), tiles.count)))
