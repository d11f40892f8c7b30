"""``python -m distill.sweep`` and ``train.py --multirun``: check all points, run them in turn, write the table."""

import argparse
import csv
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from distill.run.folder import STARTS, held_run_dir
from distill.sweep.job import DONE, OUT_OF_MEMORY, REFUSED, plan_point, train_point
from distill.sweep.points import Point, check_points, parse_words, short_keys
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError, counted
from fsdp_cp.files.atomic_file import atomic_path, write_text
from fsdp_cp.files.foreign import refuse_foreign
from fsdp_cp.launch import exit_code
from fsdp_cp.runtime.signals import Stopped, StopSignal

USAGE = """\
python -m distill.sweep [OPTIONS] experiment=NAME [key=value ...] key=A,B ...

Run a torchrun job of train.py for each combination of the values, one after another, and write sweep.csv, sweep.json
and sweep.png into sweep_dir= (runs/EXPERIMENT_sweep). The same command resumes a sweep that was stopped.

  key=A,B  key=range(6,33,8)                    Hydra's grammar of sweeps, in quotes for the shell
  --nproc-per-node N, and torchrun's others     options of each torchrun; N is this machine's number of GPUs, or 1
  --plan                                        run the planner only; nothing is trained
  --no-plan                                     skip the predictions, which may take minutes a point
  --prefix 'srun -n 2'                          words in front of each torchrun

docs/planning.md says what is measured, and which settings a sweep sets."""
FILE, TABLE, PICTURE = "sweep.json", "sweep.csv", "sweep.png"
PLANNED, INTERRUPTED = "planned", "interrupted"
_FINISHED = (DONE, OUT_OF_MEMORY)
"""Statuses of points that do not run again."""
_PRINTED = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "allocated_gib": "{:.2f} GiB",
    "predicted_allocated_gib": "{:.2f} GiB predicted",
}
"""Formats of the values that are printed after each point."""
_MADE_BY = "fsdp_cp sweep"


def main(arguments: list[str]) -> int:
    """Run a sweep; return 0, 2 for a mistake of the user, or 75 if a signal stopped it, to be resumed."""

    def work() -> None:
        if {"-h", "--help"} & set(arguments):
            print(USAGE)
            return
        logging.basicConfig(level=logging.ERROR)  # each point's run repeats the warnings of the checks
        with StopSignal():
            sweep(arguments)

    return exit_code(work)


def sweep(arguments: Sequence[str]) -> None:
    """Check all points, run the unfinished ones, and write table and picture, also after a signal (``Stopped``)."""
    options = parse_arguments(arguments)
    fixed, swept = parse_words(options.settings)
    folder = options.folder
    about = {"made_by": _MADE_BY, "fixed": fixed, "swept": list(swept), "world": options.world}
    known = read_rows(folder, about)
    print(f"checking the points; each is {shlex.join(options.launcher)} train.py ...", flush=True)
    points = check_points(fixed, swept, world=options.world, planned=options.plan)
    if all(point.refusal is not None for point in points):
        raise UserError(f"{points[0].refusal} (all points are refused: {len(points)})")
    new = [point.name for point in points if point.name not in known]
    if foreign := [name for name in new if (folder / name).exists()]:
        raise UserError(f"sweep_dir={folder} contains {foreign[0]}, which no sweep wrote; choose a new directory")
    with held_run_dir(folder, "sweep_dir"):
        rows = read_rows(folder, about)  # read again under the lock: another sweep may have ended meanwhile
        for point in points:
            row = rows.setdefault(point.name, {"name": point.name, "overrides": point.overrides, "status": None})
            _add_refusal(row, point)

        def save() -> None:
            write_text(folder / FILE, json.dumps(about | {"rows": [*rows.values()]}, indent=1) + "\n")
            write_csv(folder / TABLE, [*rows.values()])

        waiting = [point for point in points if point.refusal is None and not _is_done(rows[point.name], options)]
        print(f"{counted(len(waiting), 'point')} of {len(points)} to run", flush=True)
        try:
            for number, point in enumerate(waiting, 1):
                save()
                row = rows[point.name]
                _run_point(point, row, options, save)
                print(f"[{number}/{len(waiting)}] {point.name}: {_in_words(row)}", flush=True)
        except Stopped as stopped:
            left = sum(not _is_done(rows[point.name], options) for point in waiting)
            raise Stopped(f"{stopped}; {counted(left, 'point')} left, the same command resumes the sweep") from None
        finally:
            save()
            title = f"{folder.name}, {counted(options.world, 'rank')}; cross: out of memory"
            write_picture(folder / PICTURE, [*rows.values()], title=title)
    print(f"wrote to {folder}: {TABLE}, {FILE}, {PICTURE}", flush=True)
    if all(row["status"] == REFUSED for row in rows.values()):
        raise UserError(f"all points were refused; {TABLE} has the reasons")


