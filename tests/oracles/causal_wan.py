"""Causal Wan in one process: diffusers' network with dense masks, and with Python lists as caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor

from tests.oracles.written_out import WrittenOut

MOST_FRAMES = 1100
"""Rotary positions of the oracle's own table."""


@dataclass
class Past:
    """Keys, not rotated, and values of finished chunks, ``[layer]`` of ``(B, S, H, D)``, with the frames of each."""

    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)
    frames: list[list[int]] = field(default_factory=list)


class _Causal(WrittenOut):
    """diffusers' processor with a dense mask, or with the keys and values of a list before its own."""

    def __init__(self, layer: int, oracle: CausalWan):
        super().__init__()
        self.layer, self.oracle = layer, oracle

    def _attend(self, attn, q, k, v, rotary_emb=None):
        oracle = self.oracle
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        q, own = self._rotate(q, *rotary_emb), self._rotate(k, *rotary_emb)
        keys, values = [own], [v]
        if oracle.new is not None:
            oracle.new[self.layer] = (k.detach(), v.detach())
            for past_k, past_v, table in oracle.read(self.layer):
                keys.insert(0, self._rotate(past_k, *table))
                values.insert(0, past_v)
        k, v = torch.cat(keys, 1), torch.cat(values, 1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if oracle.mask is not None:
            scores = scores.masked_fill(~oracle.mask, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class CausalWan:
    """A causal Wan with chunks of ``chunks`` frames.

    Args:
        network: diffusers' network, whose processors change.
        chunks: latent frames of each chunk; the last repeats.
        window, sink: as in :class:`models.causal.CausalSettings`.
        trained_chunks: number of chunks of a clip in training.
    """

    def __init__(
        self,
        network: WanTransformer3DModel,
        chunks: Sequence[int],
        window: int | None = None,
        sink: int = 0,
        trained_chunks: int | None = None,
    ):
        self.network, self.chunks, self.window, self.sink = network, list(chunks), window, sink
        self.last_start = sum(chunks[: (trained_chunks or len(chunks)) - 1])
        self.mask: Tensor | None = None
        self.new: dict[int, tuple[Tensor, Tensor]] | None = None
        self.past = Past()
        config: Any = network.config
        self.rope = WanRotaryPosEmbed(config.attention_head_dim, tuple(config.patch_size), MOST_FRAMES)
        for layer, block in enumerate(network.blocks):
            block.attn1.set_processor(_Causal(layer, self))
            block.attn2.set_processor(WrittenOut())

    def sees(self, chunk: int, earlier: int) -> bool:
        """Whether a chunk attends to an earlier one."""
        return self.window is None or chunk - earlier <= self.window or earlier < self.sink

    def tables(self, frames: Sequence[int], height: int, width: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of frames at these positions."""
        tables = self.rope(torch.zeros(1, 1, max(frames) + 1, 2 * height, 2 * width))
        per = height * width
        index = torch.cat([torch.arange(f * per, (f + 1) * per) for f in frames])
        return tables[0][:, index], tables[1][:, index]

    def call(self, x: Tensor, t: Tensor, text: Tensor, frames: Sequence[int], mask: Tensor | None = None) -> Tensor:
        """Velocity of latents whose frames have these positions, times ``(B, T)``."""
        self.mask, self.size = mask, (x.shape[3] // 2, x.shape[4] // 2)
        self.network.rope.forward = lambda hidden: self.tables(frames, *self.size)
        times = 1000 * t.repeat_interleave(self.size[0] * self.size[1], 1)
        return self.network(hidden_states=x, timestep=times, encoder_hidden_states=text, return_dict=False)[0]

    def _chunk_of_token(self, x: Tensor) -> Tensor:
        per = x.shape[3] // 2 * (x.shape[4] // 2)
        return torch.cat([torch.full((n * per,), i) for i, n in enumerate(self.chunks)])

    def _history(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the chunk of a token (row) attends to that of another one, an earlier one or its own."""
        of = self._chunk_of_token(x).tolist()
        rows = [[j < i and self.sees(i, j) for j in of] for i in of]
        return torch.tensor(rows), torch.tensor([[i == j for j in of] for i in of])

    def noisy_history(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """Way 1, times ``(B, T)``."""
        earlier, same = self._history(x)
        return self.call(x, t, text, range(x.shape[2]), earlier | same)

    def clean_history(self, x: Tensor, t: Tensor, text: Tensor, clean: Tensor, context_time: float = 0.0) -> Tensor:
        """Way 2: the velocity of the noisy half, times ``(B, T)``."""
        earlier, same = self._history(x)
        mask = torch.cat([torch.cat([earlier | same, same & ~same], 1), torch.cat([earlier, same], 1)])
        frames = [*range(x.shape[2])] * 2
        times = torch.cat([torch.full_like(t, context_time), t], 1)
        return self.call(torch.cat([clean, x], 2), times, text, frames, mask)[:, :, x.shape[2] :]

    def read(self, layer: int) -> list[tuple[Tensor, Tensor, tuple[Tensor, Tensor]]]:
        """Keys and values of the chunks that the next chunk attends to, with the tables at which it reads them."""
        number = len(self.past.frames)
        start = self.past.frames[-1][-1] + 1 if number else 0
        nearer = max(0, start - self.last_start)
        parts = []
        for j, frames in enumerate(self.past.frames):
            if self.sees(number, j):
                at = [f + nearer for f in frames] if j < self.sink else frames
                parts.append((self.past.keys[j][layer], self.past.values[j][layer], self.tables(at, *self.size)))
        return parts

    def chunk(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """Way 3: the velocity of the next chunk, times ``(B,)``."""
        start = self.past.frames[-1][-1] + 1 if self.past.frames else 0
        self.new = {}
        frames = range(start, start + x.shape[2])
        v = self.call(x, t[:, None].expand(-1, x.shape[2]), text, frames)
        self.frames_of_new, new, self.new = [*frames], self.new, None
        self.found = new
        return v

    @torch.no_grad()
    def remember(self, x0: Tensor, text: Tensor, context_time: float = 0.0) -> None:
        """Append a finished chunk."""
        self.chunk(x0, torch.full((len(x0),), context_time), text)
        self.past.keys.append([self.found[layer][0] for layer in sorted(self.found)])
        self.past.values.append([self.found[layer][1] for layer in sorted(self.found)])
        self.past.frames.append(self.frames_of_new)
