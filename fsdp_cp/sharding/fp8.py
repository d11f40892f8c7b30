"""fp8 compute: the products of a network's linear layers in fp8, by torchao's ``Float8Linear`` (0.18), tensorwise.

Weights, their names and their gradients stay what they are: an input, a weight and a gradient are scaled by their own
largest element and rounded to fp8 where they are multiplied, so there is no state beside the weights. Where a forward
may carry forward-mode tangents the plain layers run, since torchao's have no forward AD and would drop them.

Everything of torchao that is not its public interface, and what FSDP2 asks of a tensor that gathers itself in another
dtype, is in :func:`_torchao` and in :class:`_GatheredInFp8`.
"""

from __future__ import annotations

import importlib.util
import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib import metadata
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fsdp_cp.duals import inside_dual_level
from fsdp_cp.errors import UserError
from fsdp_cp.sharding.settings import ShardSettings
from fsdp_cp.sharding.state import ShardedModule, evenly_sharded_weights, gather_by

log = logging.getLogger(__name__)
MULTIPLE = 16
"""Of a layer's sizes, for the fp8 products of NVIDIA's GPUs."""
CAPABILITY = (8, 9)
"""Of the first GPUs with fp8 products: Ada, then Hopper (9.0)."""
_TORCHAO = (0, 18)


def require_fp8(settings: ShardSettings, device_type: str, where: str = "") -> None:
    """Refuse fp8 where it cannot run, before anything is built.

    Args:
        settings: of a network.
        device_type: ``cuda``, or ``cpu``, where torchao emulates: it rounds to fp8 and multiplies in the dtype of
            compute.
        where: what stands before the setting's name in the message, e.g. ``"student."``.

    Raises:
        UserError: no torchao of this version; a GPU without fp8 products.
    """
    if settings.fp8 == "none":
        return
    found = metadata.version("torchao") if importlib.util.find_spec("torchao") is not None else None
    if found is None or tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < _TORCHAO:
        has = "which is not installed" if found is None else f"not {found}"
        needed = ".".join(map(str, _TORCHAO))
        raise UserError(
            f"{where}fp8={settings.fp8} needs torchao {needed} or newer, {has}; pip install 'fsdp-cp[fp8]', or use"
            f" {where}fp8=none"
        )
    capability = torch.cuda.get_device_capability() if device_type == "cuda" else CAPABILITY
    if capability < CAPABILITY:
        raise UserError(
            f"{where}fp8={settings.fp8} needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))} or more"
            f" (Ada, Hopper), and {torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}; use"
            f" {where}fp8=none"
        )


def linear_layers(
    units: Sequence[nn.Module], excluded: Iterable[nn.Module] = (), where: str = ""
) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """The linear layers of ``units`` that compute in fp8, and those whose sizes do not allow it.

    Layers of the first and of the last unit are in neither: what comes in and what goes out is the most sensitive. Nor
    is a unit that is such a layer itself, in whose place no other can be put.

    Args:
        units: of a network, in order of execution, sharded or not.
        excluded: modules that stay as they are, and theirs.
        where: what stands before the setting's name in the message.

    Raises:
        UserError: there is none that can.
    """
    left_out = {id(inner) for module in excluded for inner in module.modules()}
    # Subclasses of nn.Linear have a forward of their own, which the fp8 layer would not have.
    found = [
        module
        for unit in units[1:-1]
        for module in unit.modules()
        if type(module) is nn.Linear and module is not unit and id(module) not in left_out
    ]
    chosen = [layer for layer in found if not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)]
    if not chosen:
        why = f"its {len(found)} have sizes that are no multiples of {MULTIPLE}" if found else "it has none there"
        raise UserError(
            f"{where}fp8 is for the linear layers of blocks between the first and the last of {len(units)}, and {why};"
            f" use {where}fp8=none"
        )
    return chosen, [layer for layer in found if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE]


