"""Sharding of one network over the mesh: FSDP2 on each unit, then the root, with the project's gradient convention.

:func:`microbatch` accumulates gradients over micro-batches and over several losses of one micro-batch.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.utils import _apply_to_tensors

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, check_mesh
from fsdp_cp.runtime.torch_versions import fsdp_setter, refuse_tangents_with_gradients
from fsdp_cp.sharding import state
from fsdp_cp.sharding.activations import wrap_unit
from fsdp_cp.sharding.fp8 import apply_fp8, gather_in_fp8
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, ShardSettings
from fsdp_cp.sharding.state import ShardedModule, fsdp_modules, reshard

log = logging.getLogger(__name__)


def shard_module(
    model: nn.Module,
    *,
    mesh: Mesh,
    units: Sequence[nn.Module],
    full_precision_units: Sequence[nn.Module] = (),
    fp8_excluded: Sequence[nn.Module] = (),
    reduce_unused: bool = False,
    settings: ShardSettings | None = None,
    **changes: Any,
) -> None:
    """Shard ``model`` in place: wrap every unit for activation memory and compilation, shard it, then shard the root.

    Gradients are reduced as a SUM over all ranks, undivided: the caller scales its loss by the share of the global
    batch. Inputs are not cast (FSDP2 would cast timesteps to bf16, which rounds times above 256 to even integers).
    Sharded parameters keep the attributes of the original ones (``parameter.no_decay = True``). Accumulate gradients
    under :func:`fsdp_cp.microbatch`, which applies the strategy. A backward with ``create_graph=True`` that
    would need freed weights raises (docs/gradients.md).

    Args:
        model: model on any device; after the meta device call :func:`materialise`.
        mesh: mesh from :func:`build_mesh`; parameters are sharded over ``mesh.fsdp``.
        units: modules that are gathered separately, in order of execution (the transformer blocks).
        full_precision_units: modules that compute in fp32 under bf16, as separate units.
        fp8_excluded: modules whose linear layers stay out of fp8, e.g. those of a block's modulation.
        reduce_unused: whether a parameter without a gradient on this rank counts as zero, for ranks or losses that use
            different parameters.
        settings: see :class:`fsdp_cp.ShardSettings`.
        changes: single settings by name, e.g. ``strategy="optim"``.

    Raises:
        UserError: settings are unknown or conflict, ``mesh`` has another type, units are not modules of ``model``, or
            the model is already sharded.
        ValueError: two units share a parameter.
    """
    check_mesh(mesh)
    if isinstance(model, FSDPModule):
        raise UserError(f"{type(model).__name__} is already sharded; call shard_module once")
    settings = _checked_settings(settings or ShardSettings(), mesh.device_type, **changes)
    if reduce_unused and settings.fp8_gather:
        raise UserError("fp8_gather=true cannot send gradients of zeros; set it or reduce_unused to false")
    units = _modules_of(model, units, "units")
    full_precision_units = _modules_of(model, full_precision_units, "full_precision_units")
    # Convert layers first: the wrappers below capture a unit's forward with its current layers.
    fp8_layers = apply_fp8(model, units, settings, mesh.device_type, [*fp8_excluded, *full_precision_units])
    for unit in units:
        wrap_unit(unit, settings)
    _refuse_shared_parameters(model, [*units, *full_precision_units])
    _cast_masters(model, settings, full_precision_units)
    _refuse_double_backward(model, settings)  # before FSDP2 registers its hooks, to raise before any gather
    shard_mesh = _shard_mesh(mesh, settings)
    with _kept_attributes(model):
        _fully_shard(model, units, full_precision_units, settings, shard_mesh)
    root = cast(ShardedModule, model)  # fully_shard changed its class in place
    _configure(root, settings, shard_mesh)
    if reduce_unused:
        fsdp_setter(root, "set_reduce_scatter_unused_params", "reduce_unused=false")(True)
    _prefetch(root, cast(list[ShardedModule], units), settings)
    root._shard_settings, root._reduces_unused = settings, reduce_unused
    state.remember_units(root)
    if settings.fp8_gather:
        gather_in_fp8(root, fp8_layers, shard_mesh)  # after the line above: its hook must run first
    refuse_tangents_with_gradients(root)


def _checked_settings(settings: ShardSettings, device_type: str, **changes: Any) -> ShardSettings:
    """Return the effective settings after ``changes``. Warn once about settings without effect."""
    known = [field.name for field in fields(ShardSettings)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise UserError(f"shard_module has no setting {unknown[0]!r}; use {', '.join(known)}")
    settings = replace(settings, **changes)
    settings.check(device_type)
    effective = settings.effective()
    idle = [name for name in known if getattr(settings, name) != getattr(effective, name)]
    if idle and dist.get_rank() == 0:
        under = f"strategy={settings.strategy}, fp8={settings.fp8}"
        log.warning("settings without effect under %s: %s", under, ", ".join(idle))
    return effective


def _modules_of(model: nn.Module, modules: Iterable[nn.Module], argument: str) -> list[nn.Module]:
    """Return ``modules`` as a list, since a generator would be used up by its first reader."""
    if not isinstance(modules, Iterable):
        raise UserError(f"{argument} must be a list of modules, e.g. list(model.blocks), got {type(modules).__name__}")
    listed, inside = list(modules), {*model.modules()} - {model}
    for i, module in enumerate(listed):
        kind = type(module).__name__
        has_no_forward = isinstance(module, (nn.ModuleList, nn.ModuleDict, FSDPModule))  # or is sharded
        if not isinstance(module, nn.Module) or module not in inside or has_no_forward or module in listed[:i]:
            raise UserError(f"{argument}[{i}] must be a module in the model, with a forward, named once, got {kind}")
    return listed


def _refuse_shared_parameters(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse a parameter that two units share: FSDP2 would shard it twice and train two copies."""
    named = model.named_modules(remove_duplicate=False)  # a unit can have several names
    unit_names = {name: module for name, module in named if any(module is unit for unit in units)}
    owner: dict[nn.Parameter, nn.Module] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((module for u, module in unit_names.items() if name.startswith(u + ".")), model)
        if owner.setdefault(parameter, unit) is not unit:
            raise ValueError(f"parameter {name!r} is shared with another FSDP unit; untie it before sharding")


