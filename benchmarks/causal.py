"""Do the stages of causal distillation help? ``python -m benchmarks.causal``.

Trains few-step students on moving shapes, frame by frame, from the shipped causal teacher (stage 1): by consistency
distillation (stage 2), by self-forcing (stage 3), and by both. Clips of 6 frames, as in training, are measured as in
:mod:`benchmarks.distillation`. Clips of 24 frames are measured in windows of 6 frames. Of all motions, only blinking
continues beyond a clip of training, so they have blinking captions, and windows begin in phase with the blinking.
The same command resumes an interrupted benchmark. ``--quick`` is a short test of the whole benchmark.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.arguments import add_students
from benchmarks.distillation import ROOT, Row, Run, clips_of, in_words, measured, over_seeds, renders, table, train_all
from distill.config import Config, compose_config
from distill.data.base import ClipDataset, Measure
from distill.data.shape_measures import geometry_of, measure
from distill.data.shape_scenes import BLINK_PERIOD
from distill.report.media import contact_sheet
from fsdp_cp.launch import end_process
from models.sample import VIDEO, Sample

TEACHER, CAUSAL = ROOT / "assets" / "quickstart_teacher", ROOT / "assets" / "quickstart_causal_teacher"
STUDENT_STEPS = (4, 2, 1)
FEW_STEPS = "stages 1+2"
LONG, TRAINED = 24, 6
"""Frames of a long clip, and of a clip in training."""
WINDOWED = (
    "color_accuracy",
    "motion_accuracy",
    "area",
    "distance/area",
    "distance/compactness",
    "distance/edge_sharpness",
)
QUICK = ("steps=6", "batch_size=2", "log.every=1")


def stages(out: Path, seed: int, changes: Sequence[str]) -> dict[str, Run]:
    """Return the training runs of one seed, by name; each run begins after those before it."""
    folder = out / str(seed)
    few_steps = Run(method="dcm", recipe="quickstart_causal_dcm", folder=folder / "2", seed=seed, changes=(*changes,))
    runs = {FEW_STEPS: few_steps}
    for name, start in (("stages 1+3", CAUSAL), ("stages 1+2+3", few_steps.folder / "export" / "student")):
        runs[name] = Run(
            method="self_forcing",
            folder=folder / name.removeprefix("stages ").replace("+", ""),
            seed=seed,
            changes=(f"student.checkpoint={start}", *changes),
        )
    return runs


@dataclass(frozen=True, kw_only=True)
class Student:
    """Network to measure: one of each seed."""

    name: str
    config: Config
    folders: Sequence[Path]
    caches: Sequence[Path]
    """Folders for measures."""
    steps: tuple[int, ...]
    long: int | None = None
    """Number of steps for long clips; ``None`` for a network that makes none."""

    def rows(self, count: int) -> list[Row]:
        """Measure clips as in training, for each number of steps."""
        rows = []
        for steps in self.steps:
            found = [
                measured(self.config, "student", folder, steps, cache / f"{steps}.json", count)
                for folder, cache in zip(self.folders, self.caches, strict=True)
            ]
            rows.append(over_seeds(found, self.name))
        return rows

    def windows(self, count: int) -> list[Row]:
        """Measure each window of long clips."""
        pairs = zip(self.folders, self.caches, strict=True)
        found = [
            drift(self.config, folder, self.long, cache / f"long_{self.long}.json", count) for folder, cache in pairs
        ]
        name = f"{self.name}, {in_words(self.long)}"
        return [
            over_seeds([replace(row, steps=None) for row in rows], f"{name}, frames {rows[0].name}")
            for rows in zip(*found, strict=True)
        ]


def drift(config: Config, folder: Path, steps: int, cache: Path, count: int) -> list[Row]:
    """Measure the windows of ``count`` long clips, or read them from ``cache``. Distances are from held-out renders."""
    if not cache.exists():
        data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=Path(config.run_dir))
        blinking = blinking_captions(data)
        captions = [blinking[i % len(blinking)] for i in range(count)]
        heldout = data.heldout()
        indices = [i for i in range(len(heldout.captions()) * 32) if heldout[i]["caption"] in blinking]
        real = Sample({VIDEO: torch.stack([heldout[i]["latents"] for i in indices])})
        reference = heldout.decode(real).numpy()
        clips = clips_of(config, "student", folder, steps, captions, frames=LONG)
        windows = {}
        for start in range(0, LONG - TRAINED + 1, BLINK_PERIOD):
            window = clips[:, start : start + TRAINED]
            found = measure(window, captions, reference) | {"area": mean_area(window)}
            windows[f"{start}-{start + TRAINED - 1}"] = {key: asdict(found[key]) for key in WINDOWED}
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.save(cache.with_suffix(".npy"), clips[:2])
        cache.write_text(json.dumps(windows))
    windows = json.loads(cache.read_text())
    return [
        Row(name=frames, steps=steps, measures={key: Measure(**value) for key, value in found.items()})
        for frames, found in windows.items()
    ]


def blinking_captions(data: ClipDataset) -> list[str]:
    """Return the captions of blinking shapes."""
    return [caption for caption in data.captions() if caption.endswith("blinking")]


def mean_area(clips: np.ndarray) -> Measure:
    """Return the mean number of pixels that a shape covers in a frame; a vanished shape covers none."""
    areas = geometry_of(clips).area.mean(axis=1)
    return Measure(float(areas.mean()), float(areas.std() / len(areas) ** 0.5), higher_is_better=False)


def main(argv: list[str] | None = None) -> int:
    """Train, measure, print both tables and draw clips. Return exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causal", description=__doc__.splitlines()[0])
    add_students(parser, "runs/causal", "stage")
    parser.add_argument("--quick", action="store_true", help="a few steps and clips, to test the benchmark")
    arguments = parser.parse_args(argv)
    out = arguments.out.absolute()
    out = out.with_name(out.name + "_quick") if arguments.quick else out
    count, long_count, changes = (8, 4, QUICK) if arguments.quick else (256, 128, ())
    seeds = [stages(out, seed, changes) for seed in range(arguments.seeds)]
    for later in (False, True):  # stage 2 first
        train_all(
            [run for runs in seeds for name, run in runs.items() if later == (name != FEW_STEPS)], arguments.workers
        )

    teacher, causal, few = (
        compose_config([f"experiment=quickstart_{name}"]) for name in ("teacher", "causal_teacher", "self_forcing")
    )
    students = [
        Student(name="bidirectional teacher", config=teacher, folders=[TEACHER], caches=[out / "teacher"], steps=(50,)),
        Student(name="causal teacher", config=causal, folders=[CAUSAL], caches=[out / "causal"], steps=(50, 8), long=8),
        Student(name="stage 1", config=few, folders=[CAUSAL], caches=[out / "stage_1"], steps=STUDENT_STEPS, long=4),
    ]
    for name in seeds[0]:
        folders = [runs[name].folder for runs in seeds]
        exports = [folder / "export" / "student" for folder in folders]
        students.append(Student(name=name, config=few, folders=exports, caches=folders, steps=STUDENT_STEPS, long=4))
    rows = [renders(few, count)]
    for student in students:
        rows += student.rows(count)
    print(table(rows), end="\n\n")
    print(table([row for student in students if student.long for row in student.windows(long_count)]))
    long = [student for student in students if student.long]
    clips = [(student.name, np.load(student.caches[0] / f"long_{student.long}.npy")) for student in long]
    data = few.data.build(seed=0, device=torch.device("cpu"), run_dir=out)
    contact_sheet(out / "causal.png", clips, captions=blinking_captions(data)[:2], frames=LONG // 2)
    return 0


if __name__ == "__main__":
    end_process(main())
