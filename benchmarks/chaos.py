"""Is anything lost when ranks die? ``python -m benchmarks.chaos`` kills a training run again and again.

A tiny run on two ranks is trained undisturbed, then again while one of its ranks, by chance, gets SIGKILL: half of the
kills at a moment by chance, a quarter while a checkpoint is written, a quarter while the student is exported. After
each the same command is started again. A run takes as many kills as ``--kills-a-run`` before it may end; then another
begins. The ended runs must be the undisturbed one bit for bit, and no start may go on from an earlier checkpoint than
the newest. The exit code is 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arguments import at_least_1
from benchmarks.distillation import ROOT
from benchmarks.faults import (
    EVERY,
    SETTINGS,
    STEPS,
    Start,
    differences,
    end_all,
    leftovers,
    lives,
    new_folder,
    newest,
    processes,
    reached,
)
from fsdp_cp.errors import UserError

RANKS = 2
MOMENTS = ("any moment", "a checkpoint", "the export")
"""What a kill is aimed at."""
PATIENCE = 90.0
"""Seconds in which torchrun has to end when a rank has died; it gives the others 30 to end by themselves."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """How long the parts of an undisturbed run took, in seconds; kills are timed by it."""

    start_up: float
    """From the workers' appearance to the first step's end."""
    step: float
    checkpoint: float
    export: float

    def left(self, steps: int) -> float:
        """From the workers' appearance to the end, with so many steps to do."""
        return self.start_up + steps * self.step + self.export


@dataclass(kw_only=True)
class Kill:
    """One kill and what became of the run."""

    number: int
    run: int
    rank: int
    aim: str
    seconds: float
    """After the start of torchrun."""
    phase: str
    step: int
    """The last one in the log."""
    newest: int
    """The newest complete checkpoint's step when the rank was killed."""
    kept: int = 0
    """The same when all processes had ended: what a rank that lived on may still have published."""
    next: int | None = None
    """The step from which a later start went on."""
    faults: list[str] = field(default_factory=list)

    def judge(self, from_step: int) -> None:
        """Hold the next start against what was there to go on from."""
        self.next = from_step
        if from_step != self.kept:
            self.faults.append(f"went on from step {from_step}")
        if self.kept < self.newest:
            self.faults.append("the newest checkpoint is gone")
        if self.step - self.kept > 2 * EVERY:  # one that is being written beside the training is not there yet
            self.faults.append(f"{self.step - self.kept} steps lost")

    def line(self) -> str:
        """Of the table."""
        kept = f"{self.newest}" if self.kept == self.newest else f"{self.newest}, then {self.kept}"
        verdict = "; ".join(self.faults) or ("ok" if self.next is not None else "never went on")
        cells = (self.number, self.run, self.rank, self.aim, f"{self.seconds:.1f}", self.phase, self.step, kept)
        return f"| {' | '.join(map(str, cells))} | {'' if self.next is None else self.next} | {verdict} |"


def undisturbed(run_dir: Path, log: Path) -> Timeline:
    """Train it, and see what takes how long.

    Raises:
        RuntimeError: it failed.
    """
    checkpoints: list[float] = []
    with Start(run_dir, SETTINGS, log=log) as start:
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
    """What the next kill of a run at step ``at`` is aimed at; ``None`` if nothing that is left can be.

    The export comes last: after it a run has no steps to do, and no checkpoint to write.

    Args:
        left: the kills that are left, of all runs.
        at: the newest checkpoint's step.
        is_late: is it the turn of the run's exports?
        chance: what chooses.
    """
    sooner = [aim for aim in left.elements() if aim == "any moment" or (aim == "a checkpoint" and at < STEPS)]
    if left["the export"] and (is_late or at == STEPS or not sooner):
        return "the export"
    return chance.choice(sooner) if sooner else None


def wait_for(start: Start, aim: str, at: int, times: Timeline, chance: random.Random) -> bool:
    """Wait for the moment; false if the run ended before."""
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
        delay = chance.uniform(0, times.export / 2)  # what comes after the student is a file of a few lines
    deadline = start.age() + delay
    return not start.until(lambda: start.age() >= deadline) or start.process.poll() is None


def kill(start: Start, number: int, run: int, aim: str, chance: random.Random) -> Kill | None:
    """Kill a rank and wait for torchrun's end; ``None`` if there was no rank any more."""
    ranks = start.ranks()
    if len(ranks) < RANKS:
        return None
    rank = chance.choice(sorted(ranks))
    try:
        os.kill(ranks[rank], signal.SIGSTOP)  # so that what is looked at is what the kill meets
        if not lives(ranks[rank]):  # it had come to its end by itself, and torchrun had not looked yet
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
    """One run with up to ``most`` kills, taken from ``left`` and added to ``kills``; what else went wrong."""
    own: list[Kill] = []
    run = 1 + max((each.run for each in kills), default=0)
    exports = round(most * left["the export"] / left.total())  # this run's share of them
    while True:
        at = newest(run_dir)
        aim = choose(left, at, len(own) >= most - exports, chance) if len(own) < most else None
        with Start(run_dir, SETTINGS, log=log) as start:
            done = None
            if aim is not None and wait_for(start, aim, at, times, chance):
                done = kill(start, len(kills) + 1, run, aim, chance)
            code = start.process.wait()
            from_step = start.from_step()
        if from_step is not None:
            for earlier in own:
                if earlier.next is None:
                    earlier.judge(from_step)
        if done is None:
            break
        left[aim] -= 1
        own.append(done)
        kills.append(done)
        # The verdict comes with the next start.
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
    """Markdown; a line for each kill."""
    titles = ("kill", "run", "rank", "aimed at", "s after start", "met it", "at step", "newest checkpoint")
    lines = [f"| {' | '.join(titles)} | next start from | verdict |", "|---" * (len(titles) + 2) + "|"]
    return "\n".join([*lines, *(each.line() for each in kills)])


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
        # Runs of the same length: no last one with a kill or two, of which none can meet the export.
        remaining = -(-left.total() // args.kills_a_run)
        faults = disturbed(run_dir, out / f"run_{tries}.log", left, kills, -(-left.total() // remaining), times, chance)
        faults += differences(run_dir, truth)
        faults += [f"left behind: {name}" for name in leftovers(run_dir)]
        good &= not faults
        ends.append(f"- run {tries}: {'; '.join(faults) or 'the same as the undisturbed one, bit for bit'}")
    good &= not left.total() and all(each.next is not None and not each.faults for each in kills)
    parts = (f"checkpoint {times.checkpoint:.3f} s", f"export {times.export:.3f} s", f"step {times.step:.2f} s")
    met = ", ".join(f"{phase} {count}" for phase, count in Counter(each.phase for each in kills).most_common())
    text = "\n".join(
        [
            table(kills),
            "",
            *ends,
            "",
            f"{len(kills)} kills over {tries} runs of {STEPS} steps in {(time.monotonic() - began) / 60:.1f} minutes"
            f" ({', '.join(parts)}; met: {met}): {'nothing was lost' if good else '**something is wrong**'}.",
        ]
    )
    (out / "chaos.md").write_text(text + "\n")
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else torchrun and its ranks would outlive this program
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
