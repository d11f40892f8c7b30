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
from models.names import ADDITIONS as OF_ROLES

ADDITIONS: dict[str, type[Addition]] = {"gan_head": GanHead, "second_time": SecondTime, "last_step": LastStep}


def build_additions(chosen: Chosen, family: Family, config: Mapping[str, Any]) -> nn.ModuleDict:
    """The additions ``chosen`` to a network of ``config``, on the current default device."""
    arguments = chosen if isinstance(chosen, Mapping) else dict.fromkeys(chosen, {})
    return nn.ModuleDict({name: ADDITIONS[name](family, config, **given) for name, given in arguments.items()})


def additions_of(network: nn.Module, role: str) -> Mapping[str, Addition]:
    """The additions of ``role`` to a network by name; empty where it has none."""
    of_roles = getattr(network, OF_ROLES, {})
    return cast("Mapping[str, Addition]", of_roles[role] if role in of_roles else {})


def attach_additions(
    network: nn.Module, role: str, additions: nn.ModuleDict, family: Family, mesh: Mesh, *, shared: bool = False
) -> None:
    """Make ``additions`` the role's, and register their hooks, before the network is sharded.

    Args:
        network: in place.
        role: whose.
        additions: of :func:`build_additions`.
        family, mesh: of the network.
        shared: do other roles call the network too?
    """
    if not hasattr(network, OF_ROLES):
        setattr(network, OF_ROLES, nn.ModuleDict())
    cast(nn.ModuleDict, network.get_submodule(OF_ROLES))[role] = additions
    for addition in additions_of(network, role).values():
        addition.shared = shared
        addition.attach(network, family, mesh)
