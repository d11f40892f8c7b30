"""What a run shows of itself: sample clips on the way, and at its end the report and the student's scheduler."""

from __future__ import annotations

import itertools
import logging
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch

from distill.config import Config
from distill.data import ClipDataset
from distill.data.moving_shapes import MovingShapes
from distill.methods import Method
from distill.methods.few_step import FewStepMethod
from distill.metrics import MetricsLog
from distill.report.facts import default_settings
from distill.report.media import contact_sheet, write_mp4
from distill.report.verdict import ReportRow
from distill.report.write import report_picture, write_report
from distill.sampling import decode, generate, sample_captions
from distill.stored_clips import read_clips
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.mesh import Mesh
from fsdp_cp.progress import progress
from fsdp_cp.reduce import barrier, on_all_ranks
from fsdp_cp.words import counted, duration
from models.condition import has_image
from models.export_folder import export_scheduler

log = logging.getLogger(__name__)

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
    teacher_clips: dict[int, np.ndarray | None] = field(default_factory=dict)
    """Its sample clips by number of steps, as :meth:`clips` made them: it does not change, so they are made once."""
    stored: dict[int, str] = field(default_factory=dict)
    """Phrases that say where clips of the teacher are stored, by number of steps; they were not sampled in this run."""

    def __post_init__(self) -> None:
        if self.config.sample.captions:
            try:
                self.data.condition(list(self.config.sample.captions))
            except UserError as error:
                raise UserError(f"sample.captions: {error}") from error

    def clips(
        self,
        role: str,
        steps: int,
        captions: list[str],
        then: Sequence[tuple[str, int]] = (),
        items: Sequence[int] | None = None,
    ) -> np.ndarray | None:
        """Return uint8 ``(n, T, H, W, 3)`` on rank 0 and ``None`` elsewhere.

        Where images condition, they are those of the data set's ``items``, if these are given.

        Rank 0 shows the progress. It logs the time taken, and an estimate for the roles and steps of ``then``.
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
        seconds = time.perf_counter() - started
        share = sum(self.method.evaluations(*row) for row in then) / self.method.evaluations(role, steps)
        left = f"; about {duration(seconds * share)} of sampling left" if then else ""
        log.info("sampling %s: %s in %s%s", name, counted(len(clips), "clip"), duration(seconds), left)
        return clips

    def _stored_clips(self, steps: int, captions: list[str]) -> np.ndarray | None:
        """The teacher's clips that are stored with its weights, on every rank; ``None`` where there are none."""
        if not (isinstance(self.data, MovingShapes) and isinstance(self.method, FewStepMethod)):
            return None

        def read() -> tuple[np.ndarray, str] | None:
            if rank() != 0:
                return None
            return read_clips(self.config, self.data, steps=steps, captions=captions, seed=SAMPLE_SEED)

        found = on_all_ranks(read)[0]
        if found is None:
            return None
        clips, self.stored[steps] = found
        log.info("teacher, %s: %s %s", _steps(steps), counted(len(clips), "clip"), self.stored[steps])
        return clips

    def write_samples(self, step: int, metrics: MetricsLog | None) -> None:
        """Clips of fixed captions and noise, student against teacher, as files in ``samples/`` and in the log.

        ``step_00000100_student_4steps_I.mp4`` and, once a run, ``teacher_50steps_I.mp4`` for each clip;
        ``step_00000100.png`` with all of them.

        Args:
            step: steps of training so far.
            metrics: rank 0's log.
        """
        chosen = self.config.sample
        captions = list(chosen.captions) or sample_captions(self.data, chosen.prompts)
        rows, videos = {}, {}
        made = [("teacher", n) for n in self.teacher_clips]
        new = [row for row in self._wanted() if row not in made]
        for role, n in self._wanted():
            name = f"{role}_{n}steps"
            if (role, n) in made:
                rows[name] = self.teacher_clips[n]
                continue
            rows[name] = clips = self.clips(role, n, captions, then=new[new.index((role, n)) + 1 :])
            if role == "teacher":
                self.teacher_clips[n] = clips
            if clips is not None:
                stem = name if role == "teacher" else f"step_{step:08d}_{name}"
                with _written(self.run_dir / "samples"):
                    videos[name] = clips, self._write_videos(stem, clips)
        if rank() == 0:
            path = self.run_dir / "samples" / f"step_{step:08d}.png"
            with _written(self.run_dir / "samples"):
                sheet = contact_sheet(
                    path,
                    [(f"{role}, {_steps(n)}", rows[f"{role}_{n}steps"]) for role, n in self._wanted()],
                    captions=captions,
                    title=f"step {step}",
                )
            measures = {
                f"validation/{name}/{key}": measure.value
                for name, clips in rows.items()
                for key, measure in (self._measures(clips, captions) or {}).items()
            }
            if metrics is not None:
                metrics.show(step, sheet, videos, measures, fps=self.data.fps)
            log.info("samples of step %d: %s", step, path)
        self.data.release()
        barrier()

    def _write_videos(self, stem: str, clips: np.ndarray) -> list[Path]:
        """``samples/STEM_I.mp4`` for each clip."""
        files = [self.run_dir / "samples" / f"{stem}_{i}.mp4" for i in range(len(clips))]
        for file, clip in zip(files, clips, strict=True):
            write_mp4(file, clip, self.data.fps)
        return files

    def _wanted(self) -> list[tuple[str, int]]:
        """Which roles to sample, at which numbers of steps."""
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
        """``report.html``, ``report.json`` and ``report.png``; measured from the pixels on moving shapes.

        Args:
            facts: of the run, as the page shows them; ``steps`` among them is how many it has had.
        """
        heldout = self._heldout
        # Without measures, more clips than can be looked at would only cost time.
        count = self.config.sample.report_clips if heldout is not None else min(8, self.config.sample.report_clips)
        captions = sample_captions(self.data, count)
        # A clip that is made of an image stands in the page below the clip that the image is of.
        items = self._items(captions, self.data) if has_image(self.data.condition_shapes) else None
        rows = []
        wanted = self._wanted()
        for i, (role, n) in enumerate(wanted):
            clips = self.clips(role, n, captions, then=wanted[i + 1 :], items=items)
            if clips is not None:
                started = time.perf_counter()
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
                if heldout is not None:
                    log.info("measured %s in %s", rows[-1].name, duration(time.perf_counter() - started))
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
            versions = {
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
                "Python": platform.python_version(),
            }
            log.info("writing the report")
            # Every other clip: neighbours of the list of captions share their motion on moving shapes.
            pictured = [replace(row, clips=row.clips[:SHOWN_CLIPS:2]) for row in (reference, *rows)]
            with _written(self.run_dir):
                report_picture(self.run_dir / "report.png", pictured, captions[:SHOWN_CLIPS:2], clips=4, width=1900)
                write_report(
                    self.run_dir,
                    title=f"{self.method.settings.name} on {self.config.data.name}",
                    rows=rows,
                    reference=reference,
                    captions=captions[:SHOWN_CLIPS],
                    config_summary={
                        "mesh": str(self.mesh.shape),
                        **facts,
                        **{f"teacher, {_steps(n)}": phrase for n, phrase in self.stored.items()},
                        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
                        "sample command": shlex.join(["python", "-m", "distill.sample", str(self.run_dir)]),
                    },
                    fps=self.data.fps,
                    settings=asdict(self.config),
                    defaults=default_settings(self.config),
                    updates=self._updates(facts.get("steps", 0)),
                )
        self.data.release()
        barrier()

    def _updates(self, steps: int) -> dict[str, int]:
        """How many of the first ``steps`` were each role's, skipped ones among them."""
        turns = [self.method.trained_role(step) for step in range(steps)]
        return {name: turns.count(name) for name in sorted(set(turns))}

    def _real_clips(self, captions: list[str], heldout: MovingShapes | None) -> np.ndarray | None:
        """A real clip for each of ``captions``, as :func:`decode` gives them; few clips may show several times."""
        source: ClipDataset = self.data if heldout is None else heldout
        return decode(source, torch.stack([source[i]["latents"] for i in self._items(captions, source)]))

    def _items(self, captions: list[str], source: ClipDataset) -> list[int]:
        """An item of ``source`` for each of ``captions``, each as late as possible again."""
        waiting: dict[str, list[int]] = {}
        for position in reversed(range(len(captions))):
            waiting.setdefault(captions[position], []).append(position)
        found: dict[int, int] = {}
        for i in itertools.count():
            if len(found) == len(captions):
                return [found[position] for position in range(len(captions))]
            caption = source[i % len(source)]["caption"]
            if waiting.get(caption):
                found[waiting[caption].pop()] = i % len(source)

    def _measures(self, clips: np.ndarray, captions: list[str]):
        if self._heldout is None:
            return None
        from distill.report.measures import measure

        return measure(clips, captions, self._reference_clips)


def reference_clips(heldout: MovingShapes) -> np.ndarray:
    """What clips are measured against: 512 held-out renders, uint8 ``(512, T, H, W, 3)``.

    From the second half of the stream; the rows of held-out renders beside the networks' come from its beginning.
    """
    return heldout.clips(REFERENCE_CLIPS, first=len(heldout) // 2).numpy()


def write_scheduler(method: Method, folder: Path) -> None:
    """Write ``method``'s scheduler for a plain diffusers pipeline; where there is none, the log says why."""
    scheduler = None
    if isinstance(method, FewStepMethod):
        try:
            scheduler = method.scheduler(method.roles["student"].family.pipeline_times)
        except UserError as error:
            log.warning("%s is not written: %s", folder, error)
    export_scheduler(folder, scheduler)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """A full disk or a file in the way, after the training, as one line that says what is safe."""
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename or folder
        raise UserError(
            f"{path} cannot be written ({error.strerror}); make room there and start the same"
            " command again: what was trained is in the newest checkpoint"
        ) from error


def _steps(n: int) -> str:
    return counted(n, "step")
