"""Memory of this host: available bytes, and buffers for activations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOTS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Root folder, limit file and usage file by controller: ``""`` is cgroup v2, ``memory`` is v1."""


def available_host_memory() -> int | None:
    """Return the bytes that can be allocated on this host without swapping, or ``None`` if unknown.

    The limits of a container or a SLURM job count. Like the kernel's ``MemAvailable``, the number includes file cache
    that can be dropped.
    """
    available = []
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, LookupError, ValueError):
        pass
    for folder, limit, usage in _groups():
        try:
            cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            available.append(room + int(cache.get("inactive_file", "0")))
        except (OSError, ValueError):  # no limit file, or the limit is "max"
            continue
    return max(0, min(available)) if available else None


def host_buffer(size: int, pinned: bool) -> Tensor:
    """Allocate ``size`` bytes of CPU memory for an activation. The planner counts these calls."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Yield the folders of this process's control groups and their parents, with the names of limit and usage files.

    In a container, its group is mounted as the root, whatever path the kernel reports.
    """
    try:
        lines = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    for controller, (root, limit, usage) in _ROOTS.items():
        group = root / paths.get(controller, "/").strip("/")
        for folder in (group, *group.parents):
            if folder == root or root in folder.parents:
                yield folder, limit, usage
