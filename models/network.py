"""A network on the mesh: one sharded module with what its family knows of it, for one role or for several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from models.families.base import Family


@dataclass(kw_only=True, eq=False)
class Network:
    """Built, split over the mesh, sharded. Roles that share one hold the same object.

    What belongs to a purpose is not here: which of its parameters train is the role's own, which says so for a step.
    """

    family: Family
    config: dict[str, Any]
    """The network's configuration, as its ``config.json``."""
    module: nn.Module
    """The FSDP root."""
    precision: str
    """``fp32``, ``bf16`` or ``fp64``: dtype of compute."""
    tokens: int
    """Tokens of one sample."""
    forward_flops: int
    """Operations of one forward of one sample."""
    tangent_flops: int = 0
    """Those of its tangent in forward mode, beside it."""
