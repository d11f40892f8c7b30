"""A network on the mesh: one sharded module with facts from its family, used by one or several roles."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_cp.mesh import Mesh
from fsdp_cp.sharding.settings import Precision
from models.families.base import Family
from models.lora.serving import Serving
from models.owner import owner
from models.sparse import SparseRoles, sparse_roles


@dataclass(kw_only=True, eq=False)
class Network:
    """A network that is built, split over the mesh and sharded, without state of the roles that share it."""

    family: Family
    config: dict[str, Any]
    """Configuration of the network, as in its ``config.json``."""
    module: nn.Module
    """FSDP root."""
    mesh: Mesh
    """Mesh over which its tokens are split."""
    precision: Precision
    """``fp32``, ``bf16`` or ``fp64``: dtype of compute."""
    adapters: tuple[str, ...] = ()
    """Roles with adapters on this frozen base. If empty, one role owns the whole network."""
    serving: Serving | None = None
    """Selection of a role's adapters; ``None`` without adapters."""

    @property
    def sparse(self) -> SparseRoles:
        """Roles with sparse attention."""
        return sparse_roles(self.module)

    @contextmanager
    def serves(self, role: str) -> Iterator[None]:
        """Run calls of the module within this context for ``role``."""
        with nullcontext() if self.serving is None else self.serving.serves(role), self.sparse.serves(role):
            yield

    def _owned(self) -> Iterator[tuple[str, str | None, str, nn.Parameter]]:
        """Yield each parameter with its name in the module, its role and its public name (:func:`owner`)."""
        for name, parameter in self.module.named_parameters():
            yield name, *owner(name), parameter

    def named_parameters(self, role: str) -> dict[str, nn.Parameter]:
        """Return the parameters of ``role`` by public name: its adapters and additions. For a role
        without adapters include the network itself."""
        owners = (role,) if role in self.adapters else (role, None)
        return {public: parameter for _, owned_by, public, parameter in self._owned() if owned_by in owners}

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the network itself by diffusers name, without those that roles add."""
        return {public: parameter for _, owned_by, public, parameter in self._owned() if owned_by is None}

    def owned_names(self, role: str) -> set[str]:
        """Return the names in the module of the parameters that ``role`` adds."""
        return {name for name, owned_by, _, _ in self._owned() if owned_by == role}

    def trained_elsewhere(self, role: str) -> set[str]:
        """Return the names in the module of the parameters that other roles train."""
        return {name for name, owned_by, _, _ in self._owned() if owned_by not in (None, role)}
