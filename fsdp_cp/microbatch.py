"""Gradient accumulation over micro-batches, and over several losses of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import FSDPModule


@contextmanager
def microbatch(model: FSDPModule, *, is_first: bool, is_last: bool) -> Iterator[None]:
    """Forward and backward of one micro-batch (or of one loss of it) between two optimizer steps.

    Gradients are reduced into the sharded ``.grad`` at each backward (``optim_grads_params``); on the last one FSDP2
    also waits for the reductions and clears what it kept for prefetching. The caller scales each loss by its share
    of the global batch, since gradients are summed.

    Args:
        model: the root that :func:`fsdp_cp.shard_module` made.
        is_first: the first backward since the optimizer's step; gradients must be clear then.
        is_last: the last backward before the optimizer's step.

    Raises:
        RuntimeError: ``is_first`` with gradients left from before, which would be summed into the step silently.
    """
    if is_first and any(p.grad is not None for p in model.parameters()):
        raise RuntimeError(
            "gradients are left from an earlier step; call zero_grad(set_to_none=True) before the first micro-batch"
        )
    model.set_is_last_backward(is_last)
    try:
        yield
    finally:
        model.set_is_last_backward(True)
