"""How much memory this host still has for us, and buffers in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOTS = {"": (Path("/sys/fs/cgroup"), "memory.max", "memory.current")}
"""Of cgroup v2; of v1 there is one for each controller."""
_ROOTS["memory"] = (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")


def available_host_memory() -> int | None:
    """Bytes that can be allocated on this host without swapping, within the limits of a container or a SLURM job.

    Of a group's usage the file cache that can be dropped does not count, as in the kernel's ``MemAvailable``. ``None``
    if nothing is known.
    """
    found = []
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, LookupError, ValueError):
        pass
    for folder, limit, usage in _groups():
        try:
            cache = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            found.append(room + int(cache.get("inactive_file", "0")))
        except (OSError, ValueError):  # no such limit; "max"
            continue
    return max(0, min(found)) if found else None


def host_buffer(size: int, pinned: bool) -> Tensor:
    """``size`` bytes in CPU memory for what a device holds no longer."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Folders of this process's control groups, each with those above it, and the names of limit and usage in them.

    In a container its own group is mounted as the root, whatever path the kernel gives it.
    """
    try:
        lines = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    for controller, (root, limit, usage) in _ROOTS.items():
        own = root / paths.get(controller, "/").strip("/")
        for folder in (own, *own.parents):
            if folder == root or root in folder.parents:
                yield folder, limit, usage
