"""A network on the mesh: one sharded module with what its family knows of it, for one role or for several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from fsdp_cp.sharding.settings import Precision
from models.families.base import Family
from models.lora.serving import Serving
from models.roles.names import owner


class _Place(NamedTuple):
    """Where a parameter is: looked up there, it is the one of now, whatever has replaced it since."""

    holder: nn.Module
    attribute: str
    name: str
    """In the module."""
    role: str | None
    """Whose it is alone (:func:`models.roles.names.owner`)."""
    public: str


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

    @cached_property
    def _places(self) -> list[_Place]:
        """Of every parameter. Modules are settled by now: a step asks several times, and a walk over those of 40 blocks
        takes the host a millisecond and more."""
        walked = (
            (holder, attribute, f"{path}.{attribute}" if path else attribute)
            for path, holder in self.module.named_modules()
            for attribute, _ in holder.named_parameters(recurse=False)
        )
        return [_Place(holder, attribute, name, *owner(name)) for holder, attribute, name in walked]

    def _owned(self) -> Iterator[tuple[_Place, nn.Parameter]]:
        """Each parameter once, as :meth:`torch.nn.Module.named_parameters` gives them."""
        seen: set[int] = set()  # ids: a tensor's own hash is a call of Python
        for place in self._places:
            # As named_parameters itself does: getattr takes three times as long.
            parameter = place.holder._parameters[place.attribute]
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield place, parameter

    def named_parameters(self, role: str) -> dict[str, nn.Parameter]:
        """What belongs to ``role``, by public name: its adapters, trained copies and additions; of a role without
        adapters the network itself, too."""
        of_base = None if role not in self.adapters else role
        return {place.public: parameter for place, parameter in self._owned() if place.role in (role, of_base)}

    def base_parameters(self) -> dict[str, nn.Parameter]:
        """The network itself, by diffusers' names, without what roles add to it."""
        return {place.public: parameter for place, parameter in self._owned() if place.role is None}

    def owned_names(self, role: str) -> set[str]:
        """Names in the module of what ``role`` adds to it."""
        return {place.name for place, _ in self._owned() if place.role == role}

    def trained_elsewhere(self, role: str) -> set[str]:
        """Names in the module of what other roles train."""
        return {place.name for place, _ in self._owned() if place.role not in (None, role)}
