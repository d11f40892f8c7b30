"""The adapters that a role will have, checked against its base before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fsdp_cp.reduce import local_shard
from fsdp_cp.sharding.initialise import initialise
from models.families.base import Family
from models.lora.inject import adapter_shapes, inject, target_layers, trained_modules
from models.lora.settings import LoraSettings
from models.names import owner

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """From :func:`plan_lora`."""

    settings: LoraSettings
    targets: tuple[str, ...]
    """Linear layers with adapters, by name."""
    train: tuple[str, ...]
    """Modules of which the role trains a copy."""

    def shapes(self, network: nn.Module) -> dict[str, Shape]:
        """Of the role's own parameters on the plain ``network``, by public name."""
        return adapter_shapes(network, self.settings.rank, self.targets, self.train)

    @property
    def described(self) -> dict[str, Any]:
        """What of them a checkpoint must have for this role, as JSON."""
        return {
            "rank": self.settings.rank,
            "scale": self.settings.scale,
            "targets": list(self.targets),
            "train": list(self.train),
        }

    def inject(self, network: nn.Module, role: str) -> None:
        """Put them into ``network``, in place; see :func:`models.lora.inject.inject`."""
        inject(network, role, self.settings, self.targets, self.train)

    def fill(self, module: nn.Module, role: str, seed: int) -> None:
        """First values of ``role``'s adapters in the sharded ``module``: A drawn from ``seed``, B zero."""

        def is_its_a(name: str) -> str | None:
            return name if owner(name)[0] == role and ".lora_A." in name else None

        initialise(module, seed=seed, special=partial(_draw, self.settings), stream=is_its_a)
        for name, parameter in module.named_parameters():
            if owner(name)[0] == role and ".lora_B." in name:
                local_shard(parameter.detach()).zero_()


def _draw(settings: LoraSettings, _module: nn.Module, _name: str, tensor: Tensor) -> None:
    """The full A of a layer; ``standard`` values are those of a linear layer, as in peft."""
    if settings.init == "gaussian":
        tensor.normal_(std=1 / settings.rank)


def plan_lora(network: nn.Module, family: Family, settings: LoraSettings, where: str) -> LoraPlan:
    """Check a role's adapters against its base.

    Args:
        network: the base, plain, on any device.
        family: its family.
        settings: of the adapters; ``rank`` is above 0.
        where: the settings' prefix in a message, e.g. ``"student.lora."``.

    Raises:
        UserError: what :func:`models.lora.inject.target_layers` and ``trained_modules`` refuse.
    """
    settings.check(where)
    targets = target_layers(network, family, settings, where)
    train = trained_modules(network, settings, targets, where)
    return LoraPlan(settings=settings, targets=tuple(targets), train=tuple(train))
