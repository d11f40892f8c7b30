"""Merging of a role's adapters into a base, as plain weights."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """Weights of a network or of adapters, read tensor by tensor."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by public name (models/owner.py)."""
    read: Callable[[str], Tensor]
    """Function that returns a whole tensor by name. On a mesh every rank must call it."""


def merged(base: Weights, trained: Weights, scale: float) -> Weights:
    """Return ``W + scale B A``, summed in fp32, with the role's additions; ``scale`` is ``alpha / rank``."""
    whole = {name: shape for name, shape in trained.shapes.items() if ".lora_" not in name}

    def read(name: str) -> Tensor:
        if name in whole:
            return trained.read(name)
        layer, _, kind = name.rpartition(".")
        weight, b = base.read(name), f"{layer}.lora_B.{kind}"
        if b not in trained.shapes:
            return weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        difference = trained.read(b).to(dtype)
        if kind == "weight":
            difference = difference @ trained.read(f"{layer}.lora_A.weight").to(dtype)
        return weight.to(dtype) + scale * difference

    return Weights({**base.shapes, **whole}, read)
