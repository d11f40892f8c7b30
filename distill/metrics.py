"""``metrics.jsonl``, measures of samples and, if asked for, ``norms.jsonl``, Weights & Biases and TensorBoard.

Rank 0 alone writes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from distill import wandb_login
from distill.config import LogSettings
from distill.json_lines import cut_back
from distill.media import gif_bytes
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank

__all__ = ["MEASURES", "MetricsLog", "NormsLog", "check_services", "cut_back"]

log = logging.getLogger(__name__)

MEASURES = "samples/measures.jsonl"
"""In the run's folder: a line per set of samples."""


def check_services(settings: LogSettings) -> None:
    """Refuse a service that is not installed, and Weights & Biases where it would ask for a key or fail without one.

    Nothing is sent anywhere: whether the server can be reached and takes the key shows when the run starts. Only rank 0
    logs, so only there a key is needed.

    Args:
        settings: ``log.*``.

    Raises:
        UserError: in one line, what to install or where a key goes.
    """
    for service in ("wandb", "tensorboard"):
        if getattr(settings, service) and importlib.util.find_spec(service) is None:
            raise UserError(f"log.{service}=true needs {service}; pip install 'fsdp-cp[{service}]'")
    if settings.wandb and rank() == 0 and not wandb_login.can_log():
        raise UserError(
            "log.wandb=true, but Weights & Biases has no key here; run `wandb login`, set WANDB_API_KEY, or set"
            " WANDB_MODE=offline to upload later"
        )


class MetricsLog:
    """Appends one JSON object per logged step, with its 1-based ``step``; non-finite numbers become null.

    Weights & Biases never ends a run: where its server does not answer at the start, the run is logged offline, and
    where it fails on the way, without it.

    Args:
        run_dir: the run's folder.
        settings: ``log.*``.
        config: the whole configuration, for the services that show it.
        step: of the checkpoint that the run goes on from; what TensorBoard has after it is drawn no more.

    Raises:
        UserError: a file that cannot be written, or what Weights & Biases refuses without asking its server.
    """

    def __init__(self, run_dir: Path, settings: LogSettings, config: Mapping[str, Any], step: int = 0):
        self._run_dir = run_dir
        self._file = _append_to(run_dir / "metrics.jsonl")
        self._wandb = _start_wandb(run_dir, settings.project, config) if settings.wandb else None
        self._tensorboard = None
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log ``metrics`` of the 1-based ``step``."""
        _write(self._file, _line(step, metrics))
        self._to_wandb(lambda run: run.log({"step": step, **metrics}))
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if value is not None:
                    self._tensorboard.add_scalar(name, value, step)

    def show(
        self,
        step: int,
        sheet: Image.Image,
        videos: Mapping[str, tuple[np.ndarray, Sequence[Path]]],
        measures: Mapping[str, float],
        *,
        fps: float,
    ) -> None:
        """Show sample clips: Weights & Biases gets the mp4 files, TensorBoard, which plays none, GIFs.

        Args:
            step: 1-based.
            sheet: all clips in one picture.
            videos: by what made them, the clips, uint8 ``(n, T, H, W, 3)``, and their mp4 files.
            measures: of the clips, by name; may be empty.
            fps: frames per second of the clips.
        """
        if measures:
            with _append_to(self._run_dir / MEASURES) as file:
                _write(file, _line(step, measures))
        self._to_wandb(lambda run: run.log(_for_wandb(step, sheet, videos, measures)))
        if self._tensorboard is not None:
            self._tensorboard.add_image("samples/sheet", np.asarray(sheet), step, dataformats="HWC")
            for name, (clips, _) in videos.items():
                for i, clip in enumerate(clips):
                    _add_gif(self._tensorboard, f"samples/{name}/{i}", clip, fps, step)
            for name, value in measures.items():
                self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close everything."""
        self._file.close()
        self._to_wandb(lambda run: run.finish())
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _to_wandb(self, send: Callable[[Any], object]) -> None:
        """``send(run)``; what fails there must not end days of training, and is said once."""
        if self._wandb is None:
            return
        try:
            send(self._wandb)
        except Exception as error:  # of a service process of its own, so of any kind
            log.warning("Weights & Biases failed and is left out from here on: %s", _one_line(error))
            self._wandb = None


def _start_wandb(run_dir: Path, project: str, config: Mapping[str, Any]) -> Any:
    """The run at Weights & Biases; offline where its server does not answer."""
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    # A resumed run continues its curves; one that started afresh (resume=never) gets curves of its own.
    earlier = len(list((run_dir / "previous").glob("*")))
    run_id = hashlib.sha256(f"{run_dir.resolve()} {earlier}".encode()).hexdigest()[:16]
    arguments = {"project": project, "name": run_dir.name, "id": run_id, "dir": run_dir, "config": config}
    try:
        run = wandb.init(resume="allow", **arguments)
    except (UsageError, AuthenticationError) as error:
        raise UserError(
            f"log.wandb=true, but Weights & Biases refuses: {_one_line(error)}; see `wandb login` and log.project, or"
            " set WANDB_MODE=offline"
        ) from error
    except Exception as error:  # CommError, a service that does not start, a proxy's answer: all mean no connection
        log.warning(
            "Weights & Biases cannot be reached (%s); logging offline: `wandb sync %s/wandb/offline-run-*` uploads it",
            _one_line(error),
            run_dir,
        )
        wandb.teardown()  # its service still holds the identity of the run that did not start
        run = wandb.init(mode="offline", **arguments)
    # By its own `step`: W&B would drop what a resumed run logs again.
    run.define_metric("*", step_metric="step")
    return run


def _for_wandb(
    step: int,
    sheet: Image.Image,
    videos: Mapping[str, tuple[np.ndarray, Sequence[Path]]],
    measures: Mapping[str, float],
) -> dict[str, Any]:
    import wandb

    clips = {
        f"samples/{name}": [wandb.Video(str(file), format="mp4") for file in files]
        for name, (_, files) in videos.items()
    }
    return {"step": step, "samples/sheet": wandb.Image(sheet), **clips, **measures}


def _add_gif(writer: Any, tag: str, clip: np.ndarray, fps: float, step: int) -> None:
    """A looping clip, uint8 ``(T, H, W, 3)``, among TensorBoard's images.

    ``SummaryWriter.add_video`` needs moviepy, and its ``add_image`` makes PNGs alone, so the event is written by hand:
    with tensorboard's own ``Summary`` and torch's private ``_get_file_writer`` (tensorboard 2.18 to 2.21, torch 2.11 to
    2.13; a test reads the file back).
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    encoded, (height, width) = gif_bytes(clip, fps)
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
