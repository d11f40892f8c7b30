"""Device memory of this process: of communicators, of the allocator, and of tensors in each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.child import Context
from benchmarks.gpu.networks import GIB, Peak, fill_on_device, gib, shapes_of, words_of
from benchmarks.steps import open_trainer
from fsdp_cp.checkpoint.save_load import staging
from fsdp_cp.launch import process_group
from fsdp_cp.measure.memory import resident_gib
from fsdp_cp.measure.phases import phase_now
from fsdp_cp.mesh import MeshShape, mesh_of_shape
from tests.oracles.clips import RandomClips

MIB = 2**20
STEPS = 4
"""Number of steps, in which two roles take turns. Each role's first step allocates the optimizer's state."""


def used_mib(device: torch.device) -> float:
    """Return the used memory of a GPU over all processes, by the driver, or this process's resident memory on a CPU."""
    if device.type == "cpu":
        return 1024 * resident_gib()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / MIB


def communicators(context: Context) -> None:
    """Write the memory that each step of creating a mesh adds, up to the first communication of its groups."""
    device = context.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()
    before = used_mib(device)
    # The first row includes the driver's memory per process, whichever call allocates it.
    context.row("before this process's first tensor", MiB=before)

    def more(what: str) -> None:
        nonlocal before
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = used_mib(device)
        context.row(what, **{"MiB": now, "more MiB": now - before})
        before = now

    tensor = torch.ones(1024, device=device)
    more("a first tensor, 2 MiB of them the allocator's")
    with process_group(device):
        more("a process group of one rank")
        dist.all_reduce(tensor)
        more("its first collective")
        mesh = mesh_of_shape(MeshShape(dp_replicate=1, dp_shard=1, ring=1, ulysses=1), device_type=device.type)
        more("a mesh")
        groups = {
            group.group_name: group for group in (mesh.fsdp.get_group(), mesh.cp.get_group(), mesh.dp.get_group())
        }
        for group in groups.values():
            dist.all_reduce(tensor, group=group)
        more(f"a first collective on each of the mesh's groups: {len(groups)}")
        assert float(tensor[0]) == 1.0  # one rank: a sum does not change the value


def phases(context: Context, name: str, size: str, method: str, *more: str) -> None:
    """Write the peak of each phase of a run's steps, and the allocator's memory in addition to tensors."""
    device, peak = context.device, Peak(context.device)
    words = words_of(size, method, *more, device=context.device_type, tiny=context.tiny)
    shapes = shapes_of(words)
    clips, peaks, place = RandomClips(shapes[0]["video"], shapes[1]), dict[str, int](), ""

    def border() -> None:
        """Assign the peak since the last border to the phase that began there."""
        nonlocal place
        held = peak.read()
        assert held is not None
        peaks[place] = max(held, peaks.get(place, 0))
        peak.reset()
        place = phase_now()

    with process_group(device), peak.watched(), mock.patch("models.roles.load.set_first_values", fill_on_device):
        trainer = open_trainer(words, device, shapes, clips)
        data = trainer._steps_of_data()
        peak.reset()
        with mock.patch("fsdp_cp.measure.phases._at_borders", [border]):
            for _ in range(STEPS):
                trainer._train_step(data)
        border()
        for phase, size_of in sorted(peaks.items(), key=lambda item: -item[1]):
            context.row(name, phase=phase or "between phases", **{"peak GiB": gib(size_of)})
        if device.type == "cuda":
            # Read the allocator's peaks, which each border resets together with the peaks of tensors.
            stats = torch.cuda.memory_stats(device)
            reserved, tensors = torch.cuda.memory_reserved(device), max(peaks.values())
            context.row(
                f"{name}: allocator", **{"peak GiB": tensors / GIB, "reserved GiB": reserved / GIB,
                "reserved over tensors": reserved / tensors, "retries": stats.get("num_alloc_retries", 0),
                "MiB": used_mib(device)},
            )  # fmt: skip


def copies(context: Context) -> None:
    """Write the seconds of copies of a checkpoint's tensors to the host: pinned, a second time, and pageable."""
    device, size = context.device, (MIB if context.tiny else 256 * MIB)
    tensors = {str(i): torch.randn(size // 4, device=device) for i in range(4 if context.tiny else 32)}
    total = sum(x.nbytes for x in tensors.values())
    stager = staging(on_gpu=device.type == "cuda")

    def measured(what: str, copy: Callable[[], dict[str, Tensor]]) -> None:
        began = time.perf_counter()
        copied = copy()
        seconds = time.perf_counter() - began
        assert all(torch.equal(copied[name], x.cpu()) for name, x in tensors.items())
        context.row(what, GiB=total / GIB, seconds=seconds, **{"GB/s": total / seconds / 1e9})

    measured("first copy, which pins memory", lambda: stager.stage(tensors))
    measured("later copies", lambda: stager.stage(tensors))
    measured("pageable memory", lambda: {name: x.to("cpu", copy=True) for name, x in tensors.items()})
    stager.close()
