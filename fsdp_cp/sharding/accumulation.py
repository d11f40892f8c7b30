"""Gradient accumulation over micro-batches, and over several losses of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fsdp_cp.sharding.one_rank import computes_in_place, is_alone
from fsdp_cp.sharding.pool import pool_at
from fsdp_cp.sharding.settings import ShardSettings
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
    """Forward and backward of one micro-batch (or of one loss of it) between two optimizer steps.

    When gradients are reduced, and how long parameters stay gathered, is the strategy's (:class:`ShardSettings`):
    ``optim`` and ``no_shard`` reduce once a step, the others in each backward; replicas (``dp_replicate``) are summed
    once a step. The masters are cast to the compute dtype by each gather: once a step where parameters stay gathered.
    After the last micro-batch everything is reduced and resharded. The caller scales each loss by its share of the
    global batch, since gradients are summed.

    After an exception what the step had accumulated is dropped (:func:`discard_step`): the next step starts afresh.
    Contexts nest: on leaving an inner one the outer one's settings hold again.

    Args:
        model: the root that :func:`fsdp_cp.shard_module` made; a module around it is looked through.
        is_first: the first backward since the optimizer's step; gradients must be clear then.
        is_last: the last backward before the optimizer's step.

    Raises:
        RuntimeError: ``is_first`` with gradients left from before, which would be summed into the step silently; or a
            unit whose gradients were never reduced, since the last backward did not reach it; or, with replicas, a
            parameter that only some of the micro-batches use.
        ValueError: a module without a root of :func:`fsdp_cp.shard_module`, or with several.
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
        if is_last:
            _refuse_unreduced(root)
            reshard(root)  # units that no backward came to
            if (pool := pool_at(root)) is not None:
                pool.end_step()
        else:
            _refuse_partial(root)
            if is_alone(root) and not _keeps(settings_of(root)):
                reshard(root)  # as above: units in place stay gathered behind a forward
    except BaseException:
        discard_step(root)
        raise
    finally:
        outer.pop()
        _apply(root, outer[-1] if outer else None)


def _apply(root: ShardedModule, is_last: bool | None) -> None:
    """What the strategy does in a micro-batch; ``None`` outside of one: a backward there is a whole step."""
    settings, last = settings_of(root), is_last is not False
    reduces = last or settings.strategy in ("optim_grads", "optim_grads_params")
    may_stay = settings.strategy not in ("optim", "optim_grads") and (settings.keep_gathered or is_alone(root))
    root.set_is_last_backward(last)
    for unit in fsdp_modules(root):  # a recursive setter would walk over all modules, each
        unit.set_requires_gradient_sync(reduces, recurse=False)
        unit.set_requires_all_reduce(last, recurse=False)  # after the line above, which sets it too
        unit.set_reshard_after_backward(last or not _keeps(settings), recurse=False)
        if may_stay:
            keeps = settings.keep_gathered or computes_in_place(unit)  # at no memory, where it does
            unit.set_reshard_after_forward(is_last is None or not keeps, recurse=False)


def _keeps(settings: ShardSettings) -> bool:
    """Do parameters stay gathered from a step's first micro-batch to its last?"""
    return settings.strategy in ("optim", "optim_grads") or settings.keep_gathered


def discard_step(model: nn.Module) -> None:
    """Forget an accumulation that will not be finished: gradients, reductions under way, gathered parameters.

    Every rank must do so, since a collective that one rank left cannot be gone on with.
    """
    root = _root(model)
    reset_iteration(root)
    clear_unsynced_gradients(root)
    reshard(root)
    for parameter in root.parameters():
        parameter.grad = None


def _refuse_unreduced(root: ShardedModule) -> None:
    """FSDP2 reduces where a backward passes, and waits for all of it where one began at the root's output."""
    if not is_finished(root):
        raise RuntimeError(
            "the last micro-batch had no backward through the network, so earlier gradients were not reduced to the"
            " end; give is_last=True to the last one that has"
        )
    units = unreduced_units(root)
    if units:
        raise RuntimeError(
            f"the last micro-batch's backward did not reach {', '.join(units)}, so its gradients were not summed over"
            " the replicas; set reduce_unused=true"
        )


def _refuse_partial(root: ShardedModule) -> None:
    """FSDP2 adds up micro-batches before the replicas by position: gradients of other parameters would be mixed up."""
    units = partly_reduced_units(root)
    if units:
        raise RuntimeError(
            f"a parameter of {', '.join(units)} got no gradient in this micro-batch; accumulation over replicas"
            " needs reduce_unused=true then"
        )


def _root(model: nn.Module) -> ShardedModule:
    # Of a parent that is not sharded itself: the module in it that is.
    found = [module for module in fsdp_modules(model) if hasattr(module, "_shard_settings")]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} modules sharded by fsdp_cp.shard_module; give the one to train"
        )
    return found[0]
