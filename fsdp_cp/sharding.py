"""Shard one network over the mesh: FSDP2 per block, then the root, under the project's gradient convention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
STRATEGIES = ("optim_grads_params",)
FORWARD_AD_SINCE = (2, 13)
"""The first torch whose FSDP2 hooks pass forward-mode tangents on (pytorch issue 182641)."""


def shard_module(
    model: nn.Module,
    *,
    mesh: Mesh,
    units: Sequence[nn.Module],
    strategy: Literal["optim_grads_params"] = "optim_grads_params",
    precision: Literal["fp32", "bf16", "fp64"] = "fp32",
    full_precision_units: Sequence[nn.Module] = (),
    activation_checkpointing: bool = False,
) -> None:
    """Shard ``model`` in place: activation checkpointing, then every unit, then the root.

    Parameters keep their dtype (the masters: fp32); the compute copy that each all-gather makes has ``precision``,
    and gradients are reduced in fp32 (fp64 for ``"fp64"``) as a SUM over all ranks, undivided: the caller scales its
    loss by the share of the global batch. Inputs are not cast (FSDP2 would cast timesteps to bf16, which rounds
    times above 256 to even integers).

    Args:
        model: built on any device, the meta device included; call ``to_empty`` afterwards for that.
        mesh: the mesh; parameters are sharded over ``mesh.fsdp``.
        units: the modules gathered one at a time, in order of execution (the transformer blocks).
        strategy: ``"optim_grads_params"`` (ZeRO-3): parameters, gradients and optimizer state are sharded.
        precision: dtype of compute.
        full_precision_units: modules that compute in fp32 whatever ``precision`` says; units of their own.
        activation_checkpointing: keep only the inputs of each unit for backward, and run it again there.

    Raises:
        UserError: an unknown strategy or precision.
        ValueError: a parameter that two units share.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"strategy={strategy} is unknown; use {' or '.join(STRATEGIES)}")
    if precision not in COMPUTE_DTYPE:
        raise UserError(f"precision={precision} is unknown; use fp32 or bf16")
    _refuse_shared_parameters(model, units)
    if activation_checkpointing:
        for unit in units:
            recompute_in_backward(unit)
    reduce_dtype = torch.float64 if precision == "fp64" else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[precision], reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    full_policy = MixedPrecisionPolicy(param_dtype=reduce_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    # reshard_after_forward must be explicit on the root: by default a root stays gathered after a forward without
    # gradients, and the next optimizer or EMA update would then silently miss it.
    for unit in full_precision_units:
        fully_shard(unit, mesh=mesh.fsdp, reshard_after_forward=True, mp_policy=full_policy)
    for unit in units:
        fully_shard(unit, mesh=mesh.fsdp, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh.fsdp, reshard_after_forward=True, mp_policy=policy)
    for module in fsdp_modules(model):
        # Neither setter is recursive: on the root alone, the blocks would still average, without any error.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if torch.__version__ < FORWARD_AD_SINCE:
        model.register_forward_pre_hook(_refuse_duals, with_kwargs=True)


def _refuse_duals(_module: nn.Module, args: tuple, kwargs: dict) -> None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"forward-mode AD through a sharded network needs torch {'.'.join(map(str, FORWARD_AD_SINCE))} or newer,"
            f" not {torch.__version__}"
        )


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every FSDP unit of ``model``, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def recompute_in_backward(module: nn.Module) -> None:
    """Activation checkpointing of ``module``, in place.

    It wraps ``forward`` alone, so hooks (token splitting, FSDP's all-gather) run once, and parameter names stay.
    """
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _refuse_shared_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """FSDP2 would shard a parameter that two units share twice, and train two copies of it."""
    unit_names = [name for name, module in model.named_modules() if any(module is unit for unit in units)]
    owner: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((u for u in unit_names if name.startswith(u + ".")), "")
        if owner.setdefault(parameter, unit) != unit:
            raise ValueError(f"parameter {name!r} is shared with another FSDP unit; untie it before sharding")


@contextmanager
def unrecorded_forward(model: nn.Module) -> Iterator[None]:
    """Run forwards that no backward will follow (rollouts, teachers).

    FSDP2 notes the order of every forward, to prefetch in reverse order in backward, and forgets it only after a
    backward: a frozen network's list would grow for ever, and a rollout before a trained forward would make backward
    gather a block too many. What was noted inside this context is dropped on leaving it. The lists are private
    (``FSDPParamGroup._post_forward_indices``, ``FSDPCommContext.post_forward_order``; torch 2.11 to 2.13).
    """
    # Before the first forward of all the list does not exist.
    recorded = len(getattr(model._get_fsdp_state()._comm_ctx, "post_forward_order", ()))
    try:
        yield
    finally:
        for module in fsdp_modules(model):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._post_forward_indices[:] = [i for i in group._post_forward_indices if i < recorded]
        del model._get_fsdp_state()._comm_ctx.post_forward_order[recorded:]
