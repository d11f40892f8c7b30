"""Which additions there are, and how they are built and attached by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from fsdp_cp.mesh import Mesh
from models.additions.base import Addition, Chosen
from models.additions.gan_head import GanHead
from models.additions.time_conditioning import LastStep, SecondTime
from models.families.base import Family

ADDITIONS: dict[str, type[Addition]] = {"gan_head": GanHead, "second_time": SecondTime, "last_step": LastStep}


def build_additions(chosen: Chosen, family: Family, config: Mapping[str, Any]) -> nn.ModuleDict:
    """The additions ``chosen`` to a network of ``config``, on the current default device."""
    arguments = chosen if isinstance(chosen, Mapping) else dict.fromkeys(chosen, {})
    return nn.ModuleDict({name: ADDITIONS[name](family, config, **given) for name, given in arguments.items()})


def additions_of(network: nn.Module) -> Mapping[str, Addition]:
    """The additions of a network by name; empty where it has none."""
    return cast("Mapping[str, Addition]", getattr(network, "additions", nn.ModuleDict()))


def attach_additions(network: nn.Module, family: Family, mesh: Mesh) -> None:
    """Register the hooks of all additions that the network has, before it is sharded."""
    for addition in additions_of(network).values():
        addition.attach(network, family, mesh)
