"""Adapters in an unmodified diffusers network, by peft (0.21): which layers get them, and how they are put in.

An adapter has the name of its role. Which one a forward runs is settled in :mod:`models.lora.serving`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from peft import LoraConfig, inject_adapter_in_model
from peft.utils import ModulesToSaveWrapper
from torch import nn

from fsdp_cp.errors import UserError
from models.families.base import Family
from models.lora.settings import LoraSettings

logger = logging.getLogger(__name__)


def target_layers(
    network: nn.Module, family: Family, settings: LoraSettings, where: str, *, fresh: bool = True
) -> list[str]:
    """Names of the linear layers that get adapters.

    Args:
        network: plain, on any device.
        family: its family.
        settings: of the role.
        where: the settings' prefix in a message, e.g. ``"student.lora."``.
        fresh: whether they begin at no file, whose largest rank may be above the size of a small layer.

    Raises:
        UserError: patterns that match nothing, modules without one linear layer among them, or only layers that no
            gradient ever reaches; a rank above a layer's size.
    """
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    if settings.targets:
        chosen = [name for name in linear if any(fnmatchcase(name, pattern) for pattern in settings.targets)]
        for pattern in settings.targets:
            if not any(fnmatchcase(name, pattern) for name in linear):
                raise UserError(
                    f"{where}targets: {pattern!r} matches no linear layer; names are as {next(iter(linear))} and"
                    f" {next(reversed(linear))}"
                )
    else:
        inside = {id(module) for block in family.blocks(network) for module in block.modules()}
        chosen = [name for name, module in linear.items() if id(module) in inside]
    unread = unread_layers(network, family)  # nor would an adapter on one ever get a gradient
    for pattern in settings.targets:
        refuse_unread([name for name in chosen if fnmatchcase(name, pattern)], unread, f"{where}targets", pattern)
    chosen = read_alone(chosen, unread, f"{where}targets")
    for name in chosen:
        size = min(linear[name].in_features, linear[name].out_features)
        if fresh and settings.rank > size:
            raise UserError(
                f"{where}rank={settings.rank} is above the size of {name}, {linear[name].in_features} x"
                f" {linear[name].out_features}: the product would cost more and reach no further; use {size} or less,"
                f" or leave the layer out of {where}targets"
            )
    return chosen


def unread_layers(network: nn.Module, family: Family) -> set[str]:
    """Names of the layers of the plain ``network`` that no gradient ever reaches."""
    return {name.rpartition(".")[0] for name in family.never_trained(network)}


def refuse_unread(matching: Sequence[str], unread: set[str], setting: str, pattern: str) -> None:
    """Raise ``UserError`` where all that ``pattern`` matches is ``unread``: it asks for what never trains."""
    if matching and unread.issuperset(matching):
        raise UserError(f"{setting}: nothing reads what {matching[0]} makes, so it never trains; leave {pattern!r} out")


def read_alone(names: Sequence[str], unread: set[str], setting: str) -> list[str]:
    """``names`` without the ``unread`` ones; says which those are."""
    left_out = [name for name in names if name in unread]
    if left_out:
        logger.info("%s: %s left out: nothing reads what they make", setting, ", ".join(left_out))
    return [name for name in names if name not in unread]


def trained_modules(
    network: nn.Module, family: Family, settings: LoraSettings, targets: Sequence[str], where: str
) -> list[str]:
    """Names of the modules that the role trains whole: the linear layers and norms in those that match.

    Not the larger modules themselves: a copy of one would be another network's part, which is not split over ranks, not
    kept in fp32, and not found by another role's copy inside of it.

    Args:
        network: plain, on any device.
        family: its family.
        settings: of the role.
        targets: from :func:`target_layers`.
        where: the settings' prefix in a message.

    Raises:
        UserError: a pattern that matches no module with parameters, or a bare parameter; a module that has adapters,
            too, or that is neither a linear layer nor a norm; a pattern of which no gradient ever reaches anything.
    """
    unread = unread_layers(network, family)
    modules = {
        name: module for name, module in network.named_modules() if name and any(True for _ in module.parameters())
    }
    containers = (nn.ModuleList, nn.ModuleDict)
    found: list[str] = []
    for pattern in settings.train:
        matching = [
            name
            for name, module in modules.items()
            if fnmatchcase(name, pattern) and not isinstance(module, containers)
        ]
        if not matching:
            bare = [name for name, _ in network.named_parameters() if fnmatchcase(name, pattern)]
            why = f"matches {bare[0]}, a parameter, and a role can train modules alone" if bare else "matches no module"
            raise UserError(f"{where}train: {pattern!r} {why}; names are as {next(reversed(modules))}")
        inside = [
            f"{name}.{inner}" if inner else name
            for name in matching
            for inner, module in modules[name].named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        refuse_unread(inside, unread, f"{where}train", pattern)
        found += inside
    chosen = read_alone([name for name in modules if name in found], unread, f"{where}train")
    for name in chosen:
        module = modules[name]
        if not isinstance(module, nn.Linear) and any(parameter.ndim > 1 for parameter in module.parameters()):
            inner, _ = next(module.named_parameters(recurse=False))
            raise UserError(
                f"{where}train: {name} is a {type(module).__name__} with {inner} of its own; linear layers and norms"
                " alone can be trained whole beside adapters, so name those in it"
            )
        if name in targets:
            raise UserError(
                f"{where}train: {name} would be trained whole, and has adapters; leave one of them out ({where}targets)"
            )
    return chosen


def inject(
    network: nn.Module,
    role: str,
    settings: LoraSettings,
    targets: Sequence[str],
    train: Sequence[str],
    *,
    biased: bool = False,
) -> None:
    """Put the adapters of ``role`` into ``network``, in place, and its copies of what it trains whole.

    Args:
        network: on the meta device, plain or with other roles' adapters.
        role: their name.
        settings: of the role.
        targets: from :func:`target_layers`.
        train: from :func:`trained_modules`.
        biased: whether each B has a bias.
    """
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank * settings.scale,  # type: ignore[arg-type]  # peft divides it by the rank
        # As one pattern: of a list peft takes every name that ends as one of them does.
        target_modules="|".join(re.escape(name) for name in targets),
        lora_dropout=0.0,
        init_lora_weights=False,
        lora_bias=biased,
    )
    inject_adapter_in_model(config, network, adapter_name=role, low_cpu_mem_usage=True)
    del network.peft_config  # of which peft would warn when the next role's are put in
    for name in train:
        module = network.get_submodule(name)
        if isinstance(module, ModulesToSaveWrapper):
            module.update(role)
        else:
            network.set_submodule(name, ModulesToSaveWrapper(module, role))


def adapter_shapes(
    network: nn.Module, rank: int, targets: Sequence[str], train: Sequence[str], *, biased: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of what a role adds to the plain ``network``, by public name, without building it.

    Args:
        network: the base.
        rank: of the adapters.
        targets: from :func:`target_layers`.
        train: from :func:`trained_modules`.
        biased: whether each B has a bias.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name in targets:
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        shapes[f"{name}.lora_A.weight"] = (rank, layer.in_features)
        shapes[f"{name}.lora_B.weight"] = (layer.out_features, rank)
        if biased:
            shapes[f"{name}.lora_B.bias"] = (layer.out_features,)
    for name in train:
        shapes |= {f"{name}.{key}": tuple(p.shape) for key, p in network.get_submodule(name).named_parameters()}
    return shapes
