"""``metrics.jsonl``, measures of samples and, if asked for, ``norms.jsonl``; the services of loggers.py get the same.

Rank 0 alone writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from distill.config import LogSettings
from distill.json_lines import cut_back
from distill.loggers import Clips, open_services
from fsdp_cp.errors import UserError

__all__ = ["MEASURES", "MetricsLog", "NormsLog", "cut_back"]

MEASURES = "samples/measures.jsonl"
"""In the run's folder: a line per set of samples."""


class MetricsLog:
    """Appends one JSON object per logged step, with its 1-based ``step``; non-finite numbers become null.

    Args:
        run_dir: the run's folder.
        settings: ``log.*``.
        config: the whole configuration, for the services that show it.
        step: of the checkpoint that the run goes on from.

    Raises:
        UserError: a file that cannot be written.
    """

    def __init__(self, run_dir: Path, settings: LogSettings, config: Mapping[str, Any], step: int = 0):
        self._run_dir = run_dir
        self._file = _append_to(run_dir / "metrics.jsonl")
        self._services = open_services(run_dir, settings, config, step)

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log ``metrics`` of the 1-based ``step``."""
        _write(self._file, _line(step, metrics))
        for service in self._services:
            service.write(step, metrics)

    def show(
        self,
        step: int,
        sheet: Image.Image,
        videos: Mapping[str, tuple[np.ndarray, Sequence[Path]]],
        measures: Mapping[str, float],
        *,
        fps: float,
    ) -> None:
        """Log the measures of sample clips, and show the clips where a service can; see :class:`Clips`."""
        if measures:
            with _append_to(self._run_dir / MEASURES) as file:
                _write(file, _line(step, measures))
        clips = Clips(sheet=sheet, videos=videos, measures=measures, fps=fps)
        for service in self._services:
            service.show(step, clips)

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        for service in self._services:
            service.close()


def _append_to(path: Path) -> FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); move it away, or use another run_dir") from error


def _write(file: FileIO, line: str) -> None:
    """The line is on disk, or the run says so: a full disk would otherwise end it in a traceback."""
    left = line.encode()
    try:
        while left:
            left = left[file.write(left) :]  # unbuffered: a nearly full disk takes a part
    except OSError as error:
        raise UserError(
            f"{file.name} cannot be written ({error.strerror}); make room and start the same command again, which goes"
            " on from the newest checkpoint"
        ) from error


def _line(step: int, metrics: Mapping[str, float | None]) -> str:
    finite = {k: v if v is None or math.isfinite(v) else None for k, v in metrics.items()}
    return json.dumps({"step": step, **finite}) + "\n"


class NormsLog:
    """``norms.jsonl``: ``{"step": 5, "role": "student", "norms": {NAME: [weight, gradient], ...}}`` per line.

    A gradient that is not there is null; a number that is not finite is ``"inf"`` or ``"nan"``, and so shows itself.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path):
        self._file = _append_to(run_dir / "norms.jsonl")

    def write(self, step: int, role: str, norms: Mapping[str, tuple[float, float | None]]) -> None:
        """Log the ``norms`` of ``role`` at the 1-based ``step``, before its update."""
        shown = {name: [v if v is None or math.isfinite(v) else str(v) for v in pair] for name, pair in norms.items()}
        _write(self._file, json.dumps({"step": step, "role": role, "norms": shown}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
