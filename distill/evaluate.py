"""What a run shows of itself: sample clips on the way, and the report at its end."""

from __future__ import annotations

import itertools
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from distill.config import Config
from distill.data import ClipDataset
from distill.data.moving_shapes import MovingShapes
from distill.media import contact_sheet, write_mp4
from distill.methods import Method
from distill.report import ReportRow, report_picture, write_report
from distill.sampling import generate, sample_captions
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import barrier

SAMPLE_SEED = 12345
"""Of the noise of all sample clips: they stay comparable between steps, runs and seeds."""

REFERENCE_CLIPS = 512
"""Held-out renders that distances are measured against."""

SHOWN_CLIPS = 8
"""Clips of each row that the report shows; all of them are measured."""


@dataclass(kw_only=True)
class Evaluator:
    """Makes clips with the roles of a run; every method is called by all ranks, rank 0 writes."""

    config: Config
    mesh: Mesh
    device: torch.device
    data: ClipDataset
    method: Method
    run_dir: Path
    batch: int
    """Clips per forward on a rank."""

    def clips(self, role: str, steps: int, captions: list[str]) -> np.ndarray | None:
        """uint8 ``(n, T, H, W, 3)`` on rank 0, ``None`` elsewhere."""
        latents = generate(
            self.method,
            role,
            steps=steps,
            captions=captions,
            data=self.data,
            mesh=self.mesh,
            device=self.device,
            seed=SAMPLE_SEED,
            batch=min(self.batch, -(-len(captions) // self.mesh.dp_size)),
        )
        if rank() != 0:
            return None
        return self.data.decode(latents.float().cpu()).numpy()

    def write_samples(self, step: int, *, with_teacher: bool) -> None:
        """``samples/step_00000100_ROLE_Nsteps_I.mp4`` for each clip, ``samples/step_00000100.png`` with all of them."""
        captions = sample_captions(self.data, self.config.sample.prompts)
        wanted = self._wanted(with_teacher=with_teacher)
        rows = [(f"{role}, {_steps(n)}", role, n, self.clips(role, n, captions)) for role, n in wanted]
        if rank() == 0:
            folder = self.run_dir / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            for _, role, n, clips in rows:
                for i, clip in enumerate(clips):
                    write_mp4(folder / f"step_{step:08d}_{role}_{n}steps_{i}.mp4", clip, self.data.fps, scale=None)
            sheet = [(name, clips) for name, _, _, clips in rows]
            contact_sheet(folder / f"step_{step:08d}.png", sheet, captions=captions, title=f"step {step}")
            self.data.release()
        barrier()

    def _wanted(self, *, with_teacher: bool) -> list[tuple[str, int]]:
        """Which roles to sample, at which numbers of steps."""
        student = [("student", n) for n in self.config.sample.student_steps]
        if not with_teacher or "teacher" not in self.method.roles:
            return student
        return [("teacher", n) for n in self.config.sample.teacher_steps] + student

    def write_report(self, facts: dict[str, Any]) -> None:
        """``report.html``, ``report.json`` and ``report.png``; measured from the pixels on moving shapes."""
        heldout = self.data.heldout() if isinstance(self.data, MovingShapes) else None
        # Without measures, more clips than can be looked at would only cost time.
        count = self.config.sample.report_clips if heldout is not None else min(8, self.config.sample.report_clips)
        captions = sample_captions(self.data, count)
        rows = []
        for role, n in self._wanted(with_teacher=True):
            clips = self.clips(role, n, captions)
            if clips is not None:
                rows.append(
                    ReportRow(
                        name=f"{role}, {_steps(n)}",
                        role=role,
                        steps=n,
                        measures=self._measures(clips, captions, heldout),
                        clips=clips,
                        evaluations=self.method.evaluations(role, n),
                    )
                )
        if rank() == 0:
            real = self._real_clips(captions, heldout)
            reference = ReportRow(
                name="data" if heldout is None else "held-out renders",
                role="heldout",
                steps=None,
                measures=self._measures(real, captions, heldout),
                clips=real,
                evaluations=0,
            )
            versions = {
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
                "Python": platform.python_version(),
            }
            write_report(
                self.run_dir,
                title=f"{self.method.settings.name} on {self.config.data.name}",
                rows=rows,
                reference=reference,
                captions=captions[:SHOWN_CLIPS],
                config_summary={
                    "mesh": str(self.mesh.shape),
                    **facts,
                    "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
                    "sample command": f"python -m distill.sample {self.run_dir}",
                },
                fps=self.data.fps,
            )
            # Every other clip: neighbours of the list of captions share their motion on moving shapes.
            pictured = [replace(row, clips=row.clips[:SHOWN_CLIPS:2]) for row in (reference, *rows)]
            report_picture(self.run_dir / "report.png", pictured, captions[:SHOWN_CLIPS:2], clips=4, width=1900)
            self.data.release()
        barrier()

    def _real_clips(self, captions: list[str], heldout: MovingShapes | None) -> np.ndarray:
        """A real clip for each of ``captions``, uint8 ``(n, T, H, W, 3)``; few clips may show several times."""
        source: ClipDataset = self.data if heldout is None else heldout
        waiting: dict[str, list[int]] = {}
        for position in reversed(range(len(captions))):
            waiting.setdefault(captions[position], []).append(position)
        found: dict[int, torch.Tensor] = {}
        for i in itertools.count():
            if len(found) == len(captions):
                return source.decode(torch.stack([found[position] for position in range(len(captions))])).numpy()
            item = source[i % len(source)]
            if waiting.get(item["caption"]):
                found[waiting[item["caption"]].pop()] = item["latents"]

    def _measures(self, clips: np.ndarray, captions: list[str], heldout: MovingShapes | None):
        if heldout is None:
            return None
        from distill.measures import measure

        # A stretch of the held-out stream that the noise-floor row does not use.
        reference = heldout.clips(REFERENCE_CLIPS, first=len(heldout) // 2).numpy()
        return measure(clips, captions, reference)


def _steps(n: int) -> str:
    return f"{n} step" if n == 1 else f"{n} steps"