def _cast_masters(model: nn.Module, settings: ShardSettings, full_precision_units: Sequence[nn.Module]) -> None:
    if settings.master_dtype == "keep":
        return
    kept = {parameter for unit in full_precision_units for parameter in unit.parameters()}
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in kept:
            parameter.data = parameter.data.to(COMPUTE_DTYPE[settings.master_dtype])


@contextmanager
def _kept_attributes(model: nn.Module) -> Iterator[None]:
    """Keep the attributes that users set on parameters (``parameter.no_decay = True``) while torch replaces these."""
    attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])


def _shard_mesh(mesh: Mesh, settings: ShardSettings) -> DeviceMesh:
    if settings.strategy == "no_shard":
        return mesh.within(1) if mesh.world.size() > 1 else mesh.world  # FSDP2 would sum over one replica
    if settings.shard_ranks is not None:
        return mesh.within(settings.shard_ranks) if settings.copies(mesh.shape) > 1 else mesh.world
    return mesh.fsdp if settings.replicate else mesh.world


def _fully_shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    full_precision_units: Sequence[nn.Module],
    settings: ShardSettings,
    shard_mesh: DeviceMesh,
) -> None:
    """Shard each unit, then the root with the remaining parameters, each with its compute dtype."""
    compute_dtype = COMPUTE_DTYPE[settings.precision]
    full_dtype = torch.float64 if settings.precision == "fp64" else torch.float32
    reduce_dtype = full_dtype if settings.reduce_dtype == "auto" else COMPUTE_DTYPE[settings.reduce_dtype]
    offload = OffloadPolicy()
    if settings.offload == "cpu":
        offload = CPUOffloadPolicy(pin_memory=shard_mesh.device_type == "cuda")  # pinning needs an accelerator
    # Set it on the root too: by default a root stays gathered after a forward without gradients, and its next forward
    # would silently ignore an optimizer or EMA update.
    reshard = settings.strategy in ("no_shard", "optim_grads_params")
    for modules, dtype in ((full_precision_units, full_dtype), (units, compute_dtype), ((model,), compute_dtype)):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        for module in modules:
            fully_shard(
                module, mesh=shard_mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
            )


