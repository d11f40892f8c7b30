"""A second time input: the start of MeanFlow's interval (Geng et al. 2025, arXiv:2505.13447, section 4.3), or the last
step of the samples that a fake score learns from."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_cp.mesh import Mesh
from models.additions.base import Addition
from models.families.base import Family

NAME = "second_time"
RATES = (0.25, 32.0)
"""Minimum and maximum rate of the embedding, in radians over an interval of 1. Wan's own rates reach 1000. These are
lower, since the time derivative in MeanFlow's target grows with them (Lu & Song 2024, section 4.1)."""


class _ZeroLinear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class SecondTime(Addition):
    """Embedding of a second time ``r`` that is added to the network's embedding of ``t``, as in MeanFlow's networks.

    It is ``W2 silu(W1 f(d))`` with ``f(d) = (cos(w d) - 1, sin(w d))``, without biases, for the interval ``d = t - r``.
    ``W2`` starts at 0, so that the student equals the teacher for every r. At ``r = t`` the embedding is zero for all
    weights: there the student always predicts an instantaneous velocity. It computes in fp32 under bf16.
    """

    by_sample = True

    def __init__(self, family: Family, config: Mapping[str, Any]):
        super().__init__(family, config)
        self.rates = family.time_features(config) // 2
        width = family.time_width(config)
        self.linear_1 = nn.Linear(2 * self.rates, width, bias=False)
        self.linear_2 = _ZeroLinear(width, width, bias=False)
        self.embedded: Tensor | None = None
        """``d`` of the current call."""

    @staticmethod
    def argument(t: Tensor, r: Tensor) -> Tensor:
        """Return ``d``, ``(B,)``."""
        return t - r

    @contextmanager
    def at(self, t: Tensor, r: Tensor) -> Iterator[None]:
        """Run calls of the network within this context at the times ``(r, t)``, both ``(B,)`` in [0, 1]."""
        self.embedded = self.argument(t, r)
        try:
            yield
        finally:
            self.embedded = None  # the next call must set it again

    def attach(self, network: nn.Module, family: Family, mesh: Mesh) -> None:
        family.time_embedder(network).register_forward_hook(self._add)

    def _add(self, embedder: nn.Module, args: tuple, embedding: Tensor) -> Tensor | None:
        if self.embedded is not None:
            added = self(self.embedded)
            # With a time per token the embedding is (B, S_local, width) or flat (B S_local, width).
            if embedding.ndim == added.ndim:
                return embedding + added.repeat_interleave(len(embedding) // len(added), dim=0)
            return embedding + added[:, None]
        if self.shared:
            return None
        raise RuntimeError("this network was called without its second time; give it to Role.velocity")

    def forward(self, d: Tensor) -> Tensor:
        """Return the embedding ``(B, dim)`` of ``d`` ``(B,)``, which is fp32 or better and may be dual."""
        low, high = (math.log2(rate) for rate in RATES)
        rates = torch.logspace(low, high, self.rates, base=2.0, dtype=d.dtype, device=d.device)
        angles = d[:, None] * rates
        features = torch.cat([angles.cos() - 1, angles.sin()], dim=1)
        return self.linear_2(F.silu(self.linear_1(features.to(self.linear_1.weight.dtype))))


class LastStep(SecondTime):
    """Embedding of ``d = r`` in place of the interval, for a fake score: the time of the step that made the sample."""

    @staticmethod
    def argument(t: Tensor, r: Tensor) -> Tensor:
        return r
