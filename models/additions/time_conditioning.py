"""A second time for a network made for one: where MeanFlow's interval begins (Geng et al. 2025, arXiv:2505.13447,
section 4.3), or what a fake score is told of the samples it is shown."""

from __future__ import annotations

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
"""Least and greatest rate of the embedding, in radians over an interval of 1. Slow, unlike Wan's own (up to 1000): the
derivative in time, which MeanFlow's target is made of, grows with them (Lu & Song 2024, section 4.1)."""


class _ZeroLinear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class SecondTime(Addition):
    """Adds an embedding of a second time ``r`` to the network's own of ``t``, as MeanFlow's networks do.

    ``W2 silu(W1 f(d))`` with ``f(d) = (cos(w d) - 1, sin(w d))`` and no biases, of the interval ``d = t - r``. At first
    ``W2 = 0``: the student is the teacher for every r. At ``r = t`` the embedding is zero whatever the weights: there
    the student is the plain network for ever, with an instantaneous velocity that any sampler of the plain network can
    follow.

    It computes in fp32 under bf16, as the time embedder that it is added to.
    """

    full_precision = True

    def __init__(self, family: Family, config: Mapping[str, Any]):
        super().__init__(family, config)
        self.rates = family.time_features(config) // 2
        width = family.time_width(config)
        self.linear_1 = nn.Linear(2 * self.rates, width, bias=False)
        self.linear_2 = _ZeroLinear(width, width, bias=False)
        self.embedded: Tensor | None = None
        """``d`` of the call that is running."""

    @staticmethod
    def argument(t: Tensor, r: Tensor) -> Tensor:
        """``d``, ``(B,)``."""
        return t - r

    def attach(self, network: nn.Module, family: Family, mesh: Mesh) -> None:
        family.time_embedder(network).register_forward_hook(self._add)

    def _add(self, embedder: nn.Module, args: tuple, embedding: Tensor) -> Tensor | None:
        if self.embedded is not None:
            added = self(self.embedded)
            # With a time for each token the embedding is (B, S_local, width), or flat (B S_local, width). The addition
            # has one value per sample.
            if embedding.ndim == added.ndim:
                return embedding + added.repeat_interleave(len(embedding) // len(added), dim=0)
            return embedding + added[:, None]
        if self.shared:
            return None
        raise RuntimeError("this network has a second time, and was called without one; give Role.velocity its r")

    def forward(self, d: Tensor) -> Tensor:
        """The embedding ``(B, dim)`` of ``d`` ``(B,)``, which is fp32 or better and may be dual."""
        low, high = (math.log2(rate) for rate in RATES)
        rates = torch.logspace(low, high, self.rates, base=2.0, dtype=d.dtype, device=d.device)
        angles = d[:, None] * rates
        features = torch.cat([angles.cos() - 1, angles.sin()], dim=1)
        return self.linear_2(F.silu(self.linear_1(features.to(self.linear_1.weight.dtype))))


class LastStep(SecondTime):
    """The same of ``d = r`` itself: for a fake score, the time of the step that made the sample, at every ``t``."""

    @staticmethod
    def argument(t: Tensor, r: Tensor) -> Tensor:
        """``d``, ``(B,)``."""
        return r


@contextmanager
def second_time(additions: Mapping[str, Addition], t: Tensor, r: Tensor | None) -> Iterator[None]:
    """Calls of the network inside the context are for the times ``(r, t)``.

    Args:
        additions: the calling role's, with or without one of these.
        t: ``(B,)`` in [0, 1].
        r: ``(B,)``; ``None`` for a role without the addition.

    Raises:
        RuntimeError: a second time for a role that has no addition for it, or none for one that has.
    """
    addition = next((each for each in additions.values() if isinstance(each, SecondTime)), None)
    if addition is None:
        if r is not None:
            raise RuntimeError("a second time was given to a network without an addition for it")
        yield
        return
    if r is None:
        raise RuntimeError("this network has a second time, and was called without one; give Role.velocity its r")
    addition.embedded = addition.argument(t, r)
    try:
        yield
    finally:
        addition.embedded = None  # the next call must bring its own
