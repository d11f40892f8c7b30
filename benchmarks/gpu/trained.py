"""Trainer steps with whole networks: three Wan 1.3B, and adapters on one Wan 14B."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import fsdp_cp.attention
from benchmarks.gpu.child import Context
from benchmarks.gpu.networks import GIB, Peak, fill_on_device, gib, shapes_of, words_of
from benchmarks.planning import planned
from benchmarks.steps import open_trainer
from distill.train.trainer import Trainer
from fsdp_cp.launch import process_group
from models.families.wan import Wan
from tests.oracles.clips import RandomClips

ROUNDS = 2
"""Rounds of one step per role, after one warm-up round."""
GOALS = {"student": 0.54, "fake": 0.5}
"""MFU that a compiled step of DMD2 should reach on an H100 or H200."""
DUAL = "fsdp_cp::ring_dual"
ATTENTION = ("fsdp_cp::ring_attention", "fsdp_cp::ring_attention_backward", DUAL)
"""Operators of attention, also on one rank. The last is our name for the range of attention with a derivative."""


def plan(context: Context, name: str, size: str, method: str, *more: str) -> None:
    """Write the row of a run's plan. Call it in a process that sees no GPU, as for any plan."""
    words = words_of(size, method, *more, device="cpu", tiny=context.tiny)
    began = time.monotonic()
    allocated = planned([*words, "plan=true", "world=1"])["allocated_gib"]
    context.row(name, seconds=time.monotonic() - began, **{"planned GiB": allocated})


def adapters(context: Context, name: str, size: str, method: str, *more: str) -> None:
    """Measure :func:`steps`, unless the frozen base alone would fill the GPU.

    Raises:
        MemoryError: a GPU that is too small.
    """
    if context.device_type == "cuda":
        with torch.device("meta"):
            base = Wan().build(Wan.planning.networks[f"wan2_1_t2v_{size}"], "architecture")
        needed = 2 * sum(p.numel() for p in base.parameters()) / GIB
        there = torch.cuda.get_device_properties(context.device).total_memory / GIB
        if needed > 0.9 * there:
            raise MemoryError(f"left out: the base takes {needed:.1f} GiB in bf16, and the GPU has {there:.1f}")
    steps(context, name, size, method, *more)


def steps(context: Context, name: str, size: str, method: str, *more: str) -> None:
    """Write the rows of a run of :func:`words_of`: its steps by role, and the peak memory of the run."""
    device, peak = context.device, Peak(context.device)
    words = words_of(size, method, *more, device=context.device_type, tiny=context.tiny)
    shapes, compiled = shapes_of(words), any(word.endswith(".compile=true") for word in more)
    clips = RandomClips(shapes[0]["video"], shapes[1])  # made before the peak is watched: on a CPU they must not count
    fast = mock.patch("models.roles.load.set_first_values", fill_on_device)
    with process_group(device), peak.watched(storages=not compiled), fast:
        began = time.monotonic()
        trainer = open_trainer(words, device, shapes, clips)
        context.row(
            f"{name}: built",
            seconds=time.monotonic() - began,
            tokens=trainer.roles["student"].tokens(clips.latent_shapes),
        )
        peak.reset()
        data = trainer._steps_of_data()
        cycle = _cycle(trainer)
        began = time.monotonic()
        most, _ = _round(trainer, data, cycle, peak)
        taken = time.monotonic() - began
        context.row(f"{name}: first round", seconds=taken)
        lines: dict[str, list[dict[str, Any]]] = {role: [] for role in cycle}
        for i in range(1 if context.tiny else ROUNDS):
            # Make one round in any case. Skip further rounds if time is short.
            if i and context.left() < 2 * taken + 30:
                break
            began = time.monotonic()
            of_round, metrics = _round(trainer, data, cycle, peak)
            taken = time.monotonic() - began
            most = {role: _larger(most[role], of_round[role]) for role in cycle}
            for role, line in metrics.items():
                lines[role].append(line)
        for role in dict.fromkeys(cycle):
            context.row(f"{name}: {role} step", **_cells(role, lines[role], most[role]))
        whole = max((size for size in most.values() if size is not None), default=None)
        context.row(f"{name}: whole run", **{"peak GiB": gib(whole), "reserved GiB": _reserved(device)})
        if context.left() > 3 * taken + 30:
            for role, (share, busy) in _attention(trainer, data, cycle).items():
                idle = 1 - busy / statistics.median(line["perf/seconds_per_step"] for line in lines[role])
                cells = {"GPU idle": idle} if device.type == "cuda" else {}
                context.row(f"{name}: {role} step, profiled", attention=share, **cells)


