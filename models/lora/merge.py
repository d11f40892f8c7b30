"""A base with a role's adapters in it, as plain weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Merged:
    """Weights by diffusers' names, one at a time: ``W + scale B A``, summed in fp32 and not rounded.

    Args:
        base: a weight of the base, whole, by name.
        own: one of the role's own, whole, by public name (models/names.py).
        base_names: of the base.
        own_names: of the role.
        scale: ``alpha / rank``.
    """

    def __init__(
        self,
        base: Callable[[str], Tensor],
        own: Callable[[str], Tensor],
        base_names: Iterable[str],
        own_names: Iterable[str],
        scale: float,
    ):
        self.base, self.own, self.own_names, self.scale = base, own, set(own_names), scale
        added = [name for name in own_names if ".lora_" not in name and name not in set(base_names)]
        self.names = [*base_names, *added]
        """Of the base, and of what was added to the network beside it."""

    def __call__(self, name: str) -> Tensor:
        """The weight ``name`` of :attr:`names`, fp32 or better."""
        if name in self.own_names:  # trained whole
            return self.own(name)
        layer, _, kind = name.rpartition(".")
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.{kind}"
        weight = self.base(name)
        if b not in self.own_names:
            return weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if kind == "bias":
            return weight.to(dtype) + self.scale * self.own(b).to(dtype)
        return weight.to(dtype) + self.scale * (self.own(b).to(dtype) @ self.own(a).to(dtype))
