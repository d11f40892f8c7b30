"""``python -m distill.sweep``, and ``train.py --multirun``: points checked, started one by one, and shown."""

from __future__ import annotations

import collections
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from distill.run_folder import held_run_dir, this_start
from distill.sweep.check import Checked, check_points, refuse_ours
from distill.sweep.folder import (
    FILE,
    PICTURE,
    TABLE,
    read_point,
    read_settings,
    refuse_another,
    refuse_foreign_points,
    rows,
    swept_before,
    write_json,
    write_settings,
)
from distill.sweep.job import PointTask, is_open
from distill.sweep.launcher import check_launcher, launch
from distill.sweep.outcome import REFUSED
from distill.sweep.picture import write_picture
from distill.sweep.points import parse_words
from distill.sweep.table import markdown, write_csv
from distill.sweep.torchrun import Arguments, parse_arguments
from fsdp_cp.errors import UserError
from fsdp_cp.launch import exit_code
from fsdp_cp.paths import user_path
from fsdp_cp.signals import Stopped, StopSignal
from fsdp_cp.words import counted

USAGE = """\
python -m distill.sweep [OPTIONS] experiment=NAME [key=value ...] key=A,B ...

Starts a torchrun job of train.py for each combination of the values, one after another, and writes sweep.csv,
sweep.json and sweep.png into sweep_dir= (runs/EXPERIMENT_sweep). Started again, it goes on where it stopped.

  key=A,B  key=range(6,33,8)  key=glob(NAME*)   Hydra's grammar of sweeps, in quotes for the shell
  --nproc-per-node N, and torchrun's others     handed on; N is this machine's number of GPUs, or 1
  --plan                                        the planner alone: nothing is trained
  --no-plan                                     no prediction beside the measurements, which may take minutes a point
  --prefix 'srun -n 2'                          words in front of each torchrun
  hydra/launcher=NAME hydra.launcher.KEY=VALUE  one of Hydra's launcher plugins (submitit_slurm)

docs/sweep.md says what is measured, and what a sweep sets."""


def main(arguments: list[str]) -> int:
    """Exit code 0; 2 with one line where nothing could run; 75 for a sweep that a signal stopped and that can go on."""

    def work() -> None:
        if {"-h", "--help"} & set(arguments):
            print(USAGE)
            return
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        with StopSignal():
            sweep(arguments)

    return exit_code(work)


def sweep(arguments: Sequence[str]) -> None:
    """Check all points, run those that are not done, and write the table and the picture.

    Raises:
        UserError: a mistake in what all points share, another sweep's folder, or every point refused.
        Stopped: by a signal; what is done is in the table.
    """
    given = parse_arguments(arguments)
    refuse_ours(given.words)
    folder = _folder(given)
    found = parse_words(given.words, swept_before(folder))
    refuse_another(read_settings(folder), found, given.torchrun, folder)
    check_launcher(given.hydra, folder)
    points = found.points()
    refuse_foreign_points(folder, read_settings(folder), (point.name for point in points))
    print(
        f"{counted(len(points), 'point')} of {counted(given.world, 'rank')} each (torchrun {' '.join(given.torchrun)});"
        " checking them",
        flush=True,
    )
    checked = check_points(found.fixed, points, world=given.world, planned=given.plan, elsewhere=bool(given.hydra))
    refused = [point for point in checked if point.refusal is not None]
    if len(refused) == len(checked):
        raise UserError(refused[0].refusal + _and_others(len(refused)))
    with held_run_dir(folder, "sweep_dir"):
        settings = write_settings(
            folder,
            read_settings(folder),
            sweep=found,
            torchrun=given.torchrun,
            prefix=given.prefix,
            world=given.world,
            points=checked,
            start=this_start(["python", "-m", "distill.sweep", *arguments]),
        )
        for point in refused:
            print(f"{point.point.name}: {REFUSED}: {point.refusal}")
        names = _open_points(folder, checked, given)
        done = len(checked) - len(refused) - len(names)
        if done:
            print(f"done already: {counted(done, 'point')}")
        task = PointTask(folder=folder, names=tuple(names), predict=given.predict, train=not given.plan)
        try:
            if names:
                launch(task, names, words=given.hydra, folder=folder)
        except Stopped as stopped:
            again = shlex.join(["python", "-m", "distill.sweep", *arguments])
            left = len(_open_points(folder, checked, given))
            raise Stopped(f"{stopped}; {counted(left, 'point')} left, and {again} goes on") from None
        finally:
            _write(folder, settings, arguments)
    print(f"\n{markdown(rows(folder, settings))}\n\nwritten to {folder}: {TABLE}, {FILE}, {PICTURE}", flush=True)
    if all(row.get("status") == REFUSED for row in rows(folder, settings)):
        raise UserError("every point was refused; sweep.csv has the reasons")


def _folder(given: Arguments) -> Path:
    if given.sweep_dir is not None:
        return user_path(given.sweep_dir, "sweep_dir")
    experiment = next((word.partition("=")[2] for word in given.words if word.startswith("experiment=")), "quickstart")
    return Path("runs", f"{experiment}_sweep" if experiment.isidentifier() else "sweep")


def _open_points(folder: Path, checked: Sequence[Checked], given: Arguments) -> list[str]:
    return [
        point.point.name
        for point in checked
        if point.refusal is None
        and is_open(read_point(folder, point.point.name), predict=given.predict, train=not given.plan)
    ]


def _and_others(count: int) -> str:
    return f" (and so for all {count} points)" if count > 1 else ""


def _write(folder: Path, settings: dict, arguments: Sequence[str]) -> None:
    """Table, JSON and picture of what there is by now."""
    table = rows(folder, settings)
    write_csv(folder / TABLE, table)
    write_json(folder / FILE, {**settings, "rows": table})
    counts = collections.Counter(row.get("status") or "not begun" for row in table)
    fixed = [word for word in settings["fixed"] if word.startswith("experiment=")]
    title = f"{' '.join(fixed) or 'quickstart'}, {settings['world']} ranks: " + ", ".join(
        f"{count} {status.replace('_', ' ')}" for status, count in counts.items()
    )
    write_picture(folder / PICTURE, table, title=title)
