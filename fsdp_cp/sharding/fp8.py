"""Linear layers that compute in fp8, by torchao or by Transformer Engine: which layers, and what fp8 needs.

Weights, their names and their gradients do not change. For each product the inputs, weights and gradients are scaled by
their largest element and rounded to fp8, so no extra state exists. If a forward can carry forward-mode tangents the
plain layers run, since both packages' layers would drop tangents.

torchao's ``Float8Linear`` (0.18) has tensorwise scales; FSDP2 can also gather its weights in fp8. ``te.Linear`` (2.17
to 2.20; not yet run on a GPU here) has current scaling, inputs and weights in e4m3, gradients in e5m2. Under FSDP2 it
saves no fp8 weight; its backward casts the weight that FSDP2 gathers.
"""

import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fsdp_cp.duals import inside_dual_level
from fsdp_cp.errors import UserError, first_line
from fsdp_cp.runtime.packages import optional_package, transformer_engine
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import ShardedModule, evenly_sharded_weights, gather_by

log = logging.getLogger(__name__)
MULTIPLE = 16
"""Number that must divide a layer's sizes for fp8 products on NVIDIA GPUs."""
CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with fp8 products: Ada, then Hopper (9.0)."""
FORWARD_ROWS, BACKWARD_ROWS = 8, 16
"""Numbers that must divide the rows of an input of ``te.Linear``, which asserts 8; the weight's gradient needs 16."""
_TORCHAO = ("pip install 'fsdp-cp[fp8]'", "torchao", "0.18")


def require_fp8(settings: ShardSettings, device_type: str, where: str = "") -> None:
    """Refuse fp8 where it cannot run. On a CPU torchao emulates it: it rounds, and multiplies in the compute dtype."""
    if settings.fp8 == "none":
        return
    of_te = settings.fp8 == "transformer_engine"
    if of_te and device_type != "cuda":
        raise UserError(f"{where}fp8=transformer_engine needs device=cuda; use {where}fp8=torchao, which emulates fp8")
    package = transformer_engine() if of_te else optional_package("torchao.float8", *_TORCHAO)
    if isinstance(package, str):
        raise UserError(f"{where}fp8={settings.fp8} {package}; or use {where}fp8=none")
    if device_type == "cuda" and torch.cuda.get_device_capability() < CAPABILITY:
        name = torch.cuda.get_device_name()
        raise UserError(f"{where}fp8={settings.fp8} needs an Ada, Hopper or later GPU, not {name}; use {where}fp8=none")
    if of_te and settings.compile and (reason := compile_refusal()):
        raise UserError(f"{where}compile=true with {where}fp8=transformer_engine {reason}; use {where}compile=false")


