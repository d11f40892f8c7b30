"""A plan as a page: the picture of what each phase holds, and tables of memory, time and traffic."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

from distill.config import Config
from distill.planning.prediction import CONTEXT_GIB, FRAGMENTATION, GIB, NCCL_GIB, Prediction
from distill.planning.watched import KINDS
from distill.planning.words import verdict
from distill.report.page import document

_COLOURS = dict(
    zip(
        KINDS,
        ("#35506f", "#5f86b3", "#9fbbd8", "#d59f3c", "#0c7a56", "#7cc0a2", "#b4532a", "#7a6a8f"),
        strict=True,
    )
)
_SHOWN = 16
"""Phases in the picture; a method with several losses has more, and the small ones are alike."""


def picture(prediction: Prediction) -> bytes:
    """A PNG: what a rank holds at the peak of each phase, by kind, against the memory of the device."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    largest = sorted(prediction.peaks, key=lambda name: -prediction.peaks[name].bytes)[:_SHOWN]
    names = [name for name in _in_order(prediction) if name in largest]
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left = [0.0] * len(names)
    for kind in KINDS:
        sizes = [sum(s for (_, k), s in prediction.peaks[name].by.items() if k == kind) / GIB for name in names]
        if any(sizes):
            axes.barh(names_in_words(names), sizes, left=left, color=_COLOURS[kind], label=kind.replace("_", " "))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for position, total in enumerate(left):
        axes.text(total, position, f" {total:.1f}" if max(left) >= 10 else f" {total:.3g}", va="center", fontsize=8.5)
    axes.set_xlim(0, max(left) * 1.08)
    if prediction.hardware is not None:
        usable = (prediction.hardware.memory_gib - CONTEXT_GIB - prediction.nccl_gib) / (1 + FRAGMENTATION)
        if usable < 4 * max(left):
            axes.axvline(usable, color="#c22f3d", lw=1.5, ls=(0, (4, 3)), label="what the device has for it")
            axes.set_xlim(0, max(max(left) * 1.08, usable * 1.03))
    axes.invert_yaxis()
    axes.grid(axis="x", color="#dde1e6", lw=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(color="#dde1e6", visible=side in ("left", "bottom"))
    axes.tick_params(labelsize=9)
    axes.set_xlabel("GiB allocated on a rank at the peak of the phase")
    axes.set_title(_title(prediction), loc="left", fontsize=10.5, fontweight="bold")
    figure.legend(frameon=False, fontsize=8.5, loc="outside lower center", ncols=5)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def page(config: Config, prediction: Prediction, command: str) -> str:
    """The page, without scripts, that loads nothing.

    Args:
        config: as it was planned.
        prediction: of it.
        command: the words that make this plan again.
    """
    image = base64.b64encode(picture(prediction)).decode()
    parts = [
        "<h1>What this run would take</h1>",
        f"<p><code>{escape(command)}</code></p>",
        f'<p class="verdict{_verdict_class(prediction)}">{escape(verdict(config, prediction))}</p>',
        "<p>Of rank 0, by simulation on fake tensors: nothing was loaded, trained or sent.</p>",
        "<h2>Memory</h2>",
        f'<img src="data:image/png;base64,{image}" alt="GiB by phase and kind" style="max-width:100%">',
        "<h3>By role and kind, GiB: the most in any phase, not all of it at one moment</h3>",
        _table(
            ["", *(kind.replace("_", " ") for kind in KINDS)],
            [[role, *prediction.role_gib(role).values()] for role in prediction.roles],
        ),
        f"<h3>At the peak, {escape(prediction.peak_phase or 'between phases')}</h3>",
        _table(["role", "kind", "GiB"], _parts_of_peak(prediction)),
        '<p class="note">On top of what is allocated: '
        f"{FRAGMENTATION:.0%} for fragmentation, {CONTEXT_GIB} GiB for CUDA's context, {NCCL_GIB} GiB for each of the"
        " communicators; all three are assumed. Workspace is what attention kernels take for themselves, by formula."
        f" Of the host's memory a rank takes {prediction.offloaded_gib:.2f} GiB for what is offloaded, pinned, and"
        f" {prediction.staging_gib:.2f} GiB for a checkpoint that is being written.</p>",
        "<h2>Operations, traffic and time of a step</h2>",
        _table(["step of", "PFLOP of all ranks", "s, by arithmetic", "share of the steps"], _steps(prediction)),
        _table(["step of", "collective", "group", "GiB sent by a rank"], _traffic(prediction)),
    ]
    return document("Plan", parts)


def names_in_words(phases: Sequence[str]) -> list[str]:
    """As tables and pictures show phases."""
    return [name or "between phases" for name in phases]


def _title(prediction: Prediction) -> str:
    return f"{prediction.mesh.world} ranks: {prediction.mesh}; {prediction.tokens:,} tokens a sample"


def _in_order(prediction: Prediction) -> list[str]:
    """The phases as a run meets them: encoding, steps, samples."""
    first = [name for name in prediction.peaks if name.startswith("encode/")]
    last = [name for name in prediction.peaks if name.startswith("sample/") or name == "decode"]
    between = [name for name in prediction.peaks if name and name not in first and name not in last]
    return [*first, *([""] if "" in prediction.peaks else []), *between, *last]


def _verdict_class(prediction: Prediction) -> str:
    return {True: " won", False: " lost", None: ""}[prediction.fits]


def _parts_of_peak(prediction: Prediction) -> list[list[Any]]:
    parts = prediction.peaks[prediction.peak_phase].by
    return [[role, kind, size / GIB] for (role, kind), size in sorted(parts.items(), key=lambda item: -item[1])]


def _steps(prediction: Prediction) -> list[list[Any]]:
    dp = prediction.mesh.dp
    return [
        [name, cost.flops * dp / 1e15, prediction.seconds.get(name, "unknown"), prediction.shares[name]]
        for name, cost in prediction.simulation.steps.items()
    ]


def _traffic(prediction: Prediction) -> list[list[Any]]:
    return [
        [name, kind, group, size / GIB]
        for name, cost in prediction.simulation.steps.items()
        for (kind, group), size in sorted(cost.sent.items())
        if size
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f'<td class="value">{value:.3g}</td>' if value else '<td class="value"></td>'
        return f"<td>{escape(str(value))}</td>"

    lines = ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    return (
        '<div class="scroll"><table class="numbers"><thead><tr>'
        + "".join(f"<th>{escape(name)}</th>" for name in head)
        + "</tr></thead><tbody>"
        + "".join(lines)
        + "</tbody></table></div>"
    )
