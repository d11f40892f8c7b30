"""Where a run's metrics and clips are shown beside its own files: one small class a service, behind :class:`Logger`.

A further one is a class here and a line in :func:`open_services`; docs/extending.md shows it.
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

from distill import wandb_login
from distill.config import LogSettings
from distill.report.media import gif_bytes
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """Sample clips of one step."""

    sheet: Image.Image
    """All of them in one picture."""
    videos: Mapping[str, tuple[np.ndarray, Sequence[Path]]]
    """By what made them, the clips, uint8 ``(n, T, H, W, 3)``, and their mp4 files."""
    measures: Mapping[str, float]
    """Of the clips, by name; may be empty."""
    fps: float
    """Frames per second."""


class Logger(Protocol):
    """What shows a run's numbers. On rank 0 alone; steps are 1-based."""

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """The metrics of a step; ``None`` where there is no value."""
        ...

    def show(self, step: int, clips: Clips) -> None:
        """Sample clips."""
        ...

    def close(self) -> None:
        """Flush and close everything."""
        ...


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


def open_services(run_dir: Path, settings: LogSettings, config: Mapping[str, Any], step: int) -> list[Logger]:
    """The services that ``settings`` ask for.

    Args:
        run_dir: the run's folder.
        settings: ``log.*``.
        config: the whole configuration, for services that show it.
        step: of the checkpoint that the run goes on from.

    Raises:
        UserError: what Weights & Biases refuses without asking its server.
    """
    services: list[Logger] = []
    if settings.wandb:
        services.append(WeightsAndBiases(run_dir, settings.project, config))
    if settings.tensorboard:
        services.append(TensorBoard(run_dir, step))
    return services


class WeightsAndBiases:
    """It never ends a run: where its server does not answer at the start, the run is logged offline, and where it fails
    on the way, without it.

    Args:
        run_dir: the run's folder.
        project: at Weights & Biases.
        config: shown with the run.

    Raises:
        UserError: what it refuses without asking its server.
    """

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]):
        self._run: Any = _start_wandb(run_dir, project, config)

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._send(lambda run: run.log({"step": step, **metrics}))

    def show(self, step: int, clips: Clips) -> None:
        """The mp4 files as they are."""
        self._send(lambda run: run.log(_for_wandb(step, clips)))

    def close(self) -> None:
        self._send(lambda run: run.finish())

    def _send(self, send: Callable[[Any], object]) -> None:
        """``send(run)``; what fails there must not end days of training, and is said once."""
        if self._run is None:
            return
        try:
            send(self._run)
        except Exception as error:  # of a service process of its own, so of any kind
            log.warning("Weights & Biases failed and is left out from here on: %s", _one_line(error))
            self._run = None


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


def _for_wandb(step: int, clips: Clips) -> dict[str, Any]:
    import wandb

    videos = {
        f"samples/{name}": [wandb.Video(str(file), format="mp4") for file in files]
        for name, (_, files) in clips.videos.items()
    }
    return {"step": step, "samples/sheet": wandb.Image(clips.sheet), **videos, **clips.measures}


class TensorBoard:
    """Curves and, since it plays no mp4, clips as GIFs.

    Args:
        run_dir: the run's folder.
        step: of the checkpoint that the run goes on from; what is there after it is drawn no more.
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
    """A looping clip, uint8 ``(T, H, W, 3)``, among TensorBoard's images.

    ``SummaryWriter.add_video`` needs moviepy, and its ``add_image`` makes PNGs alone, so the event is written by hand:
    with tensorboard's own ``Summary`` and torch's private ``_get_file_writer`` (tensorboard 2.18 to 2.21, torch 2.11 to
    2.13; a test reads the file back).
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    encoded, (height, width) = gif_bytes(clip, fps)
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
