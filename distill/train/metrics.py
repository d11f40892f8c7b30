"""Metrics of a step, which rank 0 writes: ``metrics.jsonl``, ``norms.jsonl``, measures of samples, and the log line."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from PIL import Image

from distill.config.schema import LogSettings
from distill.run.loggers import open_services
from fsdp_cp.errors import duration
from fsdp_cp.files.atomic_file import writing

MEASURES = "samples/measures.jsonl"
"""File in the run directory with one line per set of samples."""


class MetricsLog:
    """Log, resumed from ``step``, with one JSON object per logged 1-based step. Non-finite numbers become null."""

    def __init__(self, run_dir: Path, settings: LogSettings, config: Mapping[str, Any], step: int = 0):
        self._run_dir = run_dir
        self._file = _append_to(run_dir / "metrics.jsonl")
        self._services = open_services(run_dir, settings, config, step)

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        _write(self._file, _line(step, metrics))
        for service in self._services:
            service.write(step, metrics)

    def write_norms(self, step: int, role: str, norms: Mapping[str, tuple[float, float | None]]) -> None:
        """Log ``norms`` (weight and gradient, null if missing, by name) of ``role`` at the 1-based ``step``, before its
        update. Non-finite numbers are the strings ``"inf"``, ``"-inf"`` and ``"nan"``."""
        shown = {name: [v if v is None or math.isfinite(v) else str(v) for v in pair] for name, pair in norms.items()}
        with _append_to(self._run_dir / "norms.jsonl") as file:
            _write(file, json.dumps({"step": step, "role": role, "norms": shown}) + "\n")

    def show(
        self, step: int, sheet: Image.Image, videos: Mapping[str, Sequence[Path]], measures: Mapping[str, float]
    ) -> None:
        """Log the measures of sample clips, and show the clips in the services; see ``Logger``."""
        if measures:
            with _append_to(self._run_dir / MEASURES) as file:
                _write(file, _line(step, measures))
        for service in self._services:
            service.show(step, sheet, videos, measures)

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


def _line(step: int, metrics: Mapping[str, float | None]) -> str:
    finite = {k: v if v is None or math.isfinite(v) else None for k, v in metrics.items()}
    return json.dumps({"step": step, **finite}) + "\n"


def speed(
    name: str, seconds: float, phases: Mapping[str, float], samples: int, tokens: int, flops: float, peak: float | None
) -> dict[str, float | None]:
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
    """Formatter of logged metrics as aligned log lines with an estimate of the remaining time. ``rates`` are the names
    of each trained role's learning rates (two for two experts)."""

    def __init__(self, rates: Mapping[str, Sequence[str]], *, step: int, steps: int):
        self._rates, self._steps = rates, steps
        self._since, self._clock = step, time.perf_counter()
        self._first = True

    def text(self, step: int, metrics: Mapping[str, float | None]) -> str:
        """Return the line of the 1-based ``step`` from its ``metrics``; ``-`` stands for a missing value."""

        def value(key: str, form: str, width: int) -> str:
            number = metrics.get(key)
            return f"{'-' if number is None else format(number, form):>{width}}"

        columns = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
        for role, names in self._rates.items():
            rates = "/".join(value(f"{name}/lr", ".2e", 8) for name in names)
            loss, norm = value(f"{role}/loss", ".4g", 9), value(f"{role}/grad_norm", ".3g", 8)
            columns.append(f"{role} loss {loss} norm {norm} lr {rates}")
        columns.append(f"{value('perf/seconds_per_step', '.3g', 6)} s")
        columns.append(f"{value('perf/tokens_per_second', ',.0f', 8)} tokens/s")
        if metrics.get("perf/mfu") is not None:  # unknown on a CPU, at all steps
            columns.append(f"MFU {value('perf/mfu', '.1%', 5)}")
        columns.append(f"{value('memory/peak_gib', '.2f', 5)} GiB")
        if step < self._steps:
            columns.append(f"{duration(self._seconds_left(step)):>8} left")
        return "  ".join(columns)

    def _seconds_left(self, step: int) -> float:
        """Extrapolate from the wall time since the first line, to leave out compilation and other first calls."""
        now = time.perf_counter()
        per_step = (now - self._clock) / (step - self._since)
        if self._first:
            self._since, self._clock, self._first = step, now, False
        return per_step * (self._steps - step)
