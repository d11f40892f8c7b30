"""Text and HTML page of a plan: memory by phase, role and kind, operations, time and traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distill.planning.prediction import CONTEXT_GIB, FRAGMENTATION, GIB, Prediction, hardware_names
from distill.planning.roles import KINDS
from distill.report.charts import svg
from distill.report.page import data_uri, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    lines.append("a step of each role: operations of all ranks, seconds by arithmetic, and the GiB that a rank sends:")
    for name, step in plan.simulation.steps.items():
        seconds = f", {plan.seconds[name]:.3g} s" if name in plan.seconds else ""
        sent = "".join(
            f", {kind} {group} {size / GIB:.3g}" for (kind, group), size in sorted(step.sent.items()) if size
        )
        operations = f"{step.flops * plan.mesh.dp / 1e15:.3g} PFLOP"
        lines.append(f"  {name:<8} {plan.shares[name]:.0%} of the steps: {operations}{seconds}{sent}")
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
    """Return the HTML page: a picture of the memory, and the lines of :func:`in_words`. It loads nothing.

    Args:
        plan: the prediction.
        command: command line that repeats this plan.
    """
    text = {"command": command, "verdict": verdict(plan), "lines": in_words(plan)[:-1]}
    return render(
        "plan.html.j2", title="Predicted needs of this run", picture=data_uri(_picture(plan), "svg+xml"), **text
    )


def _picture(plan: Prediction) -> bytes:
    """Draw the memory of each phase by kind, with a line at the device's memory for tensors, as SVG."""
    names = [_label(name) for name in plan.peaks]

    def draw(axes: Axes) -> None:
        left = np.zeros(len(names))
        for kind, color in zip(KINDS, _COLORS, strict=True):
            sizes = [sum(size for (_, k), size in peak.by.items() if k == kind) / GIB for peak in plan.peaks.values()]
            axes.barh(names, sizes, left=left, color=color, label=kind)
            left += sizes
        if plan.hardware is not None:
            usable = (plan.hardware.memory_gib - CONTEXT_GIB - plan.nccl_gib) / (1 + FRAGMENTATION)
            axes.axvline(usable, color="#c22f3d", ls="--", label=f"limit of {plan.hardware.name}")
        axes.invert_yaxis()
        axes.set_title("GiB allocated at the peak of each phase")

    return svg(draw, size=(9.6, 1.5 + 0.3 * len(names)))


def _label(phase: str) -> str:
    return phase or "between phases"
