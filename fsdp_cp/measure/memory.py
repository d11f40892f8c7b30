"""What the device is and did: peak memory, and the arithmetic it could do."""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)


def reset_peak(device: torch.device) -> None:
    """Count CUDA's peak from here on; the CPU's cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Peak memory of this process so far, GiB: allocated by torch on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reserved_gib(device: torch.device) -> float | None:
    """Most that torch's allocator held of a GPU's memory so far, GiB: what is allocated, and what it keeps for later.

    ``None`` on the CPU, whose allocator keeps nothing.
    """
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None


_at_start: list[float] = []


def mark_start(device: torch.device) -> None:
    """Note what is resident now on the CPU: Python and its libraries, before data and networks. The first call counts.

    On CUDA nothing is noted: torch's peak has no libraries in it.
    """
    if device.type == "cpu" and not _at_start:
        _at_start.append(resident_gib())


def resident_at_start() -> float | None:
    """GiB that :func:`mark_start` has noted in this process; ``None`` where it has not."""
    return _at_start[0] if _at_start else None


def resident_gib() -> float:
    """Resident memory of this process now, GiB; where there is no ``/proc``, its peak so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    except OSError:
        return peak_gib(torch.device("cpu"))


_DENSE_BF16_TFLOPS = {
    "H20": 148, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "A800": 312, "H800": 989, "L40S": 362,
}  # fmt: skip
"""Published dense bf16 rates by a word of the device's name, of Hopper as SXM modules."""


def peak_flops(device: torch.device) -> float | None:
    """Published dense bf16 rate of ``device`` in operations per second; ``None`` where it is not known."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    if {"H100", "H800"} & {*words} and {"PCIe", "PCIE", "NVL"} & {*words}:
        return None  # slower ones of the same name
    return next((rate * 1e12 for name, rate in _DENSE_BF16_TFLOPS.items() if name in words), None)


class LiveStorages(TorchDispatchMode):
    """Bytes of the tensor storages that were allocated inside the context and are still alive, and their peak.

    Each storage counts once, however many views it has, from the operation that returns it to its release, in forward
    and in backward (on the CPU, where autograd runs in the calling thread). Storages are watched, not held. Operators
    from outside of aten (custom ones, functional collectives) are looked into.

    Args:
        fakes: fake tensors count as what they stand for, where a ``FakeTensorMode`` was entered before.

    Not seen: what an aten kernel or a communication backend allocates for itself and gives back, allocations in other
    threads, and whatever no operation ever touched (``torch.from_numpy``).

    >>> with LiveStorages() as live:
    ...     x = torch.zeros(1024)
    >>> live.bytes, live.peak_bytes
    (4096, 4096)
    """

    def __init__(self, *, fakes: bool = False) -> None:
        super().__init__()
        self.fakes = fakes
        self.bytes = 0
        """Alive now; keeps falling after the context when tensors are released."""
        self.peak_bytes = 0
        """Most that was alive at once inside the context."""
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref] = {}
        self._depth = 0

    def __enter__(self):
        self._depth += 1
        if self._depth == 1:
            self._resizes = resizes_reported(self._see_resized)
            self._resizes.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any):
        self._depth -= 1
        if self._depth == 0:
            self._resizes.__exit__(*error)
        return super().__exit__(*error)

    def reset_peak(self) -> None:
        """Let the peak start from what is alive now."""
        self.peak_bytes = self.bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # wrappers of tensors (DTensor): their own dispatch comes back with what they wrap
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs), self.fakes)
        # What goes in and was never seen is older than the context, except a Python literal on its way in.
        if func is not torch.ops.aten.lift_fresh.default:
            for tensor in inputs:
                self._see(tensor.untyped_storage(), counts=False)
        results = call_in_sight(self, func, args, kwargs)
        for tensor in _tensors(results, self.fakes):
            self._see(tensor.untyped_storage(), counts=True)
        return results

    def _see(self, storage: torch.UntypedStorage, counts: bool) -> None:
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            if counts:
                self._sizes[key] = 0
        if key in self._sizes:
            self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        change = size - self._sizes[key]
        self._sizes[key] = size
        self._changed(key, change)

    def _forget(self, key: int) -> None:
        del self._watched[key]
        self._changed(key, -self._sizes.pop(key, 0))

    def _changed(self, key: int, change: int) -> None:
        """The storage ``key`` has so many bytes more."""
        self.bytes += change
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _see_resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            self._resized(storage._cdata, storage.nbytes())


@contextmanager
def resizes_reported(report: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """FSDP2 frees and refills full parameters with ``UntypedStorage.resize_``, for which no operation is dispatched."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        report(storage)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # a patch, taken back below
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _tensors(tree: Any, fakes: bool = False) -> list[Tensor]:
    """The tensors with memory: the storages of wrappers have a size and hold nothing, and so do those on meta.

    A fake tensor's storage is on the meta device too; ``fakes`` counts it as that of the tensor which it stands for.
    """
    leaves: list[Tensor] = []
    _collect(tree, leaves)

    def counts(x: Tensor) -> bool:
        if isinstance(x, FakeTensor):
            return fakes and x.fake_device.type != "meta"
        return x.untyped_storage().device.type != "meta"

    return [x for x in leaves if not is_traceable_wrapper_subclass(x) and counts(x)]


def _collect(tree: Any, leaves: list[Tensor]) -> None:
    """An operator's arguments and results have no other containers; torch's own ``tree_leaves`` takes five times as
    long, for each of the hundred thousand operators of a plan."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            _collect(each, leaves)
    elif isinstance(tree, dict):
        for each in tree.values():
            _collect(each, leaves)


def call_in_sight(mode: TorchDispatchMode, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` from within ``mode``, which goes on to watch what a kernel outside of aten calls.

    An operator is opaque to the modes above it. Entering the mode again would only bring the same call back, so the
    kernel is called below the modes while the mode watches. ``OpOverload.redispatch`` and ``_dispatch_keys`` are
    private (torch 2.11 to 2.13).
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("aten", "c10d", "prim", "prims"):
        return func(*args, **kwargs)
    inputs = _tensors((args, kwargs), fakes=True)
    if not inputs:
        return func(*args, **kwargs)
    key = torch._C._dispatch_key_for_device(inputs[0].device.type)
    with mode:
        return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)