def _configure(root: ShardedModule, settings: ShardSettings, shard_mesh: DeviceMesh) -> None:
    """Configure the reduction of gradients and its buffers."""
    if settings.separate_reduce_group:  # before the buffers are configured below
        fsdp_setter(root, "set_separate_reduce_scatter_group", "separate_reduce_group=false")()
    for unit in fsdp_modules(root):
        # Neither setter is recursive: on the root alone, the blocks would still average, without any error.
        if shard_mesh.size() > 1:  # on one rank torch would divide all gradients by 1 into a temporary
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if settings.communication_buffers == "process_group":
            unit.set_allocate_memory_from_process_group_for_comm(True)
        elif settings.communication_buffers == "symmetric":
            unit.set_symm_mem_for_comm()  # after the forced SUM, without which it skips reduce-scatter
    setter = "set_reduce_scatter_max_input_buffers"  # torch before 2.13 keeps 1
    if hasattr(root, setter) or settings.gradient_buffers > ShardSettings.gradient_buffers:
        fsdp_setter(root, setter, "gradient_buffers=1")(settings.gradient_buffers)


def _prefetch(root: ShardedModule, units: Sequence[ShardedModule], settings: ShardSettings) -> None:
    """Set the units that each unit gathers ahead; FSDP2 prefetches one by default."""
    in_order = settings.gather_stream == "compute"
    if in_order:
        state.gather_in_compute_stream(root)
        # FSDP2 does not prefetch then. The root starts, since the first unit would wait for its own gather at once.
        root.set_modules_to_forward_prefetch(list(units[: settings.forward_prefetch]))
    for i, unit in enumerate(units):
        if in_order or settings.forward_prefetch > 1:
            unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + settings.forward_prefetch]))
        if settings.backward_prefetch > 1:
            unit.set_modules_to_backward_prefetch(list(units[max(0, i - settings.backward_prefetch) : i][::-1]))


