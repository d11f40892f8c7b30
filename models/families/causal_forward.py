"""Arguments of a causal network's forward: positions, mask and history, and a record of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fsdp_cp.attention.cached import KeyValues
from fsdp_cp.attention.mask import BlockMask


@dataclass(slots=True)
class Record:
    """Keys and values that one forward without gradient leaves for a :class:`models.roles.history.Cache`."""

    layers: dict[int, KeyValues] = field(default_factory=dict)
    """Keys and values of the chunk, by layer."""
    text: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of the text, by layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CausalForward:
    """History and positions of one forward. Every block gets it as an argument, so that a block that is recomputed in
    backward reads what its forward read."""

    positions: tuple[int, ...]
    """Position of each latent frame in the clip."""
    mask: BlockMask | None = None
    """Mask over all tokens; ``None`` for a chunk, which attends to itself and to ``past``."""
    past: tuple[tuple[KeyValues, ...], ...] = ()
    """Keys and values of each earlier chunk that the chunk attends to, by layer. The first ``sinks`` are sinks."""
    sinks: int = 0
    """Number of sinks in ``past``."""
    shift: int = 0
    """Number of frames by which the sinks are nearer than their positions say."""
    text: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of the text, by layer; empty if they are not known. Used without gradients only."""
    record: Record | None = None
    """Record to fill."""

    def pairs(self, tokens: int) -> int:
        """Return the number of query-key pairs in a layer of a forward of ``tokens`` tokens."""
        if self.mask is not None:
            return self.mask.pairs
        return tokens * (tokens + sum(chunk[0].tokens for chunk in self.past))
