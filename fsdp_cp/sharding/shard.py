"""Shard one network over the mesh: FSDP2 per unit, then the root, under the project's gradient convention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, check_mesh
from fsdp_cp.sharding.activations import apply_activation_offload, apply_checkpointing, apply_compile
from fsdp_cp.sharding.fp8 import apply_fp8, gather_in_fp8
from fsdp_cp.sharding.guards import allow_inference_mode, explain_dtypes, refuse_double_backward
from fsdp_cp.sharding.one_rank import compute_in_place
from fsdp_cp.sharding.pool import pool_of
from fsdp_cp.sharding.pooled import pool_buffers
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, ShardSettings
from fsdp_cp.sharding.state import ShardedModule, fsdp_modules, gather_in_compute_stream, remember_units

log = logging.getLogger(__name__)
FORWARD_AD_SINCE = (2, 13)
"""The first torch whose FSDP2 hooks pass forward-mode tangents on with gradients enabled (pytorch issue 182641).

Without gradients the hooks register nothing with autograd, and tangents pass through those of torch 2.11 too.
"""


def shard_module(
    model: nn.Module,
    *,
    mesh: Mesh,
    units: Sequence[nn.Module],
    full_precision_units: Sequence[nn.Module] = (),
    fp8_excluded: Sequence[nn.Module] = (),
    settings: ShardSettings | None = None,
    **changes: Any,
) -> None:
    """Shard ``model`` in place: activation memory and compilation of every unit, then its sharding, then the root.

    Gradients are reduced as a SUM over all ranks, undivided: the caller scales its loss by the share of the global
    batch. Inputs are not cast (FSDP2 would cast timesteps to bf16, which rounds times above 256 to even integers).
    Attributes of parameters (``parameter.no_decay = True``) go over to the sharded ones. Accumulate gradients under
    :func:`fsdp_cp.microbatch`, which does what the strategy asks for.

    What cannot work later is refused in one sentence: inputs of another dtype that the network does not cast, and a
    backward with ``create_graph=True`` that would need weights which are gone (docs/gradients.md).

    Args:
        model: built on any device, the meta device included; call :func:`materialise` afterwards for that.
        mesh: of :func:`build_mesh`; parameters are sharded over ``mesh.fsdp``.
        units: the modules gathered one at a time, in order of execution (the transformer blocks).
        full_precision_units: modules that compute in fp32 under bf16; units of their own.
        fp8_excluded: modules whose linear layers stay as they are under ``fp8``, e.g. those of a block's modulation.
        settings: see :class:`fsdp_cp.ShardSettings`.
        changes: single settings by name, e.g. ``strategy="optim"``.

    Raises:
        UserError: settings that are unknown or exclude each other; a mesh of another kind; units that are not modules
            of ``model``; a model that is sharded already.
        ValueError: a parameter that two units share.
    """
    check_mesh(mesh)
    if isinstance(model, FSDPModule):
        raise UserError(
            f"{type(model).__name__} is sharded already; call shard_module once, on a model as it was built"
        )
    settings = _changed(settings or ShardSettings(), changes)
    settings.check(mesh.device_type)
    units, full_precision_units = (
        _modules_of(model, given, name)
        for given, name in ((units, "units"), (full_precision_units, "full_precision_units"))
    )
    # First: the wrappers below take a unit's forward with the layers that it has then.
    fp8_layers = apply_fp8(model, units, settings, mesh.device_type, [*fp8_excluded, *full_precision_units])
    for unit in units:
        apply_checkpointing(unit, settings)
        apply_compile(unit, settings)
        apply_activation_offload(unit, settings)
    shard(model, mesh, units, settings, full_precision_units=full_precision_units, fp8_layers=fp8_layers)


def shard(
    model: nn.Module,
    mesh: Mesh,
    units: Sequence[nn.Module],
    settings: ShardSettings,
    *,
    full_precision_units: Sequence[nn.Module] = (),
    fp8_layers: Sequence[nn.Linear] = (),
) -> None:
    """Shard ``model`` in place, the last step of :func:`shard_module`; ``fp8_layers`` are those of ``apply_fp8``.

    Raises:
        ValueError: a parameter that two units share.
    """
    _refuse_shared_parameters(model, [*units, *full_precision_units])
    _cast_masters(model, settings, full_precision_units)
    attributes = _attributes(model)
    explain_dtypes(model, settings)
    refuse_double_backward(model, settings)
    where = _shard_mesh(mesh, settings)
    _fully_shard(model, units, full_precision_units, settings, where)
    root = cast(ShardedModule, model)  # by now; its class has changed in place
    _set_attributes(root, attributes)
    _configure(root, settings, where)
    if settings.communication_buffers == "pooled":
        _pool(root, mesh, where)
    if where.size() == 1:
        compute_in_place(root)
    _prefetch(root, cast(list[ShardedModule], units), settings)
    root._shard_settings = settings
    remember_units(root)
    allow_inference_mode(root)
    if settings.fp8_gather:
        gather_in_fp8(root, fp8_layers, where)  # behind the line above: its hook must run first
    if torch.__version__ < FORWARD_AD_SINCE:  # type: ignore[operator]  # it compares itself with tuples too
        root.register_forward_pre_hook(_refuse_duals, with_kwargs=True)


def _fully_shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    full_precision_units: Sequence[nn.Module],
    settings: ShardSettings,
    where: DeviceMesh,
) -> None:
    """Each unit, then the root with what is left, each in the dtype in which it computes."""
    compute_dtype = COMPUTE_DTYPE[settings.precision]
    full_dtype = torch.float64 if settings.precision == "fp64" else torch.float32
    # Explicit on the root too: by default a root stays gathered after a forward without gradients, and the next
    # optimizer or EMA update would then silently miss it.
    reshard = settings.strategy in ("no_shard", "optim_grads_params")
    for modules, dtype in ((full_precision_units, full_dtype), (units, compute_dtype), ((model,), compute_dtype)):
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=_reduce_dtype(settings), cast_forward_inputs=False
        )
        for module in modules:
            fully_shard(
                module,
                mesh=where,
                reshard_after_forward=reshard,
                mp_policy=policy,
                offload_policy=_offload_policy(settings, where.device_type),
            )


def _changed(settings: ShardSettings, changes: dict[str, Any]) -> ShardSettings:
    known = [field.name for field in fields(ShardSettings)]
    for name in changes:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            raise UserError(f"shard_module has no setting {name!r}; use {close[0] if close else ', '.join(known)}")
    return replace(settings, **changes)


def _modules_of(model: nn.Module, given: Iterable[nn.Module], argument: str) -> list[nn.Module]:
    """As a list: a generator would be used up by its first reader, and nothing sharded by unit without a word."""
    if not isinstance(given, Iterable):
        raise UserError(f"{argument} is a {type(given).__name__}; use a list of modules, e.g. list(model.blocks)")
    modules, known = list(given), set(model.modules())
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise UserError(f"{argument}[{i}] is a {type(module).__name__}; use modules, e.g. list(model.blocks)")
        if module is model or module not in known:
            what = "the model itself" if module is model else f"a {type(module).__name__} that is no part of the model"
            raise UserError(f"{argument}[{i}] is {what}; use its blocks, e.g. list(model.blocks)")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise UserError(f"{argument}[{i}] is a {type(module).__name__}, which has no forward; use its members")
        if isinstance(module, FSDPModule):
            raise UserError(f"{argument}[{i}] is sharded already; call shard_module once, on a model as it was built")
        if module in modules[:i]:
            raise UserError(f"{argument}[{i}] is {argument}[{modules.index(module)}] again; name each module once")
    return modules


def _shard_mesh(mesh: Mesh, settings: ShardSettings) -> DeviceMesh:
    if settings.strategy == "no_shard":
        return mesh.replicas if mesh.world.size() > 1 else mesh.world  # FSDP2 would sum over one replica
    if settings.shard_ranks is not None:
        return mesh.within(settings.shard_ranks) if settings.copies(mesh.shape) > 1 else mesh.world
    return mesh.fsdp if settings.replicate else mesh.world


def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Memory for a model on the meta device, sharded or not; values are to be filled in, of buffers too.

    As ``to_empty``, which alone would drop the attributes of parameters (torch swaps in new ones).

    Args:
        model: its gathered parameters are let go of.
        device: where to; the CPU under ``offload="cpu"``.
    """
    attributes = _attributes(model)
    model.to_empty(device=device)
    _set_attributes(model, attributes)


