"""Recorder of the staging buffers of collectives: their sizes, lifetimes and places in memory."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_cp.sharding.pool import place
from fsdp_cp.sharding.state import fsdp_modules, param_groups

AGAIN = "gather in backward"
Key = tuple[str, int, str, int, int]
"""Network, unit, purpose, bytes, and index among equal buffers that are alive at once."""


@dataclass
class Trace:
    """Buffers of several steps, with the sets that were alive at once."""

    sizes: dict[Key, int] = field(default_factory=dict)
    conflicts: dict[Key, set[Key]] = field(default_factory=dict)
    most_alive: int = 0
    """Largest number of bytes that were alive at once."""

    def note(self, key: Key, alive: set[Key]) -> None:
        self.sizes.setdefault(key, key[3])
        self.conflicts.setdefault(key, set()).update(alive)
        for other in alive:
            self.conflicts.setdefault(other, set()).add(key)
            self.sizes.setdefault(other, other[3])
        self.most_alive = max(self.most_alive, key[3] + sum(other[3] for other in alive))

    @property
    def in_all(self) -> int:
        """Return the bytes of all buffers. A unit that is gathered in forward and backward counts once."""
        return sum(size for key, size in self.sizes.items() if key[2] != AGAIN)

    def held(self, network: str | None = None, *, passes_apart: bool = True) -> int:
        """Return the bytes of one block of memory that can hold all buffers.

        Args:
            network: count only the buffers of this network.
            passes_apart: whether a unit's weights may have different places in forward and backward.
        """
        names = {
            key: key if passes_apart or key[2] != AGAIN else (*key[:2], "gather", *key[3:])
            for key in self.sizes
            if network in (None, key[0])
        }
        position = {name: i for i, name in enumerate(dict.fromkeys(names.values()))}
        conflicts: list[set[int]] = [set() for _ in position]
        for key, name in names.items():
            conflicts[position[name]] |= {position[names[other]] for other in self.conflicts[key] if other in names}
        return place([name[3] for name in position], conflicts)[1]


class BufferWatch:
    """Context that records every buffer that FSDP2 requests for ``networks``.

    Uses private parts of FSDP2 (torch 2.11 to 2.13): ``_all_gather_comm`` and ``_reduce_scatter_comm`` of a parameter
    group. Their ``allocate`` (public) makes the buffers. A reduce-scatter requests its input first, then its output.

    Args:
        networks: roots of :func:`fsdp_cp.shard_module`, by name.
        patience: seconds of waiting before each request, in which gloo's threads free the buffers that FSDP2 has freed.
    """

    def __init__(self, networks: Mapping[str, nn.Module], patience: float = 0.0) -> None:
        self.networks, self.patience = networks, patience
        self.traces: dict[str, Trace] = {}
        """Traces by kind of step (:attr:`kind`)."""
        self.kind = ""
        self.requests = 0
        """Number of requested outputs of all-gathers and inputs of reduce-scatters."""
        self.outputs = 0
        """Number of requested outputs of reduce-scatters."""
        self.overlaps = 0
        """Number of buffers that overlapped a living buffer; must stay 0."""
        self.in_memory: Callable[[Tensor], bool] = lambda tensor: False
        self.outside = 0
        """Number of requests whose buffers are not in the memory that :attr:`in_memory` tests."""
        self.outputs_in_memory = 0
        self._alive: dict[Key, tuple[int, int, weakref.ref[Any]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> BufferWatch:
        for name, network in {id(network): (name, network) for name, network in self.networks.items()}.values():
            for i, unit in enumerate(fsdp_modules(network)):
                for group in param_groups(unit):
                    gather, reduce = group._all_gather_comm, group._reduce_scatter_comm
                    gather.allocate = self._watching(gather.allocate, name, i, itertools.repeat("gather"))
                    purposes = itertools.cycle(("reduce", "output"))
                    reduce.allocate = self._watching(reduce.allocate, name, i, purposes)
                    self._stack.callback(vars(gather).pop, "allocate")
                    self._stack.callback(vars(reduce).pop, "allocate")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _watching(self, allocate: Callable[..., Tensor], network: str, unit: int, purposes: Any) -> Callable:
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            if self.patience and self._alive:
                time.sleep(self.patience)
            tensor = allocate(*args, **kwargs)
            purpose = next(purposes)
            if purpose == "output":
                self.outputs += 1
                self.outputs_in_memory += self.in_memory(tensor)
                return tensor
            self.requests += 1
            self.outside += not self.in_memory(tensor)
            begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            alive = dict(self._alive)
            self.overlaps += any(begin < stop and start < end for start, stop, _ in alive.values())
            if purpose == "gather" and torch._C._current_graph_task_id() != -1:  # private: in a backward (2.11 to 2.13)
                purpose = AGAIN
            copies = ((network, unit, purpose, tensor.nbytes, n) for n in itertools.count())
            key = next(key for key in copies if key not in alive)
            self.traces.setdefault(self.kind, Trace()).note(key, set(alive))
            gone = weakref.ref(tensor.untyped_storage(), lambda _: self._alive.pop(key, None))
            self._alive[key] = (begin, end, gone)
            return tensor

        return watched


def union(traces: Mapping[str, Trace]) -> Trace:
    """Combine the traces of all kinds of steps."""
    whole = Trace()
    for trace in traces.values():
        for key, others in trace.conflicts.items():
            whole.sizes[key] = trace.sizes[key]
            whole.conflicts.setdefault(key, set()).update(others)
        whole.most_alive = max(whole.most_alive, trace.most_alive)
    return whole
