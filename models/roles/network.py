"""A network on the mesh: one sharded module with facts from its family, used by one or several roles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from fsdp_cp.mesh import Mesh
from fsdp_cp.sharding.settings import Precision
from models.families.base import Family
from models.lora.serving import Serving
from models.roles.names import owner


class _Place(NamedTuple):
    """Location of a parameter. A lookup there finds the current parameter even if FSDP2 has replaced it."""

    holder: nn.Module
    attribute: str
    name: str
    """Name in the module."""
    role: str | None
    """Role that owns the parameter (:func:`models.roles.names.owner`)."""
    public: str


@dataclass(kw_only=True, eq=False)
class Network:
    """A network that is built, split over the mesh and sharded. Roles that share it hold the same object.

    State of a single role is not here: each role decides in each step which of its parameters train.
    """

    family: Family
    config: dict[str, Any]
    """Configuration of the network, as in its ``config.json``."""
    module: nn.Module
    """FSDP root."""
    mesh: Mesh
    """Mesh over which its tokens are split."""
    precision: Precision
    """``fp32``, ``bf16`` or ``fp64``: dtype of compute."""
    tokens: int
    """Number of tokens of one sample."""
    forward_flops: int
    """Floating-point operations of one forward of one sample."""
    tangent_flops: int = 0
    """Additional operations of the forward-mode tangent."""
    attention_flops: int = 0
    """Operations of attention within the forward, which selective recomputation does not repeat."""
    adapters: tuple[str, ...] = ()
    """Roles with adapters on this frozen base. If empty, one role owns the whole network."""
    serving: Serving | None = None
    """Selection of a role's adapters; ``None`` without adapters."""

    @contextmanager
    def serves(self, role: str) -> Iterator[None]:
        """Run calls of the module within this context for ``role``."""
        if self.serving is None:
            yield
            return
        with self.serving.serves(role):
            yield

    @cached_property
    def _places(self) -> list[_Place]:
        """Locations of all parameters, cached: a step needs them several times, and a walk over 40 blocks takes the
        host more than a millisecond."""
        walked = (
            (holder, attribute, f"{path}.{attribute}" if path else attribute)
            for path, holder in self.module.named_modules()
            for attribute, _ in holder.named_parameters(recurse=False)
        )
        return [_Place(holder, attribute, name, *owner(name)) for holder, attribute, name in walked]

    def _owned(self) -> Iterator[tuple[_Place, nn.Parameter]]:
        """Yield each parameter once, in the order of :meth:`torch.nn.Module.named_parameters`."""
        seen: set[int] = set()  # ids, since hashing a tensor is a Python call
        for place in self._places:
            # Use _parameters as named_parameters does, since getattr takes three times as long.
            parameter = place.holder._parameters[place.attribute]
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield place, parameter

    def named_parameters(self, role: str) -> dict[str, nn.Parameter]:
        """Return the parameters of ``role`` by public name: its adapters, trained copies and additions. For a role
        without adapters include the network itself."""
        of_base = None if role not in self.adapters else role
        return {place.public: parameter for place, parameter in self._owned() if place.role in (role, of_base)}

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the network itself by diffusers name, without those that roles add."""
        return {place.public: parameter for place, parameter in self._owned() if place.role is None}

    def owned_names(self, role: str) -> set[str]:
        """Return the names in the module of the parameters that ``role`` adds."""
        return {place.name for place, _ in self._owned() if place.role == role}

    def trained_elsewhere(self, role: str) -> set[str]:
        """Return the names in the module of the parameters that other roles train."""
        return {place.name for place, _ in self._owned() if place.role not in (None, role)}
