"""Histories of a causal network's forward: a whole clip under a mask, or the keys and values of earlier chunks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.attention.cached import KeyValues, buffered_attention, cached_attention, held_tokens
from fsdp_cp.attention.mask import BlockMask
from fsdp_cp.mesh import Mesh
from models.causal import CausalSettings

Rotate = Callable[[Tensor], Tensor]
Attend = Callable[..., Tensor]
"""Attention ``attend(q, k, v, mesh=..., **options)`` of the rank's new tokens ``(B, S_local, H, D)`` to themselves and
to the history of one forward in one layer. A block gets it as an argument, so that a block that is recomputed in
backward reads what its forward read."""


class History(ABC):
    """History of one forward, for all layers."""

    compiles = True
    """Whether blocks may be compiled: one graph serves all forwards."""

    @abstractmethod
    def pairs(self, tokens: int) -> int:
        """Return the number of query-key pairs in a layer of a forward of ``tokens`` tokens."""

    def begin(  # noqa: B027
        self, k: Tensor, tokens: int, layers: int, mesh: Mesh, shift: int, rotate: Rotate
    ) -> None:
        """Prepare a forward of a chunk of ``tokens`` tokens on all ranks, before its first block.

        ``k`` is an empty tensor ``(B, 0, heads, head_dim)`` with the dtype and device of the keys. ``rotate`` moves
        keys by ``shift`` frames, by which the sinks are nearer than their positions say.
        """

    @abstractmethod
    def layer(self, index: int) -> Attend:
        """Return the attention of one layer to the history."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that a forward leaves in memory on this rank."""
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CausalForward:
    """Positions and history of one forward."""

    positions: tuple[int, ...]
    """Position of each latent frame in the clip."""
    history: History
    shift: int = 0
    """Number of frames by which the sinks are nearer than their positions say."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeClip(History):
    """A whole clip under a mask."""

    mask: BlockMask

    def pairs(self, tokens: int) -> int:
        return self.mask.pairs

    def layer(self, index: int) -> Attend:
        return cast(Attend, partial(context_parallel_attention, mask=self.mask))


@dataclass(kw_only=True, eq=False)
class Chunks(History):
    """Immutable keys and values of earlier chunks, through which a network can train: a forward, and its recomputation
    in backward, read the same tensors. A layer takes one kernel call per chunk."""

    past: tuple[tuple[KeyValues, ...], ...]
    """Keys and values of each earlier chunk that the chunk attends to, by layer. The first ``sinks`` are sinks."""
    sinks: int
    record: dict[int, KeyValues] | None = None
    """Keys and values of the forward's own chunk, by layer, to fill."""
    compiles = False  # one graph per number of chunks
    _rotate: Rotate | None = None

    def pairs(self, tokens: int) -> int:
        return tokens * (tokens + sum(chunk[0].tokens for chunk in self.past))

    def begin(self, k, tokens, layers, mesh, shift, rotate):
        self._rotate = rotate if shift else None

    def layer(self, index: int) -> Attend:
        past = [chunk[index] for chunk in self.past]
        if self._rotate is not None:
            past[: self.sinks] = [replace(sink, k=self._rotate(sink.k)) for sink in past[: self.sinks]]

        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            out, chunk = cached_attention(q, k, v, past, **options)
            if self.record is not None:
                self.record[index] = chunk
            return out

        return attend

    def tensors(self):
        yield from (x for entry in (self.record or {}).values() for x in (entry.k, entry.v))


