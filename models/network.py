"""A network on the mesh: one sharded module with what its family knows of it, for one role or for several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_cp.sharding.settings import Precision
from models.families.base import Family
from models.lora.serving import Serving
from models.names import owner


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
    precision: Precision
    """``fp32``, ``bf16`` or ``fp64``: dtype of compute."""
    tokens: int
    """Tokens of one sample."""
    forward_flops: int
    """Operations of one forward of one sample."""
    tangent_flops: int = 0
    """Those of its tangent in forward mode, beside it."""
    attention_flops: int = 0
    """Of the forward's, attention's own: what selective recomputation does not run again."""
    adapters: tuple[str, ...] = ()
    """Roles that add to a frozen base; without any the network has one role, which has all of it."""
    serving: Serving | None = None
    """Of a network with adapters."""

    @contextmanager
    def serves(self, role: str) -> Iterator[None]:
        """Calls of the module inside are ``role``'s."""
        if self.serving is None:
            yield
            return
        with self.serving.serves(role):
            yield

    def named_parameters(self, role: str) -> dict[str, nn.Parameter]:
        """What belongs to ``role``, by public name: its adapters, trained copies and additions; of a role without
        adapters the network itself, too."""
        of_base = None if role not in self.adapters else role
        owned = ((owner(name), parameter) for name, parameter in self.module.named_parameters())
        return {name: parameter for (of, name), parameter in owned if of in (role, of_base)}

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """The network itself, by diffusers' names, without what roles add to it."""
        owned = ((owner(name), parameter) for name, parameter in self.module.named_parameters())
        return {name: parameter for (of, name), parameter in owned if of is None}

    def trained_elsewhere(self, role: str) -> set[str]:
        """Names in the module of what other roles train."""
        return {name for name, _ in self.module.named_parameters() if owner(name)[0] not in (None, role)}
