"""A discriminator on the features of a score network (Yin et al. 2024, arXiv:2405.14867, section 4.3).

In the paper it is a stack of convolutions on the bottleneck of a UNet. Here it is a small network on each token after
several transformer blocks (three, as in FastGen's recipes for Wan). No rank needs another rank's tokens, so the result
is exact for every token split.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import gather_tokens
from models.additions.base import Addition
from models.families.base import Family


def default_blocks(layers: int) -> list[int]:
    """Return the blocks at one half, three quarters and the end: 15, 22, 29 of Wan 1.3B's 30, as in FastGen."""
    return sorted({layers // 2, 3 * layers // 4, layers - 1})


class _TokenHead(nn.Module):
    """Norm, ``Linear``, SiLU, and ``Linear`` to one logit per token."""

    def __init__(self, width: int):
        super().__init__()
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        x = F.layer_norm(features.to(self.out.weight.dtype), features.shape[-1:])
        return self.out(F.silu(self.hidden(x)))


class GanHead(Addition):
    """Discriminator on the tokens after each of K blocks. ``D(x)`` has K logits, each a mean over a sample's tokens.

    It computes in fp32 under ``precision=bf16``: the approximate R1 penalty is a difference of nearly equal logits. It
    reads the outputs of ``blocks``, ascending; those of :func:`default_blocks` by default.
    """

    def __init__(self, family: Family, config: Mapping[str, Any], *, blocks: Sequence[int] | None = None):
        super().__init__(family, config)
        layers = family.layers(config)
        self.blocks = default_blocks(layers) if blocks is None else list(blocks)
        if not self.blocks or self.blocks != sorted(set(self.blocks) & set(range(layers))):
            wanted = f"ascend from 0 to {layers - 1}, or be null for {default_blocks(layers)}"
            raise UserError(f"method.gan_blocks={self.blocks} must {wanted}")
        self.depth = (self.blocks[-1] + 1) / layers
        """Share of the blocks that the logits' gradient passes."""
        self.heads = nn.ModuleList(_TokenHead(family.width(config)) for _ in self.blocks)
        self._tokens: int | None = None
        self._features: dict[int, Tensor] = {}

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Return logits ``(B, S_local, K)`` for the features ``(B, S_local, width)`` after each of the K blocks."""
        return torch.cat([head(feature) for head, feature in zip(self.heads, features, strict=True)], dim=-1)

    def attach(self, network: nn.Module, family: Family, mesh: Mesh) -> None:
        blocks = family.blocks(network)
        for block in self.blocks:
            blocks[block].register_forward_hook(partial(self._capture, block))
        network.register_forward_hook(partial(self._append, mesh))

    @contextmanager
    def wanted(self, tokens: int) -> Iterator[None]:
        """Append ``D`` ``(B, K)`` to the network's outputs within this context; a sample has ``tokens`` on all
        ranks."""
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens, self._features = None, {}

    def _capture(self, index: int, _block: nn.Module, _args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        if self._tokens is not None:
            self._features[index] = output[0] if isinstance(output, tuple) else output

    def _append(
        self, mesh: Mesh, _network: nn.Module, _args: tuple, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if self._tokens is None:
            return None
        logits = self([self._features[block] for block in self.blocks])
        # Use no parameters after the gather: their gradients would be cp times too large.
        return *output, gather_tokens(logits, mesh, self._tokens).mean(1)
