"""Timeouts of collectives: one for all process groups of this process.

torch sets the timeout of each group separately. Groups of a ``DeviceMesh`` get the backend's default (30 minutes for
gloo, 10 for NCCL), whatever timeout the group of all ranks has. Private names of torch (2.11 to 2.13) are all here.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def process_groups() -> list[dist.ProcessGroup]:
    """Return every process group that this rank is in; ``_world.pg_map`` is private (torch 2.11 to 2.13)."""
    return list(dist.distributed_c10d._world.pg_map)


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group``, wrapped ones too, which torch's own setter leaves out."""
    backends = [group._get_backend(torch.device(kind)) for kind in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def set_timeout(timeout: timedelta, groups: list[dist.ProcessGroup] | None = None) -> None:
    """Set the timeout of ``groups``, by default all but those of :func:`keep_timeout`, for later collectives."""
    for group in [group for group in process_groups() if group not in _state.kept] if groups is None else groups:
        for backend in _backends(group):
            with suppress(RuntimeError):  # a backend without timeouts, as tests use
                backend._set_default_timeout(timeout)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return a group's timeout; ``None`` for a backend without one."""
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(group)]
    return next((timeout for timeout in timeouts if timeout is not None), None)


def world_timeout() -> timedelta | None:
    world = dist.group.WORLD
    assert world is not None, "no process group"
    return timeout_of(world)


@contextmanager
def inherited_timeout() -> Iterator[None]:
    """Give groups made within this context the timeout of the group of all ranks; other groups do not change."""
    before = process_groups()
    yield
    timeout = world_timeout()
    if timeout is not None:
        set_timeout(timeout, [group for group in process_groups() if group not in before])


@dataclass
class _Shortened:
    """Timeouts of :func:`shorten` and :func:`long_timeout`; ``short`` is ``None`` while the long one is set."""

    long: timedelta | None = None
    short: timedelta | None = None
    kept: list[dist.ProcessGroup] = field(default_factory=list)


_state = _Shortened()


def keep_timeout(group: dist.ProcessGroup) -> None:
    """Exempt ``group`` from :func:`shorten`: its ranks do not work in step with the training."""
    _state.kept.append(group)


def shorten(timeout: timedelta) -> None:
    """Set, once, ``timeout`` for every group outside of :func:`long_timeout`. All ranks call it after a collective."""
    if _state.short == timeout:
        return
    if _state.long is None:
        _state.long = world_timeout()
    _state.short = timeout
    set_timeout(timeout)


@contextmanager
def long_timeout() -> Iterator[None]:
    """Restore the timeout from before :func:`shorten`, for work of one rank that the others wait for.

    All ranks enter it. It ends with a barrier: a rank that left earlier would wait with the short timeout for a rank
    that still works. After an exception the long timeout stays.
    """
    short, long = _state.short, _state.long
    if short is None or long is None:  # not shortened, or nested
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
    """Reset the state of this module, before the process groups are destroyed."""
    _state.long = _state.short = None
    _state.kept.clear()
