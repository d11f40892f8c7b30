"""``metrics.jsonl``, measures of samples and, if asked for, ``norms.jsonl``, Weights & Biases and TensorBoard.

Rank 0 alone writes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from distill.config import LogSettings

MEASURES = "samples/measures.jsonl"
"""In the run's folder: a line per set of samples."""


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after ``step``, and a torn last line; a resumed run writes them again.

    Args:
        path: ``metrics.jsonl`` or another file of such lines; may be absent.
        step: the checkpoint's step.
    """
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] <= step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    temporary.replace(path)


class MetricsLog:
    """Appends one JSON object per logged step, with its 1-based ``step``; non-finite numbers become null.

    Args:
        run_dir: the run's folder.
        settings: ``log.*``.
        config: the whole configuration, for the services that show it.
    """

    def __init__(self, run_dir: Path, settings: LogSettings, config: Mapping[str, Any]):
        self._run_dir = run_dir
        self._file = (run_dir / "metrics.jsonl").open("a")
        self._wandb = self._tensorboard = None
        if settings.wandb:
            import wandb

            # A resumed run continues its curves; one that started afresh (resume=never) gets curves of its own.
            earlier = len(list((run_dir / "previous").glob("*")))
            run_id = hashlib.sha256(f"{run_dir.resolve()} {earlier}".encode()).hexdigest()[:16]
            self._wandb = wandb.init(
                project=settings.project, name=run_dir.name, id=run_id, resume="allow", dir=run_dir, config=config
            )
            # By its own `step`: W&B would drop what a resumed run logs again.
            self._wandb.define_metric("*", step_metric="step")
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(run_dir / "tensorboard")

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log ``metrics`` of the 1-based ``step``."""
        self._file.write(_line(step, metrics))
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **metrics})
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)

    def show(
        self,
        step: int,
        sheet: Image.Image,
        videos: Mapping[str, Sequence[Path]],
        measures: Mapping[str, float],
    ) -> None:
        """Show sample clips. TensorBoard gets no videos: it would need moviepy, and make GIFs of them.

        Args:
            step: 1-based.
            sheet: all clips in one picture.
            videos: mp4 files by what made them.
            measures: of the clips, by name; may be empty.
        """
        if measures:
            with (self._run_dir / MEASURES).open("a") as file:
                file.write(_line(step, measures))
        if self._wandb is not None:
            import wandb

            clips = {
                f"samples/{name}": [wandb.Video(str(f), format="mp4") for f in files] for name, files in videos.items()
            }
            self._wandb.log({"step": step, "samples/sheet": wandb.Image(sheet), **clips, **measures})
        if self._tensorboard is not None:
            self._tensorboard.add_image("samples/sheet", np.asarray(sheet), step, dataformats="HWC")
            for name, value in measures.items():
                self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._tensorboard is not None:
            self._tensorboard.close()


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
        self._file = (run_dir / "norms.jsonl").open("a")

    def write(self, step: int, role: str, norms: Mapping[str, tuple[float, float | None]]) -> None:
        """Log the ``norms`` of ``role`` at the 1-based ``step``, before its update."""
        shown = {name: [v if v is None or math.isfinite(v) else str(v) for v in pair] for name, pair in norms.items()}
        self._file.write(json.dumps({"step": step, "role": role, "norms": shown}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
