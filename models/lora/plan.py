"""Plan of a role's adapters, checked against its base before anything is built and injected by peft (0.21).

An adapter has the name of its role, a training adapter one of its own. :mod:`models.lora.serving` selects the adapters
that a forward runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from fsdp_cp.errors import UserError
from fsdp_cp.reduce import local_shard
from fsdp_cp.sharding.initialise import copy_own_part, initialise
from models.families.base import Family, Shape
from models.lora.saved import SavedAdapters, inspect_adapters, linear_layers
from models.lora.settings import LoraSettings
from models.owner import owner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """Adapters of one role, made by :func:`plan_lora`."""

    settings: LoraSettings
    targets: tuple[str, ...]
    """Names of the linear layers with adapters."""
    saved: SavedAdapters | None = None
    """File with the adapters' first values; ``None`` for new adapters."""
    biased: bool = False
    """Whether each B has a bias, because the file has one."""

    def shapes(self, network: nn.Module) -> dict[str, Shape]:
        """Return the shapes of the role's own parameters on the plain ``network``, by public name."""
        shapes: dict[str, Shape] = {}
        for name in self.targets:
            layer = network.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            shapes[f"{name}.lora_A.weight"] = (self.settings.rank, layer.in_features)
            shapes[f"{name}.lora_B.weight"] = (layer.out_features, self.settings.rank)
            if self.biased:
                shapes[f"{name}.lora_B.bias"] = (layer.out_features,)
        return shapes

    def for_network(self, network: nn.Module) -> LoraPlan:
        """Return the plan for a network of the same kind with fewer blocks."""
        names = {name for name, _ in network.named_modules()}
        return replace(self, saved=None, targets=tuple(name for name in self.targets if name in names))

    def inject(self, network: nn.Module, role: str) -> None:
        """Add the adapters of ``role`` to ``network`` on the meta device, in place, next to those of other roles."""
        config = LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.settings.rank * self.settings.scale,  # peft divides it by the rank
            # Pass one pattern: for a list peft would match every name with one of these endings.
            target_modules="|".join(re.escape(name) for name in self.targets),
            init_lora_weights=False,
            lora_bias=self.biased,
        )
        inject_adapter_in_model(config, network, adapter_name=role, low_cpu_mem_usage=True)
        del network.peft_config  # avoids peft's warning when the next role's adapters are added

    def fill(self, module: nn.Module, role: str, seed: int) -> dict[str, Tensor]:
        """Initialize ``role``'s adapters in the sharded ``module``, from the file or as peft: B 0, A from ``seed``.
        Return them."""
        parameters = {
            name: p.detach() for name, p in module.named_parameters() if owner(name)[0] == role and ".lora_" in name
        }
        if self.saved is None:
            initialise(module, seed=seed, stream=lambda name: name if name.endswith(f".lora_A.{role}") else None)
            for name, parameter in parameters.items():
                if ".lora_B." in name:
                    local_shard(parameter).zero_()
            return parameters
        values = self.saved.read()
        for name, parameter in parameters.items():
            layer, _, matrix = owner(name)[1].rpartition(".lora_")
            value = values[layer].get(matrix, torch.zeros(parameter.shape))  # zero if only other layers have a bias
            copy_own_part(parameter, value / (1.0 if matrix == "A.weight" else self.settings.scale), name)
        return parameters


def plan_lora(
    network: nn.Module,
    family: Family,
    settings: LoraSettings,
    role: str,
    saved: Path | None = None,
    *,
    setting: str | None = None,
) -> LoraPlan:
    """Check a role's adapters against its plain base ``network``; the file ``saved``, of ``setting``, by default
    ``ROLE.checkpoint``, gives the rank if it is 0."""
    where, setting, inspected = f"{role}.lora.", setting or f"{role}.checkpoint", None
    if saved is not None:
        inspected = inspect_adapters(saved, network, family, setting)
        if settings.rank not in (0, inspected.rank):
            file = f"{setting}={saved.parent}"
            raise UserError(f"{where}rank={settings.rank} must be {inspected.rank}, as in {file}")
        kept = _without_unread(inspected.scales, network, family, str(saved))
        inspected = replace(inspected, scales={name: inspected.scales[name] for name in kept})
        settings = replace(settings, rank=inspected.rank, targets=settings.targets or kept)
    targets = target_layers(network, family, settings, where, fresh=saved is None)
    if saved is not None and inspected is not None and set(targets) != inspected.scales.keys():
        raise UserError(f"{where}targets names other layers than {setting}={saved.parent} has; leave it out")
    biased = inspected is not None and inspected.biased
    return LoraPlan(settings=settings, targets=tuple(targets), saved=inspected, biased=biased)


def target_layers(
    network: nn.Module, family: Family, settings: LoraSettings, where: str, *, fresh: bool = True
) -> list[str]:
    """Return the linear layers of a plain ``network`` that get adapters; those of a file, not ``fresh``, may be of any
    rank."""
    linear, setting = linear_layers(network), f"{where}targets"
    if patterns := settings.targets or family.adapter_targets:
        matched: set[str] = set()
        for pattern in patterns:
            matched.update(_matching(pattern, network, family, setting))
        chosen = [name for name in linear if name in matched]
    else:
        inside = {id(module) for block in family.blocks(network) for module in block.modules()}
        in_blocks = [name for name, module in linear.items() if id(module) in inside]
        chosen = _without_unread(in_blocks, network, family, setting)
    for name in chosen:
        size = min(linear[name].in_features, linear[name].out_features)
        if fresh and settings.rank > size:
            raise UserError(f"{where}rank={settings.rank} must be at most {size}, the size of {name}")
    return chosen


def _matching(pattern: str, network: nn.Module, family: Family, setting: str) -> list[str]:
    """Return the linear layers that ``pattern`` names and a gradient reaches, at least one."""
    names = [*linear_layers(network)]
    matching = [name for name in names if fnmatchcase(name, pattern)]
    trains = _without_unread(matching, network, family, setting)
    if not trains:
        why = f"matches {matching[0]}, whose output nothing reads" if matching else "matches nothing"
        raise UserError(f"{setting}: {pattern!r} {why}; names are as {names[0]} and {names[-1]}")
    return trains


def _without_unread(names: Collection[str], network: nn.Module, family: Family, where: str) -> list[str]:
    """Return ``names`` without the layers that no gradient reaches, and log the removed ones."""
    unread = {name.rpartition(".")[0] for name in family.never_trained(network)}
    left_out = [name for name in names if name in unread]
    if left_out:
        logger.info("%s: left out %s, whose output nothing reads", where, ", ".join(left_out))
    return [name for name in names if name not in unread]
