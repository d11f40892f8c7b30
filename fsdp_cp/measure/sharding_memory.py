"""Memory of a sharded network on this rank beyond its shards: gathered parameters, gradients, staging buffers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_cp.measure.memory import resizes_reported
from fsdp_cp.reduce import local_shard
from fsdp_cp.sharding.state import fsdp_modules, param_groups

KINDS = ("gathered", "staging", "full_gradients", "reduce_inputs", "shard_gradients")


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the storages of ``tensors`` on this rank (a DTensor's shard), each storage once."""
    storages = (local_shard(x).untyped_storage() for x in tensors if x is not None)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def gathered_outputs(networks: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the all-gather outputs that hold full parameters, resized to 0 between uses.

    ``all_gather_outputs`` is private (torch 2.11 to 2.13).
    """
    for parameter in _fsdp_params(networks):
        yield from parameter.all_gather_outputs


def _fsdp_params(networks: Iterable[nn.Module]) -> Iterator[Any]:
    for network in networks:
        for unit in fsdp_modules(network):
            for group in param_groups(unit):
                yield from group.fsdp_params


def has_run(network: nn.Module) -> bool:
    """Return whether any unit has run a forward, which makes the buffers that :class:`ShardingMemory` watches."""
    return any(parameter.all_gather_outputs for parameter in _fsdp_params([network]))


class ShardingMemory:
    """Bytes that FSDP2 holds for ``networks`` on this rank inside the context, now and at their peak.

    - ``gathered``: full parameters;
    - ``staging``: outputs of all-gathers that are running or not yet freed (full parameters in rank order);
    - ``full_gradients``: gradients of units in backward or waiting for a reduction;
    - ``reduce_inputs``: gradient buffers, which are copies of full gradients in rank order;
    - ``shard_gradients``: outputs of reductions, which become the gradients of the shards.

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
                for unit in fsdp_modules(network):
                    for group in param_groups(unit):
                        stack.enter_context(self._watch_group(group))
            stack.enter_context(resizes_reported(self._resized))
            self.reset_peak()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

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

    @contextmanager
    def _watch_group(self, group: Any) -> Iterator[None]:
        """Watch the buffers of one parameter group. The private parts of FSDP2 are all here (torch 2.11 to 2.13).

        ``FSDPParam.all_gather_outputs`` hold the full parameters and are resized to 0 between uses.
        ``_unsharded_param`` gets the full gradient. ``Comm.allocate`` (public) makes the staging buffers; in
        ``foreach_reduce`` it makes first the input of a reduction, then its output, also with one shard.
        """
        if not all(parameter.all_gather_outputs for parameter in group.fsdp_params):
            raise RuntimeError(f"{group!r} has not run yet; run one forward before measuring")
        handles = []
        for parameter in group.fsdp_params:
            for output in parameter.all_gather_outputs:
                storage = output.untyped_storage()
                self._gathered[storage._cdata] = storage.nbytes()
                self.bytes["gathered"] += storage.nbytes()
            shard, full = parameter.sharded_param, parameter._unsharded_param
            for gradient in (full.grad, parameter.unsharded_accumulated_grad):
                self._add("full_gradients", gradient)
            self._add("shard_gradients", shard.grad)
            if full.requires_grad:
                handles.append(full.register_post_accumulate_grad_hook(lambda p: self._add("full_gradients", p.grad)))
                # FSDP2 calls this hook once the gradient exists. If dtypes differ, it is not the reduction's output.
                handles.append(shard.register_post_accumulate_grad_hook(lambda p: self._add("shard_gradients", p.grad)))
            parameter.to_accumulated_grad_if_needed = self._casting(parameter)
        gather, reduce = group._all_gather_comm, group._reduce_scatter_comm
        inputs_and_outputs = _alternately("reduce_inputs", "shard_gradients")
        gather.allocate = self._watching(gather.allocate, lambda: "staging")
        reduce.allocate = self._watching(reduce.allocate, lambda: next(inputs_and_outputs))
        try:
            yield
        finally:
            del gather.allocate, reduce.allocate  # restores the methods of their classes
            for handle in handles:
                handle.remove()
            for parameter in group.fsdp_params:
                del parameter.to_accumulated_grad_if_needed
                for output in parameter.all_gather_outputs:
                    self.bytes["gathered"] -= self._gathered.pop(output.untyped_storage()._cdata, 0)

    def _watching(self, allocate: Callable[..., Tensor], kind: Callable[[], str]) -> Callable[..., Tensor]:
        def watched(*args: Any, **kwargs: Any) -> Tensor:
            if self.patience:
                time.sleep(self.patience)
            tensor = allocate(*args, **kwargs)
            self._add(kind(), tensor)
            return tensor

        return watched

    def _casting(self, parameter: Any) -> Callable[[], None]:
        cast = parameter.to_accumulated_grad_if_needed  # casts gradients that wait to the dtype of the reduction

        def watched() -> None:
            cast()
            self._add("full_gradients", parameter.unsharded_accumulated_grad)

        return watched

    def _add(self, kind: str, tensor: Tensor | None) -> None:
        if tensor is None:
            return
        storage = local_shard(tensor).untyped_storage()
        key = storage._cdata
        with self._lock:
            if key not in self._watched:
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


def _alternately(*names: str) -> Iterator[str]:
    while True:
        yield from names
