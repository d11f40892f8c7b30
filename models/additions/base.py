"""Small trainable modules that a role attaches to an unmodified diffusers network.

An addition is sharded, trained, averaged and resumed with the network that it is attached to, under the parameter
names ``additions.NAME.*``. Other roles of the network run without it. It changes the network only through hooks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from fsdp_cp.mesh import Mesh
from models.families.base import Family
from models.owner import ADDITIONS, PREFIX

T = TypeVar("T")
Chosen = Sequence[str] | Mapping[str, Mapping[str, Any]]
"""Names of additions, or their names with keyword arguments for each."""


class Addition(nn.Module):
    """Base class. An addition is built from the network's configuration on the current default device, then attached.

    It computes in fp32 under ``precision=bf16``, as a separate FSDP unit.

    Every parameter must belong to a module with ``reset_parameters``, either a submodule or the addition: its values
    are drawn from a seed, even if the network comes from a checkpoint.
    """

    shared = False
    """Whether other roles, which run without the addition, call the network too."""
    by_sample = False
    """Whether a call tells it something of each sample."""
    freezes: Sequence[str] = ()
    """Names of the network's parameters that do not train with the addition."""

    def __init__(self, family: Family, config: Mapping[str, Any]):
        """Build the addition for a network of ``family`` with configuration ``config``."""
        super().__init__()

    def attach(self, network: nn.Module, family: Family, mesh: Mesh) -> None:
        """Register hooks on ``network`` before it is sharded. They act only in calls that request the addition.

        FSDP begins its backward at the network's outputs, so a result that enters a loss must be one of them.
        """
        raise NotImplementedError


def named_additions(tensors: Iterable[str]) -> set[str]:
    """Return the names of the additions to which tensors of these names belong."""
    return {name.removeprefix(PREFIX).partition(".")[0] for name in tensors if name.startswith(PREFIX)}


def network_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of the network itself, by parameter name."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}


def addition_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of the additions, by parameter name."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def additions_of(network: nn.Module, role: str) -> Mapping[str, Addition]:
    """Return the additions of ``role`` to a network, by name; empty if it has none."""
    by_role = getattr(network, ADDITIONS, {})
    return cast("Mapping[str, Addition]", by_role[role] if role in by_role else {})


def attach_additions(
    network: nn.Module, role: str, additions: nn.ModuleDict, family: Family, mesh: Mesh, *, shared: bool = False
) -> None:
    """Attach ``additions`` of ``role`` to the network in place, before it is sharded; ``shared`` as in the class."""
    if not hasattr(network, ADDITIONS):
        setattr(network, ADDITIONS, nn.ModuleDict())
    cast(nn.ModuleDict, network.get_submodule(ADDITIONS))[role] = additions
    for addition in additions_of(network, role).values():
        addition.shared = shared
        addition.attach(network, family, mesh)