def _cycle(trainer: Trainer) -> list[str]:
    """Return the roles of the first steps, until each role has trained."""
    roles = [trainer.method.trained_role(step) for step in range(8)]
    return roles[: 1 + max(roles.index(role) for role in trainer.roles)]


def _round(
    trainer: Trainer, data: Any, cycle: list[str], peak: Peak
) -> tuple[dict[str, int | None], dict[str, dict[str, Any]]]:
    """Make a step of each role, and return peak memory and metrics by role."""
    most: dict[str, int | None] = {}
    metrics: dict[str, dict[str, Any]] = {}
    for role in cycle:
        peak.reset()
        metrics[role] = trainer._train_step(data)  # its last read from the device waits for all kernels
        most[role] = _larger(most.get(role), peak.read())
    return most, metrics


def _larger(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)


def _cells(role: str, lines: list[dict[str, Any]], most: int | None) -> dict[str, Any]:
    seconds = statistics.median(line["perf/seconds_per_step"] for line in lines)
    rates = [line["perf/mfu"] for line in lines if line["perf/mfu"] is not None]
    cells: dict[str, Any] = {
        "seconds": seconds,
        "rounds": len(lines),
        "TFLOP/s": lines[-1]["perf/flops"] / seconds / 1e12,
        "MFU": statistics.median(rates) if rates else None,
        "peak GiB": gib(most),
        "loss": lines[-1][f"{role}/loss"],
        "gradient norm": lines[-1][f"{role}/grad_norm"],
    }
    if rates:
        cells["goal met"] = cells["MFU"] >= GOALS[role]
    return cells


def _reserved(device: torch.device) -> float | None:
    return torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else None


def _attention(trainer: Trainer, data: Any, cycle: list[str]) -> dict[str, tuple[float, float]]:
    """Return, by role, attention's share of a step's kernel seconds, and the kernel seconds.

    Concurrent kernels of two streams both count.
    """
    on_gpu = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    operator = fsdp_cp.attention.attend_in_ring
    attend = operator.forward

    def named(tensors: Any, *args: Any) -> Any:
        with record_function(DUAL) if len(tensors) > 3 else nullcontext():
            return attend(tensors, *args)

    shares = {}
    for role in cycle:
        with profile(activities=activities) as profiler, mock.patch.object(operator, "forward", named):
            trainer._train_step(data)
        events = profiler.key_averages()
        # Named ranges (phases, DUAL) appear twice, since the GPU's timeline has them too. Kernels appear once.
        operators = [event for event in events if event.device_type == DeviceType.CPU and event.key in ATTENTION]
        if on_gpu:
            kernels = [event for event in events if event.device_type == DeviceType.CUDA]
            whole = sum(e.self_device_time_total for e in kernels if not getattr(e, "is_user_annotation", False))
            part = sum(event.device_time_total for event in operators)
        else:
            whole = sum(event.self_cpu_time_total for event in events)
            part = sum(event.cpu_time_total for event in operators)
        shares[role] = (part / whole if whole else 0.0, whole / 1e6)
    return shares


def plan_of_phases(context: Context, name: str, size: str, method: str, *more: str) -> None:
    """Write the rows of a run's plan, by training phase. Call it like :func:`plan`."""
    words = words_of(size, method, *more, device="cpu", tiny=context.tiny)
    for phase, predicted in planned([*words, "plan=true", "world=1"])["phases"].items():
        if not phase.startswith(("encode/", "sample/", "decode")):
            context.row(name, phase=phase or "between phases", **{"planned GiB": predicted["gib"]})
