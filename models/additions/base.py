"""Small trainable modules beside an unmodified diffusers network: part of its role, not of its class.

An addition is sharded, trained, averaged and resumed with the network that it is attached to, under the parameter
names ``additions.NAME.*``. It belongs to a role: other roles of the network run without it. It reaches into the network
through hooks alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

from torch import nn

from fsdp_cp.mesh import Mesh
from models.families.base import Family
from models.roles.names import ADDITIONS

PREFIX = "additions."
T = TypeVar("T")
Chosen = Sequence[str] | Mapping[str, Mapping[str, Any]]
"""Names of additions, or their names with keyword arguments for each."""


class Addition(nn.Module):
    """Base: built from the network's configuration on the current default device, then attached.

    Every parameter belongs to a submodule with a ``reset_parameters``, or the addition has its own: values are drawn by
    :func:`fsdp_cp.sharding.initialise.initialise`, from a seed, also where the network's come from a checkpoint.
    """

    full_precision: ClassVar[bool] = False
    """Compute in fp32 under ``precision=bf16``, as an FSDP unit of its own."""
    shared = False
    """Do other roles call the network too? They run without it."""

    def __init__(self, family: Family, config: Mapping[str, Any]):
        """``config`` is the network's, of ``family``."""
        super().__init__()

    def attach(self, network: nn.Module, family: Family, mesh: Mesh) -> None:
        """Register hooks on ``network``, before it is sharded; they do nothing unless the role's call asks for it.

        What the network returns is where FSDP begins its backward: a result for a loss must be among its outputs.
        """
        raise NotImplementedError


def named_additions(tensors: Iterable[str]) -> set[str]:
    """Which additions the tensors of these names belong to."""
    return {name.removeprefix(PREFIX).partition(".")[0] for name in tensors if name.startswith(PREFIX)}


def own(tensors: Mapping[str, T]) -> dict[str, T]:
    """Those of the network itself, by parameter name."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}


def added(tensors: Mapping[str, T]) -> dict[str, T]:
    """Those of its additions, by parameter name."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def additions_of(network: nn.Module, role: str) -> Mapping[str, Addition]:
    """Return the additions of ``role`` to a network, by name; empty if it has none."""
    of_roles = getattr(network, ADDITIONS, {})
    return cast("Mapping[str, Addition]", of_roles[role] if role in of_roles else {})


def attach_additions(
    network: nn.Module, role: str, additions: nn.ModuleDict, family: Family, mesh: Mesh, *, shared: bool = False
) -> None:
    """Add ``additions`` to the network, in place, for ``role``, and register their hooks, before it is sharded.

    Args:
        network: of ``family``, on ``mesh``.
        role: the role's name.
        additions: by name (:func:`models.roles.role_plan.build_additions`).
        family, mesh: of the network.
        shared: whether other roles call the network too.
    """
    if not hasattr(network, ADDITIONS):
        setattr(network, ADDITIONS, nn.ModuleDict())
    cast(nn.ModuleDict, network.get_submodule(ADDITIONS))[role] = additions
    for addition in additions_of(network, role).values():
        addition.shared = shared
        addition.attach(network, family, mesh)
