"""Selection of the role whose adapters a forward of a shared network runs, including recomputation in backward.

peft's ``set_adapter`` and ``enable_adapters`` also change ``requires_grad``, possibly between a forward and its
backward, so they are not used. Instead the role is an argument of every FSDP unit's forward. Recomputation in backward
then uses the same role, even if the network has served another role since.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

_ARGUMENT = "serves_adapters"
_Layer = tuple[nn.Module, frozenset[str]]


def training_adapter(role: str) -> str:
    """Return the name of the frozen adapter that ``role`` has in training alone."""
    return f"{role}_training"


class Serving:
    """Selector for one network with adapters, made before it is sharded; backward can recompute ``units``."""

    def __init__(self, network: nn.Module, units: Sequence[nn.Module]):
        self.adapters: tuple[str, ...] | None = None
        """Names of the adapters of the current call, of which the network may have some."""
        self.in_training = True
        """Whether calls run training adapters."""
        in_units: set[nn.Module] = set()
        for unit in units:
            layers = _layers(unit)
            in_units.update(layer for layer, _ in layers)
            if layers:
                _take_the_role(unit, layers)
                unit.register_forward_pre_hook(partial(self._tell, layers), with_kwargs=True)
        self._elsewhere = [entry for entry in _layers(network) if entry[0] not in in_units]

    @contextmanager
    def serves(self, role: str) -> Iterator[None]:
        """Run calls of the network within this context for ``role``; a role without adapters gets the base. Nests."""
        outer, self.adapters = self.adapters, (role, training_adapter(role)) if self.in_training else (role,)
        _bind(self._elsewhere, self.adapters)
        try:
            yield
        finally:
            self.adapters = outer
            if outer is not None:
                _bind(self._elsewhere, outer)

    def _tell(self, layers: list[_Layer], _unit: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict[str, Any]]:
        assert self.adapters is not None, "a network with adapters is called through a role"
        _bind(layers, self.adapters)
        return args, {**kwargs, _ARGUMENT: self.adapters}


def _take_the_role(unit: nn.Module, layers: list[_Layer]) -> None:
    """Wrap ``unit.forward``, before the wrappers that recompute or compile it."""
    inner = unit.forward

    def forward(*args, **kwargs):
        adapters = kwargs.pop(_ARGUMENT)
        # A compiled graph is specialized to the adapters of its forward, including recomputation.
        if not torch.compiler.is_compiling():
            _bind(layers, adapters)
        return inner(*args, **kwargs)

    unit.forward = forward


def _layers(module: nn.Module) -> list[_Layer]:
    """Return the adapted layers in ``module``, each with the names of its adapters."""
    adapted = [child for child in module.modules() if isinstance(child, BaseTunerLayer)]
    return [(layer, frozenset(cast(nn.ModuleDict, layer.lora_A))) for layer in adapted]


def _bind(layers: list[_Layer], adapters: tuple[str, ...]) -> None:
    """Set the active adapters that peft's layers (0.21) read in forward; without an entry they run the base."""
    for layer, existing in layers:
        layer.__dict__["_active_adapter"] = [name for name in adapters if name in existing]
