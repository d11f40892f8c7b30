"""Text and HTML page of a plan: memory by phase, role and kind, operations, time and traffic."""

from __future__ import annotations

from typing import Any

from distill.planning.prediction import CONTEXT_GIB, FRAGMENTATION, GIB, Prediction, hardware_names
from distill.planning.roles import KINDS
from distill.report.page import render

_COLORS = ("#35506f", "#5f86b3", "#9fbbd8", "#d59f3c", "#0c7a56", "#7cc0a2", "#b4532a", "#c9a227", "#7a6a8f")
"""Color of each kind of memory."""


def in_words(plan: Prediction) -> list[str]:
    """Return the lines that ``plan=true`` prints."""
    lines = [
        f"plan for {plan.mesh.world} ranks: nothing is loaded, trained or sent",
        f"mesh: {plan.mesh}; {plan.tokens} tokens a sample",
        "GiB a rank, the largest of each kind in any phase:",
        f"  {'':<8}" + "".join(f"{kind:>17}" for kind in KINDS),
    ]
    lines += [f"  {role:<8}" + "".join(f"{x:>17.3f}" for x in plan.role_gib(role).values()) for role in plan.roles]
    lines.append("GiB a rank at the peak of each phase, and its largest contents:")
    for name, peak in sorted(plan.peaks.items(), key=lambda item: -item[1].bytes):
        largest = sorted(peak.by.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{role} {kind} {size / GIB:.3f}" for (role, kind), size in largest)
        lines.append(f"  {peak.bytes / GIB:8.3f}  {_label(name)}: {words}")
    lines.append(
        f"allocated in training {plan.allocated_gib:.3f} GiB; with fragmentation, CUDA's context and NCCL, which are"
        f" assumed, {plan.device_gib:.2f} GiB in {_label(plan.peak_phase)}"
    )
    if plan.host_gib:
        lines.append(
            f"host memory {plan.host_gib:.3f} GiB a rank: {plan.offloaded_gib:.3f} for offloaded tensors,"
            f" {plan.staging_gib:.3f} for the copy of a checkpoint that is being written"
        )
    return [*lines, verdict(plan)]


def verdict(plan: Prediction) -> str:
    """Return one or two sentences on whether the run fits and how long it takes."""
    hardware = plan.hardware
    if hardware is None:
        names = ", ".join(hardware_names())
        return f"{plan.device_gib:.1f} GiB of each device; set planning.hardware to see if it fits: {names}"
    fits = "fits" if plan.fits else "does not fit"
    words = f"It {fits}: {plan.device_gib:.1f} GiB of the {hardware.memory_gib:g} GiB of each {hardware.name}"
    seconds = plan.seconds_per_step
    if seconds is None:
        return f"{words}; times are known for bf16 without offload=cpu."
    return (
        f"{words}; by arithmetic {seconds:.3g} s a step (MFU {plan.mfu:.2f}, products at {hardware.sustained:g} of"
        f" {hardware.bf16_tflops:g} TFLOPS, which is assumed), {plan.steps} steps in {seconds * plan.steps / 86400:.3g}"
        f" days and {plan.gpu_hours:,.0f} GPU-hours."
    )


def page(plan: Prediction, command: str) -> str:
    """Return the HTML page. It has no scripts and loads nothing.

    Args:
        plan: the prediction.
        command: command line that repeats this plan.
    """
    costs = plan.simulation.steps
    at_peak = sorted(plan.peaks[plan.peak_phase].by.items(), key=lambda item: -item[1])
    return render(
        "plan.html.j2",
        title="Predicted needs of this run",
        plan=plan,
        command=command,
        verdict=verdict(plan),
        colors=dict(zip(KINDS, _COLORS, strict=True)),
        **_bars(plan),
        roles=[[role, *plan.role_gib(role).values()] for role in plan.roles],
        peak=_label(plan.peak_phase),
        largest=[[role, kind, size / GIB] for (role, kind), size in at_peak],
        fragmentation=FRAGMENTATION,
        context=CONTEXT_GIB,
        steps=[
            [name, cost.flops * plan.mesh.dp / 1e15, plan.seconds.get(name, "unknown"), plan.shares[name]]
            for name, cost in costs.items()
        ],
        traffic=[
            [name, kind, group, size / GIB]
            for name, cost in costs.items()
            for (kind, group), size in sorted(cost.sent.items())
            if size
        ],
    )


def _bars(plan: Prediction) -> dict[str, Any]:
    """Return ``phases`` (label, GiB, percent of the width by kind) and ``limit``, the device's memory in percent."""
    usable = 0.0
    if plan.hardware is not None:
        usable = (plan.hardware.memory_gib - CONTEXT_GIB - plan.nccl_gib) / (1 + FRAGMENTATION)
    usable = usable if usable < 4 * plan.most_gib else 0.0  # otherwise the bars are too short to read
    width = max(usable, plan.most_gib) / 99
    phases = []
    for name, peak in plan.peaks.items():
        kinds = [(kind, sum(size for (_, k), size in peak.by.items() if k == kind) / GIB / width) for kind in KINDS]
        phases.append((_label(name), peak.bytes / GIB, kinds))
    return {"phases": phases, "limit": usable / width}


def _label(phase: str) -> str:
    return phase or "between phases"
