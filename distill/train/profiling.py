"""``profile.*``: torch's profiler and the CUDA allocator's history over chosen steps, on chosen ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from distill.config.schema import ProfileSettings
from fsdp_cp.errors import shown
from fsdp_cp.files.atomic_file import atomic_path
from fsdp_cp.launch import rank
from fsdp_cp.reduce import barrier
from fsdp_cp.runtime.signals import Stopped
from fsdp_cp.runtime.timeouts import long_timeout

log = logging.getLogger(__name__)

FOLDER = "profile"
"""Name of the folder of profiles in the run directory."""
_TRACE, _MEMORY = ".json.gz", "_memory.pickle"
_ENTRIES = 1_000_000
"""Number of allocations and releases to keep, the latest ones. Each takes about 1 KB of host memory."""


class StepProfiler:
    """Context around the training, on all ranks, that profiles ``profile.steps`` and changes no number and no earlier
    file. ``step`` steps are done already."""

    def __init__(self, settings: ProfileSettings, *, device: torch.device, run_dir: Path, step: int):
        self._steps = range(settings.steps[0], settings.steps[1] + 1) if settings.steps else range(0)
        self._chosen = settings.ranks == "all" or rank() in settings.ranks
        self._cuda, self._folder = device.type == "cuda", run_dir / FOLDER
        self._memory = settings.memory and self._cuda
        self._profiler: profile | None = None
        self._first = self._latest = 0
        if settings.memory and not self._cuda and rank() == 0:
            log.warning("profile.memory=true has no effect: only CUDA's allocator keeps a history")
        if self._steps and self._steps[-1] <= step and rank() == 0:
            log.info("profile.steps=%s: resumed after step %d, nothing is profiled", shown(settings.steps), step)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Write the steps so far if a signal stopped the run, or the allocator's history if the run failed."""
        if isinstance(error, Stopped) and self._latest:
            self._write()
        elif self._profiler is not None:
            with suppress(Exception):  # the run's own error is what the user must see
                self._stop(self._free_stem("until_failure"), with_trace=False)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the 1-based step ``number`` if it is chosen; write the files after the last chosen step."""
        if number not in self._steps:
            yield
            return
        if self._chosen and self._profiler is None:
            self._start(number)
        with record_function(f"ProfilerStep#{number}"):  # tools that read traces recognize a step by this name
            yield
        self._latest = number
        if number == self._steps[-1]:
            with long_timeout():
                self._write()
                barrier()

    def _start(self, number: int) -> None:
        self._first = number
        if self._memory:  # private (torch 2.11 to 2.13)
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=_ENTRIES, clear_history=True)
        self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])])
        self._profiler.start()

    def _write(self) -> None:
        """Write this rank's files. A failure only logs a warning: a profile must not end a run."""
        if self._profiler is None:
            return
        stem = self._free_stem(f"{self._first}_{self._latest}")
        try:
            self._stop(stem, with_trace=True)
        except (OSError, RuntimeError) as error:  # a full disk; an error of kineto
            log.warning("rank %d could not write %s* (%s); training continues", rank(), self._folder / stem, error)
        else:
            log.info("profiled steps %d to %d: %s*", self._first, self._latest, self._folder / stem)

    def _stop(self, stem: str, *, with_trace: bool) -> None:
        """Stop recording and write files whose names begin with ``stem``."""
        profiler, self._profiler = self._profiler, None
        with ExitStack() as stack:
            if self._memory:
                stack.callback(torch.cuda.memory._record_memory_history, None)
            with ExitStack() as recording:
                recording.callback(profiler.stop)
                if self._memory:  # for https://pytorch.org/memory_viz
                    path = recording.enter_context(atomic_path(self._folder / f"{stem}{_MEMORY}"))
                    torch.cuda.memory._dump_snapshot(str(path))
            if with_trace:
                with atomic_path(self._folder / f"{stem}{_TRACE}") as temporary:
                    profiler.export_chrome_trace(str(temporary))

    def _free_stem(self, steps: str) -> str:
        """Return ``steps_STEPS_rankR``, with a number appended if an earlier start of the run wrote such files."""
        stem = f"steps_{steps}_rank{rank()}"
        names = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        return next(n for n in names if not any((self._folder / f"{n}{end}").exists() for end in (_TRACE, _MEMORY)))
