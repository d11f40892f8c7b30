"""Test of recovery from dead ranks: ``python -m benchmarks.chaos`` kills a training run again and again.

First trains a tiny run on two ranks undisturbed. Then trains it again and sends SIGKILL to random ranks: half of the
kills at a random moment, a quarter during a checkpoint, a quarter during the export of the student. After each kill the
same command starts again. A run gets ``--kills-a-run`` kills before it may end; then the next run begins. The ended
runs must equal the undisturbed run bit for bit, and every start must resume from the newest checkpoint. Otherwise the
exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from benchmarks.arguments import at_least_1
from benchmarks.distillation import ROOT
from distill.run.folder import STARTS
from fsdp_cp.checkpoint.folder import reader, saved_steps, step_folder
from fsdp_cp.errors import UserError

RANKS = 2
STEPS, EVERY, KEEP = 24, 3, 2
SETTINGS = (
    "experiment=quickstart",
    "device=cpu",
    "batch_size=2",
    f"steps={STEPS}",
    f"checkpoint.every={EVERY}",
    f"checkpoint.keep={KEEP}",
    "log.every=1",
    "sample.every=0",
    "sample.at_end=false",
)
"""Overrides of a run of a few seconds that often writes checkpoints and ends with the export."""
PROGRESS = ("unlogged", "seconds")
"""Keys of a checkpoint's ``state.json`` that note elapsed time and therefore differ between equal runs."""
MOMENTS = ("any moment", "a checkpoint", "the export")
"""Targets of kills."""
PATIENCE = 90.0
"""Seconds in which torchrun must end after the death of a rank. It gives the other ranks 30 seconds to end."""


def new_folder(folder: Path) -> Path:
    """Make ``folder`` and return its absolute path.

    Raises:
        UserError: the folder is not empty.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder} is not empty; remove it or give another")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment() -> dict[str, str]:
    """Return this process's environment without torchrun's variables, with one thread for each rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in names} | {"OMP_NUM_THREADS": "1"}


def processes(run_dir: Path) -> dict[int, int | None]:
    """Return the rank of every living process of the run in ``run_dir``, by process id; ``None`` for a torchrun."""
    ranks_by_process: dict[int, int | None] = {}
    word = f"run_dir={run_dir}"
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word not in (entry / "cmdline").read_text(errors="replace").split("\0"):
                continue
            variables = (entry / "environ").read_text(errors="replace").split("\0")
        except OSError:  # the process has ended
            continue
        ranks = [text.removeprefix("RANK=") for text in variables if text.startswith("RANK=")]
        ranks_by_process[int(entry.name)] = int(ranks[0]) if ranks else None
    return ranks_by_process


