"""Sample clips during a run, and the report and the student's scheduler at its end."""

from __future__ import annotations

import itertools
import logging
import platform
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from distill.config import Config
from distill.data import ClipDataset
from distill.data.moving_shapes import MovingShapes
from distill.evaluate.sampling import decode, generate, sample_captions
from distill.evaluate.stored_clips import read_clips
from distill.methods import Method
from distill.methods.common.few_step import FewStepMethod
from distill.report.media import contact_sheet, write_mp4
from distill.report.verdict import ReportRow
from distill.report.write import report_picture, write_report
from distill.train.metrics import MetricsLog
from fsdp_cp.errors import UserError, counted, duration
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import barrier, on_all_ranks
from fsdp_cp.runtime.progress import progress
from models.files.export_folder import export_scheduler
from models.roles.condition import has_image

log = logging.getLogger(__name__)

SAMPLE_SEED = 12345
"""Noise seed of all sample clips. It is fixed, so that clips are comparable across steps, runs and seeds."""

REFERENCE_CLIPS = 512
"""Number of held-out renders that distances are measured against."""

SHOWN_CLIPS = 8
"""Number of clips per row that the report shows. All clips are measured."""


@dataclass(kw_only=True)
class Evaluator:
    """Sampler of clips with a run's roles. All ranks must call every method; rank 0 writes."""

    config: Config
    mesh: Mesh
    device: torch.device
    data: ClipDataset
    method: Method
    run_dir: Path
    batch: int
    """Number of clips per forward on a rank."""
    teacher_clips: dict[int, np.ndarray | None] = field(default_factory=dict)
    """Teacher's sample clips by number of steps. The teacher does not change, so they are sampled once."""
    stored: dict[int, str] = field(default_factory=dict)
    """Descriptions of the teacher's clips that were read from a file instead of sampled, by number of steps."""

    def clips(
        self, role: str, steps: int, captions: list[str], items: Sequence[int] | None = None
    ) -> np.ndarray | None:
        """Sample clips: return uint8 ``(n, T, H, W, 3)`` on rank 0 and ``None`` on the other ranks.

        An image-conditioned network takes the images of the data set's ``items``, if given.
        """
        if role == "teacher" and (stored := self._stored_clips(steps, captions)) is not None:
            return stored if rank() == 0 else None
        name, started = f"{role}, {_steps(steps)}", time.perf_counter()
        with progress(len(captions), f"sampling {name}", "clip") as advance:
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
                advance=advance,
                clips=items,
            )
            clips = decode(self.data, latents)
        if clips is None:
            return None
        log.info("sampled %s: %s in %s", name, counted(len(clips), "clip"), duration(time.perf_counter() - started))
        return clips

    def _stored_clips(self, steps: int, captions: list[str]) -> np.ndarray | None:
        """Return the teacher's clips that are stored with its weights, on every rank, or ``None``."""
        if not (isinstance(self.data, MovingShapes) and isinstance(self.method, FewStepMethod)):
            return None
        options = {"steps": steps, "captions": captions, "seed": SAMPLE_SEED}
        stored = on_all_ranks(lambda: read_clips(self.config, self.data, **options) if rank() == 0 else None)[0]
        if stored is None:
            return None
        clips, self.stored[steps] = stored
        log.info("teacher, %s: %s %s", _steps(steps), counted(len(clips), "clip"), self.stored[steps])
        return clips

    def write_samples(self, step: int, metrics: MetricsLog | None) -> None:
        """Write clips of student and teacher, of fixed captions and noise, to ``samples/`` and to the loggers.

        Each clip becomes ``step_00000100_student_4steps_I.mp4`` or, once per run, ``teacher_50steps_I.mp4``.
        ``step_00000100.png`` shows all clips.

        Args:
            step: number of training steps so far.
            metrics: rank 0's log.
        """
        chosen = self.config.sample
        captions = list(chosen.captions) or sample_captions(self.data, chosen.prompts)
        rows, videos, folder = {}, {}, self.run_dir / "samples"
        for role, n in self._wanted():
            if role == "teacher" and n in self.teacher_clips:
                rows[role, n] = self.teacher_clips[n]
                continue
            rows[role, n] = clips = self.clips(role, n, captions)
            stem = f"{role}_{n}steps"
            if role == "teacher":
                self.teacher_clips[n] = clips
            else:
                stem = f"step_{step:08d}_{stem}"
            if clips is not None:
                files = [folder / f"{stem}_{i}.mp4" for i in range(len(clips))]
                with _written(folder):
                    for file, clip in zip(files, clips, strict=True):
                        write_mp4(file, clip, self.data.fps)
                videos[f"{role}_{n}steps"] = files
        if rank() == 0:
            path = folder / f"step_{step:08d}.png"
            shown = [(f"{role}, {_steps(n)}", clips) for (role, n), clips in rows.items()]
            with _written(folder):
                sheet = contact_sheet(path, shown, captions=captions, title=f"step {step}")
            measures = {
                f"validation/{role}_{n}steps/{key}": measure.value
                for (role, n), clips in rows.items()
                for key, measure in (self._measures(clips, captions) or {}).items()
            }
            if metrics is not None:
                metrics.show(step, sheet, videos, measures)
            log.info("wrote the samples of step %d to %s", step, path)
        self.data.release()
        barrier()

    def _wanted(self) -> list[tuple[str, int]]:
        """Return the roles to sample, with their numbers of steps."""
        student = [("student", n) for n in self.config.sample.student_steps]
        if "teacher" not in self.method.roles:
            return student
        return [("teacher", n) for n in self.config.sample.teacher_steps] + student

    @cached_property
    def _heldout(self) -> MovingShapes | None:
        return self.data.heldout() if isinstance(self.data, MovingShapes) else None

    @cached_property
    def _reference_clips(self) -> np.ndarray:
        return reference_clips(self._heldout)

    def write_report(self, facts: dict[str, Any]) -> None:
        """Write ``report.html``, ``report.json`` and ``report.png``. Moving shapes are measured from their pixels.

        Args:
            facts: facts of the run that the page shows; ``steps`` is the number of steps trained.
        """
        heldout = self._heldout
        # Without measures, clips beyond the shown ones would only cost time.
        count = self.config.sample.report_clips if heldout is not None else min(8, self.config.sample.report_clips)
        captions = sample_captions(self.data, count)
        # The page shows a clip made from an image below the real clip that the image comes from.
        items = self._items(captions, self.data) if has_image(self.data.condition_shapes) else None
        rows = []
        for role, n in self._wanted():
            clips = self.clips(role, n, captions, items)
            if clips is not None:
                rows.append(
                    ReportRow(
                        name=f"{role}, {_steps(n)}" + (" (stored)" if role == "teacher" and n in self.stored else ""),
                        role=role,
                        steps=n,
                        measures=self._measures(clips, captions),
                        clips=clips,
                        evaluations=self.method.evaluations(role, n),
                    )
                )
        real = self._real_clips(captions, heldout)
        if real is not None:
            reference = ReportRow(
                name="data" if heldout is None else "held-out renders",
                role="heldout",
                steps=None,
                measures=self._measures(real, captions),
                clips=real,
                evaluations=0,
            )
            libraries = ", ".join(f"{library.__name__} {library.__version__}" for library in (torch, diffusers))
            log.info("writing the report")
            # Show every other clip: neighbouring captions of moving shapes share their motion.
            pictured = [replace(row, clips=row.clips[:SHOWN_CLIPS:2]) for row in (reference, *rows)]
            with _written(self.run_dir):
                report_picture(self.run_dir / "report.png", pictured, captions[:SHOWN_CLIPS:2])
                write_report(
                    self.run_dir,
                    title=self._title(),
                    rows=rows,
                    reference=reference,
                    captions=captions[:SHOWN_CLIPS],
                    config_summary={
                        **({"student": "export/student"} if self.config.export.at_end else {}),
                        "mesh": str(self.mesh.shape),
                        **facts,
                        **{f"teacher, {_steps(n)}": phrase for n, phrase in self.stored.items()},
                        "versions": f"{libraries}, Python {platform.python_version()}",
                        "sample command": shlex.join(["python", "-m", "distill.sample", str(self.run_dir)]),
                    },
                    fps=self.data.fps,
                    clip=self.config.optim.clip,
                    updates=Counter(map(self.method.trained_role, range(facts.get("steps", 0)))),
                )
        self.data.release()
        barrier()

    def _title(self) -> str:
        """Say what was distilled, or trained where the method has no teacher."""
        method, teacher = self.method.settings.name, self.config.teacher.checkpoint
        if "teacher" in self.method.roles and teacher is not None:
            return f"{Path(teacher).name} distilled by {method}"
        return f"{method} on {self.config.data.name}"

    def _real_clips(self, captions: list[str], heldout: MovingShapes | None) -> np.ndarray | None:
        """Return a real clip for each of ``captions``, like :func:`decode`. A small data set repeats clips."""
        source: ClipDataset = self.data if heldout is None else heldout
        return decode(source, torch.stack([source[i]["latents"] for i in self._items(captions, source)]))

    def _items(self, captions: list[str], source: ClipDataset) -> list[int]:
        """Return an item of ``source`` for each caption. Items of the same caption take turns."""
        waiting: dict[str, list[int]] = {}
        for position in reversed(range(len(captions))):
            waiting.setdefault(captions[position], []).append(position)
        items: dict[int, int] = {}
        for i in itertools.count():
            if len(items) == len(captions):
                return [items[position] for position in range(len(captions))]
            caption = source[i % len(source)]["caption"]
            if waiting.get(caption):
                items[waiting[caption].pop()] = i % len(source)

    def _measures(self, clips: np.ndarray, captions: list[str]):
        if self._heldout is None:
            return None
        from distill.report.measures import measure

        return measure(clips, captions, self._reference_clips)


def reference_clips(heldout: MovingShapes) -> np.ndarray:
    """Return the 512 held-out renders that clips are measured against, uint8 ``(512, T, H, W, 3)``.

    They come from the second half of the stream; the report's row of held-out renders comes from its beginning.
    """
    return heldout.clips(REFERENCE_CLIPS, first=len(heldout) // 2).numpy()


def write_scheduler(method: Method, folder: Path) -> None:
    """Write the scheduler with which a plain diffusers pipeline samples as ``method`` does, or log why none fits."""
    scheduler = None
    if isinstance(method, FewStepMethod):
        try:
            scheduler = method.scheduler(method.roles["student"].family.pipeline_times)
        except UserError as error:
            log.warning("could not write %s: %s", folder, error)
    export_scheduler(folder, scheduler)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Turn a failed write into a one-line error that says that the checkpoint is safe."""
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename or folder
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make room there and start the same"
            " command again: the newest checkpoint holds what was trained"
        ) from error


def _steps(n: int) -> str:
    return counted(n, "step")
