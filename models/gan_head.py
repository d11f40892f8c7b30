"""A discriminator on the features of a score network (Yin et al. 2024, arXiv:2405.14867, section 4.3).

There it is a stack of convolutions on the bottleneck of a UNet. Here it is a small network on each token behind a
middle block of a transformer, so that no rank needs another's tokens: it is exact however they are split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import gather_tokens
from models.additions import Addition


class GanHead(Addition):
    """Per token normalise, ``Linear``, SiLU, ``Linear`` to one logit; ``D(x)`` is their mean over a sample's tokens.

    Computes in fp32 under ``precision=bf16``: the approximate R1 penalty is a difference of nearly equal logits.

    Args:
        config: of a diffusers video transformer (``blocks``, ``patch_size``).
        block: index of the block whose output it reads; the middle one by default.

    Raises:
        UserError: a block that the network does not have.
    """

    full_precision = True

    def __init__(self, config: Mapping[str, Any], *, block: int | None = None):
        super().__init__(config)
        layers = config["num_layers"]
        if block is not None and block >= layers:
            raise UserError(
                f"method.gan_block={block}, but the network has {layers} blocks; use 0 to {layers - 1}, or null for the"
                " middle one"
            )
        self.block = (layers - 1) // 2 if block is None else block
        self.depth = (self.block + 1) / layers
        """Share of the blocks that a gradient of the logits passes."""
        self.patch = tuple(config["patch_size"])
        width = config["num_attention_heads"] * config["attention_head_dim"]
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)
        self._wanted = False
        self._features: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(B, S_local)`` of features ``(B, S_local, width)``."""
        x = F.layer_norm(features.to(self.out.weight.dtype), features.shape[-1:])
        return self.out(F.silu(self.hidden(x))).squeeze(-1)

    def attach(self, network: nn.Module, mesh: Mesh) -> None:
        network.blocks[self.block].register_forward_hook(self._capture)
        network.register_forward_hook(partial(self._append, mesh), with_kwargs=True)

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Inside, the network returns ``D`` ``(B,)`` behind its other outputs; it costs nothing outside."""
        self._wanted = True
        try:
            yield
        finally:
            self._wanted, self._features = False, None

    def _capture(self, _block: nn.Module, _args: tuple, output: Tensor) -> None:
        if self._wanted:
            self._features = output

    def _append(
        self, mesh: Mesh, _network: nn.Module, _args: tuple, kwargs: dict[str, Any], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        if not self._wanted:
            return None
        sizes = kwargs["hidden_states"].shape[2:]
        total = math.prod(size // patch for size, patch in zip(sizes, self.patch, strict=True))
        # Nothing with parameters behind the gather: their gradients would be cp times too large.
        return *output, gather_tokens(self(self._features), mesh, total).mean(1)
