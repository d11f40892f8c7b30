"""History of a causal role's forward: a whole clip under a mask, or the cached keys and values of earlier chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_cp.attention.cached import KeyValues
from models.causal import CausalSettings
from models.condition import Condition
from models.families.causal_forward import CausalForward, Record
from models.sample import Sample

if TYPE_CHECKING:
    from models.roles.role import Role


def whole_clip(
    settings: CausalSettings, x: Sample, t: Tensor, clean: Sample | None, tokens: int
) -> tuple[CausalForward, Sample, Tensor]:
    """Return the history, the latents and the times of a forward of a whole clip.

    Args:
        settings: settings of the role.
        x: latents ``x_t``.
        t: ``(B,)`` or ``(B, T)``.
        clean: clean clip, the history of every chunk; ``None`` for the noisy history in ``x``.
        tokens: number of tokens in a latent frame.

    Raises:
        ValueError: frames that are not whole chunks, or clips of different shapes.
    """
    frames = x.video.shape[2]
    mask = settings.mask(frames, tokens, clean=clean is not None)
    if clean is None:
        return CausalForward(positions=tuple(range(frames)), mask=mask), x, t
    if clean.shapes != x.shapes:
        raise ValueError(f"clean {clean.shapes} must have the shapes of x, {x.shapes}")
    noisy = t if t.ndim == 2 else t[:, None].expand(-1, frames)
    times = torch.cat([torch.full_like(noisy, settings.context_time), noisy], dim=1)
    return CausalForward(positions=tuple(range(frames)) * 2, mask=mask), Sample.cat([clean, x], dim=2), times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """Keys and values of the chunks so far that the next chunk attends to, on this rank. It never changes:
    :meth:`with_chunk` returns a new one, which shares its tensors.

    A forward thus keeps its history until its backward. A buffer that is overwritten would change the history of a
    block that is recomputed, and with it the gradients, without an error.
    """

    role: Role
    """Role that fills the cache."""
    condition: Condition
    """Condition of the B samples."""
    frames: int = 0
    """Number of latent frames so far, evicted ones included."""
    count: int = 0
    """Number of chunks so far, evicted ones included."""
    chunks: Mapping[int, tuple[KeyValues, ...]] = field(default_factory=dict)
    """Keys and values of each layer, by the number of the chunk."""
    text: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of the text, by layer; empty before the first chunk."""

    def forward(self, record: Record | None = None) -> CausalForward:
        """Return the arguments of a forward of the next chunk."""
        role, settings = self.role, self.role.causal
        assert settings is not None
        trained = role.trained_frames
        return CausalForward(
            positions=tuple(range(self.frames, self.frames + settings.size(self.count))),
            past=tuple(self.chunks.values()),
            sinks=sum(number < settings.sink for number in self.chunks),
            shift=0 if trained is None else max(0, self.frames - settings.last_start(trained)),
            text=self.text,
            record=record,
        )

    @torch.no_grad()
    def with_chunk(self, x0: Sample) -> Cache:
        """Return the cache with one more chunk, without the chunks that the one after it does not attend to.

        One forward without gradient computes keys and values at ``context_time``; for ``context_time`` above 0 the
        caller adds the noise. A collective.

        Args:
            x0: latents of the finished chunk.

        Raises:
            ValueError: ``x0`` has another number of frames or samples.
        """
        settings = self.role.causal
        assert settings is not None
        dtype = torch.promote_types(x0.dtype, torch.float32)
        t = torch.full((len(x0),), settings.context_time, dtype=dtype, device=x0.device)
        record = Record()
        self.role.chunk_velocity(x0, t, self, record)
        layers = tuple(record.layers[layer] for layer in sorted(record.layers))
        count = self.count + 1
        return replace(
            self,
            frames=self.frames + x0.video.shape[2],
            count=count,
            chunks={n: kv for n, kv in {**self.chunks, self.count: layers}.items() if settings.sees(count, n)},
            text=self.text or record.text,
        )
