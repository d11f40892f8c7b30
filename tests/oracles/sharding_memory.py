"""Memory of a sharded network on this rank beyond its shards: gathered parameters, gradients, staging buffers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fsdp_cp.measure.memory import resizes_reported
from fsdp_cp.reduce import local_shard
from fsdp_cp.runtime.torch_versions import param_groups
from fsdp_cp.sharding.allocations import KINDS, watch_allocations
from fsdp_cp.sharding.state import fsdp_modules


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the storages of ``tensors`` on this rank (a DTensor's shard), each storage once."""
    storages = (local_shard(x).untyped_storage() for x in tensors if x is not None)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class ShardingMemory:
    """Bytes that FSDP2 holds for ``networks`` on this rank inside the context, now and at their peak.

    Kinds of bytes are those of :data:`fsdp_cp.sharding.allocations.KINDS`.

    Tensors are watched from allocation to release, not kept alive. Not counted: activations, a shard's cast to the
    compute dtype for an all-gather (1 / ranks of a unit), temporaries of autograd, and on CUDA memory that the caching
    allocator keeps because another stream may still use it. gloo's threads free a buffer shortly after they report its
    collective as done, which may add to a peak (:meth:`settle`).

    Args:
        networks: roots of :func:`fsdp_cp.shard_module` that have run forward once.
        patience: seconds to wait before every allocation, so that gloo's threads first free the buffers that FSDP2 has
            released. Peaks are then exact, but steps are slower.

    Raises:
        RuntimeError: on entry, if a network has not run: FSDP2 makes its buffers in the first forward.
    """

    def __init__(self, *networks: nn.Module, patience: float = 0.0) -> None:
        self.networks, self.patience = networks, patience
        self.bytes: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Bytes alive now by kind, including parameters and gradients from before the context."""
        self.peak: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Peak bytes by kind."""
        self.peak_parameters = 0
        """Peak bytes of ``gathered`` and ``staging`` together."""
        self.peak_gradients = 0
        """Peak bytes of the three kinds of gradients together."""
        self.peak_reduce_inputs = 0
        """Largest number of gradient buffers alive at once (not bytes)."""
        self._watched: dict[int, tuple[str, int, weakref.ref]] = {}
        self._reduce_inputs = 0
        self._lock = threading.RLock()  # gloo's threads release storages too, also while the lock is held here
        self._gathered: dict[int, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> ShardingMemory:
        with ExitStack() as stack:
            for network in self.networks:
                stack.enter_context(watch_allocations(network, self._add))
                for group in (group for unit in fsdp_modules(network) for group in param_groups(unit)):
                    for comm in (group._all_gather_comm, group._reduce_scatter_comm) if self.patience else ():
                        stack.enter_context(mock.patch.object(comm, "allocate", self._delayed(comm.allocate)))
            stack.enter_context(resizes_reported(self._resized))
            self.reset_peak()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self._gathered.clear()
        self.bytes["gathered"] = 0

    def reset_peak(self) -> None:
        """Restart the peaks from the bytes alive now."""
        self.peak = dict.fromkeys(KINDS, 0)
        self.peak_parameters = self.peak_gradients = self.peak_reduce_inputs = 0
        with self._lock:
            self._note_peak()

    def settle(self, *kinds: str, seconds: float = 1.0) -> None:
        """Wait at most ``seconds`` until gloo's threads have freed all buffers of ``kinds``."""
        deadline = time.monotonic() + seconds
        while any(self.bytes[kind] for kind in kinds) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _delayed(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def delayed(*args: Any, **kwargs: Any) -> Tensor:
            time.sleep(self.patience)
            return allocate(*args, **kwargs)

        return delayed

    def _add(self, kind: str, tensor: Tensor) -> None:
        storage = local_shard(tensor).untyped_storage()
        key = storage._cdata
        with self._lock:
            if kind == "gathered":
                self._gathered[key] = storage.nbytes()
                self.bytes["gathered"] += storage.nbytes()
            elif key not in self._watched:
                self._watched[key] = (kind, storage.nbytes(), weakref.ref(storage, lambda _: self._forget(key)))
                self.bytes[kind] += storage.nbytes()
                self._reduce_inputs += kind == "reduce_inputs"
                self._note_peak()

    def _forget(self, key: int) -> None:
        with self._lock:
            kind, size, _ = self._watched.pop(key)
            self.bytes[kind] -= size
            self._reduce_inputs -= kind == "reduce_inputs"

    def _resized(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            if storage._cdata in self._gathered:
                self.bytes["gathered"] += storage.nbytes() - self._gathered[storage._cdata]
                self._gathered[storage._cdata] = storage.nbytes()
                self._note_peak()

    def _note_peak(self) -> None:
        now = self.bytes
        self.peak = {kind: max(most, now[kind]) for kind, most in self.peak.items()}
        self.peak_parameters = max(self.peak_parameters, now["gathered"] + now["staging"])
        gradients = now["full_gradients"] + now["reduce_inputs"] + now["shard_gradients"]
        self.peak_gradients = max(self.peak_gradients, gradients)
        self.peak_reduce_inputs = max(self.peak_reduce_inputs, self._reduce_inputs)
