"""A base with a role's adapters in it, as plain weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Weights of a network or of adapters that are read one at a time."""

    shapes: Mapping[str, tuple[int, ...]]
    """By public name (models/roles/names.py)."""
    read: Callable[[str], Tensor]
    """Returns a whole tensor by its name. On a mesh every rank must call it."""


def merged(base: Weights, own: Weights, scale: float) -> Weights:
    """Return ``W + scale B A``, summed in fp32 and not rounded, and what the role trains whole or added to the network.

    Args:
        base: the base.
        own: the role's own.
        scale: ``alpha / rank``.
    """
    whole = {name: shape for name, shape in own.shapes.items() if ".lora_" not in name}

    def read(name: str) -> Tensor:
        if name in whole:
            return own.read(name)
        layer, _, kind = name.rpartition(".")
        weight, b = base.read(name), f"{layer}.lora_B.{kind}"
        if b not in own.shapes:
            return weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        difference = own.read(b).to(dtype)
        if kind == "weight":
            difference = difference @ own.read(f"{layer}.lora_A.weight").to(dtype)
        return weight.to(dtype) + scale * difference

    return Weights({**base.shapes, **whole}, read)
