"""A role: one sharded network with a purpose (teacher, student, fake score), called on full latents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fsdp_cp.duals import may_be_dual
from fsdp_cp.fsdp_state import frozen, reshard, unrecorded_forward
from fsdp_cp.shard_settings import COMPUTE_DTYPE
from fsdp_cp.sharding import gather_first_block_early, settings_of
from models.second_time import second_time
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

    def velocity(self, x: Tensor, t: Tensor, text: Tensor, r: Tensor | None = None) -> Tensor:
        """The rectified-flow velocity ``v(x_t, t, text)``, an estimate of ``e - x0``.

        Args:
            x: ``x_t``, full latents ``(B, C, T, H, W)``, fp32 or better.
            t: ``(B,)`` in [0, 1]; the network gets ``1000 t``, never rounded to the compute dtype.
            text: caption embeddings ``(B, L, D)``.
            r: ``(B,)`` in [0, 1], for a network with the addition ``second_time`` (the mean velocity from r to t) or
                ``last_step`` (of samples whose last step was at r), and only for one.

        Returns:
            ``(B, C, T, H, W)`` in the dtype of ``x``.
        """
        with second_time(self.network, t, r):
            return self._outputs(x, t, text)[0].to(x.dtype)

    def logits(self, x: Tensor, t: Tensor, text: Tensor, r: Tensor | None = None) -> Tensor:
        """``D(x_t, t, text)`` of this role's GAN head (models/gan_head.py), above 0 where ``x_t`` looks real.

        Args:
            x, t, text, r: as of :meth:`velocity`.

        Returns:
            ``(B, K)`` of its K blocks, in the dtype of ``x``.
        """
        head = self.network.additions["gan_head"]
        with head.wanted(), second_time(self.network, t, r):
            return self._outputs(x, t, text, depth=head.depth)[1].to(x.dtype)

    def _outputs(self, x: Tensor, t: Tensor, text: Tensor, depth: float = 1.0) -> tuple[Tensor, ...]:
        """What the network returns; ``depth`` is the share of it that a backward passes."""
        dtype = COMPUTE_DTYPE[self.precision]
        assert t.dtype in (torch.float32, torch.float64), "times lose their meaning below fp32"
        # A backward costs a forward for the inputs' gradients and one for the weights'.
        backward = 2 if self.trainable else int(x.requires_grad)
        passes = 1 + depth * backward * torch.is_grad_enabled()
        if may_be_dual(x) and any(forward_ad.unpack_dual(a).tangent is not None for a in (x, t)):
            passes += 1  # the tangent's products; attention's own are more, by a constant
        forward = self.family.forward_flops(self.config, self.tokens, self.text_tokens)
        self.flops += int(passes * x.shape[0] * forward)
        with nullcontext() if torch.is_grad_enabled() else unrecorded_forward(self.network):
            return self.family.outputs(self.network, x.to(dtype), 1000 * t, text.to(dtype))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let gradients pass through to the inputs alone: inside, a trained role gets none and allocates none.

        For whole steps, between two updates: a backward must end inside too. Afterwards what was trainable before is so
        again, and nothing else. Nests.
        """
        before, self.trainable = self.trainable, False
        try:
            with frozen(self.network):
                yield
        finally:
            self.trainable = before

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
