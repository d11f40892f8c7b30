"""One point: the planner's process, then its torchrun job, in a folder of its own; and how both are ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.config.errors import CONFIGS
from distill.planning.files import FILE as PLAN_FILE
from distill.sweep.folder import POINT, TABLE, read_point, read_settings, rows, write_json
from distill.sweep.outcome import (
    DONE,
    INTERRUPTED,
    OUT_OF_MEMORY,
    PLANNED,
    REFUSED,
    RUNNING,
    classify,
    measurements,
    read_tail,
)
from distill.sweep.table import in_a_line, write_csv
from fsdp_cp.errors import UserError
from fsdp_cp.launch import outside_of_torchrun
from fsdp_cp.signals import end_with_parent

log = logging.getLogger(__name__)

TRAIN = CONFIGS.parent / "train.py"
OUTPUT, PLAN_OUTPUT = "output.txt", "plan.txt"
"""What the job's and the planner's processes print; ``log.txt`` is the run's own."""
FINISHED = (DONE, OUT_OF_MEMORY)
"""States of points that are not run again."""
_PATIENCE = 30.0
"""Seconds that torchrun has to clean up behind its workers."""


@dataclass(frozen=True, kw_only=True)
class PointTask:
    """What a launcher of Hydra's calls, here or on another machine: one point, by its name in ``sweep.json``."""

    folder: Path
    names: tuple[str, ...]
    """Points of this start, in their order."""
    predict: bool
    train: bool

    def __call__(self, config: Any) -> str:
        """Run the point that ``config.point`` names; returns its status."""
        name = str(config.point)
        row = run_point(self.folder, name, predict=self.predict, train=self.train)
        place = f"[{self.names.index(name) + 1}/{len(self.names)}]"
        print(f"{place} {name}: {in_a_line(row)}", flush=True)
        write_csv(self.folder / TABLE, rows(self.folder, read_settings(self.folder), ended=False))
        return row["status"]


def is_open(row: dict[str, Any], *, predict: bool, train: bool) -> bool:
    """Whether anything is left to be done for a point with this row."""
    return (train and row.get("status") not in FINISHED) or (predict and not _has_prediction(row))


def run_point(folder: Path, name: str, *, predict: bool, train: bool) -> dict[str, Any]:
    """Plan and train one point, each unless it has been already; returns its row, which ``point.json`` keeps.

    Args:
        folder: the sweep's.
        name: of the point.
        predict: ask the planner.
        train: start the torchrun job.
    """
    settings = read_settings(folder)
    about, run_dir = settings["points"][name], folder / name
    run_dir.mkdir(parents=True, exist_ok=True)
    row = read_point(folder, name)
    words = [*about["words"], f"run_dir={run_dir}"]
    if predict and not _has_prediction(row):
        command = [sys.executable, str(TRAIN), *words, "plan=true", f"world={settings['world']}"]
        code, _ = _run(command, run_dir / PLAN_OUTPUT)
        row |= _prediction(code, run_dir, about["batch_size"])
        write_json(run_dir / POINT, row)
    if train and row.get("status") not in FINISHED:
        command = [*settings["prefix"], sys.executable, "-m", "torch.distributed.run", *settings["torchrun"]]
        write_json(run_dir / POINT, row | {"status": RUNNING, "reason": None})
        try:
            code, seconds = _run([*command, str(TRAIN), *words], run_dir / OUTPUT)
        except BaseException as stopped:  # a signal: the table says so, whatever becomes of this process
            write_json(run_dir / POINT, row | {"status": INTERRUPTED, "reason": str(stopped) or type(stopped).__name__})
            raise
        status, reason = classify(code, read_tail(run_dir / OUTPUT))
        row |= {"status": status, "reason": reason, "seconds": round(seconds, 1)}
        if status == DONE:
            row |= measurements(run_dir, warm_up=about["warm_up"], measured=about["measured"])
    elif not train and row.get("status") not in FINISHED:
        refused = row.get("plan_reason")
        row |= {"status": PLANNED if refused is None else REFUSED, "reason": refused}
    write_json(run_dir / POINT, row)
    return row


def _has_prediction(row: dict[str, Any]) -> bool:
    return row.get("predicted_allocated_gib") is not None


def _prediction(code: int, run_dir: Path, batch_size: int | None) -> dict[str, Any]:
    """The planner's part of a row."""
    names = ("predicted_allocated_gib", "predicted_tokens_per_second", "predicted_mfu")
    if code != 0:
        _, reason = classify(code, read_tail(run_dir / PLAN_OUTPUT))
        return {**dict.fromkeys(names), "plan_reason": reason}
    plan = json.loads((run_dir / PLAN_FILE).read_text())
    seconds = plan["seconds_per_step"]
    rate = None if seconds is None or batch_size is None else plan["tokens"] * batch_size / seconds
    return dict(zip(names, (plan["allocated_gib"], rate, plan["mfu"]), strict=True)) | {"plan_reason": None}


def _run(command: Sequence[str], output: Path) -> tuple[int, float]:
    """Exit code and seconds of a process, its output in a file; ended with all that it started when this one is told.

    Raises:
        UserError: a program that is not there, or a file that cannot be written.
    """
    environment = outside_of_torchrun()
    started = time.monotonic()
    try:
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C comes to the sweep alone, which ends its point in order
                # A sweep that is killed leaves no torchrun behind, in a folder that the next start wants.
                preexec_fn=end_with_parent,
            )
    except OSError as error:
        raise UserError(
            f"{command[0]} cannot be started ({error.strerror}); {output} was to have its output"
        ) from error
    try:
        return process.wait(), time.monotonic() - started
    except BaseException:
        end_processes(process)
        raise


def end_processes(process: subprocess.Popen) -> None:
    """End a job that is of no use any more: its workers at once, torchrun when it has cleaned up.

    Told by SIGTERM alone, the workers would finish their step and save a checkpoint, which may be hundreds of GB and
    which nobody wants of a point that is run afresh. torchrun puts each into a session of its own, so that no signal to
    a process group reaches them.
    """
    process.terminate()
    for each in _descendants(process.pid):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            pass
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _descendants(parent: int) -> list[int]:
    """Processes that ``parent`` started, and theirs; Linux alone."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            above = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        children.setdefault(above, []).append(int(entry.parent.name))
    found, open_ones = [], [parent]
    while open_ones:
        below = children.get(open_ones.pop(), [])
        found += below
        open_ones += below
    return found
