"""Metrics of a step, which rank 0 writes: ``metrics.jsonl``, ``norms.jsonl``, measures of samples, and the log line."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from distill.config.schema import LogSettings
from distill.run.loggers import Metrics, Shown, open_services
from fsdp_cp.errors import duration
from fsdp_cp.files.atomic_file import writing

MEASURES = "samples/measures.jsonl"
"""File in the run directory with one line per set of samples."""
_MANY = 100
"""Number of steps above which a run prints every tenth one."""


class MetricsLog:
    """Log, resumed from ``step``, with one JSON object per logged 1-based step. Non-finite numbers become null."""

    def __init__(self, run_dir: Path, settings: LogSettings, config: Mapping[str, Any], step: int = 0):
        self._run_dir = run_dir
        self._file = _append_to(run_dir / "metrics.jsonl")
        self._services = open_services(run_dir, settings, config, step)

    def write(self, step: int, metrics: Metrics) -> None:
        _write(self._file, _line(step, metrics))
        for service in self._services:
            service.write(step, metrics)

    def write_norms(self, step: int, role: str, norms: Mapping[str, tuple[float, float | None]]) -> None:
        """Log ``norms`` (weight and gradient, null if missing, by name) of ``role`` at the 1-based ``step``, before its
        update. Non-finite numbers are the strings ``"inf"``, ``"-inf"`` and ``"nan"``."""
        shown = {name: [v if v is None or math.isfinite(v) else str(v) for v in pair] for name, pair in norms.items()}
        with _append_to(self._run_dir / "norms.jsonl") as file:
            _write(file, json.dumps({"step": step, "role": role, "norms": shown}) + "\n")

    def show(self, step: int, shown: Shown) -> None:
        """Log the measures of sample clips, and show the clips in the services."""
        if shown.measures:
            with _append_to(self._run_dir / MEASURES) as file:
                _write(file, _line(step, shown.measures))
        for service in self._services:
            service.show(step, shown)

    def close(self) -> None:
        self._file.close()
        for service in self._services:
            service.close()


def _append_to(path: Path) -> FileIO:
    with writing(path, "move it away, or use another run_dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)


def _write(file: FileIO, line: str) -> None:
    left = line.encode()
    with writing(file.name, "make room and start the same command again: it resumes from the newest checkpoint"):
        while left:
            left = left[file.write(left) :]  # an unbuffered write to a nearly full disk may write only a part


def _line(step: int, metrics: Metrics) -> str:
    finite = {k: v if v is None or math.isfinite(v) else None for k, v in metrics.items()}
    return json.dumps({"step": step, **finite}) + "\n"


def speed(
    name: str, seconds: float, phases: Mapping[str, float], samples: int, tokens: int, flops: float, peak: float | None
) -> Metrics:
    """Return the ``perf/*`` metrics of one step, of all ranks together: time by phase, throughput and model FLOP
    utilization of ``peak`` operations per second (``None`` if unknown). A line of metrics holds the latest step of
    every role, so keys of phases have its name; those under ``perf/seconds/ROLE/`` add up to ``perf/seconds/ROLE``."""
    times = {phase.removeprefix(f"{name}/") or "other": taken for phase, taken in phases.items()}
    return {
        "perf/seconds_per_step": seconds,
        "perf/samples_per_second": samples / seconds,
        "perf/tokens": tokens,
        "perf/tokens_per_second": tokens / seconds,
        "perf/flops": flops,
        "perf/mfu": None if peak is None else flops / seconds / peak,
        f"perf/seconds/{name}": seconds,
        **{f"perf/seconds/{name}/{phase}": taken for phase, taken in times.items()},
    }


class StepLine:
    """Log line of several steps, with both roles' latest values and an estimate of the remaining time.

    Args:
        rates: names of each trained role's learning rates (two for two experts).
        step: step from which the run starts.
        steps: all steps of the run.
        every: steps between lines; ``None`` for 10 in a run of more than 100 steps, else 1.
    """

    def __init__(self, rates: Mapping[str, Sequence[str]], *, step: int, steps: int, every: int | None):
        self._rates, self._steps = rates, steps
        self._every = every or (10 if steps > _MANY else 1)
        self._since, self._clock = step, time.perf_counter()
        self._first = True
        self._printed = step
        """Step of the latest line."""
        self._latest: Metrics = {}
        self._new: list[Metrics] = []
        """Metrics of the steps since the latest line."""

    def add(self, metrics: Metrics) -> None:
        """Take the metrics of one step."""
        self._latest |= metrics
        self._new.append(metrics)

    def is_due(self, step: int) -> bool:
        """Return whether a line follows the logged 1-based ``step``: after enough steps, and after the last one."""
        return step - self._printed >= self._every or step == self._steps

    def text(self, step: int, peak_gib: float) -> str:
        """Return the line after the 1-based ``step``; ``-`` stands for a role that has not trained yet. Losses and
        speeds are means over the steps since the latest line, or its values for a role that did not train since."""
        self._latest |= {
            f"{role}/loss": loss for role in self._rates if (loss := self._mean(f"{role}/loss")) is not None
        }
        columns = [f"step {step:>{len(str(self._steps))}}/{self._steps}", *map(self._role, self._rates)]
        columns.append(f"{_cell(self._mean('perf/seconds_per_step'), '.3g', 6)} s")
        columns.append(f"{_cell(self._mean('perf/tokens_per_second', by_time=True), ',.0f', 8)} tokens/s")
        if (used := self._mean("perf/mfu", by_time=True)) is not None:  # unknown on a CPU
            columns.append(f"MFU {_cell(used, '.1%', 5)}")
        columns.append(f"{_cell(peak_gib, '.2f', 5)} GiB")
        if step < self._steps:
            columns.append(f"{duration(self._seconds_left(step)):>8} left")
        self._printed, self._new = step, []
        return "  ".join(columns)

    def _role(self, role: str) -> str:
        value = self._latest.get
        rates = "/".join(_cell(value(f"{name}/lr"), ".2e", 8) for name in self._rates[role])
        loss, norm = _cell(value(f"{role}/loss"), ".4g", 9), _cell(value(f"{role}/grad_norm"), ".3g", 8)
        return f"{role} loss {loss} norm {norm} lr {rates}"

    def _mean(self, key: str, *, by_time: bool = False) -> float | None:
        """Return the mean of ``key`` over the new steps that have it, weighted by their seconds for ``by_time``."""
        total = weights = 0.0
        for metrics in self._new:
            if (value := metrics.get(key)) is not None:
                weight = metrics["perf/seconds_per_step"] if by_time else 1.0
                total, weights = total + weight * value, weights + weight
        return total / weights if weights else None

    def _seconds_left(self, step: int) -> float:
        """Extrapolate from the wall time since the first line, to leave out compilation and other first calls."""
        now = time.perf_counter()
        per_step = (now - self._clock) / (step - self._since)
        if self._first:
            self._since, self._clock, self._first = step, now, False
        return per_step * (self._steps - step)


def _cell(value: float | None, form: str, width: int) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
