"""All access to FSDP2's private state, in one place (torch 2.11 to 2.13).

The public interface does not expose gathered units, unreduced gradients, execution order or shard sizes. Tests check
each function against the behavior that it relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_cp.runtime.torch_versions import param_groups, reset_iter_state

if TYPE_CHECKING:
    from fsdp_cp.sharding.settings import ShardSettings

    class ShardedModule(FSDPModule, nn.Module):
        """Type of a module after ``fully_shard``; torch's ``FSDPModule`` is not a module in type hints."""

        _shard_settings: ShardSettings
        _reduces_unused: bool
        """Settings of a root; see :func:`fsdp_cp.sharding.shard.settings_of`."""
else:
    ShardedModule = FSDPModule

_UNITS = "_shard_units"
"""Attribute of a root of :func:`fsdp_cp.shard_module`, with the list of its units."""


def fsdp_modules(model: nn.Module) -> list[ShardedModule]:
    """Return every FSDP unit of ``model``, the root first."""
    known = vars(model).get(_UNITS)
    if known is not None:
        return list(known)
    return [module for module in model.modules() if isinstance(module, ShardedModule)]


def remember_units(root: ShardedModule) -> None:
    """Cache the result of :func:`fsdp_modules` for ``root``: a step needs it a dozen times, and the walk takes ms."""
    root.__dict__[_UNITS] = fsdp_modules(root)


def _groups(model: nn.Module) -> Iterator[tuple[ShardedModule, Any]]:
    """Yield each unit with its ``FSDPParamGroup``."""
    for module in fsdp_modules(model):
        for group in param_groups(module):
            yield module, group


def fsdp_params(model: nn.Module) -> Iterator[Any]:
    """Yield the ``FSDPParam`` of every parameter of ``model``."""
    for _, group in _groups(model):
        yield from group.fsdp_params


def gathered_units(model: nn.Module) -> list[ShardedModule]:
    """Return the units of ``model`` whose full parameters are gathered or being gathered."""
    gathered = [m for m, group in _groups(model) if not group.is_sharded or group._all_gather_result is not None]
    return list(dict.fromkeys(gathered))


def reshard(model: nn.Module) -> None:
    """Free every gathered parameter of ``model``, and pending gathers, whose weights would miss the next update."""
    for module in gathered_units(model):
        for group in param_groups(module):
            if group._all_gather_result is not None:
                group.wait_for_unshard()
        module.reshard()


