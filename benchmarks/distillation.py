"""Comparison of the distillation methods: ``python -m benchmarks.distillation``.

Trains a student per method and seed from the shipped teacher on moving shapes, by the recipes
``experiment=quickstart_METHOD``, and measures it. Every method gets the same number of network evaluations, which the
report states. Each run is one process, with one run per core in parallel. The same command resumes an interrupted
benchmark. ``--quick`` is a short test of the whole benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.arguments import add_students
from benchmarks.diversity import diversity
from distill.config import Config, compose_config, load_config
from distill.data.base import Measure
from distill.data.sets.encoded_set import EncodedSet
from distill.data.shape_measures import MEASURES
from distill.evaluate.evaluator import SAMPLE_SEED
from distill.evaluate.networks import network_to_sample
from distill.evaluate.sampling import sample_captions
from distill.methods import METHODS
from distill.methods.common.schedules import euler_times
from distill.report.media import contact_sheet
from distill.run.open import open_mesh
from fsdp_cp.errors import UserError
from fsdp_cp.launch import end_process
from fsdp_cp.runtime.signals import end_with_parent
from models.families.operations import count_flops
from models.roles.role_plan import plan_role
from models.sample import VIDEO

ROOT = Path(__file__).resolve().parent.parent
DISTILLING = ("dmd2", "rcm", "scm", "meanflow", "dcm", "ode_regression", "pdd")
"""Methods in the order of the table. Only dmd2 and rcm can fail the benchmark."""
STUDENT_STEPS, TEACHER_STEPS = (1, 2, 4), (1, 2, 4, 8, 50)
FULL = 50
CLIPS = 256
PICTURED = 4
COUNTS_FROM, CLOSED, KEPT = 3.0, 0.8, 0.95
UNEVEN = 1.01
"""Limit of the largest number of network evaluations over the smallest. They vary with the random rollout lengths."""


def all_settings(config: Config) -> str:
    """Return all settings as YAML, to detect a recipe or a default that has changed since a student was trained."""
    return OmegaConf.to_yaml(asdict(config))


def claim(folder: Path, settings: str) -> None:
    """Make ``folder`` for results of ``settings``, or check that it holds results of the same settings.

    Raises:
        UserError: a folder with other settings.
    """
    noted = folder / "settings.yaml"
    if noted.exists() and noted.read_text() != settings:
        raise UserError(f"{folder} is of other settings; use another --out, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    noted.write_text(settings)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training run of one student."""

    method: str
    folder: Path
    changes: tuple[str, ...] = ()
    """Settings that change the recipe."""
    seed: int = 0
    recipe: str | None = None
    """Experiment of the run; ``None`` for ``quickstart_METHOD``."""
    program: tuple[str, ...] = ("train.py",)
    """Arguments of Python before the settings."""

    def overrides(self) -> list[str]:
        """Return the settings for ``train.py``."""
        recipe = "quickstart_teacher" if self.method == "flow_matching" else f"quickstart_{self.method}"
        words = [f"experiment={self.recipe or recipe}", f"seed={self.seed}", f"run_dir={self.folder}"]
        alone = ["device=cpu", "mesh.cp=1", "log.every=1"]
        no_samples = ["sample.every=0", "sample.report_clips=0", "sample.prompts=1", "sample.teacher_steps=[]"]
        return [*words, *alone, *no_samples, *self.changes]

    def settings(self) -> str:
        """Return :func:`all_settings` of the run."""
        return all_settings(compose_config(self.overrides()))

    def train(self, settings: str) -> None:
        """Train to the end, or resume an interrupted run. Do nothing for a finished run.

        Args:
            settings: result of :meth:`settings`.

        Raises:
            UserError: a run that began with other settings.
            RuntimeError: a failed run; the message has the end of its log.
        """
        claim(self.folder, settings)
        finished = self.folder / "finished"
        if finished.exists():
            return
        for command in self._commands():
            with (self.folder / "log").open("a") as log:
                code = subprocess.run(
                    command,
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    preexec_fn=end_with_parent,  # else it keeps its lock, and the same command cannot resume
                ).returncode
            if code:
                raise RuntimeError(
                    f"{' '.join(command)} ended with {code}:\n{(self.folder / 'log').read_text()[-2000:]}"
                )
        finished.touch()

    def _commands(self) -> list[list[str]]:
        train = [sys.executable, *self.program, *self.overrides()]
        if self.method != "ode_regression":
            return [train]
        times = compose_config(self.overrides()).method.step_list
        options = ["--clips", "1024", "--steps", "24", "--states", ",".join(map(str, times))]
        make = [sys.executable, "-m", "distill.teacher_clips", *self.overrides(), str(self.clips), *options]
        return [make, [*train, "data=encoded", f"data.path={self.clips}"]]

    @property
    def clips(self) -> Path:
        """Folder of the teacher's clips, for ``ode_regression``."""
        return self.folder / "clips"

    def config(self) -> Config:
        """Return the configuration of the finished run, with the rendered clips for measures."""
        config = load_config(self.folder / "config.yaml")
        config.data = compose_config(self.overrides()).data
        return config

    def metrics(self) -> list[dict[str, float | None]]:
        """Return the metrics of every step."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def evaluations(self, forward: float) -> float:
        """Return the number of network evaluations of one clip in the training, including the teacher's clips.

        A backward counts as two evaluations, or one through a frozen network. A forward-mode derivative counts by its
        operations.

        Args:
            forward: floating-point operations of a forward of one clip.
        """
        made = 0
        if self.method == "ode_regression":
            about = EncodedSet(self.clips, "clips").about["settings"]
            teacher = about["teacher"]
            times = {*euler_times(teacher["steps"], teacher["shift"]), *teacher["states"]}
            made = about["clips"] * (len(times) - 1) * (1 if teacher["guidance_scale"] == 1 else 2)
        return sum(line["perf/flops"] for line in self.metrics()) / forward + made

    def student_updates(self) -> int:
        """Return the number of steps that trained the student."""
        config = load_config(self.folder / "config.yaml")
        method = METHODS[config.method.name][0](config.method, {})
        return sum(method.trained_role(step) == "student" for step in range(config.steps))


def train_all(runs: Sequence[Run], workers: int) -> None:
    """Call :meth:`Run.train` of each run, with ``workers`` in parallel, and print which runs have ended."""
    settings = [run.settings() for run in runs]  # before the threads start: composing settings is not thread-safe
    with ThreadPoolExecutor(workers) as pool:
        for run, _ in zip(runs, pool.map(Run.train, runs, settings), strict=True):
            print(f"{run.folder}: trained", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    steps: int | None
    """Number of sampling steps; ``None`` for renders."""
    measures: dict[str, Measure]


def renders(config: Config, count: int) -> Row:
    """Measure real clips: the first ``count`` of the held-out stream, whose captions take turns."""
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=Path(config.run_dir)).heldout()
    clips = data.clips(count).numpy()
    captions = [data[i]["caption"] for i in range(count)]
    measures = data.measure(clips, captions) | diversity(clips, captions)
    return Row(name="held-out renders", steps=None, measures=measures)


def clips_of(
    config: Config, role_name: str, folder: Path, steps: int, captions: list[str], frames: int | None = None
) -> np.ndarray:
    """Sample clips, uint8 ``(n, T, H, W, 3)``, of the network in ``folder`` with the sampler of the method.

    A causal network makes clips of any number of ``frames``; the default is that of the data.
    """
    device, config = torch.device("cpu"), replace(config, device="cpu")
    data = config.data.build(seed=0, device=device, run_dir=Path(config.run_dir))
    network = network_to_sample(config, role_name, folder, steps)
    channels, data_frames, *sizes = data.latent_shapes[VIDEO]
    with open_mesh(config, network.plan, device) as mesh:
        latents = network.loaded(mesh=mesh, device=device, data=data).generate(
            role_name,
            captions,
            steps=steps,
            seed=SAMPLE_SEED,
            batch=64,
            latent_shapes={VIDEO: (channels, frames or data_frames, *sizes)},
        )
    return data.decode(latents).numpy()


def measured(config: Config, role_name: str, folder: Path, steps: int, cache: Path, count: int) -> Row:
    """Measure caption accuracy, feature distances and diversity of ``count`` clips, or read them from ``cache``."""
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=Path(config.run_dir))
    captions = sample_captions(data, count)
    if not cache.exists():
        clips = clips_of(config, role_name, folder, steps, captions)
        measures = data.measure(clips, captions) | diversity(clips, captions)
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.save(cache.with_suffix(".npy"), clips[: 2 * PICTURED : 2])
        cache.write_text(json.dumps({name: asdict(value) for name, value in measures.items()}))
    values = {name: Measure(**value) for name, value in json.loads(cache.read_text()).items()}
    return Row(name=role_name, steps=steps, measures=values)


def measured_student(run: Run, steps: int, count: int) -> Row:
    """Return :func:`measured` of the student that a run exported."""
    config, student = run.config(), run.folder / "export" / "student"
    return measured(config, "student", student, steps, run.folder / f"student_{steps}.json", count)


def over_seeds(rows: Sequence[Row], name: str) -> Row:
    """Return the mean of several students. Its standard error covers measurement and differences between students."""
    combined = {}
    for key in rows[0].measures:
        values = np.array([row.measures[key].value for row in rows])
        errors = np.array([row.measures[key].standard_error for row in rows])
        between = values.std(ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
        # Differences between students already include the measurement error, but few students may agree by chance.
        within = math.sqrt((errors**2).sum()) / len(rows)
        combined[key] = replace(
            rows[0].measures[key], value=float(values.mean()), standard_error=float(max(between, within))
        )
    return Row(name=name, steps=rows[0].steps, measures=combined)


def clip_flops(config: Config) -> float:
    """Return the floating-point operations of a forward of one clip."""
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=Path(config.run_dir))
    plan = plan_role("teacher", checkpoint=str(ROOT / config.teacher.checkpoint))
    return count_flops(plan.family, plan.config, data.latent_shapes, data.condition_shapes).forward


def in_words(steps: int) -> str:
    """Return ``1 step``, ``2 steps`` and so on."""
    return f"{steps} step{'s' * (steps > 1)}"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with one line per row."""
    keys = list(rows[0].measures)
    lines = ["| | " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for row in rows:
        # Without clips that show a shape, a spread is NaN.
        cells = (
            "none" if math.isnan(m.value) else f"{m.value:.3f} ± {m.standard_error:.3f}" for m in row.measures.values()
        )
        name = row.name if row.steps is None else f"{row.name}, {in_words(row.steps)}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def closed(teacher: Row, full: Row, student: Row, key: str) -> float:
    """Return the share of the teacher's loss of quality, from taking so few steps, that the student recovers."""
    lost = teacher.measures[key].value - full.measures[key].value
    return (teacher.measures[key].value - student.measures[key].value) / lost


def judge(method: str, teachers: dict[int, Row], students: dict[int, Row]) -> tuple[bool, list[str]]:
    """Check a method's students: the share that they recover (:func:`closed`), and caption accuracy at 4 steps."""
    full, good, lines = teachers[FULL], True, []
    for steps, student in students.items():
        teacher = teachers[steps]
        for key in MEASURES:
            worse = teacher.measures[key].worse_by(full.measures[key])
            if worse < COUNTS_FROM:
                continue
            share = closed(teacher, full, student, key)
            good &= share >= CLOSED
            lines.append(
                f"| {method}, {in_words(steps)} | {key.replace('_', ' ')} | {worse:.1f} | {share:.0%} |"
                f" {'yes' if share >= CLOSED else '**no**'} |"
            )
    for key in ("color_accuracy", "motion_accuracy"):
        share = students[4].measures[key].value / full.measures[key].value
        good &= share >= KEPT
        lines.append(
            f"| {method}, 4 steps | {key.replace('_', ' ')}, share of the teacher's at {FULL} | | {share:.1%} |"
            f" {'yes' if share >= KEPT else '**no**'} |"
        )
    return good, lines


def judge_evaluations(spent: dict[str, list[float]], updates: dict[str, int]) -> tuple[bool, list[str]]:
    """Check that the training of every student took the same number of network evaluations of a clip.

    Args:
        spent: network evaluations by method, one number per seed.
        updates: number of the student's updates by method.
    """
    lines = ["| method | training: network evaluations of a clip, thousands, by seed | updates of the student |"]
    lines.append("|---|---|---|")
    for method, numbers in spent.items():
        lines.append(f"| {method} | {', '.join(f'{n / 1e3:.1f}' for n in numbers)} | {updates[method]} |")
    everyones = [n for numbers in spent.values() for n in numbers]
    ratio = max(everyones) / min(everyones)
    lines += ["", f"The largest number is {ratio:.4f} times the smallest."]
    return ratio <= UNEVEN, lines


def spread_lines(rcm: dict[int, Row], dmd2: dict[int, Row]) -> list[str]:
    """Return table lines with the spread of rCM's students minus that of DMD2's, by steps (a claim of rCM's paper)."""
    lines = []
    for steps, row in rcm.items():
        for key in (key for key in row.measures if key.startswith("spread/")):
            more, less = row.measures[key], dmd2[steps].measures[key]
            error = math.hypot(more.standard_error, less.standard_error)
            lines.append(f"| {steps} | {key} | {more.value - less.value:+.4f} ± {error:.4f} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distillation", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=list(DISTILLING), choices=DISTILLING, metavar="METHOD")
    add_students(parser, "runs/distillation", "method")
    parser.add_argument("--quick", action="store_true", help="one seed, 10 steps, dmd2 and rcm alone")
    args = parser.parse_args(argv)
    if args.quick:
        args.methods, args.seeds, args.out = ["dmd2", "rcm"], 1, args.out.with_name(args.out.name + "_quick")
    out = args.out.resolve()
    changes, count = (("steps=10", "batch_size=8"), CLIPS // 8) if args.quick else ((), CLIPS)
    runs = [
        Run(method=method, seed=seed, folder=out / method / str(seed), changes=changes)
        for seed in range(args.seeds)
        for method in args.methods
    ]
    train_all(runs, args.workers)
    torch.set_num_threads(args.workers)

    # The teacher gets the guidance of the students' targets, and evenly spaced times: the methods' shifts differ.
    config = compose_config(["experiment=quickstart_dmd2", "method.shift=1.0", f"run_dir={out}"])
    source, measures = ROOT / config.teacher.checkpoint, out / "teacher"
    claim(measures, all_settings(config))
    teachers = {n: measured(config, "teacher", source, n, measures / f"{n}.json", count) for n in TEACHER_STEPS}
    students: dict[str, dict[int, Row]] = {}
    for method in args.methods:
        seeds = [run for run in runs if run.method == method]
        students[method] = {}
        for n in STUDENT_STEPS:
            students[method][n] = over_seeds([measured_student(run, n, count) for run in seeds], method)
    student_rows = [row for rows in students.values() for row in rows.values()]
    print(table([renders(config, count), *teachers.values(), *student_rows]))
    forward = clip_flops(config)
    good, lines = judge_evaluations(
        {method: [run.evaluations(forward) for run in runs if run.method == method] for method in args.methods},
        {run.method: run.student_updates() for run in runs},
    )
    print("\n" + "\n".join(lines))
    print("\n| | measure | teacher worse than at 50 steps, SE | closed | closed >= 80 %, share >= 95 % |")
    print("|---|---|---|---|---|")
    for method in args.methods:
        fine, lines = judge(method, teachers, students[method])
        good &= fine or method not in ("dmd2", "rcm")
        print("\n".join(lines))
    if {"dmd2", "rcm"} <= students.keys():
        print("\n| steps | | rcm less dmd2 |")
        print("|---|---|---|")
        print("\n".join(spread_lines(students["rcm"], students["dmd2"])))
    picture(out, runs)
    print(f"\npicture: {out / 'distillation.png'}")
    return 0 if good or args.quick else 1


def picture(out: Path, runs: Sequence[Run]) -> None:
    """Draw clips of the teacher and of each method's first student, for the same captions and noise."""
    config = compose_config(["experiment=quickstart", f"run_dir={out}"])
    data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=out)
    captions = sample_captions(data, CLIPS)[: 2 * PICTURED : 2]
    rows = [(f"teacher, {in_words(n)}", np.load(out / "teacher" / f"{n}.npy")) for n in (50, 4, 1)]
    for run in runs:
        if run.seed == 0:
            rows += [(f"{run.method}, {in_words(n)}", np.load(run.folder / f"student_{n}.npy")) for n in (4, 1)]
    contact_sheet(out / "distillation.png", rows, captions=captions)


if __name__ == "__main__":
    try:
        end_process(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