def apply_fp8(
    model: nn.Module,
    units: Sequence[nn.Module],
    settings: ShardSettings,
    device_type: str,
    excluded: Iterable[nn.Module] = (),
) -> list[nn.Linear]:
    """``fp8`` of ``settings``, in place; before units are checkpointed and compiled, which wrap what they find.

    Returns:
        The layers that compute in fp8 now: other modules with the same parameters under the same names.

    Raises:
        UserError: see :func:`require_fp8` and :func:`linear_layers`; a layer with hooks, which would be lost.
    """
    if settings.fp8 == "none":
        return []
    require_fp8(settings, device_type)
    chosen, odd = linear_layers(units, excluded)
    names = {id(module): name for name, module in model.named_modules()}
    for layer in chosen:
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        if any(hooks) or "forward" in vars(layer):
            raise UserError(
                f"fp8: the layer {names[id(layer)]} has hooks, which its fp8 layer would not have; add them afterwards"
            )
    emulate = device_type != "cuda"
    wanted = {id(layer) for layer in chosen}
    converted = [layer for unit in units[1:-1] for layer in convert(unit, wanted, emulate=emulate)]
    if dist.get_rank() == 0:
        how = " (emulated: this device has no fp8 products)" if emulate else ""
        skipped = f"; {len(odd)} stay as they are, of sizes that are no multiples of {MULTIPLE}" if odd else ""
        log.info("fp8: %d linear layers of %s%s%s", len(converted), type(model).__name__, how, skipped)
    return converted


def convert(module: nn.Module, wanted: Collection[int], *, emulate: bool) -> list[nn.Linear]:
    """Put an fp8 layer in the place of each linear layer in ``module`` whose ``id`` is ``wanted``; these, in order."""
    ao = _torchao()
    # Padded: a rank's tokens are the inner size of the weight gradient's product, and need not be a multiple of 16.
    config = ao.Float8LinearConfig(emulate=emulate, pad_inner_dim=not emulate)
    names = [name for name, each in module.named_modules() if id(each) in wanted]
    ao.convert_to_float8_training(module, module_filter_fn=lambda each, _: id(each) in wanted, config=config)
    layers = [cast(nn.Linear, module.get_submodule(name)) for name in names]
    for layer in layers:
        layer.__class__ = ao.Fp8Linear
    return layers


def gather_in_fp8(root: ShardedModule, layers: Sequence[nn.Linear], where: DeviceMesh) -> None:
    """Let FSDP2 gather the weights of ``layers`` in fp8: a byte an element, with a scale for each whole weight.

    The scales are settled before each forward of ``root``, all in one all-reduce of their largest elements, which
    waits for no host; a weight that is gathered again in backward has its forward's. A weight of which ranks do not
    hold equal parts is gathered in the dtype of compute: FSDP2 has no padding for tensors that gather themselves.

    Args:
        root: sharded.
        layers: of :func:`apply_fp8`.
        where: what it is sharded over; the last axis holds the shards.
    """
    gathers = _GatheredInFp8(root, layers, where)
    if gathers.layers:
        root.register_forward_pre_hook(gathers.prepare, prepend=True)  # in front of the root's and the units' gathers
    if gathers.left_out and dist.get_rank() == 0:
        log.info(
            "fp8_gather: %d of %d weights do not divide evenly over the ranks, and are gathered as they compute",
            gathers.left_out,
            len(layers),
        )


class _GatheredInFp8:
    """What FSDP2 (torch 2.11 to 2.13) calls before and after it gathers a weight: torchao's functions for it.

    torchao's own way is a parameter of a tensor class of its own, which optimizers, averages, checkpoints and exports
    would see. Here only the shard's tensor has the two functions, as attributes; they are put there anew where it was
    replaced (``to_empty``, loading).
    """

    def __init__(self, root: ShardedModule, layers: Sequence[nn.Linear], where: DeviceMesh):
        self._weights, self.left_out = evenly_sharded_weights(root, layers)
        self.layers = [layer for _, layer in self._weights]
        self._group = where.get_group(where.ndim - 1)

    @torch.no_grad()
    def prepare(self, _module: nn.Module, _args: Any) -> None:
        """Settle the scales of all weights."""
        # Outside of inference mode, as FSDP2's own memory: a scale from within could not be saved for a backward.
        with torch.inference_mode(False):
            shards = [weight.sharded_param._local_tensor for weight, _ in self._weights]
            largest = torch.stack(torch._foreach_norm(shards, ord=float("inf"))).float()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            scales = _torchao().amax_to_scale(largest, _target_dtype(self.layers[0])).unbind()
        for (weight, layer), shard, scale in zip(self._weights, shards, scales, strict=True):
            if not hasattr(shard, "fsdp_pre_all_gather"):
                gather_by(weight, *_functions(shard, layer))
            shard._fp8_scale = scale