@contextmanager
def resharded(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Reshard all ``networks``, roots of :func:`fsdp_cp.shard_module`, on exit.

    Strategies that keep parameters gathered for a whole step (``optim``, ``optim_grads``) would otherwise hold an idle
    network's full weights until its next use, and would ignore updates to its shards until then.
    """
    try:
        yield
    except BaseException:
        for network in networks:
            with suppress(Exception):  # the network may be in a bad state; the user must see the first error
                reshard(network)
        raise
    for network in networks:
        reshard(network)


def clear_unsynced_gradients(model: nn.Module) -> None:
    """Drop unreduced gradients, which ``zero_grad`` and ``reset_iter_state`` keep."""
    for _, group in _groups(model):
        group._partial_reduce_output = None
    for parameter in fsdp_params(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _has_unreduced_gradient(parameter: Any) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def complete_unreduced_gradients(model: nn.Module) -> None:
    """Give zeros to the trained parameters of a unit that lack a gradient next to accumulated ones.

    FSDP2 casts accumulated gradients to the dtype of the reduction, and refuses others in the last backward.
    """
    for _, group in _groups(model):
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        accumulated = [p.unsharded_accumulated_grad for p in trained if p.unsharded_accumulated_grad is not None]
        for p in trained if accumulated else ():
            if p.unsharded_accumulated_grad is None:
                p.unsharded_accumulated_grad = accumulated[0].new_zeros(p._unsharded_param.shape)


def has_gradients(model: nn.Module) -> bool:
    """Return whether any parameter has a gradient, on its shard or not yet reduced."""
    if any(group._partial_reduce_output is not None for _, group in _groups(model)):
        return True
    return any(p.sharded_param.grad is not None or _has_unreduced_gradient(p) for p in fsdp_params(model))


def unreduced_units(model: nn.Module) -> list[str]:
    """Return the names of the units whose gradients were reduced over shards but not over replicas."""
    return _names(model, [module for module, group in _groups(model) if group._partial_reduce_output is not None])


def partly_reduced_units(model: nn.Module) -> list[str]:
    """Return the names of the units whose gradients reduced over shards lack a trainable parameter."""
    partly = []
    for module, group in _groups(model):
        if group._partial_reduce_output is not None:
            trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            whole = sum(p.padded_sharded_param_size.numel() for p in trained)
            if group._partial_reduce_output.numel() < whole:
                partly.append(module)
    return _names(model, partly)


def _names(model: nn.Module, units: list[ShardedModule]) -> list[str]:
    """Return the names of ``units``, in the order of the modules."""
    if not units:
        return []
    return [name or "the root" for name, module in model.named_modules() if module in units]


def is_finished(root: ShardedModule) -> bool:
    """Return whether FSDP2 completed the last backward: it reduced all gradients and waited for all reductions."""
    pending = getattr(root._get_fsdp_state()._comm_ctx, "_last_post_reduce_events", {})
    return not pending and not any(map(_has_unreduced_gradient, fsdp_params(root)))


def gather_in_compute_stream(model: FSDPModule) -> None:
    """Let only the communication of gathers overlap; with streams of their own FSDP2 keeps another staging buffer."""
    model._set_unshard_async_op(True)


def evenly_sharded_weights(model: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[Any, Any]]:
    """Return (``FSDPParam``, layer) for the ``weight`` of each of ``layers`` that divides evenly over the ranks."""
    wanted = {id(layer) for layer in layers}
    infos = [(p, p._module_info) for p in fsdp_params(model)]
    weights = [(p, info.module) for p, info in infos if info.param_name == "weight" and id(info.module) in wanted]
    assert len(weights) == len(layers), "each layer is in one unit"
    return [(p, layer) for p, layer in weights if p._orig_size[0] % p.mesh_info.shard_mesh_size == 0]


def gather_by(parameter: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Gather an ``FSDPParam`` by ``before`` and ``after`` instead of in its compute dtype.

    They are FSDP2's ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. FSDP2 looks for them on the shard's tensor
    when it creates the parameter; ``_init_extensions`` (private) repeats the lookup.
    """
    shard = parameter.sharded_param._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
    parameter._init_extensions()


@contextmanager
def frozen(model: nn.Module, names: Container[str] | None = None) -> Iterator[None]:
    """Freeze the root ``model``, or its parameters ``names``, within this context; restore the earlier state. Nests.

    Use it for whole steps: a backward must end inside. ``requires_grad_`` alone does not suffice: FSDP2 chooses the
    dtypes of reductions at the first forward, from the trainable parameters. A network frozen at that time would reduce
    in the compute dtype, and fail to store bf16 gradients on its fp32 masters. On gathered parameters
    ``requires_grad_`` would be lost at the next reshard.
    """
    reshard(model)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            parameter.requires_grad_(False)
    _settle_dtypes(model)
    try:
        yield
    except BaseException:
        reset_iteration(model)  # a failed forward or backward leaves its units gathered
        raise
    finally:
        reshard(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
        _settle_dtypes(model)


def _settle_dtypes(model: nn.Module) -> None:
    """Let FSDP2 read again which parameters are trainable, and choose the dtypes of reductions."""
    for _, group in _groups(model):
        group._init_mp_dtypes()


def reset_iteration(root: nn.Module) -> None:
    """Reset FSDP2's bookkeeping after an exception in a forward or backward."""
    if isinstance(root, ShardedModule) and root._get_fsdp_state()._is_root:  # fails before the first forward
        reset_iter_state(root, fsdp_modules(root))
        reshard(root)


@contextmanager
def unrecorded_forward(model: nn.Module) -> Iterator[None]:
    """Run forwards without a backward (rollouts, teachers).

    FSDP2 records the order of every forward, to prefetch in reverse order in backward, and clears the record only after
    a backward. A frozen network's list would grow forever, and after a rollout the backward of a trained forward would
    gather one block too many. Leaving the context drops its records.
    """
    assert isinstance(model, ShardedModule), "a root of shard_module"
    # The list does not exist before the first forward.
    recorded = len(getattr(model._get_fsdp_state()._comm_ctx, "post_forward_order", ()))
    try:
        yield
    except BaseException:
        reset_iteration(model)  # a failed forward leaves its units waiting for its end
        raise
    finally:
        for _, group in _groups(model):
            group._post_forward_indices[:] = [i for i in group._post_forward_indices if i < recorded]
        del getattr(model._get_fsdp_state()._comm_ctx, "post_forward_order", [])[recorded:]