def lives(process: int) -> bool:
    """Return whether the process runs. An ended process stays listed until its parent reads its exit code."""
    try:
        # "PID (NAME) STATE ...", where NAME may contain any character
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end_all(run_dir: Path) -> None:
    """Send SIGKILL to every process of the run, since torchrun's workers have their own sessions and outlive it."""
    for process in processes(run_dir):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Start:
    """Context of one start of ``train.py`` on two ranks. No process of the start outlives the context.

    Args:
        run_dir: the run directory.
        log: file to which the output is appended.
    """

    def __init__(self, run_dir: Path, log: Path):
        self.run_dir = run_dir
        self.began, self._began_ns = time.monotonic(), time.time_ns()
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [*torchrun, "train.py", *SETTINGS, f"run_dir={run_dir}"],
                cwd=ROOT,
                env=environment(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C then reaches only this program, which ends all processes
            )

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            end_all(self.run_dir)
            self.process.wait()

    def age(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.began

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> bool:
        """Wait for ``condition`` and return ``True``, or ``False`` if torchrun ends first.

        Raises:
            RuntimeError: neither happened within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing happened in {seconds:.0f} s in {self.run_dir}")
            time.sleep(0.002)  # short: a checkpoint of the tiny model takes a few dozen such intervals
        return True

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the workers by rank."""
        return {rank: process for process, rank in processes(self.run_dir).items() if rank is not None}

    def _is_new(self, path: Path) -> bool:
        try:
            return path.stat().st_ctime_ns > self._began_ns
        except OSError:
            return False

    def from_step(self) -> int | None:
        """Return the step from which this start resumes; ``None`` before the start has recorded it."""
        if not self._is_new(self.run_dir / STARTS):
            return None
        lines = (self.run_dir / STARTS).read_text().splitlines()
        return json.loads(lines[-1])["from_step"] if lines else None

    def writes_checkpoint(self, step: int | None = None) -> bool:
        """Return whether this start is writing a checkpoint, or the checkpoint of ``step``."""
        pattern = "step_*.tmp" if step is None else f"step_{step:08d}.tmp"
        return any(self._is_new(path) for path in (self.run_dir / "checkpoints").glob(pattern))

    def exports(self) -> bool:
        """Return whether this start is writing the export."""
        return any(self._is_new(path) for path in (self.run_dir / "export").glob(".*.unfinished_*"))

    def exported(self) -> bool:
        """Return whether this start has written the last file of the export."""
        return self._is_new(self.run_dir / "export" / "scheduler")


def newest(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    return max(saved_steps(run_dir / "checkpoints"), default=0)


def losses(run_dir: Path) -> list[dict[str, float]]:
    """Return step, losses and gradient norms of each complete line of ``metrics.jsonl``."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except OSError:
        return []
    lines = [json.loads(line) for line in text.split("\n")[:-1] if line.endswith("}")]
    return [{k: v for k, v in line.items() if k == "step" or k.endswith(("/loss", "/grad_norm"))} for line in lines]


def reached(run_dir: Path) -> int:
    """Return the last step in ``metrics.jsonl``."""
    return max((line["step"] for line in losses(run_dir)), default=0)


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load every tensor of a checkpoint: weights and optimizer states."""
    saved = reader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in saved.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process loads it
        dcp.load(tensors, storage_reader=reader(checkpoint), no_dist=True)
    return tensors


def _differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str) -> Iterator[str]:
    """Yield a line if names or bytes of the tensors differ."""
    if ours.keys() != theirs.keys():
        yield f"{what}: {len(ours.keys() ^ theirs.keys())} tensors are in one alone"
    # Compare bytes: equal NaNs must be equal, and 0 and -0 must differ.
    bad = [
        name
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name].dtype != theirs[name].dtype
        or not torch.equal(ours[name].reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
    ]
    if bad:
        yield f"{what}: {len(bad)} of {len(ours)} tensors differ, {bad[0]} the first"


def _state(checkpoint: Path) -> dict[str, Any]:
    """Return the content of ``state.json`` that is equal in equal runs."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["settings"]["run_dir"]
    return {key: value for key, value in state.items() if key not in PROGRESS}


def differences(run_dir: Path, truth: Path) -> list[str]:
    """Return one line for each difference from an undisturbed run, compared bit for bit."""
    faults = []
    if losses(run_dir) != losses(truth):
        faults.append("metrics.jsonl: the losses differ")
    if [line["step"] for line in losses(run_dir)] != list(range(1, newest(truth) + 1)):
        faults.append("metrics.jsonl: not every step once")
    if newest(run_dir) != newest(truth):
        return [*faults, f"the newest checkpoint is of step {newest(run_dir)}, not {newest(truth)}"]
    ours, theirs = (step_folder(folder / "checkpoints", newest(truth)) for folder in (run_dir, truth))
    faults += _differing(_tensors(ours), _tensors(theirs), "the newest checkpoint")
    if _state(ours) != _state(theirs):
        faults.append("the newest checkpoint: state.json differs")
    files = sorted(path.relative_to(truth) for path in (truth / "export").rglob("*") if path.is_file())
    for file in files:
        if not (run_dir / file).is_file():
            faults.append(f"{file} is missing")
        elif file.suffix == ".safetensors":
            faults += _differing(load_file(run_dir / file), load_file(truth / file), str(file))
    return faults


def leftovers(run_dir: Path) -> list[str]:
    """Return the names of partial checkpoints and exports, and a message if more than ``KEEP`` checkpoints are left."""
    checkpoints = run_dir / "checkpoints"
    paths = [path for pattern in ("*.tmp", "left_*") for path in checkpoints.glob(pattern)]
    paths += [path for path in checkpoints.glob("step_*[0-9]") if not (path / "state.json").is_file()]
    exports = (".*unfinished_*", ".*replaced_*", ".*removed_*", "*_kept_*")
    paths += [path for pattern in exports for path in run_dir.rglob(pattern)]
    paths += [path for pattern in (".shared_*", ".*.tmp", "*.tmp") for path in run_dir.glob(pattern)]
    names = [str(path.relative_to(run_dir)) for path in sorted(set(paths))]
    if len(saved_steps(checkpoints)) > KEEP:
        names.append(f"{len(saved_steps(checkpoints))} checkpoints, of which {KEEP} are to be kept")
    return names


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Duration of the parts of an undisturbed run, in seconds, by which kills are timed."""

    start_up: float
    """Seconds from the appearance of the workers to the end of the first step."""
    step: float
    checkpoint: float
    export: float

    def left(self, steps: int) -> float:
        """Return the seconds from the appearance of the workers to the end, for a start with ``steps`` steps."""
        return self.start_up + steps * self.step + self.export


@dataclass(kw_only=True)
class Kill:
    """Record of one kill and of the next start."""

    number: int
    run: int
    rank: int
    aim: str
    seconds: float
    """Seconds after the start of torchrun."""
    phase: str
    step: int
    """Last step in the log."""
    newest: int
    """Step of the newest complete checkpoint at the kill."""
    kept: int = 0
    """Step of the newest complete checkpoint when all processes had ended. A surviving rank may publish one."""
    next: int | None = None
    """Step from which the next start resumed."""
    faults: list[str] = field(default_factory=list)

    def judge(self, from_step: int) -> None:
        """Check that the next start resumed from the newest checkpoint."""
        self.next = from_step
        if from_step != self.kept:
            self.faults.append(f"went on from step {from_step}")
        if self.kept < self.newest:
            self.faults.append("the newest checkpoint is gone")
        if self.step - self.kept > 2 * EVERY:  # an asynchronous checkpoint may not be complete yet
            self.faults.append(f"{self.step - self.kept} steps lost")

    def line(self) -> str:
        """Return the line of the table."""
        kept = f"{self.newest}" if self.kept == self.newest else f"{self.newest}, then {self.kept}"
        verdict = "; ".join(self.faults) or ("ok" if self.next is not None else "never went on")
        cells = (self.number, self.run, self.rank, self.aim, f"{self.seconds:.1f}", self.phase, self.step, kept)
        return f"| {' | '.join(map(str, cells))} | {'' if self.next is None else self.next} | {verdict} |"


def undisturbed(run_dir: Path, log: Path) -> Timeline:
    """Train the undisturbed run, and return the duration of its parts.

    Raises:
        RuntimeError: a failed run.
    """
    checkpoints: list[float] = []
    with Start(run_dir, log) as start:
        start.until(lambda: len(start.ranks()) == RANKS)
        appeared = start.age()
        start.until(lambda: reached(run_dir) >= 1)
        first = start.age()
        while start.until(lambda: start.writes_checkpoint() or start.exports()) and not start.exports():
            began = start.age()
            start.until(lambda: not start.writes_checkpoint())
            checkpoints.append(start.age() - began)
        exporting = start.age()
        start.until(start.exported)
        exported = start.age()
        if start.process.wait() != 0 or not checkpoints:
            raise RuntimeError(f"the undisturbed run failed; see {log}")
    return Timeline(
        start_up=first - appeared,
        step=(exporting - first) / (STEPS - 1),
        checkpoint=statistics.median(checkpoints),
        export=exported - exporting,
    )


def choose(left: Counter[str], at: int, is_late: bool, chance: random.Random) -> str | None:
    """Return the target of the next kill of a run at step ``at``; ``None`` if no remaining target is possible.

    Exports come last: after an export, a run has no steps and no checkpoints left.

    Args:
        left: the remaining kills of all runs, by target.
        at: step of the newest checkpoint.
        is_late: whether the run has had all its other kills.
        chance: source of randomness.
    """
    sooner = [aim for aim in left.elements() if aim == "any moment" or (aim == "a checkpoint" and at < STEPS)]
    if left["the export"] and (is_late or at == STEPS or not sooner):
        return "the export"
    return chance.choice(sooner) if sooner else None


def wait_for(start: Start, aim: str, at: int, times: Timeline, chance: random.Random) -> bool:
    """Wait for the moment of the kill. Return ``False`` if the run ended first."""
    if not start.until(lambda: len(start.ranks()) == RANKS):
        return False
    if aim == "any moment":
        delay = chance.uniform(0, times.left(STEPS - at))
    elif aim == "a checkpoint":
        coming = [step for step in range(1, STEPS + 1) if step > at and step % EVERY == 0]
        step = chance.choice(coming)
        if not start.until(lambda: start.writes_checkpoint(step)):
            return False
        delay = chance.uniform(0, times.checkpoint)
    else:
        if not start.until(start.exports):
            return False
        delay = chance.uniform(0, times.export / 2)  # the first half: after the student only a tiny file is written
    deadline = start.age() + delay
    return not start.until(lambda: start.age() >= deadline) or start.process.poll() is None


def kill(start: Start, number: int, run: int, aim: str, chance: random.Random) -> Kill | None:
    """Kill a rank and wait for the end of torchrun. Return ``None`` if the ranks have already ended."""
    ranks = start.ranks()
    if len(ranks) < RANKS:
        return None
    rank = chance.choice(sorted(ranks))
    try:
        os.kill(ranks[rank], signal.SIGSTOP)  # freeze the rank, to record the state that the kill meets
        if not lives(ranks[rank]):  # it had ended by itself, and torchrun had not noticed yet
            return None
        if start.from_step() is None:
            phase = "starting"
        elif start.writes_checkpoint():
            phase = "writing a checkpoint"
        elif start.exports():
            phase = "exporting"
        else:
            phase = "exported" if start.exported() else "training"
        done = Kill(
            number=number,
            run=run,
            rank=rank,
            aim=aim,
            seconds=start.age(),
            phase=phase,
            step=reached(start.run_dir),
            newest=newest(start.run_dir),
        )
        os.kill(ranks[rank], signal.SIGKILL)
    except ProcessLookupError:
        return None
    deadline = time.monotonic() + PATIENCE
    while start.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if start.process.poll() is None:
        done.faults.append(f"torchrun lived on for {PATIENCE:.0f} s")
    elif start.process.returncode == 0:
        done.faults.append("torchrun ended with 0")
    elif processes(start.run_dir):
        done.faults.append(f"{len(processes(start.run_dir))} processes lived on")
    end_all(start.run_dir)
    start.process.wait()
    done.kept = newest(start.run_dir)
    return done


def disturbed(
    run_dir: Path, log: Path, left: Counter[str], kills: list[Kill], most: int, times: Timeline, chance: random.Random
) -> list[str]:
    """Make one run with up to ``most`` kills, moved from ``left`` to ``kills``. Return other faults of the run."""
    run_kills: list[Kill] = []
    run = 1 + max((earlier.run for earlier in kills), default=0)
    exports = round(most * left["the export"] / left.total())  # this run's share of the kills at an export
    while True:
        at = newest(run_dir)
        aim = choose(left, at, len(run_kills) >= most - exports, chance) if len(run_kills) < most else None
        with Start(run_dir, log) as start:
            done = None
            if aim is not None and wait_for(start, aim, at, times, chance):
                done = kill(start, len(kills) + 1, run, aim, chance)
            code = start.process.wait()
            from_step = start.from_step()
        if from_step is not None:
            for earlier in run_kills:
                if earlier.next is None:
                    earlier.judge(from_step)
        if done is None:
            break
        left[aim] -= 1
        run_kills.append(done)
        kills.append(done)
        # The next start completes the verdict.
        print(
            f"kill {done.number}: rank {done.rank} of run {done.run} after {done.seconds:.1f} s, {done.phase},"
            f" step {done.step}",
            file=sys.stderr,
            flush=True,
        )
    faults = [f"its last start ended with {code}"] if code else []
    if processes(run_dir):
        faults.append(f"processes {sorted(processes(run_dir))} lived on")
        end_all(run_dir)
    return faults


def table(kills: list[Kill]) -> str:
    """Return a Markdown table with a line for each kill."""
    titles = ("kill", "run", "rank", "aimed at", "s after start", "met it", "at step", "newest checkpoint")
    lines = [f"| {' | '.join(titles)} | next start from | verdict |", "|---" * (len(titles) + 2) + "|"]
    return "\n".join([*lines, *(kill.line() for kill in kills)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=at_least_1, default=50, metavar="N", help="runs that are killed: starts")
    parser.add_argument("--kills-a-run", type=at_least_1, default=8, metavar="N", help="before it may end")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments; what they meet depends on the host")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="new folder: runs, logs and chaos.md")
    args = parser.parse_args(argv)
    out, began, chance = new_folder(args.out), time.monotonic(), random.Random(args.seed)
    truth = out / "undisturbed"
    times = undisturbed(truth, out / "undisturbed.log")
    quarter = args.runs // 4
    left = Counter(dict(zip(MOMENTS, (args.runs - 2 * quarter, quarter, quarter), strict=True)))
    kills: list[Kill] = []
    ends, good, tries = [], True, 0
    while left.total() and tries < 2 * args.runs:
        tries += 1
        run_dir = out / f"run_{tries}"
        # Distribute the kills evenly: a last run with one or two kills could not have one at the export.
        remaining = -(-left.total() // args.kills_a_run)
        faults = disturbed(run_dir, out / f"run_{tries}.log", left, kills, -(-left.total() // remaining), times, chance)
        faults += differences(run_dir, truth)
        faults += [f"left behind: {name}" for name in leftovers(run_dir)]
        good &= not faults
        ends.append(f"- run {tries}: {'; '.join(faults) or 'the same as the undisturbed one, bit for bit'}")
    good &= not left.total() and all(kill.next is not None and not kill.faults for kill in kills)
    durations = (f"checkpoint {times.checkpoint:.3f} s", f"export {times.export:.3f} s", f"step {times.step:.2f} s")
    met = ", ".join(f"{phase} {count}" for phase, count in Counter(kill.phase for kill in kills).most_common())
    text = "\n".join(
        [
            table(kills),
            "",
            *ends,
            "",
            f"{len(kills)} kills over {tries} runs of {STEPS} steps in {(time.monotonic() - began) / 60:.1f} minutes"
            f" ({', '.join(durations)}; met: {met}): {'nothing was lost' if good else '**something is wrong**'}.",
        ]
    )
    (out / "chaos.md").write_text(text + "\n")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise torchrun and its ranks outlive this program
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
