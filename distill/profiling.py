"""``profile.*``: torch's profiler and the CUDA allocator's history over chosen steps, on chosen ranks."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from distill.config import Config
from distill.config.schema import ProfileSettings
from distill.report.media import atomic_path
from fsdp_cp.errors import UserError, shown
from fsdp_cp.launch import rank
from fsdp_cp.measure.overlap import by_name, shares, trace_intervals, trace_windows
from fsdp_cp.reduce import all_gather_objects
from fsdp_cp.signals import Stopped
from fsdp_cp.timeouts import long_timeout

log = logging.getLogger(__name__)

FOLDER = "profile"
"""In the run's folder."""
_SHARES = ("collectives_share", "collectives_exposed_share")
_ENTRIES = 1_000_000
"""Allocations and releases that are kept, the latest; each takes about a KB of the host's memory."""


def check_profile(config: Config, *, world: int, device: torch.device) -> None:
    """Compare ``profile.*`` with the world and the device of the run.

    Raises:
        UserError: a rank that is not there, or a history of the CPU's allocator.
    """
    ranks = config.profile.ranks
    if isinstance(ranks, list) and (missing := [r for r in ranks if r >= world]):
        raise UserError(
            f"profile.ranks={shown(ranks)}: there is no rank {missing[0]} in a world of {world}; use 0 to {world - 1},"
            " or profile.ranks=all"
        )
    if config.profile.memory and device.type != "cuda" and not config.plan:
        raise UserError(
            "profile.memory=true: the history is CUDA's allocator's, and on the CPU there is none; leave it out"
        )


class StepProfiler:
    """Profiles the steps ``profile.steps`` as they come; as a context around the training, on all ranks.

    A step computes the same with and without it. What it writes is new: a file that is there stays as it is.

    Args:
        settings: ``profile.*``.
        device: this rank's.
        run_dir: the run's folder.
        step: how many steps the run has behind it.
    """

    def __init__(self, settings: ProfileSettings, *, device: torch.device, run_dir: Path, step: int):
        self._steps = range(settings.steps[0], settings.steps[1] + 1) if settings.steps else range(0)
        self._chosen = settings.ranks == "all" or rank() in settings.ranks
        self._memory, self._device, self._folder = settings.memory, device, run_dir / FOLDER
        self._profiler: profile | None = None
        self._first = self._latest = 0
        if self._steps and self._steps[-1] <= step and rank() == 0:
            log.info("profile.steps=%s: step %d is behind them, nothing is profiled", shown(settings.steps), step)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that is stopped on the way writes the steps that it has; one that fails, the allocator's history."""
        if self._profiler is None:
            return
        if isinstance(error, Stopped) and self._latest:
            self._write()
            return
        with suppress(Exception):  # the run's own error is what the user must see
            self._stop(self._free_name("until_failure"), with_trace=False)

    @contextmanager
    def of(self, step: int) -> Iterator[dict[str, float | None]]:
        """Around the 1-based ``step``; after the last one the dictionary has its metrics, the same on all ranks."""
        found: dict[str, float | None] = {}
        if step not in self._steps:
            yield found
            return
        if self._chosen and self._profiler is None:
            self._start(step)
        with record_function(f"ProfilerStep#{step}"):  # the name by which tools that read traces know a step
            yield found
        self._latest = step
        if step == self._steps[-1]:
            with long_timeout():
                found |= self._finish()

    def _start(self, step: int) -> None:
        self._first = step
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        if self._memory:
            record_allocations(True)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def _finish(self) -> dict[str, float | None]:
        """Write; the means over the ranks that could."""
        summaries = [summary for summary in all_gather_objects(self._write()) if summary is not None]
        means: dict[str, float | None] = {}
        for key in _SHARES:
            values = [summary[key] for summary in summaries if summary[key] is not None]
            means[f"perf/{key}"] = mean(values) if values else None
        if rank() == 0 and summaries:
            told = [f"{100 * value:.0f} %" if value is not None else "unknown" for value in means.values()]
            log.info(
                "profiled steps %d to %d on %d rank(s), in %s: collectives took %s of the time, %s with no computation",
                summaries[0]["steps"][0],
                self._latest,
                len(summaries),
                self._folder,
                *told,
            )
        return means

    def _write(self) -> dict[str, Any] | None:
        """This rank's files; ``None`` where it is not profiled or they cannot be written, which must not end a run."""
        if self._profiler is None:
            return None
        name = self._free_name(f"{self._first}_{self._latest}")
        try:
            return self._stop(name, with_trace=True)
        except (OSError, ValueError, RuntimeError) as error:  # a full disk; half a trace; of kineto
            log.warning("%s* of rank %d cannot be written (%s); the run goes on", self._folder / name, rank(), error)
            return None

    def _stop(self, name: str, *, with_trace: bool) -> dict[str, Any] | None:
        """End the recording, and write what it has to files that begin with ``name``."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        try:
            try:
                if self._memory:
                    with atomic_path(self._folder / f"{name}_memory.pickle") as part:
                        dump_allocations(part)
            finally:
                profiler.stop()
            if not with_trace:
                return None
            # The trace last: where the disk is full, the smaller file is there.
            with atomic_path(self._folder / f"{name}.json.gz") as part:
                profiler.export_chrome_trace(str(part))
                summary = self._summary(part)
                with atomic_path(self._folder / f"{name}_summary.json") as small:
                    small.write_text(json.dumps(summary, indent=1) + "\n")
            return summary
        finally:
            if self._memory:
                record_allocations(False)

    def _summary(self, file: Path) -> dict[str, Any]:
        """What the trace in ``file`` says of this rank's time.

        Raises:
            ValueError: no whole trace.
        """
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            trace = json.load(stream)
        steps = trace_windows(trace)
        if not steps:
            raise ValueError("there are no steps in the trace")
        intervals, windows = trace_intervals(trace, self._device.type), list(steps.values())
        found = shares(intervals, windows) if intervals else None  # none: CUPTI was another profiler's
        return {
            "rank": rank(),
            "device": self._device.type,
            "steps": [min(steps), max(steps)],
            "seconds": sum(end - start for start, end in windows) / 1e6,
            "collectives_share": None if found is None else found.collectives,
            "collectives_exposed_share": None if found is None else found.exposed,
            "compute_share": None if found is None else found.compute,
            "collectives": by_name(intervals, windows),
        }

    def _free_name(self, steps: str) -> str:
        """``steps_STEPS_rankR``, with a number behind it where an earlier start of the run has files of that name."""
        name = f"steps_{steps}_rank{rank()}"
        taken = {file.name for file in self._folder.glob("*")}
        number, free = 1, name
        while any(f"{free}{end}" in taken for end in (".json.gz", "_summary.json", "_memory.pickle")):
            number += 1
            free = f"{name}_{number}"
        return free


def record_allocations(on: bool) -> None:
    """Begin or end the history of CUDA's allocator; ``_record_memory_history`` is private (torch 2.11 to 2.13)."""
    if on:
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=_ENTRIES, clear_history=True)
    else:
        torch.cuda.memory._record_memory_history(None)


def dump_allocations(file: Path) -> None:
    """Write the history, for https://pytorch.org/memory_viz; ``_dump_snapshot`` is private (torch 2.11 to 2.13)."""
    torch.cuda.memory._dump_snapshot(str(file))
