"""What a run shows of itself: sample clips on the way, and the report at its end."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

log = logging.getLogger(__name__)

SAMPLE_SEED = 12345
"""Of the noise of all sample clips: they stay comparable between steps, runs and seeds."""


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
        """``samples/step_00000100/``: an mp4 per clip of the student and a contact sheet."""
        captions = sample_captions(self.data, self.config.sample.prompts)
        wanted = [("student", n) for n in self.config.sample.student_steps]
        if with_teacher and "teacher" in self.method.roles:
            wanted = [("teacher", n) for n in self.config.sample.teacher_steps] + wanted
        rows = [(f"{role}, {_steps(n)}", role, n, self.clips(role, n, captions)) for role, n in wanted]
        if rank() == 0:
            folder = self.run_dir / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            for _, role, n, clips in rows:
                for i, clip in enumerate(clips):
                    write_mp4(folder / f"step_{step:08d}_{role}_{n}steps_{i}.mp4", clip, self.data.fps, scale=None)
            sheet = [(name, clips) for name, _, _, clips in rows]
            contact_sheet(folder / f"step_{step:08d}.png", sheet, captions=captions, title=f"step {step}")
        barrier()

    def write_report(self, facts: dict[str, Any]) -> None:
        """``report.html``, ``report.json`` and ``report.png``; measured from the pixels on moving shapes."""
        count = self.config.sample.report_clips
        captions = sample_captions(self.data, count)
        heldout = None
        if rank() == 0 and isinstance(self.data, MovingShapes):
            heldout = self.data.heldout()
        rows = []
        for role, counts in (("teacher", self.config.sample.teacher_steps), ("student", self.config.sample.student_steps)):
            if role not in self.method.roles:
                continue
            for n in counts:
                clips = self.clips(role, n, captions)
                if clips is not None:
                    guided = role == "teacher" or self.method.settings.name == "flow_matching"
                    passes = 2 if guided and self.method.settings.guidance_scale != 1 else 1
                    rows.append(
                        ReportRow(
                            name=f"{role}, {_steps(n)}",
                            role=role,
                            steps=n,
                            measures=self._measures(clips, captions, heldout),
                            clips=clips,
                            evaluations=n * passes,
                        )
                    )
        if rank() == 0:
            real, real_captions = self._real_clips(captions, heldout)
            reference = ReportRow(
                name="held-out renders" if heldout is not None else "data",
                role="heldout",
                steps=None,
                measures=self._measures(real, real_captions, heldout),
                clips=real,
                evaluations=0,
            )
            facts = {
                "mesh": str(self.mesh.shape),
                **facts,
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
            write_report(
                self.run_dir,
                title=f"{self.method.settings.name} on {self.config.data.name}",
                rows=rows,
                reference=reference,
                captions=captions,
                config_summary=facts,
                fps=self.data.fps,
            )
            report_picture(self.run_dir / "report.png", rows, captions)
        barrier()

    def _real_clips(self, captions: list[str], heldout: MovingShapes | None) -> tuple[np.ndarray, list[str]]:
        """Real clips of ``captions`` in their order."""
        source: Any = heldout if heldout is not None else self.data
        wanted: dict[str, list[int]] = {}
        for i in range(min(len(source), 64 * len(captions))):
            wanted.setdefault(source[i]["caption"], []).append(i)
        used: dict[str, int] = dict.fromkeys(wanted, 0)
        indices = []
        for caption in captions:
            indices.append(wanted[caption][used[caption] % len(wanted[caption])])
            used[caption] += 1
        latents = torch.stack([source[i]["latents"] for i in indices])
        return source.decode(latents).numpy(), captions

    def _measures(self, clips: np.ndarray, captions: list[str], heldout: MovingShapes | None):
        if heldout is None:
            return None
        from distill.measures import measure

        # A stretch of the held-out stream that the noise-floor row does not use.
        reference = heldout.clips(REFERENCE_CLIPS, first=len(heldout) // 2).numpy()
        return measure(clips, captions, reference)


REFERENCE_CLIPS = 512
"""Held-out renders that distances are measured against."""


def _steps(n: int) -> str:
    return f"{n} step" if n == 1 else f"{n} steps"
