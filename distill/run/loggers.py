"""Logging services that show a run's metrics and clips, one small class each.

To add a service, write a class here and add a line to :func:`open_services`; see docs/extending.md.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from distill.config import LogSettings
from distill.report.media import gif_bytes
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """Sample clips of one step."""

    sheet: Image.Image
    """Picture of all clips."""
    videos: Mapping[str, tuple[np.ndarray, Sequence[Path]]]
    """Clips, uint8 ``(n, T, H, W, 3)``, and their mp4 files, by the name of the network and its number of steps."""
    measures: Mapping[str, float]
    """Measures of the clips by name; may be empty."""
    fps: float
    """Frames per second."""


class Logger(Protocol):
    """Service that shows a run's metrics and clips. Exists on rank 0 only; steps are 1-based."""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log the metrics of a step; ``None`` where there is no value."""
        ...

    def show(self, step: int, clips: Clips) -> None:
        """Show sample clips."""
        ...

    def close(self) -> None:
        """Flush and close everything."""
        ...


def check_services(settings: LogSettings) -> None:
    """Refuse a service that is not installed.

    Args:
        settings: ``log.*``.

    Raises:
        UserError: a missing package.
    """
    for service in ("wandb", "tensorboard"):
        if getattr(settings, service) and importlib.util.find_spec(service) is None:
            raise UserError(f"log.{service}=true needs {service}; pip install 'fsdp-cp[{service}]'")


def log_in(settings: LogSettings) -> None:
    """Let Weights & Biases find its key on rank 0, or ask for it on a terminal, before anything expensive.

    Nothing is sent. Only the start of the run shows whether the server can be reached and accepts the key.

    Args:
        settings: ``log.*``.

    Raises:
        UserError: no key, and no terminal to ask for one.
    """
    if not settings.wandb or rank() != 0:
        return
    import wandb

    try:
        wandb.login(verify=False)
    except Exception as error:
        raise UserError(
            f"log.wandb=true: {_one_line(error)}; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to"
            " upload later"
        ) from error


def open_services(run_dir: Path, settings: LogSettings, config: Mapping[str, Any], step: int) -> list[Logger]:
    """Open the services that ``settings`` enable.

    Args:
        run_dir: the run directory.
        settings: ``log.*``.
        config: the whole configuration, for services that show it.
        step: step of the checkpoint from which the run resumes.
    """
    services: list[Logger] = []
    if settings.wandb:
        services.append(WeightsAndBiases(run_dir, settings.project, config))
    if settings.tensorboard:
        services.append(TensorBoard(run_dir, step))
    return services


class WeightsAndBiases:
    """Logger to Weights & Biases. Its failures never end a run.

    A run whose server does not answer, or refuses, is logged offline. After a later failure the run continues without
    the service.

    Args:
        run_dir: the run directory.
        project: name of the project at Weights & Biases.
        config: shown with the run.
    """

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]):
        # A resumed run continues its curves; one that started from scratch (resume=never) gets its own.
        earlier = len(list((run_dir / "previous").glob("*")))
        run_id = hashlib.sha256(f"{run_dir.resolve()} {earlier}".encode()).hexdigest()[:16]
        self._start = {"project": project, "name": run_dir.name, "id": run_id, "dir": run_dir, "config": config}
        self._run: Any = None
        if not self._try(self._open, f"logging offline: `wandb sync {run_dir}/wandb/offline-run-*` uploads it"):
            self._try(lambda: self._open(mode="offline"), "continuing without it")

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._send(lambda run: run.log({"step": step, **metrics}))

    def show(self, step: int, clips: Clips) -> None:
        """Send the mp4 files as they are."""
        self._send(lambda run: run.log(_for_wandb(step, clips)))

    def close(self) -> None:
        self._send(lambda run: run.finish())

    def _open(self, **mode: str) -> None:
        import wandb

        if mode:
            wandb.teardown()  # its service still holds the identity of the run that did not start
        run = wandb.init(resume=None if mode else "allow", **mode, **self._start)
        # Use our `step` as the x axis: by its own counter, W&B drops the steps that a resumed run logs again.
        run.define_metric("*", step_metric="step")
        self._run = run

    def _send(self, send: Callable[[Any], object]) -> None:
        run = self._run
        if run is not None and not self._try(lambda: send(run), "continuing without it"):
            self._run = None

    @staticmethod
    def _try(work: Callable[[], object], instead: str) -> bool:
        """Call ``work``; after a failure warn and return ``False``: it must not end days of training."""
        try:
            work()
        except Exception as error:  # errors come from W&B's service process and can be of any kind
            log.warning("Weights & Biases failed (%s); %s", _one_line(error), instead)
            return False
        return True


def _for_wandb(step: int, clips: Clips) -> dict[str, Any]:
    import wandb

    videos = {
        f"samples/{name}": [wandb.Video(str(file), format="mp4") for file in files]
        for name, (_, files) in clips.videos.items()
    }
    return {"step": step, "samples/sheet": wandb.Image(clips.sheet), **videos, **clips.measures}


class TensorBoard:
    """Logger to TensorBoard. Clips are GIFs, since TensorBoard does not play mp4.

    Args:
        run_dir: the run directory.
        step: step of the checkpoint from which the run resumes; TensorBoard hides later values.
    """

    def __init__(self, run_dir: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def show(self, step: int, clips: Clips) -> None:
        self._writer.add_image("samples/sheet", np.asarray(clips.sheet), step, dataformats="HWC")
        for name, (videos, _) in clips.videos.items():
            for i, clip in enumerate(videos):
                _add_gif(self._writer, f"samples/{name}/{i}", clip, clips.fps, step)
        for name, value in clips.measures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _add_gif(writer: Any, tag: str, clip: np.ndarray, fps: float, step: int) -> None:
    """Add a looping clip, uint8 ``(T, H, W, 3)``, to TensorBoard's images.

    ``SummaryWriter.add_video`` needs moviepy, and its ``add_image`` makes only PNGs, so this writes the event with
    tensorboard's ``Summary`` and torch's private ``_get_file_writer`` (tensorboard 2.18 to 2.21, torch 2.11 to 2.13;
    a test reads the file back).
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    encoded, (height, width) = gif_bytes(clip, fps)
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
