"""Logging services that show a run's metrics and clips, one small class each, on rank 0; see docs/extending.md.

Steps are 1-based, and a metric without a value is ``None``.
"""

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from distill.config.schema import LogSettings
from fsdp_cp.errors import UserError

log = logging.getLogger(__name__)


Metrics = dict[str, float | None]
"""Values by the names of metrics; ``None`` without a value."""


class Shown(NamedTuple):
    """Sample clips of one step."""

    sheet: Image.Image
    """Picture of all."""
    videos: Mapping[str, Sequence[Path]]
    """mp4 files by network and number of steps."""
    measures: Mapping[str, float]


def check_services(settings: LogSettings) -> None:
    for service in ("wandb", "tensorboard"):
        if getattr(settings, service) and importlib.util.find_spec(service) is None:
            raise UserError(f"log.{service}=true needs {service}; pip install 'fsdp-cp[{service}]'")


def open_services(run_dir: Path, settings: LogSettings, config: Mapping[str, Any], step: int) -> list[Any]:
    """Open the services that ``settings`` enable. The run resumes from ``step``."""
    services: list[Any] = []
    if settings.wandb:
        services.append(WeightsAndBiases(run_dir, settings.project, config))
    if settings.tensorboard:
        services.append(TensorBoard(run_dir, step))
    return services


class Service:
    """A logger whose failures never end a run: after one it logs no more."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._run: Any = None
        """The service's own object; ``None`` after a failure."""

    def _send(self, send: Callable[[Any], object]) -> None:
        run = self._run
        if run is not None and not self._try(lambda: send(run), "continuing without it"):
            self._run = None

    def _try(self, work: Callable[[], object], instead: str) -> bool:
        """Call ``work``; after a failure warn and return ``False``: it must not end days of training."""
        try:
            work()
        except Exception as error:  # errors come from services' processes and threads, and can be of any kind
            reason = " ".join(str(error).split()) or type(error).__name__
            log.warning("%s failed (%s); %s", self.name, reason, instead)
            return False
        return True


class WeightsAndBiases(Service):
    """Logger to Weights & Biases, offline without a key or an answer of the server."""

    name = "Weights & Biases"

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]):
        super().__init__()
        # A resumed run continues its curves; one that started from scratch (resume=never) gets its own.
        earlier = len(list((run_dir / "previous").glob("*")))
        run_id = hashlib.sha256(f"{run_dir.resolve()} {earlier}".encode()).hexdigest()[:16]
        self._start = {"project": project, "name": run_dir.name, "id": run_id, "dir": run_dir, "config": config}
        if not self._try(self._open, f"logging offline: `wandb sync {run_dir}/wandb/offline-run-*` uploads it"):
            self._try(lambda: self._open(mode="offline"), "continuing without it")

    def write(self, step: int, metrics: Metrics) -> None:
        self._send(lambda run: run.log({"step": step, **metrics}))

    def show(self, step: int, shown: Shown) -> None:
        def send(run: Any) -> None:
            import wandb

            clips = {
                f"samples/{name}": [wandb.Video(str(file), format="mp4") for file in files]
                for name, files in shown.videos.items()
            }
            run.log({"step": step, "samples/sheet": wandb.Image(shown.sheet), **clips, **shown.measures})

        self._send(send)

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


class TensorBoard(Service):
    """Logger to TensorBoard, from ``step`` on. It plays no mp4 files: clips are one picture of their frames."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        super().__init__()
        self._run = SummaryWriter(run_dir / "tensorboard", purge_step=step + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        def send(writer: Any) -> None:
            for name, value in metrics.items():
                if value is not None:
                    writer.add_scalar(name, value, step)

        self._send(send)

    def show(self, step: int, shown: Shown) -> None:
        sheet = np.asarray(shown.sheet)
        self._send(lambda writer: writer.add_image("samples/sheet", sheet, step, dataformats="HWC"))
        self.write(step, shown.measures)

    def close(self) -> None:
        self._send(lambda writer: writer.close())