@dataclass(eq=False)
class Slots(History):
    """Keys and values of a stream in one buffer per layer, filled in place, without gradient. A layer takes one kernel
    call, and one compiled block serves every chunk.

    The buffer holds the sinks, then a ring of ``window + 1`` slots, of which the new chunk takes the oldest. Sinks are
    moved from a copy of their unmoved keys, since moving them in place would add up rounding. The buffer has room for
    a clip of ``chunks`` chunks; without a window it grows for a longer one.
    """

    settings: CausalSettings
    chunks: int
    count: int = 0
    """Number of finished chunks."""
    keys: list[Tensor] = field(default_factory=list)
    """Keys ``(B, slots, heads / ulysses, head_dim)`` of each layer, of the tokens that this rank holds."""
    values: list[Tensor] = field(default_factory=list)
    sinks: list[Tensor] = field(default_factory=list)
    """Unmoved keys of the sinks, of each layer."""
    _shift: int = 0
    """Number of frames by which the sinks in ``keys`` are moved."""
    _held: tuple[int, int] = (0, 0)
    """Number of tokens of the first and of a later chunk that this rank holds."""
    _place: Tensor | None = None

    def tensors(self):
        yield from (*self.keys, *self.values, *self.sinks)

    def pairs(self, tokens: int) -> int:
        frame = tokens // self.settings.size(self.count)
        seen = [i for i in range(self.count) if self.settings.sees(self.count, i)]
        return tokens * (tokens + frame * sum(map(self.settings.size, seen)))

    def begin(self, k, tokens, layers, mesh, shift, rotate):
        frame = tokens // self.settings.size(self.count)
        first, later = (held_tokens(frame * self.settings.size(i), mesh.context) for i in (0, 1))
        self._held = first, later
        place = self._slots(self.count)
        while place[2] > self._slots(self.chunks - 1)[2]:
            self.chunks *= 2
        self._allocate(k, layers, mesh.context.ulysses_size)
        self._place = torch.tensor(place, device="cpu")
        if shift != self._shift:
            moved = self._sink_tokens(self.count)
            for keys, sinks in zip(self.keys, self.sinks, strict=True):
                keys[:, :moved] = rotate(sinks[:, :moved])
            self._shift = shift

    def layer(self, index: int) -> Attend:
        assert self._place is not None, "begin comes first"
        return partial(buffered_attention, keys=self.keys[index], values=self.values[index], place=self._place)

    def advance(self) -> None:
        """Finish the chunk that the last forward wrote."""
        start, stop = self._sink_tokens(self.count), self._sink_tokens(self.count + 1)
        for keys, sinks in zip(self.keys, self.sinks, strict=True):
            sinks[:, start:stop] = keys[:, start:stop]
        self.count += 1

    def _allocate(self, k: Tensor, layers: int, ulysses: int) -> None:
        room, sinks = self._slots(self.chunks - 1)[2], self._sink_tokens(self.settings.sink)
        held = k[:, :, : k.shape[2] // ulysses]
        if not self.keys:
            self.keys, self.values = ([held] * layers for _ in range(2))
            self.sinks = [_longer(held, sinks) for _ in range(layers)]
        if self.keys[0].shape[1] < room:
            for buffers in (self.keys, self.values):  # one at a time: both of its sizes are in memory
                buffers[:] = (_longer(x, room) for x in buffers)

    def _sink_tokens(self, number: int) -> int:
        """Return the number of tokens of the sinks among the first ``number`` chunks."""
        first, later = self._held
        number = min(number, self.settings.sink)
        return first + (number - 1) * later if number else 0

    def _slots(self, number: int) -> tuple[int, int, int]:
        """Return the place of chunk ``number``: its first slot, and the start and stop of the slots that it sees."""
        (first, later), settings = self._held, self.settings
        size, end = later if number else first, self._sink_tokens(number + 1)
        if number < settings.sink:
            return end - size, 0, end
        # The first chunk of a clip can be of another size. Without sinks it takes the end of the ring's first slot.
        widest = later if settings.sink else max(first, later)
        turn = number - settings.sink
        slot = turn if settings.window is None else turn % (settings.window + 1)
        oldest = first if turn == slot and not settings.sink else later  # the chunk in the ring's first slot
        last = slot if turn == slot else settings.window
        assert last is not None
        end += widest
        return end + slot * later - size, 0 if settings.sink else widest - oldest, end + last * later


def _longer(x: Tensor, tokens: int) -> Tensor:
    """Return a tensor of ``tokens`` tokens that begins with those of ``x`` ``(B, S, heads, D)``."""
    longer = x.new_empty((x.shape[0], tokens, *x.shape[2:]))
    longer[:, : x.shape[1]] = x
    return longer
