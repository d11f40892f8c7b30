"""Peak memory and peak arithmetic rate of a device, memory of this host, and live bytes of tensors by label."""

import os
import resource
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
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
    """Restart the count of CUDA's peak memory. The CPU's peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: allocated by torch on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reserved_gib(device: torch.device) -> float | None:
    """Return the peak GPU memory in GiB that torch's allocator reserved; ``None`` on the CPU, where it has no cache."""
    return torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None


_at_start: list[float] = []


def mark_start(device: torch.device) -> None:
    """Record, once, the resident memory of Python and its libraries, which CUDA's peak excludes."""
    if device.type == "cpu" and not _at_start:
        _at_start.append(resident_gib())


def resident_at_start() -> float | None:
    """Return the GiB that :func:`mark_start` recorded in this process, or ``None``."""
    return _at_start[0] if _at_start else None


def resident_gib() -> float:
    """Return the resident memory of this process in GiB; without ``/proc``, its peak so far."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    except OSError:
        return peak_gib(torch.device("cpu"))


_DENSE_BF16_TFLOPS = {
    "H20": 148, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "A800": 312, "H800": 989, "L40S": 362,
}  # fmt: skip
"""Published dense bf16 rates by a word in the device's name; for Hopper those of SXM modules."""


def peak_flops(device: torch.device) -> float | None:
    """Return the published dense bf16 rate of ``device`` in operations per second, or ``None`` if unknown."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    if {"H100", "H800"} & {*words} and {"PCIe", "PCIE", "NVL"} & {*words}:
        return None  # slower modules with the same name
    return next((rate * 1e12 for name, rate in _DENSE_BF16_TFLOPS.items() if name in words), None)


@dataclass(frozen=True)
class Peak:
    """Bytes alive at the peak."""

    bytes: int
    by: dict[Hashable, int]
    """Bytes by label."""


class LiveStorages(TorchDispatchMode):
    """Bytes of the tensor storages that were allocated inside the context and are still alive, and their peak.

    Each storage counts once, however many views it has, from the operation that returns it to its release, in forward
    and in backward (on the CPU, where autograd runs in the calling thread). Storages are watched, not kept alive.
    Allocations inside operators outside of aten (custom ones, functional collectives) count too. A storage gets the
    label that is current at its allocation.

    Not counted: temporary memory of aten kernels and communication backends, allocations in other threads, and tensors
    that no operation touched (``torch.from_numpy``).

    Args:
        place: function that returns the name of the current part of the work. Each part has a separate peak.
        elsewhere: function that returns whether storages with a label are in another memory, whatever their torch
            device. :attr:`bytes` and the peaks exclude them.
        fakes: whether fake tensors count like the tensors they stand for. Enter the ``FakeTensorMode`` first.

    >>> with LiveStorages() as live:
    ...     x = torch.zeros(1024)
    >>> live.bytes, live.peak_bytes
    (4096, 4096)
    """

    def __init__(
        self,
        *,
        place: Callable[[], str] = lambda: "",
        elsewhere: Callable[[Hashable], bool] = lambda label: False,
        fakes: bool = False,
    ) -> None:
        super().__init__()
        self.place, self.elsewhere, self.fakes = place, elsewhere, fakes
        self.bytes = 0
        """Bytes alive now; updated after the context too."""
        self.peak_bytes = 0
        """Most bytes alive at once inside the context."""
        self.label: Hashable = None
        """Label for new storages."""
        self.by: Counter[Hashable] = Counter()
        """Bytes alive now, by label."""
        self.peaks: dict[str, Peak] = {}
        """Peak of each place."""
        self.away = Peak(0, {})
        """Peak of the storages in another memory."""
        self._sizes: dict[int, int] = {}
        self._labels: dict[int, Hashable] = {}
        self._watched: dict[int, weakref.ref] = {}
        self._depth = 0

    def __enter__(self):
        self._depth += 1
        if self._depth == 1:
            self._resizes = resizes_reported(self._resized)
            self._resizes.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any):
        self._depth -= 1
        if self._depth == 0:
            self._resizes.__exit__(*error)
        return super().__exit__(*error)

    def reset_peak(self) -> None:
        """Restart the peaks of all places from the bytes alive now."""
        self.peak_bytes = self.bytes
        self.peaks, self.away = {}, Peak(0, {})
        self._note_peak_away()

    @contextmanager
    def labelled(self, label: Hashable) -> Iterator[None]:
        """Within this context, give new storages ``label``."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def relabel(self, tensor: Tensor, label: Hashable) -> None:
        """Give ``tensor``'s storage (for a DTensor, its shard's) another ``label``."""
        key = getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata
        if key in self._sizes:
            size = self._sizes[key]
            self._changed(key, -size)
            self._labels[key] = label
            self._changed(key, size)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a wrapper (DTensor): its dispatch calls this again with the wrapped tensors
        # Autograd asks for a device more often than it computes; a fake tensor's needs no further dispatch.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs), self.fakes)
        # An unknown input is older than the context, except that of lift_fresh: a new tensor from a Python literal.
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
                self._sizes[key], self._labels[key] = 0, self.label
        self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._sizes:
            change = storage.nbytes() - self._sizes[key]
            self._sizes[key] += change
            self._changed(key, change)

    def _forget(self, key: int) -> None:
        del self._watched[key]
        self._changed(key, -self._sizes.pop(key, 0))
        self._labels.pop(key, None)

    def _changed(self, key: int, change: int) -> None:
        """Add ``change`` bytes of the storage ``key``."""
        if not change:
            return
        label = self._labels[key]
        self.by[label] += change
        if self.elsewhere(label):
            self._note_peak_away()
        else:
            self.bytes += change
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        place = self.place()
        if place not in self.peaks or self.bytes > self.peaks[place].bytes:
            self.peaks[place] = Peak(self.bytes, self._alive(elsewhere=False))

    def _note_peak_away(self) -> None:
        alive = self._alive(elsewhere=True)
        if (size := sum(alive.values())) > self.away.bytes:
            self.away = Peak(size, alive)

    def _alive(self, elsewhere: bool) -> dict[Hashable, int]:
        return {label: size for label, size in self.by.items() if size and self.elsewhere(label) == elsewhere}


