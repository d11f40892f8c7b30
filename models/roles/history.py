"""History of a causal role's forward: a whole clip under a mask, or the cached keys and values of earlier chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fsdp_cp.attention.cached import KeyValues
from models.causal import CausalSettings
from models.condition import Condition
from models.families.causal_forward import CausalForward, Chunks, History, Slots, WholeClip
from models.sample import Sample


class CausalRole(Protocol):
    """The part of a :class:`models.roles.role.Role` that a cache uses."""

    name: str
    causal: CausalSettings | None
    trained_frames: int

    def chunk_velocity(self, x: Sample, t: Tensor, cache: Cache, history: History | None = None) -> Sample:
        """Return the velocity of the next chunk, and keep its keys and values in ``history``."""
        ...


def whole_clip(
    settings: CausalSettings, x: Sample, t: Tensor, clean: Sample | None, tokens: int
) -> tuple[CausalForward, Sample, Tensor]:
    """Return the history, the latents and the times of a forward of a clip ``x`` at ``t``, ``(B,)`` or ``(B, T)``.

    The history of every chunk is in the ``clean`` clip, or noisy in ``x``. A latent frame has ``tokens`` tokens.
    """
    frames = x.video.shape[2]
    history = WholeClip(settings.mask(frames, tokens, clean=clean is not None))
    if clean is None:
        return CausalForward(positions=tuple(range(frames)), history=history), x, t
    if clean.shapes != x.shapes:
        raise ValueError(f"clean {clean.shapes} must have the shapes of x, {x.shapes}")
    noisy = t if t.ndim == 2 else t[:, None].expand(-1, frames)
    times = torch.cat([torch.full_like(noisy, settings.context_time), noisy], dim=1)
    return CausalForward(positions=tuple(range(frames)) * 2, history=history), Sample.cat([clean, x], dim=2), times


@dataclass(frozen=True, kw_only=True, eq=False)
class Cache(ABC):
    """Chunks so far of B samples of a causal role, as their keys and values on this rank."""

    role: CausalRole
    """Role that fills the cache."""
    condition: Condition
    """Condition of the B samples."""
    frames: int = 0
    """Number of latent frames so far, evicted ones included."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of chunks so far, evicted ones included."""

    @abstractmethod
    def history(self) -> History:
        """Return the history of a forward of the next chunk."""

    @abstractmethod
    def with_chunk(self, x0: Sample) -> Cache:
        """Return the cache with one more chunk, without the chunks that the one after it does not attend to.

        One forward without gradient computes keys and values of the finished chunk ``x0`` at ``context_time``; for
        ``context_time`` above 0 the caller adds the noise. A collective.
        """

    @property
    def settings(self) -> CausalSettings:
        assert self.role.causal is not None
        return self.role.causal

    def forward(self, history: History) -> CausalForward:
        """Return the arguments of a forward of the next chunk."""
        last = sum(self.settings.chunks(self.role.trained_frames)[:-1])  # where a trained clip's last chunk begins
        return CausalForward(
            positions=tuple(range(self.frames, self.frames + self.settings.size(self.count))),
            history=history,
            shift=max(0, self.frames - last),
        )

    def _remember(self, x0: Sample, history: History) -> None:
        dtype = torch.promote_types(x0.dtype, torch.float32)
        t = torch.full((len(x0),), self.settings.context_time, dtype=dtype, device=x0.device)
        self.role.chunk_velocity(x0, t, self, history)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingCache(Cache):
    """Cache that never changes: :meth:`with_chunk` returns a new one, which shares its tensors.

    A forward thus keeps its history until its backward. A buffer that is overwritten would change the history of a
    block that is recomputed, and with it the gradients, without an error.
    """

    count: int = 0
    chunks: Mapping[int, tuple[KeyValues, ...]] = field(default_factory=dict)
    """Keys and values of each layer, by the number of the chunk."""

    def history(self) -> Chunks:
        sinks = sum(number < self.settings.sink for number in self.chunks)
        return Chunks(past=tuple(self.chunks.values()), sinks=sinks)

    @torch.no_grad()
    def with_chunk(self, x0: Sample) -> TrainingCache:
        history, count = self.history(), self.count + 1
        history.record = {}
        self._remember(x0, history)
        layers = tuple(history.record[layer] for layer in sorted(history.record))
        chunks = {n: kv for n, kv in {**self.chunks, self.count: layers}.items() if self.settings.sees(count, n)}
        return replace(self, frames=self.frames + x0.video.shape[2], count=count, chunks=chunks)


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamCache(Cache):
    """Cache for sampling without gradient, one buffer that its forwards change: of the caches of a clip, only the one
    that :meth:`with_chunk` returned last is valid."""

    slots: Slots

    @property
    def count(self) -> int:
        return self.slots.count

    def history(self) -> Slots:
        if torch.is_grad_enabled():
            raise RuntimeError("a cache without training=True needs torch.no_grad(): forwards change it in place")
        return self.slots

    @torch.no_grad()
    def with_chunk(self, x0: Sample) -> StreamCache:
        self._remember(x0, self.slots)
        self.slots.advance()
        return replace(self, frames=self.frames + x0.video.shape[2])