def _attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What users hung onto the parameters (``parameter.no_decay = True``), by name."""
    return {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}


def _set_attributes(model: nn.Module, attributes: dict[str, dict[str, Any]]) -> None:
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])


def settings_of(model: nn.Module) -> ShardSettings:
    """How :func:`shard_module` sharded ``model``.

    Raises:
        ValueError: a module that it did not shard.
    """
    settings = getattr(model, "_shard_settings", None)
    if settings is None:
        raise ValueError(f"{type(model).__name__} was not sharded by fsdp_cp.shard_module")
    return settings


def gather_first_block_early(model: nn.Module, first: nn.Module) -> None:
    """Begin to gather the root and the ``first`` unit that the next forward of ``model`` runs.

    Call it after the optimizer's step (and EMA swaps, weight loading), with the forward to come: what is gathered
    earlier has the weights from before. :func:`fsdp_cp.sharding.state.reshard` drops it again where no forward comes.

    Raises:
        RuntimeError: while a CUDA graph is being captured, which would record the gather outside of its step.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("gather_first_block_early cannot be captured in a CUDA graph; call it outside the capture")
    # Not recursive: unsharding the root alone would leave the first block's gather to the forward.
    for module in dict.fromkeys((model, first)):
        cast(ShardedModule, module).unshard(async_op=True)


