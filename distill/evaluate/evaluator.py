"""Sample clips during a run and the report at its end, with clips that are stored next to the teacher."""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import default_collate

from distill.config import Config
from distill.data.base import ClipDataset, MeasuredDataset, buckets_of, sample_of
from distill.evaluate.sampling import Clips, ClipSampler, decode, sample_captions, sampling_batch
from distill.evaluate.stored_clips import read_clips
from distill.methods.common.few_step import FewStepMethod
from distill.report.media import contact_sheet, write_clips
from distill.report.verdict import ReportRow
from distill.report.write import write_report
from distill.run.loggers import Shown
from fsdp_cp.errors import NotFinite, UserError, counted, duration
from fsdp_cp.files.atomic_file import writing
from fsdp_cp.launch import rank
from fsdp_cp.progress import first_rank_log
from fsdp_cp.reduce import barrier, on_first_rank
from models.condition import has_image
from models.sample import Sample

log = first_rank_log(__name__)

T = TypeVar("T")

SAMPLE_SEED = 12345
"""Noise seed of all sample clips. It is fixed, so that clips are comparable across steps, runs and seeds."""

SHOWN_CLIPS = 8
"""Number of clips per row that the report shows. All clips are measured."""


@dataclass(kw_only=True, eq=False)
class Evaluator(ClipSampler):
    """Samples of student and teacher during a run, and its report. All ranks call each method; rank 0 writes."""

    config: Config
    micro_batch_size: int
    teacher_clips: dict[int, Clips | None] = field(default_factory=dict)
    """Teacher's sample clips by number of steps. The teacher does not change, so they are sampled once."""
    stored: dict[int, str] = field(default_factory=dict)
    """Descriptions of the teacher's clips that were read from a file instead of sampled, by number of steps."""

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @cached_property
    def batch(self) -> int:
        """Number of clips per forward on a rank. A micro-batch fits, since training runs it."""
        shapes = self.data.latent_shapes
        return max(self.micro_batch_size, sampling_batch(self.method.roles.values(), shapes, self.mesh, self.device))

    def clips(self, role: str, steps: int, captions: list[str], items: Sequence[int] | None = None) -> Clips | None:
        """Sample clips, with the images of the data's ``items`` if given: return them on rank 0, ``None`` elsewhere or
        if they are not finite."""
        if role == "teacher" and (stored := self._stored_clips(steps, captions)) is not None:
            return Clips(stored) if rank() == 0 else None
        name, started = f"{role}, {_steps(steps)}", time.perf_counter()
        clips = self.decoded(name, self.data, self.latents(role, steps, captions, items))
        if clips is None:
            return None
        log.info("sampled %s: %s in %s", name, counted(len(captions), "clip"), duration(time.perf_counter() - started))
        return clips

    def latents(self, role: str, steps: int, captions: list[str], items: Sequence[int] | None = None) -> Sample:
        """Sample the latents of clips, with the images of the data's ``items`` if given."""
        return self.generate(role, captions, steps=steps, seed=SAMPLE_SEED, batch=self.batch, clips=items)

    def decoded(
        self, name: str, data: ClipDataset, latents: Sample, use: Callable[[ClipDataset, Sample], T | None] = decode
    ) -> T | None:
        """Return what ``use`` makes of the clips ``name``. Clips that are not finite become a warning and ``None``."""
        try:
            return use(data, latents)
        except NotFinite as error:
            log.warning("left out the clips of %s: %s", name, error)
            return None

    def _stored_clips(self, steps: int, captions: list[str]) -> np.ndarray | None:
        """Return the teacher's clips that are stored with its weights, on every rank, or ``None``."""
        if not (isinstance(self.data, MeasuredDataset) and isinstance(self.method, FewStepMethod)):
            return None
        options = {"steps": steps, "captions": captions, "seed": SAMPLE_SEED}
        stored = on_first_rank(lambda: read_clips(self.config, self.data, **options))
        if stored is None:
            return None
        clips, self.stored[steps] = stored
        log.info("teacher, %s: %s %s", _steps(steps), counted(len(clips), "clip"), self.stored[steps])
        return clips

    def sheet(self, step: int) -> Path:
        """Return the picture of all samples of a step, which is written last."""
        return self.run_dir / "samples" / f"step_{step:08d}.png"

    def write_samples(self, step: int) -> Shown | None:
        """Write clips of fixed captions and noise to ``samples/``, as ``step_00000100_student_4steps_I.mp4``,
        ``step_00000100.png`` with all and, once per run, ``teacher_50steps_I.mp4``; return them on rank 0."""
        chosen = self.config.sample
        captions = list(chosen.captions) or sample_captions(self.data, chosen.prompts)
        rows, videos, folder, shown = {}, {}, self.run_dir / "samples", None
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
                files = [folder / f"{stem}_{i}.mp4" for i in range(len(captions))]
                with _written(folder):
                    write_clips(files, *clips, fps=self.data.fps)
                videos[f"{role}_{n}steps"] = files
        rows = {key: clips for key, clips in rows.items() if clips is not None}  # none on other ranks
        if rows:
            path = self.sheet(step)
            labeled = [(f"{role}, {_steps(n)}", clips.frames) for (role, n), clips in rows.items()]
            with _written(folder):
                sheet = contact_sheet(path, labeled, captions=captions, title=f"step {step}")
            measures = {}
            for (role, n), clips in rows.items() if isinstance(self.data, MeasuredDataset) else ():
                measured = clips.measured(self.data, captions)
                measures |= {f"validation/{role}_{n}steps/{key}": measure.value for key, measure in measured.items()}
            shown = Shown(sheet, videos, measures)
            log.info("wrote the samples of step %d to %s", step, path)
        self.data.release()
        barrier()
        return shown

    def _wanted(self) -> list[tuple[str, int]]:
        """Return the roles to sample, with their numbers of steps."""
        steps = self.config.sample
        wanted = [("teacher", n) for n in steps.teacher_steps] + [("student", n) for n in steps.student_steps]
        return [(role, n) for role, n in dict.fromkeys(wanted) if role in self.method.roles]

    def write_report(self, facts: dict[str, Any]) -> None:
        """Write ``report.html`` and ``report.json``, with measures of a :class:`MeasuredDataset`, and ``facts``, whose
        ``steps`` are those trained."""
        is_measured = isinstance(self.data, MeasuredDataset)
        # Without measures, clips beyond the shown ones would only cost time.
        count = self.config.sample.report_clips if is_measured else min(SHOWN_CLIPS, self.config.sample.report_clips)
        captions = sample_captions(self.data, count)
        # The page shows a clip made from an image below the real clip that the image comes from.
        items = self._items(captions, self.data) if has_image(self.data.condition_shapes) else None
        rows = []
        for role, n in self._wanted():
            clips = self.clips(role, n, captions, items)
            if clips is not None:
                name = f"{role}, {_steps(n)}" + " (stored)" * (role == "teacher" and n in self.stored)
                rows.append(self._row(name, role, n, clips, captions))
        real = self.real_clips(captions)
        if real is not None:
            name = "held-out renders" if is_measured else "data"
            reference = self._row(name, "heldout", None, real, captions)
            log.info("writing the report")
            with _written(self.run_dir):
                if is_measured and real.sounds is not None:  # what measures of sound are without a connection
                    order = np.random.default_rng(0).permutation(len(captions))
                    mixed = real._replace(sounds=[real.sounds[i] for i in order])
                    rows.append(self._row(f"{name}, sound of another", "heldout", None, mixed, captions))
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
                        "sample command": shlex.join(["python", "-m", "distill.sample", str(self.run_dir)]),
                    },
                    fps=self.data.fps,
                    max_norms={name: self.config.optim.clip_of(name) for name in self.method.trained_roles},
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

    def real_captions(self) -> list[str]:
        """Return the captions that :meth:`real_clips` can have, in the order of :func:`sample_captions`."""
        source = self.data.heldout() if isinstance(self.data, MeasuredDataset) else self.data
        own = {source.caption(int(item)) for item in buckets_of(source)[0].items}
        return [caption for caption in sample_captions(self.data, len(self.data.captions())) if caption in own]

    def real_clips(self, captions: list[str]) -> Clips | None:
        """Return a real clip for each of ``captions``, like :func:`decode`."""
        return self.decoded("the data", *self.real_latents(captions))

    def real_latents(self, captions: list[str]) -> tuple[ClipDataset, Sample]:
        """Return the data set of a real clip for each of ``captions``, and its latents. A small one repeats clips."""
        source = self.data.heldout() if isinstance(self.data, MeasuredDataset) else self.data
        items = default_collate([source[i] for i in self._items(captions, source)])
        latents = sample_of(items, dict.fromkeys(source.latent_shapes, 1.0))
        assert latents is not None, "the report is of data with clips"
        return source, latents

    def _items(self, captions: list[str], source: ClipDataset) -> list[int]:
        """Return an item of ``source`` for each caption, of its first bucket. Items of the same caption take turns."""
        items: dict[str, list[int]] = {caption: [] for caption in captions}
        for item in map(int, buckets_of(source)[0].items):
            if (own := items.get(source.caption(item))) is not None:
                own.append(item)
        if missing := [caption for caption, own in items.items() if not own]:
            why = f"{self.config.data.name}: no clip of its first size has the caption {missing[0]!r}"
            raise UserError(f"{why}, so none is compared; use sample.report_clips=0")
        turns = {caption: cycle(own) for caption, own in items.items()}
        return [next(turns[caption]) for caption in captions]

    def _row(self, name: str, role: Any, steps: int | None, clips: Clips, captions: list[str]) -> ReportRow:
        evaluations = 0 if steps is None else self.method.evaluations(role, steps)
        measures = clips.measured(self.data, captions) if isinstance(self.data, MeasuredDataset) else None
        sounds = None if clips.sounds is None else clips.sounds[:SHOWN_CLIPS]
        what = {"measures": measures, "clips": clips.frames, "sounds": sounds, "evaluations": evaluations}
        return ReportRow(name=name, role=role, steps=steps, **what)


def _written(folder: Path) -> AbstractContextManager[None]:
    """Turn a failed write into one line that says that the checkpoint is safe."""
    return writing(folder, "make room and start the same command again: the newest checkpoint holds what was trained")


def _steps(n: int) -> str:
    return counted(n, "step")
