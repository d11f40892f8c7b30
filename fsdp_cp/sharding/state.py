"""Everything that reads or mends FSDP2's private state, in one place (torch 2.11 to 2.13).

The public interface has no answer to these: what is gathered now, which gradients wait for a reduction, in which order
the units ran, how large their shards are. Tests hold each function against the behaviour it relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_cp.sharding.pool import pool_at

if TYPE_CHECKING:
    from fsdp_cp.sharding.settings import ShardSettings

    class ShardedModule(FSDPModule, nn.Module):
        """What ``fully_shard`` makes of a module; for torch's type hints an ``FSDPModule`` is no module."""

        _shard_settings: ShardSettings
        """Of a root; see :func:`fsdp_cp.sharding.shard.settings_of`."""
else:
    ShardedModule = FSDPModule

_FROZEN_HERE = "_frozen_by_set_trainable"
"""Attribute of a parameter; :func:`fsdp_cp.materialise` carries it over, as all attributes of parameters."""


_UNITS = "_shard_units"
"""Attribute of a root that :func:`fsdp_cp.shard_module` made."""


def fsdp_modules(model: nn.Module) -> list[ShardedModule]:
    """Every FSDP unit of ``model``, the root first."""
    known = vars(model).get(_UNITS)
    if known is not None:
        return list(known)
    return [module for module in model.modules() if isinstance(module, ShardedModule)]


def remember_units(root: ShardedModule) -> None:
    """What :func:`fsdp_modules` says of ``root`` is settled: a step asks a dozen times, and of 40 blocks the walk over
    all modules takes milliseconds of the host."""
    root.__dict__[_UNITS] = fsdp_modules(root)


def param_groups(module: FSDPModule) -> list[Any]:
    """The ``FSDPParamGroup`` of one unit, in a list; empty for a unit without parameters of its own.

    ``FSDPState._fsdp_param_groups`` in torch 2.13, ``_fsdp_param_group`` before.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def is_gathered(module: FSDPModule) -> bool:
    """Are the full parameters of this unit alive, or on their way?"""
    return any(not group.is_sharded or group._all_gather_result is not None for group in param_groups(module))


def gathered_units(model: nn.Module) -> list[ShardedModule]:
    """The units of ``model`` whose full parameters are alive, or on their way."""
    return [module for module in fsdp_modules(model) if is_gathered(module)]


def never_gathered_units(model: nn.Module) -> list[ShardedModule]:
    """The units whose full parameters have not had any memory yet."""
    return [
        module
        for module in fsdp_modules(model)
        if any(not hasattr(p, "_unsharded_param") for group in param_groups(module) for p in group.fsdp_params)
    ]


def reshard(model: nn.Module) -> None:
    """Let go of every gathered parameter of ``model``; its shards are what counts from here on.

    A gather that was begun and not waited for is dropped too: its weights would be those from before the next update.
    """
    for module in gathered_units(model):
        for group in param_groups(module):
            if group._all_gather_result is not None:
                group.wait_for_unshard()
        module.reshard()


def clear_unsynced_gradients(model: nn.Module) -> None:
    """Drop gradients that no reduction has taken yet; neither ``zero_grad`` nor ``reset_iter_state`` does."""
    for module in fsdp_modules(model):
        for group in param_groups(module):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def has_gradients(model: nn.Module) -> bool:
    """Is there a gradient of any parameter: on its shard, or one that no reduction has taken yet?"""
    for module in fsdp_modules(model):
        for group in param_groups(module):
            if group._partial_reduce_output is not None:
                return True
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                waiting = parameter.unsharded_accumulated_grad is not None
                if waiting or parameter.sharded_param.grad is not None:
                    return True
                if unsharded is not None and unsharded.grad is not None:
                    return True
    return False


def unreduced_units(model: nn.Module) -> list[str]:
    """Names of the units that hold a sum over their shards which the replicas have not been added to."""
    units = [
        module
        for module in fsdp_modules(model)
        if any(group._partial_reduce_output is not None for group in param_groups(module))
    ]
    return _names(model, units)


def partly_reduced_units(model: nn.Module) -> list[str]:
    """Names of the units whose sum over their shards lacks one of their trainable parameters."""
    found = []
    for module in fsdp_modules(model):
        for group in param_groups(module):
            if group._partial_reduce_output is not None:
                trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
                whole = sum(p.padded_sharded_param_size.numel() for p in trained)
                if group._partial_reduce_output.numel() < whole:
                    found.append(module)
    return _names(model, found)


def _names(model: nn.Module, units: list[ShardedModule]) -> list[str]:
    """Of ``units``, in the order of the modules."""
    if not units:
        return []
    return [name or "the root" for name, module in model.named_modules() if module in units]


def is_finished(root: ShardedModule) -> bool:
    """Has FSDP2 closed the last backward: waited for every reduction, and reduced what was accumulated?"""
    pending = getattr(root._get_fsdp_state()._comm_ctx, "_last_post_reduce_events", {})
    if pending:
        return False
    for module in fsdp_modules(root):
        for group in param_groups(module):
            for parameter in group.fsdp_params:
                unsharded = getattr(parameter, "_unsharded_param", None)
                if parameter.unsharded_accumulated_grad is not None:
                    return False
                if unsharded is not None and unsharded.grad is not None:
                    return False
    return True


def gather_in_compute_stream(model: FSDPModule) -> None:
    """Allocate, copy in and copy out in the stream of compute; only the communication runs beside it.

    ``FSDPModule._set_unshard_async_op`` (private, recursive). With streams of its own FSDP2 keeps a unit's staging
    buffer until the next one's has been copied out.
    """
    model._set_unshard_async_op(True)


def evenly_sharded_weights(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[tuple[Any, Any]], int]:
    """(``FSDPParam``, layer) of the ``weight`` of each of ``layers`` of which every rank holds an equal part.

    Returns:
        Those, and how many there are of the others. FSDP2 pads an uneven part, but not one that gathers itself.
    """
    wanted = {id(layer) for layer in layers}
    found = [
        parameter
        for module in fsdp_modules(model)
        for group in param_groups(module)
        for parameter in group.fsdp_params
        if parameter._module_info.param_name == "weight" and id(parameter._module_info.module) in wanted
    ]
    assert len(found) == len(layers), "each layer is in one unit"
    even = [p for p in found if p._orig_size[0] % p.mesh_info.shard_mesh_size == 0]
    return [(p, p._module_info.module) for p in even], len(found) - len(even)


def gather_by(parameter: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Let an ``FSDPParam`` be gathered by ``before`` and ``after`` instead of in its dtype of compute.

    They are FSDP2's ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, which it looks for on the shard's tensor when
    the parameter is made: ``_init_extensions`` (private) looks again.
    """
    shard = parameter.sharded_param._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
    parameter._init_extensions()


