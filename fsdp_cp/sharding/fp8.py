"""fp8 compute of linear layers: which layers, and what it needs.

Weights, their names and their gradients do not change. For each product the inputs, weights and gradients are scaled by
their largest element and rounded to fp8, so no extra state exists.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_cp.errors import UserError
from fsdp_cp.runtime.packages import optional_package, transformer_engine
from fsdp_cp.sharding.fp8_torchao import torchao_linear
from fsdp_cp.sharding.fp8_transformer_engine import compile_refusal, te_linear
from fsdp_cp.sharding.settings import ShardSettings

log = logging.getLogger(__name__)
MULTIPLE = 16
"""Number that must divide a layer's sizes for fp8 products on NVIDIA GPUs."""
CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with fp8 products: Ada, then Hopper (9.0)."""
_TORCHAO = ("pip install 'fsdp-cp[fp8]'", "torchao", "0.18")


def require_fp8(settings: ShardSettings, device_type: str, where: str = "") -> None:
    """Refuse fp8 where it cannot run, before anything is built.

    Args:
        settings: settings of a network.
        device_type: ``cuda``, or ``cpu``, where torchao emulates fp8: it rounds to fp8 and multiplies in the compute
            dtype.
        where: prefix of the setting's name in the message, e.g. ``"student."``.

    Raises:
        UserError: the package is missing or too old, the device does not support fp8 products, or the package does not
            compile under ``compile=true``.
    """
    if settings.fp8 == "none":
        return
    of_te = settings.fp8 == "transformer_engine"
    if of_te and device_type != "cuda":
        raise UserError(
            f"{where}fp8=transformer_engine needs device=cuda, not {device_type}; use {where}fp8=torchao, which"
            " emulates fp8 on a CPU"
        )
    package = transformer_engine() if of_te else optional_package("torchao.float8", *_TORCHAO)
    if isinstance(package, str):
        raise UserError(f"{where}fp8={settings.fp8} {package}; or use {where}fp8=none")
    if device_type == "cuda" and torch.cuda.get_device_capability() < CAPABILITY:
        raise UserError(
            f"{where}fp8={settings.fp8} needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))} or more"
            f" (Ada, Hopper), not {torch.cuda.get_device_name()}; use {where}fp8=none"
        )
    if of_te and settings.compile and (reason := compile_refusal()):
        raise UserError(f"{where}compile=true with {where}fp8=transformer_engine {reason}; use {where}compile=false")


def linear_layers(units: Sequence[nn.Module], excluded: Iterable[nn.Module] = (), where: str = "") -> list[nn.Linear]:
    """Return the linear layers of ``units`` that compute in fp8: those whose sizes allow it.

    Layers of the first and last unit are left out, since they are the most sensitive. A unit that is a linear layer
    itself cannot be replaced.

    Args:
        units: units of a network, in order of execution, sharded or not.
        excluded: modules whose layers do not change.
        where: prefix of the setting's name in the message.

    Raises:
        UserError: no layer can compute in fp8.
    """
    left_out = {id(inner) for module in excluded for inner in module.modules()}
    layers = [
        module
        for unit in units[1:-1]
        for module in unit.modules()
        # Skip subclasses of nn.Linear: the fp8 layer would lose their forward.
        if type(module) is nn.Linear and module is not unit and id(module) not in left_out
    ]
    chosen = [layer for layer in layers if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)]
    if not chosen:
        raise UserError(
            f"{where}fp8 needs linear layers with sizes that are multiples of {MULTIPLE} between the first and the last"
            f" of the {len(units)} blocks; none of the {len(layers)} there qualifies; use {where}fp8=none"
        )
    return chosen


def apply_fp8(
    model: nn.Module,
    units: Sequence[nn.Module],
    settings: ShardSettings,
    device_type: str,
    excluded: Iterable[nn.Module] = (),
) -> list[nn.Module]:
    """Replace the layers that compute in fp8, in place; before units are checkpointed and compiled.

    Returns:
        The fp8 layers: new modules with the same parameters under the same names.

    Raises:
        UserError: as for :func:`require_fp8` and :func:`linear_layers`; or a layer has hooks, which would be lost.
    """
    if settings.fp8 == "none":
        return []
    require_fp8(settings, device_type)
    chosen = linear_layers(units, excluded)
    names = {id(module): name for name, module in model.named_modules()}
    for layer in chosen:
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks) or "forward" in vars(layer):
            raise UserError(f"fp8: the layer {names[id(layer)]} has hooks, which fp8 would drop; add them afterwards")
    emulate = device_type != "cuda"
    if dist.get_rank() == 0:
        log.info(
            "fp8%s: %d of the %d linear layers in the blocks of %s",
            " (emulated: this device has no fp8 products)" if emulate else "",
            len(chosen),
            sum(isinstance(module, nn.Linear) for unit in units for module in unit.modules()),
            type(model).__name__,
        )
    of_te = settings.fp8 == "transformer_engine"
    converted = {
        names[id(layer)]: te_linear(layer) if of_te else torchao_linear(layer, emulate=emulate) for layer in chosen
    }
    for name, made in converted.items():
        model.set_submodule(name, made)
    return list(converted.values())