def linear_layers(units: Sequence[nn.Module], excluded: Iterable[nn.Module] = (), where: str = "") -> list[nn.Linear]:
    """Return the linear layers of ``units`` that compute in fp8: those whose sizes allow it.

    Layers of the first and last unit are left out, since they are the most sensitive, and those of ``excluded``
    modules. A unit that is a linear layer itself cannot be replaced.
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
        inside = f"linear layers of multiples of {MULTIPLE} between the first and the last of the {len(units)} blocks"
        raise UserError(f"{where}fp8 needs {inside}; use {where}fp8=none")
    return chosen


def apply_fp8(
    model: nn.Module,
    units: Sequence[nn.Module],
    settings: ShardSettings,
    device_type: str,
    excluded: Iterable[nn.Module] = (),
) -> list[nn.Module]:
    """Replace the layers that compute in fp8, in place, before units are wrapped; return the new layers."""
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
        layers = sum(isinstance(module, nn.Linear) for unit in units for module in unit.modules())
        how = "fp8 (emulated: this device has no fp8 products)" if emulate else "fp8"
        log.info("%s: %d of the %d linear layers in the blocks of %s", how, len(chosen), layers, type(model).__name__)
    of_te = settings.fp8 == "transformer_engine"
    converted = {
        names[id(layer)]: te_linear(layer) if of_te else torchao_linear(layer, emulate=emulate) for layer in chosen
    }
    for name, made in converted.items():
        model.set_submodule(name, made)
    return list(converted.values())


def torchao_linear(layer: nn.Linear, *, emulate: bool) -> nn.Module:
    """Return an fp8 layer with the parameters of ``layer``, under the same names.

    torchao's forward would drop tangents, so inside a dual level the layer runs as a plain one. The level decides, as
    in :func:`fsdp_cp.sharding.activations.compile_forward`.
    """
    from torchao.float8 import Float8LinearConfig, Float8TrainingTensor, convert_to_float8_training

    # Pad: the inner size of the weight gradient's product is a rank's token count, which may not be a multiple of 16.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)
    made: Any = convert_to_float8_training(layer, config=config)
    in_fp8 = made.forward

    def forward(x: Tensor) -> Tensor:
        if not inside_dual_level():
            return in_fp8(x)
        if isinstance(made.weight, Float8TrainingTensor):
            raise RuntimeError("a forward with tangents cannot use weights gathered in fp8; set fp8_gather=false")
        return F.linear(x, made.weight, made.bias)

    made.forward = forward
    return made


def gather_in_fp8(root: ShardedModule, layers: Sequence[nn.Module], shard_mesh: DeviceMesh) -> None:
    """Let FSDP2 gather the weights of ``layers`` in fp8: one byte per element, and one scale per whole weight.

    Before each forward of ``root`` one all-reduce of the largest elements computes the scales, without waiting for the
    host. A gather in backward uses the scale of its forward. Weights that do not divide evenly over the ranks, on the
    last axis of ``shard_mesh``, are gathered in the compute dtype: FSDP2 does not pad tensors that gather themselves.

    torchao instead uses a different parameter class, which optimizers, averages, checkpoints and exports would see.
    Here only the shard's tensor has FSDP2's two functions as attributes.
    """
    from torchao.float8.float8_utils import amax_to_scale  # private (torchao 0.18)

    weights = evenly_sharded_weights(root, layers)
    if len(weights) < len(layers) and dist.get_rank() == 0:
        uneven = f"{len(layers) - len(weights)} of {len(layers)} weights do not divide evenly over the ranks"
        log.info("fp8_gather: %s; gathering them in the compute dtype", uneven)
    if not weights:
        return
    group = shard_mesh.get_group(shard_mesh.ndim - 1)

    @torch.no_grad()
    def settle_scales(_module: nn.Module, _args: Any) -> None:
        shards = [weight.sharded_param._local_tensor for weight, _ in weights]
        largest = torch.stack(torch._foreach_norm(shards, ord=float("inf"))).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scales = amax_to_scale(largest, _target_dtype(weights[0][1])).unbind()
        for (weight, layer), shard, scale in zip(weights, shards, scales, strict=True):
            if not hasattr(shard, "fsdp_pre_all_gather"):  # first forward, to_empty, loading
                gather_by(weight, *_gather_functions(shard, layer))
            shard._fp8_scale = scale

    root.register_forward_pre_hook(settle_scales, prepend=True)  # before the gathers of the root and the units


def _target_dtype(layer: Any) -> torch.dtype:
    return layer.config.cast_config_weight.target_dtype


def _gather_functions(shard: Any, layer: Any) -> tuple[Any, Any]:
    """Return FSDP2's ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` for one ``shard``, based on torchao's."""
    from torchao.float8 import Float8TrainingTensor
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor  # private (torchao 0.18)

    mm_config, target = layer.linear_mm_config, _target_dtype(layer)
    reference = weakref.ref(shard)  # the shard holds these functions: a cycle would keep its memory

    def before(mesh: DeviceMesh) -> Any:
        shard: Any = reference()
        return WeightWithDynamicFloat8CastTensor(shard, mm_config, target, shard._fp8_scale).fsdp_pre_all_gather(mesh)

    def after(outputs: Any, scale: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None and not isinstance(out, Float8TrainingTensor):
            raise RuntimeError("fp8_gather: the network was gathered before its first forward; call its forward first")
        weight = WeightWithDynamicFloat8CastTensor(reference(), mm_config, target)
        return weight.fsdp_post_all_gather(outputs, scale, dtype, out=out)

    return before, after


def te_linear(layer: Any) -> nn.Module:
    """Return a ``te.Linear`` with the parameters of the ``nn.Linear`` ``layer``, under the same names."""
    # On the meta device te.Linear allocates nothing and draws no random numbers; its default device is "cuda".
    options = {"bias": layer.bias is not None, "params_dtype": layer.weight.dtype, "device": "meta"}
    made = _layer_class()(in_features=layer.in_features, out_features=layer.out_features, **options)
    for name, parameter in layer.named_parameters():
        made.register_parameter(name, parameter)
    return made.train(layer.training)


@cache
def _layer_class() -> type[nn.Module]:
    te: Any = transformer_engine()
    recipe: Any = transformer_engine("transformer_engine.common.recipe")
    current_scaling = recipe.Float8CurrentScaling()

    class Float8Linear(te.Linear):
        """``te.Linear`` without a state, for any number of rows, and plain inside a dual level."""

        get_extra_state = nn.Module.get_extra_state  # torch then leaves the key out of state dicts
        set_extra_state = nn.Module.set_extra_state

        def reset_parameters(self, defer_init: bool = False) -> None:
            if not defer_init:  # te.Linear would draw other values, on a GPU
                nn.Linear.reset_parameters(self)

        def forward(self, x: Tensor) -> Tensor:
            if inside_dual_level():  # te.Linear would drop tangents
                return F.linear(x, self.weight, self.bias if self.use_bias else None)
            rows = math.prod(x.shape[:-1])
            multiple = BACKWARD_ROWS if torch.is_grad_enabled() and self.weight.requires_grad else FORWARD_ROWS
            # Rows of zeros change neither the scales nor the sums over rows.
            padded = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, -rows % multiple))
            with te.autocast(enabled=True, recipe=current_scaling):
                out: Tensor = super().forward(padded)
            return out[:rows].view(*x.shape[:-1], -1)

    return Float8Linear


@cache
def compile_refusal() -> str:
    """Return why units with these layers cannot be compiled (from 2.20 on a trial decides), or an empty string."""
    if isinstance(package := transformer_engine(at_least="2.20"), str):
        return package
    try:
        layer: Any = te_linear(nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16))
        torch.compile(layer, fullgraph=True)(layer.weight.detach()).sum().backward()
    except Exception as error:  # of Dynamo, inductor or the package
        return f"cannot compile a layer: {first_line(error)}"
    return ""