def _cast_masters(model: nn.Module, settings: ShardSettings, full_precision_units: Sequence[nn.Module]) -> None:
    if settings.master_dtype == "keep":
        return
    kept = {parameter for unit in full_precision_units for parameter in unit.parameters()}
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in kept:
            parameter.data = parameter.data.to(COMPUTE_DTYPE[settings.master_dtype])


def _reduce_dtype(settings: ShardSettings) -> torch.dtype:
    if settings.reduce_dtype != "auto":
        return COMPUTE_DTYPE[settings.reduce_dtype]
    return torch.float64 if settings.precision == "fp64" else torch.float32


def _offload_policy(settings: ShardSettings, device_type: str) -> OffloadPolicy:
    if settings.offload == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type == "cuda")  # pinning fails without an accelerator


def _configure(model: ShardedModule, settings: ShardSettings, where: DeviceMesh) -> None:
    shard_size = where.size(where.ndim - 1)
    # With one shard torch (2.11 to 2.13) divides by the factor twice: in place of the reduce-scatter, and after it.
    factor = 1 / settings.gradient_scale if shard_size > 1 else settings.gradient_scale**-0.5
    # On one rank alone there is no average to turn off, and torch would divide by 1 into a temporary of all gradients.
    divides = where.size() > 1 or factor != 1
    if settings.separate_reduce_group:  # before its buffers are asked for below
        _newer(model, "set_separate_reduce_scatter_group", "separate_reduce_group=false")()
    for module in fsdp_modules(model):
        # Neither setter is recursive: on the root alone, the blocks would still average, without any error.
        if divides:
            module.set_gradient_divide_factor(factor)
        module.set_force_sum_reduction_for_comms(True)
        if settings.communication_buffers == "process_group":
            module.set_allocate_memory_from_process_group_for_comm(True)
        elif settings.communication_buffers == "symmetric":
            module.set_symm_mem_for_comm()  # after the forced SUM, without which it leaves reduce-scatter alone
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):
        model.set_reduce_scatter_max_input_buffers(settings.gradient_buffers)
    elif settings.gradient_buffers not in (1, ShardSettings.gradient_buffers):
        log.warning("gradient_buffers=%d needs torch 2.13; FSDP keeps 1", settings.gradient_buffers)
    if settings.reduce_unused:
        _newer(model, "set_reduce_scatter_unused_params", "reduce_unused=false")(True)


def _pool(root: ShardedModule, mesh: Mesh, where: DeviceMesh) -> None:
    ranks = where.size(where.ndim - 1)
    if ranks > 1:
        pool_buffers(root, pool_of(mesh), ranks)
    elif dist.get_rank() == 0:
        log.info("communication_buffers=pooled: one rank holds all, so there are no collectives whose buffers to pool")


def _newer(model: nn.Module, setter: str, instead: str) -> Callable[..., None]:
    """A setter of ``FSDPModule`` that not every torch since 2.11 has."""
    if not hasattr(model, setter):
        raise UserError(f"torch {torch.__version__} has no {setter}; use {instead}, or torch 2.13")
    return getattr(model, setter)


def _prefetch(model: ShardedModule, units: Sequence[ShardedModule], settings: ShardSettings) -> None:
    """FSDP2 prefetches one unit by itself; more are listed for each."""
    in_order = settings.gather_stream == "compute"
    if in_order:
        gather_in_compute_stream(model)
        # Nothing runs ahead by itself then. The root begins: the first unit's gather would be waited for at once.
        model.set_modules_to_forward_prefetch(list(units[: settings.forward_prefetch]))
    for i, unit in enumerate(units):
        if in_order or settings.forward_prefetch > 1:
            unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + settings.forward_prefetch]))
        if settings.backward_prefetch > 1:
            unit.set_modules_to_backward_prefetch(list(units[max(0, i - settings.backward_prefetch) : i][::-1]))


def _refuse_duals(_module: nn.Module, args: tuple, kwargs: dict) -> None:
    if not torch.is_grad_enabled():
        return
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(
            f"forward-mode AD through a sharded network with gradients enabled needs torch"
            f" {'.'.join(map(str, FORWARD_AD_SINCE))} or newer, not {torch.__version__};"
            " compute it under torch.no_grad()"
        )


def _refuse_shared_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """FSDP2 would shard a parameter that two units share twice, and train two copies of it."""
    unit_names = [name for name, module in model.named_modules() if any(module is unit for unit in units)]
    owner: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((u for u in unit_names if name.startswith(u + ".")), "")
        if owner.setdefault(parameter, unit) != unit:
            raise ValueError(f"parameter {name!r} is shared with another FSDP unit; untie it before sharding")