@contextmanager
def resizes_reported(report: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Within this context, ``report`` each ``UntypedStorage.resize_``: FSDP2 frees and refills by it, undispatched."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        report(storage)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # a patch, undone below
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _tensors(tree: Any, fakes: bool) -> list[Tensor]:
    """Return the tensors that have memory, not wrappers nor tensors on meta; ``fakes`` includes fake tensors."""

    def counts(x: Tensor) -> bool:
        if isinstance(x, FakeTensor):
            return fakes and x.fake_device.type != "meta"
        return x.untyped_storage().device.type != "meta"

    return [x for x in _leaves(tree) if not is_traceable_wrapper_subclass(x) and counts(x)]


def _leaves(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operator's containers. torch's ``tree_leaves`` takes five times as long."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)


def call_in_sight(mode: TorchDispatchMode, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call ``func(*args, **kwargs)`` from within ``mode`` so that ``mode`` sees the operations in a non-aten kernel.

    An operator is opaque to modes, and calling it with the mode active would only dispatch to the mode again. So the
    kernel is called below the modes while ``mode`` is active. ``OpOverload.redispatch`` and
    ``_dispatch_key_for_device`` are private (torch 2.11 to 2.13).
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("aten", "c10d", "prim", "prims"):
        return func(*args, **kwargs)
    inputs = _tensors((args, kwargs), fakes=True)
    if not inputs:
        return func(*args, **kwargs)
    key = torch._C._dispatch_key_for_device(inputs[0].device.type)
    with mode:
        return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)


_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOTS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Root folder, limit file and usage file by controller: ``""`` is cgroup v2, ``memory`` is v1."""


def available_host_memory() -> int | None:
    """Return the bytes that can be allocated on this host without swapping, or ``None`` if unknown.

    Limits of a container or a SLURM job count. File cache that can be dropped is included, as in ``MemAvailable``.
    """
    available = []
    with suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for folder, limit, usage in _groups():
        with suppress(OSError, ValueError):  # no limit file, or the limit is "max"
            cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            available.append(room + int(cache.get("inactive_file", "0")))
    return max(0, min(available)) if available else None


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Yield the folders of this process's control groups and their parents, with the names of limit and usage files."""
    paths: dict[str, str] = {}
    with suppress(OSError):
        lines = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
        paths = {name: path for _, names, path in lines for name in names.split(",")}
    for controller, (root, limit, usage) in _ROOTS.items():
        group = root / paths.get(controller, "/").strip("/")
        for folder in (group, *group.parents):
            if folder == root or root in folder.parents:
                yield folder, limit, usage
