"""Phases of a step: named for profilers, and with nothing left gathered behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch.profiler import record_function

from fsdp_cp.fsdp_state import reshard


@contextmanager
def phase(name: str, networks: Iterable[nn.Module] = ()) -> Iterator[None]:
    """A ``record_function`` range, on CUDA an NVTX range too; on leaving it every one of ``networks`` is resharded.

    Strategies that keep parameters gathered for a whole step (``optim``, ``optim_grads``) would hold an idle network's
    full weights until its next use, and updates to its shards would be ignored until then.

    Args:
        name: of the range, e.g. ``"student/backward"``.
        networks: roots of :func:`fsdp_cp.shard_module`.
    """
    with _named(name):
        try:
            yield
        except BaseException:
            for network in networks:
                with suppress(Exception):  # of a network in disarray: what failed first is what the user must see
                    reshard(network)
            raise
        for network in networks:
            reshard(network)


@contextmanager
def _named(name: str) -> Iterator[None]:
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