def _target_dtype(layer: nn.Module) -> torch.dtype:
    return cast(Any, layer).config.cast_config_weight.target_dtype


def _functions(shard: Any, layer: Any) -> tuple[Any, Any]:
    """Of FSDP2's interface for one ``shard``: its bytes and scale, and the whole weight of all ranks' bytes."""
    ao, mm_config, target = _torchao(), layer.linear_mm_config, _target_dtype(layer)
    reference = weakref.ref(shard)  # which has these functions: a cycle would keep its memory after the network's end

    def before(mesh: DeviceMesh) -> Any:
        shard: Any = reference()
        wrapped = ao.WeightWithDynamicFloat8CastTensor(shard, mm_config, target, shard._fp8_scale)
        return wrapped.fsdp_pre_all_gather(mesh)

    def after(outputs: Any, scale: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None and not isinstance(out, ao.Float8TrainingTensor):
            raise RuntimeError("fp8_gather: the network was gathered before its first forward; call its forward first")
        wrapped = ao.WeightWithDynamicFloat8CastTensor(reference(), mm_config, target)
        return wrapped.fsdp_post_all_gather(outputs, scale, dtype, out=out)

    return before, after


@cache
def _torchao() -> SimpleNamespace:
    """What is used of torchao, imported where a network asks for fp8: it is an extra, and takes a second.

    Public are ``Float8LinearConfig`` and ``convert_to_float8_training``; the rest is private (torchao 0.18).
    """
    from torchao.float8 import Float8LinearConfig, Float8TrainingTensor, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole
    from torchao.float8.float8_utils import amax_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    @torch._dynamo.allow_in_graph
    class Multiply(matmul_with_hp_or_float8_args):
        """torchao's, but that a frozen weight's gradient is not computed: it would cost a third of the products."""

        @staticmethod
        def backward(ctx, grad):
            if ctx.needs_input_grad[1]:
                return matmul_with_hp_or_float8_args.backward(ctx, grad)
            _, weight = ctx.saved_tensors
            flat, casts, config = grad.reshape(-1, grad.shape[-1]), ctx.config, ctx.linear_mm_config
            if not isinstance(weight, Float8TrainingTensor):
                target = casts.cast_config_weight_for_grad_input.target_dtype
                weight = hp_tensor_to_float8_dynamic(weight, target, config, gemm_input_role=GemmInputRole.WEIGHT)
            flat = hp_tensor_to_float8_dynamic(
                flat, casts.cast_config_grad_output.target_dtype, config, gemm_input_role=GemmInputRole.GRAD_OUTPUT
            )
            out = torch.mm(flat, weight.t())
            return out.reshape(*grad.shape[:-1], out.shape[-1]), None, None, None

    class Fp8Linear(Float8Linear):
        """torchao's, but that the plain layer runs where tangents may come: by what is asked, see
        :func:`fsdp_cp.sharding.activations.compile_forward`."""

        def forward(self, x):
            # Whose tensors torchao's classes of tensors cannot take apart. Dynamo cannot be asked for it.
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return self.forward(x)
            if inside_dual_level():
                if isinstance(self.weight, Float8TrainingTensor):
                    raise RuntimeError(
                        "a forward with forward-mode tangents needs weights that are gathered as they compute, not in"
                        " fp8; set fp8_gather=false"
                    )
                return F.linear(x, self.weight, self.bias)
            out = Multiply.apply(x, self.weight.t(), self.linear_mm_config, self.config)
            return out if self.bias is None else out + self.bias.to(out.dtype)

    return SimpleNamespace(
        Float8LinearConfig=Float8LinearConfig,
        Float8TrainingTensor=Float8TrainingTensor,
        WeightWithDynamicFloat8CastTensor=WeightWithDynamicFloat8CastTensor,
        amax_to_scale=amax_to_scale,
        Fp8Linear=Fp8Linear,
        convert_to_float8_training=convert_to_float8_training,
    )