def set_trainable(model: nn.Module, trainable: bool) -> None:
    """Freeze or unfreeze a network that :func:`fsdp_cp.shard_module` made, at any time between two steps.

    ``True`` takes back what ``False`` did: what was frozen before (the base under adapters) stays frozen, however often
    ``False`` was said. A network of which nothing is trainable, and which nothing was frozen of here, is unfrozen as a
    whole. For a stretch of code use :func:`frozen`, which nests.

    ``requires_grad_`` alone is not enough: FSDP2 settles the dtypes of reductions at the first forward, from the
    parameters that were trainable then. A network that was frozen would reduce in the compute dtype, and fail to store
    bf16 gradients on its fp32 masters. On gathered parameters ``requires_grad_`` would be lost at the next reshard.
    """
    reshard(model)
    parameters = list(model.parameters())
    if trainable:
        changed = [p for p in parameters if vars(p).pop(_FROZEN_HERE, False)]
        if not changed and not any(p.requires_grad for p in parameters):
            changed = [p for p in parameters if p.is_floating_point() or p.is_complex()]
    else:
        changed = [p for p in parameters if p.requires_grad]
        for parameter in changed:
            setattr(parameter, _FROZEN_HERE, True)
    for parameter in changed:
        parameter.requires_grad_(trainable)
    _settle_dtypes(model)


@contextmanager
def frozen(model: nn.Module, names: Container[str] | None = None) -> Iterator[None]:
    """Inside nothing of ``model`` is trainable; afterwards exactly what was before, after an exception too. Nests.

    For whole steps, as :func:`set_trainable`: a backward must end inside.

    Args:
        model: a root that :func:`fsdp_cp.shard_module` made.
        names: of the parameters that are frozen, where not all are.
    """
    reshard(model)
    before = {name: (p.requires_grad, _FROZEN_HERE in vars(p)) for name, p in model.named_parameters()}
    if names is None:
        set_trainable(model, False)
    else:
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.requires_grad_(False)
        _settle_dtypes(model)
    try:
        yield
    except BaseException:
        reset_iteration(model)  # a forward or backward that broke off would not let go of its units
        raise
    finally:
        reshard(model)
        for name, parameter in model.named_parameters():
            was_trainable, was_frozen_here = before[name]
            parameter.requires_grad_(was_trainable)
            vars(parameter).pop(_FROZEN_HERE, None)
            if was_frozen_here:
                setattr(parameter, _FROZEN_HERE, True)
        _settle_dtypes(model)


def _settle_dtypes(model: nn.Module) -> None:
    """Let FSDP2 look again which parameters are trainable, and in which dtype to reduce."""
    for module in fsdp_modules(model):
        for group in param_groups(module):
            group._init_mp_dtypes()


def reset_iteration(root: nn.Module) -> None:
    """Bring FSDP2's own bookkeeping back to rest after an exception in a forward or backward."""
    if not isinstance(root, ShardedModule):
        return
    _reset_iteration(root)
    if (pool := pool_at(root)) is not None:  # after what FSDP2 lets go of here
        pool.break_off()


def _reset_iteration(root: ShardedModule) -> None:
    state = root._get_fsdp_state()
    if not state._is_root:
        return  # before the first forward there is nothing to reset, and it would fail
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # torch 2.11 and 2.12 have no such call.
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    idle = type(state._training_state).IDLE
    for module in fsdp_modules(root):
        module._get_fsdp_state()._training_state = idle
        for group in param_groups(module):
            group._training_state = idle
            group._post_forward_indices.clear()
            group._partial_reduce_output = None
    reshard(root)


@contextmanager
def unrecorded_forward(model: nn.Module) -> Iterator[None]:
    """Run forwards that no backward will follow (rollouts, teachers).

    FSDP2 notes the order of every forward, to prefetch in reverse order in backward, and forgets it only after a
    backward: a frozen network's list would grow for ever, and a rollout before a trained forward would make backward
    gather a block too many. What was noted inside this context is dropped on leaving it.
    """
    assert isinstance(model, ShardedModule), "a root of shard_module"
    # Before the first forward of all the list does not exist.
    recorded = len(getattr(model._get_fsdp_state()._comm_ctx, "post_forward_order", ()))
    try:
        yield
    except BaseException:
        reset_iteration(model)  # a forward that broke off would leave its units waiting for its end
        raise
    finally:
        for module in fsdp_modules(model):
            for group in param_groups(module):
                group._post_forward_indices[:] = [i for i in group._post_forward_indices if i < recorded]
        del getattr(model._get_fsdp_state()._comm_ctx, "post_forward_order", [])[recorded:]
