"""The adapters that a role will have, checked against its base before anything is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.reduce import local_shard
from fsdp_cp.sharding.initialise import copy_own_part, initialise
from models.families.base import Family
from models.lora.inject import adapter_shapes, inject, target_layers, trained_modules, unread_layers
from models.lora.saved import SavedAdapters, inspect_adapters
from models.lora.settings import LoraSettings
from models.names import owner

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """From :func:`plan_lora`."""

    settings: LoraSettings
    targets: tuple[str, ...]
    """Linear layers with adapters, by name."""
    train: tuple[str, ...]
    """Modules of which the role trains a copy."""
    saved: SavedAdapters | None = None
    """Where their first values come from; ``None`` for fresh ones."""
    biased: bool = False
    """Whether each B has a bias, as in a file with one."""

    def shapes(self, network: nn.Module) -> dict[str, Shape]:
        """Of the role's own parameters on the plain ``network``, by public name."""
        return adapter_shapes(network, self.settings.rank, self.targets, self.train, biased=self.biased)

    @property
    def described(self) -> dict[str, Any]:
        """What of them a checkpoint must have for this role, as JSON."""
        return {
            "rank": self.settings.rank,
            "scale": self.settings.scale,
            "targets": list(self.targets),
            "train": list(self.train),
        }

    def of(self, network: nn.Module) -> LoraPlan:
        """For a network of the same kind with fewer blocks: what of the layers it has."""
        names = {name for name, _ in network.named_modules()}
        targets, train = (tuple(name for name in chosen if name in names) for chosen in (self.targets, self.train))
        return replace(self, saved=None, targets=targets, train=train)

    def inject(self, network: nn.Module, role: str) -> None:
        """Put them into ``network``, in place; see :func:`models.lora.inject.inject`."""
        inject(network, role, self.settings, self.targets, self.train, biased=self.biased)

    def fill(self, module: nn.Module, role: str, seed: int) -> None:
        """First values of ``role``'s adapters in the sharded ``module``: the file's, or A from ``seed`` and B zero."""

        if self.saved is not None:
            found = self.saved.read()
            for name, parameter in module.named_parameters():
                of, public = owner(name)
                if of == role and ".lora_" in name:
                    layer, _, which = public.rpartition(".lora_")
                    a, b, bias = found[layer]
                    value = {"A.weight": a, "B.weight": b, "B.bias": bias}[which]
                    if value is None:  # other layers have one
                        value = torch.zeros(parameter.shape)
                    copy_own_part(
                        parameter.detach(), value / (1.0 if which == "A.weight" else self.settings.scale), name
                    )
            return

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


def plan_lora(
    network: nn.Module, family: Family, settings: LoraSettings, role: str, saved: Path | None = None
) -> LoraPlan:
    """Check a role's adapters against its base.

    Args:
        network: the base, plain, on any device.
        family: its family.
        settings: of the adapters; ``rank`` is above 0, unless it is the file's.
        role: the role's name, for messages.
        saved: the file that they come from; ``None`` for fresh ones.

    Raises:
        UserError: what :func:`models.lora.inject.target_layers`, ``trained_modules`` and
            :func:`models.lora.saved.inspect_adapters` refuse; a file of another rank, or for other layers.
    """
    where, found = f"{role}.lora.", None
    settings.check(where)
    if saved is not None:
        found = inspect_adapters(saved, network, family, f"{role}.checkpoint")
        unread = found.tensors.keys() & unread_layers(network, family)
        if unread:
            logger.info("%s: %d adapters left out, of layers whose output nothing reads", saved, len(unread))
            if unread == found.tensors.keys():
                raise UserError(
                    f"{role}.checkpoint={saved.parent}: its adapters are of layers whose output nothing reads, so they"
                    " change nothing; give others, or the base alone"
                )
            found = replace(found, tensors={name: of for name, of in found.tensors.items() if name not in unread})
        if settings.rank not in (0, found.rank):
            raise UserError(
                f"{where}rank={settings.rank}, but the adapters in {role}.checkpoint={saved.parent} have rank"
                f" {found.rank}; leave it out"
            )
        if not settings.targets:
            settings = replace(settings, rank=found.rank, targets=sorted(found.tensors))
    targets = target_layers(network, family, settings, where, fresh=saved is None)
    if saved is not None and found is not None and set(targets) != found.tensors.keys():
        raise UserError(
            f"{where}targets names {len(targets)} layers, but the adapters in {role}.checkpoint={saved.parent} are for"
            f" {len(found.tensors)} others; leave it out"
        )
    train = trained_modules(network, family, settings, targets, where)
    biased = found is not None and found.biased
    return LoraPlan(settings=settings, targets=tuple(targets), train=tuple(train), saved=found, biased=biased)
