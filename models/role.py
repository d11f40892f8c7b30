"""A role: one sharded network with a purpose (teacher, student, fake score), called on full latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_cp.fsdp_state import reshard, unrecorded_forward
from fsdp_cp.shard_settings import COMPUTE_DTYPE
from fsdp_cp.sharding import gather_first_block_early, settings_of
from models.wan import Wan


@dataclass(kw_only=True)
class Role:
    """One network on the mesh. Callers never see that it is sharded, or that its tokens are split."""

    name: str
    """``teacher``, ``student`` or ``fake``."""
    family: type[Wan]
    config: dict[str, Any]
    """The network's configuration, as its ``config.json``."""
    network: nn.Module
    """The FSDP root."""
    trainable: bool
    precision: str
    """``fp32``, ``bf16`` or ``fp64``: dtype of compute."""
    tokens: int
    """Tokens of one sample."""
    text_tokens: int
    flops: int = 0
    """Operations since the trainer last set it to 0, over all samples that this rank passed in; backward included."""

    def velocity(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """The rectified-flow velocity ``v(x_t, t, text)``, an estimate of ``e - x0``.

        Args:
            x: ``x_t``, full latents ``(B, C, T, H, W)``, fp32 or better.
            t: ``(B,)`` in [0, 1]; the network gets ``1000 t``, never rounded to the compute dtype.
            text: caption embeddings ``(B, L, D)``.

        Returns:
            ``(B, C, T, H, W)`` in the dtype of ``x``.
        """
        dtype = COMPUTE_DTYPE[self.precision]
        assert t.dtype in (torch.float32, torch.float64), "times lose their meaning below fp32"
        with_grad = torch.is_grad_enabled() and self.trainable
        self.flops += (
            (3 if with_grad else 1) * x.shape[0] * self.family.forward_flops(self.config, self.tokens, self.text_tokens)
        )
        if torch.is_grad_enabled():
            return self.family.velocity(self.network, x.to(dtype), 1000 * t, text.to(dtype)).to(x.dtype)
        with unrecorded_forward(self.network):
            return self.family.velocity(self.network, x.to(dtype), 1000 * t, text.to(dtype)).to(x.dtype)

    def gather_early(self) -> None:
        """Begin to gather what this role's next forward needs first, if its settings ask for it."""
        if settings_of(self.network).gather_early:
            gather_first_block_early(self.network, self.family.units(self.network)[0])

    def rest(self) -> None:
        """Hold the shards alone. Until then updates of them would be ignored where parameters stay gathered."""
        reshard(self.network)

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, in a fixed order."""
        self.rest()
        return list(self.network.parameters())

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by its diffusers name, as the sharded master (a DTensor that shares its storage)."""
        self.rest()
        return {name: parameter.detach() for name, parameter in self.network.named_parameters()}