def _add_refusal(row: dict[str, Any], point: Point) -> None:
    """Note in an unfinished row the point's tokens, and why a run refuses it."""
    if row["status"] in _FINISHED:
        return
    row |= {"tokens": point.tokens, "reason": point.refusal}
    if point.refusal is not None:
        row["status"] = REFUSED


def _run_point(point: Point, row: dict[str, Any], options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Plan and train a point as ``options`` say, and enter the results in its row."""
    run_dir = options.folder / point.name
    run_dir.mkdir(exist_ok=True)
    if not options.no_plan and not _is_predicted(row):
        row |= plan_point(point, run_dir, world=options.world)
    if not options.plan:
        row["status"] = INTERRUPTED  # until it ends
        save()
        row |= train_point(point, run_dir, launcher=options.launcher)
    elif row["status"] not in _FINISHED:
        row["reason"] = row["plan_reason"]
        row["status"] = PLANNED if row["reason"] is None else REFUSED


def _in_words(row: dict[str, Any]) -> str:
    values = [text.format(row[name]) for name, text in _PRINTED.items() if row.get(name) is not None]
    reason = [row["reason"]] if row["reason"] else []
    return ", ".join([row["status"], *values, *reason])


def _is_done(row: dict[str, Any], options: argparse.Namespace) -> bool:
    return _is_predicted(row) if options.plan else row["status"] in _FINISHED


def _is_predicted(row: dict[str, Any]) -> bool:
    return row.get("predicted_allocated_gib") is not None


def read_rows(folder: Path, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of ``sweep.json`` by name; empty if no sweep has run in ``folder``."""
    earlier = refuse_foreign(
        *(folder, "sweep_dir", (STARTS, TABLE, PICTURE)),
        record=FILE,
        is_ours=lambda sweep: sweep["made_by"] == _MADE_BY,
        maker="a sweep",
    )
    if earlier is None:
        return {}
    try:
        changed = [key for key in about if earlier[key] != about[key]]
        rows = {row["name"]: row for row in earlier["rows"]}
    except (LookupError, TypeError) as error:
        raise UserError(f"sweep_dir={folder}: {FILE} is not of this version; choose a new directory") from error
    if changed:
        key = changed[0]
        differs = f"its {key} is {earlier[key]}, not {about[key]}"
        raise UserError(f"sweep_dir={folder} contains another sweep: {differs}; choose a new directory")
    return rows


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Split a sweep's command line into ``plan``, ``no_plan``, ``settings`` (words ``key=value`` without
    ``sweep_dir``), ``folder``, ``world`` (ranks of a job), and ``launcher``: ``--prefix``, torchrun and its options."""
    from torch.distributed.run import determine_local_world_size, get_args_parser

    if "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ:
        raise UserError("a sweep starts torchrun itself; run python -m distill.sweep --nproc-per-node N without it")
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("-m", "--multirun", action="store_true")
    ours.add_argument("--prefix", type=shlex.split, default=[])
    planner = ours.add_mutually_exclusive_group()
    planner.add_argument("--plan", action="store_true")
    planner.add_argument("--no-plan", action="store_true")
    theirs = get_args_parser()
    theirs.set_defaults(nnodes="1", nproc_per_node=str(max(1, torch.cuda.device_count())))
    ours.error = theirs.error = _refuse  # type: ignore[method-assign]  # instead of printing usage and exiting
    options, rest = ours.parse_known_args(arguments)
    parsed = theirs.parse_args([*rest, "-"])  # without settings, "-" takes the place of torchrun's script
    settings = [parsed.training_script, *parsed.training_script_args][:-1]
    torchrun = rest[: len(rest) - len(settings)]
    if late := [word for word in settings if word.startswith("-")]:
        _refuse(f"{late[0]} must come before the settings")
    try:
        nodes, processes = int(parsed.nnodes), determine_local_world_size(parsed.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--nnodes and --nproc-per-node must be numbers ({error})") from error
    if nodes == 1 and not any(word.lstrip("-").startswith(("standalone", "rdzv", "master")) for word in torchrun):
        torchrun.insert(0, "--standalone")
    chosen = dict(word.split("=", 1) for word in settings if "=" in word)
    folder = chosen.get("sweep_dir", f"runs/{chosen.get('experiment', 'quickstart')}_sweep")
    if not folder:
        _refuse("sweep_dir= is empty (an unset shell variable?); give a folder")
    run = [sys.executable, "-m", "torch.distributed.run", *torchrun, f"--nproc-per-node={processes}"]
    options.launcher, options.world = [*options.prefix, *run], nodes * processes
    options.settings = [word for word in settings if not word.startswith("sweep_dir=")]
    options.folder = user_path(folder, "sweep_dir")
    return options


def _refuse(message: str) -> NoReturn:
    raise UserError(f"{message}; options are torchrun's, --plan, --no-plan and --prefix")


COLUMNS = (
    *("status", "tokens", "tokens_per_second", "allocated_gib", "predicted_allocated_gib", "mfu", "seconds_per_step"),
    *("measured_steps", "predicted_tokens_per_second", "predicted_mfu", "reason", "plan_reason"),
)
"""Columns after the swept settings; an empty cell is an unknown value."""
_PANELS = {"tokens/s of all ranks": "tokens_per_second", "MFU": "mfu", "peak memory of a rank, GiB": "allocated_gib"}


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    keys = list(rows[0]["overrides"])
    with atomic_path(file) as temporary, temporary.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*keys, *COLUMNS])
        writer.writerows([*row["overrides"].values(), *map(row.get, COLUMNS)] for row in rows)


def lines_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group the rows into the picture's lines, sorted by tokens. Rows of a line differ only in data settings."""
    short = short_keys(rows[0]["overrides"])
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted((row for row in rows if row["tokens"] is not None), key=lambda row: row["tokens"]):
        values = [f"{short[key]}={value}" for key, value in row["overrides"].items() if not key.startswith("data")]
        lines.setdefault(", ".join(values) or "all points", []).append(row)
    return lines


def write_picture(file: Path, rows: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Draw speed, MFU and peak memory against tokens as PNG, with dashed predictions; a cross is out of memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    for axes, (label, column) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        for number, (name, line) in enumerate(lines_of(rows).items()):
            style = {"color": f"C{number % 10}", "marker": "osD^vP"[number // 10 % 6]}
            tokens = [row["tokens"] for row in line]
            measured, predicted = ([row.get(key) for row in line] for key in (column, f"predicted_{column}"))
            axes.plot(tokens, np.array(measured, float), label=name, **style)
            axes.plot(tokens, np.array(predicted, float), label=f"{name}, predicted", ls="--", mfc="white", **style)
            for row in line:
                if row["status"] == OUT_OF_MEMORY:
                    height = row.get(f"predicted_{column}") or 0
                    axes.plot(row["tokens"], height, "X", color=style["color"], ms=9, clip_on=False)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.tick_params(axis="x", rotation=30)
        axes.grid(lw=0.4)
        axes.set_xlabel("tokens of a sample")
        axes.set_title(label, loc="left", fontweight="bold", fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    with atomic_path(file) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
