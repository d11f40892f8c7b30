"""Hydra's launcher plugins, which a compose API alone never starts: each of their jobs is one point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from distill.config.errors import CONFIGS
from fsdp_cp.errors import UserError

_CONFIG = "sweep_point"


def launch(task: Callable[[Any], Any], names: Sequence[str], *, words: Sequence[str], folder: Path) -> None:
    """Have the launcher that ``words`` choose call ``task`` for each of ``names``; returns when all have ended.

    The launcher gets a small configuration of its own, ``{point: NAME}``: a point's settings are in ``sweep.json``, and
    its composed ones are its own process's. ``Callbacks`` is private (hydra-core 1.3), and part of what
    ``Launcher.setup`` takes.

    Args:
        task: picklable, since a launcher may call it on another machine.
        names: of the points.
        words: ``hydra/launcher=NAME`` and ``hydra.launcher.KEY=VALUE``; none for Hydra's basic launcher, which runs one
            after another in this process.
        folder: the sweep's, for the launcher's own files.

    Raises:
        UserError: as :func:`check_launcher`.
    """
    logging.getLogger("hydra").setLevel(logging.WARNING)  # of each job it would say what our own line says
    with _configured(words, folder) as (loader, config):
        context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
        try:
            launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        except HydraException as error:
            raise UserError(_in_a_line(words, error)) from error
        for done in launcher.launch([[f"point='{name}'"] for name in names], initial_job_idx=0):
            done.return_value  # noqa: B018  # raises what the task has raised


def check_launcher(words: Sequence[str], folder: Path) -> None:
    """Refuse what :func:`launch` would, before anything is written.

    Raises:
        UserError: a launcher that is not installed, or settings that it does not have.
    """
    with _configured(words, folder):
        pass


@contextmanager
def _configured(words: Sequence[str], folder: Path) -> Iterator[tuple[ConfigLoader, DictConfig]]:
    ConfigStore.instance().store(name=_CONFIG, node={"point": None})
    quoted = str(folder).replace("\\", "\\\\").replace("'", r"\'")
    own = [
        f"hydra.sweep.dir='{quoted}'",
        "hydra.sweep.subdir=.",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    with initialize_config_dir(str(CONFIGS), job_name="sweep", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            config = loader.load_configuration(_CONFIG, [*own, *words], run_mode=RunMode.MULTIRUN)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(_in_a_line(words, error)) from error
        yield loader, config


def _in_a_line(words: Sequence[str], error: Exception) -> str:
    return f"{' '.join(words)}: {' '.join(str(error.__cause__ or error).split())[:300]}"