def _refuse_double_backward(model: nn.Module, settings: ShardSettings) -> None:
    """Raise if a backward with ``create_graph=True`` would free the weights that the second backward needs."""
    kind, keeps = type(model).__name__, settings.keeps_gathered

    def check(_grad: Tensor) -> None:
        if not torch.is_grad_enabled():  # in a backward: only with create_graph=True
            return
        open_contexts = getattr(model, "_open_microbatches", ())
        if keeps and open_contexts and open_contexts[-1] is False:
            return
        held = "put it into `with microbatch(model, is_first=False, is_last=False)`"
        instead = held if keeps else "use strategy='optim', 'optim_grads' or keep_gathered=True"
        raise UserError(
            f"a backward with create_graph=True (a gradient penalty) through {kind}: strategy={settings.strategy!r}"
            " frees its weights before the second backward needs them; take a finite difference, or, without"
            f" fsdp_cp.attention, {instead} (docs/gradients.md, 'Gradient penalties')"
        )

    def check_backward(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(check)
        return x

    # FSDP2 finds an output's tensors by the same private function (torch 2.11 to 2.13).
    model.register_forward_hook(lambda _module, _args, output: _apply_to_tensors(check_backward, output))


def materialise(model: nn.Module, device: torch.device | str) -> None:
    """Allocate uninitialized memory for parameters and buffers of a model on the meta device, sharded or not.

    Unlike ``to_empty`` it keeps the attributes of parameters (torch creates new parameters). It frees gathered ones.
    Under ``offload="cpu"`` the ``device`` is the CPU.
    """
    with _kept_attributes(model):
        model.to_empty(device=device)


def settings_of(model: nn.Module) -> ShardSettings:
    """Return the settings of a ``model`` of :func:`shard_module`; settings without effect are the defaults."""
    settings = getattr(model, "_shard_settings", None)
    if settings is None:
        raise ValueError(f"{type(model).__name__} was not sharded by fsdp_cp.shard_module")
    return settings


def gather_first_block_early(model: nn.Module, first: nn.Module) -> None:
    """Begin to gather the root and ``first``, the first unit in the next forward of ``model``.

    Call it after the optimizer's step, EMA swaps and weight loading: an earlier gather has the old weights.
    If no forward follows, :func:`fsdp_cp.sharding.state.reshard` drops the gather.
    """
    # Not recursive: unsharding the root alone would leave the first block's gather to the forward.
    for module in dict.fromkeys((model, first)):
        cast(ShardedModule, module).unshard(async_op=True)


@contextmanager
def microbatch(model: nn.Module, *, is_first: bool, is_last: bool) -> Iterator[None]:
    """Run forward and backward of one micro-batch (or of one loss of it) between two optimizer steps.

    The strategy decides when gradients are reduced and how long parameters stay gathered (:class:`ShardSettings`):
    ``optim`` and ``no_shard`` reduce once a step, the others in each backward. Gradients of replicas (``dp_replicate``)
    are summed once a step. Each gather casts the masters to the compute dtype. After the last micro-batch all gradients
    are reduced and all parameters resharded. Gradients are summed, so the caller must scale each loss by its share of
    the global batch.

    An exception drops the gradients that the step has accumulated (:func:`discard_step`). Contexts nest: leaving an
    inner context restores the outer one's settings.

    Args:
        model: the root that :func:`fsdp_cp.shard_module` made, or a module around it.
        is_first: whether this is the first backward since the optimizer's step; gradients must be clear then.
        is_last: whether this is the last backward before the optimizer's step.

    Raises:
        RuntimeError: ``is_first`` with gradients from an earlier step, which would be added silently; the last backward
            did not reach a unit; or, with replicas, only some of the micro-batches use a parameter.
        ValueError: ``model`` does not contain exactly one root of :func:`fsdp_cp.shard_module`.
    """
    root = _root(model)
    if is_first and state.has_gradients(root):
        raise RuntimeError("gradients are left from a step; call zero_grad(set_to_none=True) or discard_step(model)")
    outer = root.__dict__.setdefault("_open_microbatches", [])
    outer.append(is_last)
    _apply(root, is_last)
    try:
        if is_last and root._reduces_unused:
            state.complete_unreduced_gradients(root)
        yield
        _refuse_incomplete(root, is_last)
        if is_last:
            reshard(root)  # units that the backward did not reach
    except BaseException:
        discard_step(root)
        raise
    finally:
        outer.pop()
        _apply(root, outer[-1] if outer else None)


def _apply(root: ShardedModule, is_last: bool | None) -> None:
    """Set FSDP2's flags for a micro-batch; ``None`` is outside of one, where a backward is a whole step."""
    settings, last = settings_of(root), is_last is not False
    reduces = last or settings.strategy in ("optim_grads", "optim_grads_params")
    root.set_is_last_backward(last)
    for unit in fsdp_modules(root):  # not recursive: each setter would walk over all modules
        unit.set_requires_gradient_sync(reduces, recurse=False)
        unit.set_requires_all_reduce(last, recurse=False)  # after the line above, which sets it too
        unit.set_reshard_after_backward(last or not settings.keeps_gathered, recurse=False)
        if settings.keep_gathered:
            unit.set_reshard_after_forward(is_last is None, recurse=False)


@contextmanager
def kept_gathered(model: nn.Module) -> Iterator[None]:
    """Keep parameters gathered between several forwards without a backward, and free them on exit.

    This holds for settings that keep parameters gathered within a step (:attr:`ShardSettings.keeps_gathered`); with
    others nothing changes. Within a :func:`microbatch` of ``model`` that context decides, and frees them.
    """
    root = _root(model)
    if root.__dict__.get("_open_microbatches") or not settings_of(root).keeps_gathered:
        yield
        return
    for unit in fsdp_modules(root):
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        _apply(root, None)
        reshard(root)


def discard_step(model: nn.Module) -> None:
    """Drop an unfinished accumulation: gradients, reductions, gathered parameters. Called by all ranks."""
    root = _root(model)
    state.reset_iteration(root)
    state.clear_unsynced_gradients(root)
    reshard(root)
    for parameter in root.parameters():
        parameter.grad = None


def _refuse_incomplete(root: ShardedModule, is_last: bool) -> None:
    """Refuse gradients that FSDP2 did not reduce, or would add up wrongly, in the micro-batch that ends."""
    # FSDP2 reduces the units that a backward passes, and waits for all only if it began at the root's output.
    if is_last and not state.is_finished(root):
        raise RuntimeError("the last micro-batch had no backward; give is_last=True to the last one that has one")
    if is_last and (units := state.unreduced_units(root)):
        raise RuntimeError(f"the last backward did not reach {', '.join(units)}; give shard_module reduce_unused=True")
    # Before the all-reduce FSDP2 adds micro-batches by position, which would mix gradients of different parameters.
    if not is_last and (units := state.partly_reduced_units(root)):
        raise RuntimeError(f"a parameter of {', '.join(units)} got no gradient; give shard_module reduce_unused=True")


def _root(model: nn.Module) -> ShardedModule:
    roots = [module for module in fsdp_modules(model) if hasattr(module, "_shard_settings")]
    if len(roots) != 1:
        raise ValueError(f"{type(model).__name__} has {len(roots)} roots of shard_module; give the one to train")
    return roots[0]
