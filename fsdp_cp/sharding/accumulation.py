"""Gradient accumulation over micro-batches and over several losses of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fsdp_cp.sharding.pool import pool_at
from fsdp_cp.sharding.shard import settings_of
from fsdp_cp.sharding.state import (
    ShardedModule,
    clear_unsynced_gradients,
    fsdp_modules,
    has_gradients,
    is_finished,
    partly_reduced_units,
    reset_iteration,
    reshard,
    unreduced_units,
)


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
            did not reach a unit, whose gradients were never reduced; or, with replicas, only some of the micro-batches
            use a parameter.
        ValueError: ``model`` does not contain exactly one root of :func:`fsdp_cp.shard_module`.
    """
    root = _root(model)
    if is_first and has_gradients(root):
        raise RuntimeError(
            "gradients are left from an earlier step; call zero_grad(set_to_none=True) before the first micro-batch,"
            " or discard_step(model) after one that was broken off"
        )
    outer = root.__dict__.setdefault("_open_microbatches", [])
    outer.append(is_last)
    _apply(root, is_last)
    try:
        yield
        _refuse_incomplete(root, is_last)
        if is_last:
            reshard(root)  # units that the backward did not reach
            if (pool := pool_at(root)) is not None:
                pool.end_step()
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
    """Drop an unfinished accumulation: gradients, pending reductions, gathered parameters.

    Every rank must call it, since a collective that one rank left cannot be resumed.
    """
    root = _root(model)
    reset_iteration(root)
    clear_unsynced_gradients(root)
    reshard(root)
    for parameter in root.parameters():
        parameter.grad = None


def _refuse_incomplete(root: ShardedModule, is_last: bool) -> None:
    """Refuse gradients that FSDP2 did not reduce, or would add up wrongly, in the micro-batch that ends."""
    # FSDP2 reduces the units that a backward passes, and waits for all reductions only if it began at the root's
    # output.
    if is_last and not is_finished(root):
        raise RuntimeError(
            "the last micro-batch had no backward through the network, so earlier gradients were not fully reduced;"
            " give is_last=True to the last one that has a backward"
        )
    if is_last and (units := unreduced_units(root)):
        raise RuntimeError(
            f"the last micro-batch's backward did not reach {', '.join(units)}, so its gradients were not summed over"
            " the replicas; set reduce_unused=true"
        )
    # Before the all-reduce FSDP2 adds micro-batches by position, which would mix gradients of different parameters.
    if not is_last and (units := partly_reduced_units(root)):
        raise RuntimeError(
            f"a parameter of {', '.join(units)} got no gradient in this micro-batch; accumulation over replicas"
            " needs reduce_unused=true then"
        )


def _root(model: nn.Module) -> ShardedModule:
    roots = [module for module in fsdp_modules(model) if hasattr(module, "_shard_settings")]
    if len(roots) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(roots)} modules sharded by fsdp_cp.shard_module; give the one to train"
        )
    return roots[0]
