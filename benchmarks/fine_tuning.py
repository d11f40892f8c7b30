"""Fine-tuning of a network whose guidance is built in: ``python -m benchmarks.fine_tuning``.

Moving shapes, in four steps:

1. A teacher whose captions need guidance: the shipped one, trained on with 30 % wrong colors in captions.
2. The base: its guided output, fitted by one forward. Its guidance is built in.
3. 40 clips with a color and a word that the base does not know are learned by adapters, plainly or by one of the
   settings of ``method=flow_matching`` that keep guidance. Every arm gets the same number of network evaluations.
4. Measures at guidance 1: the new word's color, color and motion of old captions, diversity, and the field of guidance
   (conditional output less the base's unconditional one) next to the base's.

With ``--few-steps`` the distilled network is a four-step student of the shipped teacher instead, by DMD2 with adapters.
It learns the same clips in three ways (:func:`few_step_arms`), and is measured at four steps.

The same command resumes.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.arguments import add_students
from benchmarks.distillation import ROOT, Row, Run, clip_flops, clips_of, over_seeds, table, train_all
from benchmarks.diversity import diversity
from distill.config import Config, compose_config
from distill.data import moving_shapes, shape_scenes
from distill.data.base import Measure
from distill.data.encoders import words
from distill.evaluate.networks import network_to_sample
from distill.methods.flow_matching import FlowMatching
from distill.run.open import open_mesh
from fsdp_cp.errors import UserError
from fsdp_cp.launch import end_process
from models.condition import Condition
from models.sample import VIDEO, Sample

SHIPPED = "assets/quickstart_teacher"
GUIDANCE = 3.0
WORD, COLOR = "pink", (1.0, shape_scenes.BACKGROUND, 0.5)
NEW_CLIPS = 40
WRONG = 0.3
"""Share of captions with a wrong color."""
STEPS = 16
TIMES = (0.25, 0.5, 0.75, 0.95)
BUILT_IN = f"method.built_in_guidance={GUIDANCE}"
ANCHOR = ("method.anchor_weight=1", "method.anchor_min_time=0.9")
ARMS: dict[str, tuple[float, tuple[str, ...]]] = {
    "plain": (1.0, ()),
    "live null": (4 / 3, (BUILT_IN, "method.null=live")),
    "frozen null": (4 / 3, (BUILT_IN, "method.null=frozen")),
    "live null, anchor": (4 / 3 + 0.5, (BUILT_IN, "method.null=live", *ANCHOR)),
    "training adapter": (2.0, ()),
    "kept": (4 / 3, ("method.keep_weight=0.5",)),
}
"""Cost of a step next to a plain one, in network evaluations (that of the training adapter's fit included), and changes
of the recipe, by arm."""
FEW_STEPS = 4
DISTILL_STEPS = 600
DISTILL_COST = 2.6
"""Network evaluations of a step of DMD2, on average, next to those of a plain step of adapters."""
LONGER = 3
"""Budgets of the longer distillation from a fine-tuned teacher."""
SPENT = "training, thousand evaluations of a clip"
MEASURED = ("color_accuracy", "motion_accuracy", "distance/edge_sharpness")


def new_captions(_: Any = None) -> tuple[str, ...]:
    """Return the captions of the new word."""
    return tuple(f"a {WORD} {shape} {motion}" for motion in words.MOTIONS for shape in words.SHAPES)


def mixed_captions(_: Any = None) -> tuple[str, ...]:
    """Return old captions, each followed by one of the new word."""
    old = [caption for caption in shape_scenes.CAPTIONS if WORD not in caption]
    return tuple(caption for pair in zip(old, cycle(new_captions())) for caption in pair)


class _Words(words.WordTable):
    """The table with one word more, whose vector is orthogonal to all others."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        basis = torch.linalg.qr(self.vectors.T).Q
        further = torch.randn(len(basis), generator=torch.Generator().manual_seed(0))
        further -= basis @ (basis.T @ further)
        self._row[WORD] = len(self.words)
        self.words = [*self.words, WORD]
        self.vectors = torch.cat([self.vectors, (further / further.square().mean().sqrt())[None]])


def _with_wrong_captions(item: Any) -> Any:
    def wrong(data: Any, index: int) -> dict:
        found = item(data, index)
        random = np.random.default_rng((7, index))
        if random.random() < WRONG:
            article, _, *rest = found["caption"].split()
            color = str(random.choice([c for c in words.COLORS if c not in found["caption"]]))
            found |= data.embeddings(" ".join([article, color, *rest]))
        return found

    return wrong


def _guided(fixed: Any) -> Any:
    def guided(method: FlowMatching, role: str, x: Sample, condition: Condition, times: Any) -> Sample:
        conditional = fixed(method, role, x, condition, times)
        null = fixed(method, role, x, condition.null, times)
        return null + (conditional - null) * GUIDANCE

    return guided


@contextmanager
def _new_clips() -> Iterator[None]:
    shapes = moving_shapes.MovingShapes
    item = shapes.__getitem__
    with (
        mock.patch.object(moving_shapes, "captions_of", new_captions),
        mock.patch.object(shapes, "__getitem__", lambda data, index: item(data, index % NEW_CLIPS)),
    ):
        yield


@contextmanager
def world(name: str) -> Iterator[None]:
    """Change the data or the fit within this context: ``wrong`` captions, a ``guided`` target, the ``new`` word, or
    ``mixed`` captions, half of them with the new word."""
    if name == "wrong":
        shapes = moving_shapes.MovingShapes
        with mock.patch.object(shapes, "__getitem__", _with_wrong_captions(shapes.__getitem__)):
            yield
    elif name == "guided":
        with mock.patch.object(FlowMatching, "_fixed", _guided(FlowMatching._fixed)):
            yield
    else:
        known = (*shape_scenes.CAPTIONS, *new_captions())
        with (
            mock.patch.object(moving_shapes, "WordTable", _Words),
            mock.patch.object(shape_scenes, "CAPTIONS", known),
            mock.patch.dict(shape_scenes.RGB, {WORD: COLOR}),
            _new_clips() if name == "new" else nullcontext(),
            mock.patch.object(moving_shapes, "captions_of", mixed_captions) if name == "mixed" else nullcontext(),
        ):
            yield


def training(name: str, folder: Path, base: Path | str, steps: int, *changes: str, seed: int = 0) -> Run:
    """Return a run of flow matching from ``base`` in the :func:`world` ``name``."""
    return Run(
        method="flow_matching",
        folder=folder,
        seed=seed,
        changes=(
            "student.architecture=null",
            f"student.checkpoint={base}",
            f"teacher.checkpoint={base}",
            f"steps={steps}",
            "optim.student.warmup=10",
            "student.ema.start=0",
            "student.ema.decay=0.9",
            "method.guidance_scale=1",
            *changes,
        ),
        program=("-m", "benchmarks.fine_tuning", f"--world={name}"),
    )


def field(config: Config, role: str, folder: Path, base: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return the outputs ``(times, clips, ...)`` for held-out renders of old captions, ``v`` and without ``base`` the
    unconditional ``null``."""
    device = torch.device("cpu")
    config.device = "cpu"
    data = config.data.build(seed=0, device=device, run_dir=Path(config.run_dir)).heldout()
    network, items = network_to_sample(config, role, folder, STEPS), [data[i] for i in range(64)]
    clean = torch.stack([item["latents"] for item in items])
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(5))
    condition = data.condition([item["caption"] for item in items])
    null = condition.null
    found: dict[str, list[torch.Tensor]] = {"v": []} | ({"null": []} if base is None else {})
    with open_mesh(config, network.plan, device) as mesh, torch.no_grad():
        student = network.loaded(mesh=mesh, device=device, data=data).method.roles[role]
        for at in TIMES:
            t = torch.full((len(clean),), at)
            x = Sample({VIDEO: (1 - at) * clean + at * noise})
            for name in found:
                found[name].append(student.velocity(x, t, condition if name == "v" else null, at=at).video)
    return {name: torch.stack(values) for name, values in found.items()}


def field_measures(v: torch.Tensor, base: Mapping[str, torch.Tensor]) -> dict[str, Measure]:
    """Compare the field of guidance of ``v`` with that of the base; means over clips and times. The error is over the
    times of high noise, as the guard's."""
    own, its = (x.flatten(2) for x in (v - base["null"], base["v"] - base["null"]))
    length = (own.norm(dim=-1) / its.norm(dim=-1)).mean(0)
    cosine = torch.nn.functional.cosine_similarity(own, its, dim=-1).mean(0)
    is_noisy = torch.tensor(TIMES) >= 0.5
    error = ((own - its).norm(dim=-1) / its.norm(dim=-1))[is_noisy].mean(0)
    pairs = {"field's length": length, "field's cosine": cosine, "field's error": error}
    return {
        name: Measure(value=float(x.mean()), standard_error=float(x.std() / len(x) ** 0.5), higher_is_better=True)
        for name, x in pairs.items()
    }


def share(right: Sequence[bool]) -> Measure:
    """Return a share with its standard error."""
    mean = float(np.mean(right))
    return Measure(value=mean, standard_error=(mean * (1 - mean) / len(right)) ** 0.5, higher_is_better=True)


def is_new_color(clip: np.ndarray) -> bool:
    """Whether the shape of a clip ``(T, H, W, 3)`` has the new color rather than a known one."""
    pixels = clip.reshape(-1, 3) / 255.0
    shown = pixels[pixels.max(-1) > 0.7]
    if len(shown) == 0:
        return False
    known = np.array([*(rgb for name, rgb in shape_scenes.RGB.items() if name != WORD), COLOR])
    distances = np.abs(known - shown.mean(0)).max(-1)
    return bool(distances.argmin() == len(known) - 1 and distances.min() < 0.2)


def measured(
    config: Config,
    role: str,
    folder: Path,
    cache: Path,
    base: Mapping[str, torch.Tensor] | None,
    clips: int,
    steps: int = STEPS,
) -> Row:
    """Measure a network at guidance 1, or read the measures from ``cache``."""
    if not cache.exists():
        with world("both"):
            data = config.data.build(seed=0, device=torch.device("cpu"), run_dir=Path(config.run_dir))
            old = [data.captions()[i * 5 % 64] for i in range(clips)]
            new = [new_captions()[i % 8] for i in range(clips // 2)]
            of_old, of_new = (clips_of(config, role, folder, steps, captions) for captions in (old, new))
            found = {"new word": share([is_new_color(clip) for clip in of_new])}
            kept = data.measure(of_old, old)
            found |= {name: kept[name] for name in MEASURED} | diversity(of_old, old)
            if base is not None:
                found |= field_measures(field(config, role, folder, base)["v"], base)
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps({name: asdict(value) for name, value in found.items()}))
    values = {name: Measure(**value) for name, value in json.loads(cache.read_text()).items()}
    return Row(name=role, steps=None, measures=values)


def make_clips(out: Path, base: Path) -> None:
    """Sample clips of the base, for the fit of a training adapter, unless they are there."""
    settings = ["experiment=quickstart_dmd2", "device=cpu", "mesh.cp=1", "method.guidance_scale=1", "batch_size=32"]
    roles = [f"{role}.checkpoint={base}" for role in ("teacher", "student", "fake")]
    command = [sys.executable, "-m", "distill.teacher_clips", *settings, *roles, f"run_dir={out}_run", str(out)]
    subprocess.run([*command, "--clips", "128", "--steps", str(STEPS)], cwd=ROOT, check=True)


def adapter_settings(lr: str) -> tuple[str, ...]:
    """Return the changes of the recipe for adapters that learn the new clips at the rate ``lr``."""
    return (f"optim.student.lr={lr}", "student.lora.rank=8", "batch_size=8", "method.caption_dropout=0")


def arm_runs(out: Path, base: Path, arm: str, lr: str, seed: int, steps: int) -> list[Run]:
    """Return the runs of one arm, in order."""
    cost, changes = ARMS[arm]
    folder = out / arm.replace(" ", "_").replace(",", "") / lr / str(seed)
    own = adapter_settings(lr)
    run = training("new", folder, base, round(steps / cost), *own, *changes, seed=seed)
    if arm != "training adapter":
        return [run]
    undone = training("undone", out / "undone" / lr / str(seed), base, round(steps / cost), *own, seed=seed)
    clips = out / "base_clips"
    undone = Run(**{**undone.__dict__, "changes": (*undone.changes, "data=encoded", f"data.path={clips}")})
    adapter = undone.folder / "export" / "student_lora"
    return [undone, Run(**{**run.__dict__, "changes": (*run.changes, f"student.training_adapter={adapter}")})]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning", description=__doc__.splitlines()[0])
    add_students(parser, "runs/fine_tuning", "arm")
    parser.add_argument("--rates", nargs="+", default=["1e-3", "3e-3"])
    parser.add_argument("--steps", type=int, default=160, help="plain steps of an arm's budget")
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--clips", type=int, default=128)
    parser.add_argument("--few-steps", action="store_true", help="fine-tune a few-step student")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    if args.few_steps:
        return compare_few_steps(args, out / "few_steps")
    teacher = training("wrong", out / "teacher", SHIPPED, args.base_steps, "optim.student.lr=5e-4")
    train_all([teacher], 1)
    its = teacher.folder / "export" / "student"
    distilled = (
        "optim.student.lr=5e-4",
        "method.keep_weight=1000",
        "method.caption_dropout=0.1",
    )
    base_run = training("guided", out / "base", its, args.base_steps // 2, *distilled)
    train_all([base_run], 1)
    base = base_run.folder / "export" / "student"
    make_clips(out / "base_clips", base)
    return compare(args, out, its, base, base_run)


def compare(args: argparse.Namespace, out: Path, teacher: Path, base: Path, base_run: Run) -> int:
    """Train and measure the arms, and print the table."""
    torch.set_num_threads(args.workers)
    config = base_run.config()
    if (out / "fields.pt").exists():
        fields = torch.load(out / "fields.pt")
    else:
        fields = field(config, "student", base, None)
        torch.save(fields, out / "fields.pt")
    rows = []
    for guidance in (1.0, GUIDANCE):
        config.method.guidance_scale = guidance
        cache = out / "measures" / f"teacher_{guidance:g}.json"
        rows.append(named(measured(config, "student", teacher, cache, None, args.clips), f"teacher, {guidance:g}"))
    config.method.guidance_scale = 1.0
    rows.append(named(measured(config, "student", base, out / "measures" / "base.json", fields, args.clips), "base"))
    print(table(rows), flush=True)
    found: dict[str, list[Row]] = {}
    for seed, lr, arm in product(range(args.seeds), args.rates, ARMS):
        runs = arm_runs(out, base, arm, lr, seed, args.steps)
        for run in runs:
            train_all([run], 1)
        run = runs[-1]
        student = run.folder / "export" / "student"
        row = measured(run.config(), "student", student, run.folder / "m.json", fields, args.clips)
        found.setdefault(f"{arm}, rate {lr}", []).append(row)
        print(table([named(row, f"{arm}, rate {lr}, seed {seed}")]).splitlines()[-1], flush=True)
    print(mean_table(found))
    return 0


def distillation(folder: Path, steps: int, seed: int, *changes: str) -> Run:
    """Return a run of DMD2 whose student and fake score are adapters, in the ``mixed`` :func:`world` if it has
    ``changes``."""
    lora = ("adapters=lora", "student.lora.rank=32", "fake.lora.rank=32", f"steps={steps}")
    program = ("-m", "benchmarks.fine_tuning", "--world=mixed") if changes else ("train.py",)
    return Run(method="dmd2", folder=folder, seed=seed, changes=(*lora, *changes), program=program)


def few_step_arms(out: Path, student: Run, lr: str, seed: int, steps: int) -> Iterator[tuple[str, Path, list[Run]]]:
    """Train ways in which a few-step ``student`` learns the new word; yield their names, weights and runs.

    All but the last have the network evaluations of ``steps`` plain steps:

    1. Plain flow matching of the student.
    2. The same of its base, whose adapter is then stacked with the student's.
    3. Half as many steps of the base, then DMD2 of the student from it, on mixed captions.
    """
    exports = student.folder / "export"

    def fit(name: str, base: Path, count: int) -> Run:
        run = training("new", out / name / lr / str(seed), base, count, *adapter_settings(lr), seed=seed)
        train_all([run], 1)
        return run

    plain = fit("plain", exports / "student", steps)
    yield "plain fit of the student", plain.folder / "export" / "student", [plain]
    base = ROOT / SHIPPED
    adapter = fit("adapter", base, steps)
    for weight in ("1", "0.5"):
        stacked = adapter.folder / f"stacked_{weight}"
        if not stacked.exists():
            parts = [str(exports / "student_lora"), str(adapter.folder / "export" / "student_lora"), str(base)]
            command = [sys.executable, "-m", "models.lora", "stack", *parts, str(stacked), "--weights", "1", weight]
            subprocess.run(command, cwd=ROOT, check=True)
        yield f"adapter of the base, stacked at {weight}", stacked, [adapter]
    half = fit("half", base, steps // 2)
    for teacher, budget in ((half, 0.5), (adapter, LONGER - 1)):
        its = teacher.folder / "export" / "student"
        roles = (f"teacher.checkpoint={its}", f"student.checkpoint={exports / 'student'}")
        folder = out / f"distilled_{budget:g}" / lr / str(seed)
        again = distillation(folder, round(steps * budget / DISTILL_COST), seed, *roles)
        train_all([again], 1)
        yield f"distilled from the fine-tuned base for {budget:g}", folder / "export" / "student", [teacher, again]


def compare_few_steps(args: argparse.Namespace, out: Path) -> int:
    """Train and measure the ways of :func:`few_step_arms`, and print the table."""
    torch.set_num_threads(args.workers)
    found: dict[str, list[Row]] = {}
    forward = clip_flops(compose_config(["experiment=quickstart_dmd2", f"run_dir={out}"]))
    for seed in range(args.seeds):
        student = distillation(out / "student" / str(seed), DISTILL_STEPS, seed)
        train_all([student], 1)
        config = student.config()

        def add(name: str, row: Row, runs: Sequence[Run] = ()) -> None:
            spent = Measure(sum(run.evaluations(forward) for run in runs) / 1e3, 0.0, higher_is_better=False)
            found.setdefault(name, []).append(Row(name=name, steps=None, measures={**row.measures, SPENT: spent}))
            print(table(found[name][-1:]).splitlines()[-1], flush=True)

        for steps in (STEPS, FEW_STEPS):
            cache = out / "measures" / f"base_{steps}.json"
            row = measured(config, "teacher", ROOT / SHIPPED, cache, None, args.clips, steps)
            add(f"base, {steps} steps", row)
        of_student = student.folder / "export" / "student"
        add("student", measured(config, "student", of_student, student.folder / "m.json", None, args.clips, FEW_STEPS))
        for lr in args.rates:
            for name, folder, runs in few_step_arms(out, student, lr, seed, args.steps):
                cache = runs[-1].folder / f"{folder.name}.json"
                row = measured(config, "student", folder, cache, None, args.clips, FEW_STEPS)
                add(f"{name}, rate {lr}", row, runs)
    print(mean_table(found))
    return 0


def mean_table(found: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of the means over seeds, by name."""
    return table([named(over_seeds(rows, name), name) for name, rows in found.items()])


def named(row: Row, name: str) -> Row:
    """Return ``row`` under another name."""
    return Row(name=name, steps=None, measures=row.measures)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("--world="):  # a training that this benchmark started
        chosen = sys.argv[1].split("=")[1]
        sys.argv = ["train.py", *sys.argv[2:]]
        with world(chosen):
            runpy.run_path("train.py", run_name="__main__")
    try:
        end_process(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
