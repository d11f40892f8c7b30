"""What a rank does whose attention fails: it still takes part in what the others wait for, then raises.

A collective that one rank leaves out makes the others hang, and so does the next one, even where every rank catches
the exception. So an exception of local work is kept, NaN goes on in place of what could not be computed, and the
exception is raised at the end of the call. One of communication itself is raised at once: a neighbour is gone, and
whoever waited for it would hang or fail again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError  # private (torch 2.11 to 2.13)

StopRecomputation = _StopRecomputationError
"""By which checkpointing ends a recomputation, on all ranks at the same place, once it has what backward needs."""

_MARK = "_fsdp_cp_of_communication"
P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def communication() -> Iterator[None]:
    """What is raised inside is no failure of this rank's own: :meth:`Failure.attempt` lets it pass."""
    try:
        yield
    except Exception as error:
        setattr(error, _MARK, True)
        raise


def is_local(error: Exception) -> bool:
    """Did this rank's own work fail, with its neighbours still there?"""
    marked = (e for e in (error, error.__context__) if hasattr(e, _MARK))
    return not isinstance(error, StopRecomputation) and not any(marked)


class Failure:
    """The first exception of local work in one call; as a context manager it is raised at the end.

    Communication is done outside of :meth:`attempt`, or in :func:`communication`.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of ``work(...)``; ``None`` if it fails."""
        try:
            return work(*args, **kwargs)
        except Exception as error:
            if not is_local(error):
                raise
            self.keep(error)
        return None

    def keep(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            # The tensors of the frames that failed would leave no room for what is still to be received.
            traceback.clear_frames(error.__traceback__)
        if self.error is None:
            self.error = error

    def raise_first(self) -> None:
        if self.error is None:
            return
        error, self.error = self.error, None
        try:
            raise error
        finally:
            del error  # or its traceback, this frame and all the tensors in it keep each other alive

    def __enter__(self) -> Failure:
        return self

    def __exit__(self, *_: object) -> None:
        self.raise_first()  # of two, a broken connection among them, the first is what the user must see


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, failure: Failure, *tensors: Tensor):
        ctx.failure = failure
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        ctx.failure.raise_first()
        return None, *grads


def raise_in_backward(tensors: tuple[Tensor, ...], failure: Failure) -> tuple[Tensor, ...]:
    """The same tensors; when their gradients are there, ``failure`` is raised if it has been kept by then."""
    return _Raise.apply(failure, *tensors)
