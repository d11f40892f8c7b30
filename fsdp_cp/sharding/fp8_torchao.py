"""fp8 layers by torchao's ``Float8Linear`` (0.18) with tensorwise scales, and their gathers in fp8.

If a forward can carry forward-mode tangents the plain layers run, since torchao's layers would drop tangents. torchao
is imported at first use: it is optional, and its import takes a second.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fsdp_cp.context.duals import inside_dual_level
from fsdp_cp.sharding.state import ShardedModule, evenly_sharded_weights, gather_by

log = logging.getLogger(__name__)


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
        # torchao's tensor classes cannot unpack inference tensors. Dynamo cannot trace the query of the mode.
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return forward(x)
        if not inside_dual_level():
            return in_fp8(x)
        if isinstance(made.weight, Float8TrainingTensor):
            raise RuntimeError(
                "a forward with forward-mode tangents cannot use weights gathered in fp8; set fp8_gather=false"
            )
        return F.linear(x, made.weight, made.bias)

    made.forward = forward
    return made


def gather_in_fp8(root: ShardedModule, layers: Sequence[nn.Module], shard_mesh: DeviceMesh) -> None:
    """Let FSDP2 gather the weights of ``layers`` in fp8: one byte per element, and one scale per whole weight.

    Before each forward of ``root`` one all-reduce of the largest elements computes the scales, without waiting for the
    host. A gather in backward uses the scale of its forward. Weights that do not divide evenly over the ranks are
    gathered in the compute dtype, since FSDP2 does not pad tensors that gather themselves.

    torchao instead uses a different parameter class, which optimizers, averages, checkpoints and exports would see.
    Here only the shard's tensor has FSDP2's two functions as attributes.

    Args:
        root: sharded network.
        layers: layers from :func:`fsdp_cp.sharding.fp8.apply_fp8`.
        shard_mesh: mesh over which ``root`` is sharded; the last axis holds the shards.
    """
    from torchao.float8.float8_utils import amax_to_scale  # private (torchao 0.18)

    weights = evenly_sharded_weights(root, layers)
    if len(weights) < len(layers) and dist.get_rank() == 0:
        log.info(
            "fp8_gather: %d of %d weights do not divide evenly over the ranks; gathering them in the compute dtype",
            len(layers) - len(weights),
            len(layers),
        )
    if not weights:
        return
    group = shard_mesh.get_group(shard_mesh.ndim - 1)

    @torch.no_grad()
    def settle_scales(_module: nn.Module, _args: Any) -> None:
        # Leave inference mode, as for FSDP2's memory: a backward could not save a scale created in it.
        with torch.inference_mode(False):
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
