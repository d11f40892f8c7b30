"""How long a rank waits for the others in a collective: one timeout for all process groups of this process.

torch gives each group a timeout of its own, and those that a ``DeviceMesh`` makes the backend's default (30 minutes for
gloo, 10 for NCCL) whatever the group of all ranks was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def process_groups() -> list[dist.ProcessGroup]:
    """Every process group that this rank is in; ``_world.pg_map`` is private (torch 2.11 to 2.13)."""
    return list(dist.distributed_c10d._world.pg_map)


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """What communicates for ``group``; all four names are private (torch 2.11 to 2.13).

    ``torch.distributed.distributed_c10d._set_pg_timeout`` does the same, but leaves out what
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps.
    """
    backends = [group._get_backend(torch.device(kind)) for kind in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def set_timeout(timeout: timedelta, groups: list[dist.ProcessGroup] | None = None) -> None:
    """Set the timeout of ``groups``, by default of every group, for the collectives that begin from here on.

    Groups that :func:`keep_timeout` was called for are left out by default. ``Backend._set_default_timeout`` is private
    (torch 2.11 to 2.13).
    """
    all_groups = [group for group in process_groups() if group not in _state.kept]
    for group in all_groups if groups is None else groups:
        for backend in _backends(group):
            with suppress(RuntimeError):  # of a backend without timeouts, as tests use
                backend._set_default_timeout(timeout)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """A group's timeout; ``None`` where its backend has none. ``options._timeout`` is private (torch 2.11 to 2.13)."""
    found = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(group)]
    return next((timeout for timeout in found if timeout is not None), None)


def world_timeout() -> timedelta | None:
    """:func:`timeout_of` the group of all ranks, which there must be."""
    world = dist.group.WORLD
    assert world is not None, "no process group"
    return timeout_of(world)


@contextmanager
def inherited_timeout() -> Iterator[None]:
    """Groups that are made inside get the timeout of the group of all ranks; others keep theirs."""
    before = process_groups()
    yield
    timeout = world_timeout()
    if timeout is not None:
        set_timeout(timeout, [group for group in process_groups() if group not in before])


@dataclass
class _Shortened:
    """The two timeouts between which :func:`long_timeout` changes; ``short`` is ``None`` where the long one is set."""

    long: timedelta | None = None
    short: timedelta | None = None
    kept: list[dist.ProcessGroup] = field(default_factory=list)


_state = _Shortened()


def keep_timeout(group: dist.ProcessGroup) -> None:
    """Leave ``group`` its timeout from here on: its ranks work beside the training, where a step's means nothing."""
    _state.kept.append(group)


def shorten(timeout: timedelta) -> None:
    """From here on ``timeout`` for every group, but inside of :func:`long_timeout`; again, it changes nothing.

    Called by all ranks at the same place, after a collective that all of them have left.
    """
    if _state.short == timeout:
        return
    if _state.long is None:
        _state.long = world_timeout()
    _state.short = timeout
    set_timeout(timeout)


@contextmanager
def long_timeout() -> Iterator[None]:
    """The timeout from before :func:`shorten`, for work of one rank that the others wait for. Called by all ranks.

    It ends with a barrier: a rank that had left before would wait with the short timeout for one that still works.
    After an exception the long timeout stays.
    """
    short, long = _state.short, _state.long
    if short is None or long is None:  # not shortened, or inside of another one
        yield
        return
    _state.short = None
    set_timeout(long)
    yield
    if dist.get_world_size() > 1:
        dist.barrier()
    set_timeout(short)
    _state.short = short


def forget() -> None:
    """The process groups are gone, and with them what :func:`shorten` has changed."""
    _state.long = _state.short = None
    _state.kept.clear()
