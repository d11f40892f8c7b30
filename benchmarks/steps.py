"""Trainer of a run, on this process group, for benchmarks that call its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distill.config import compose_config
from distill.data.base import ClipDataset
from distill.run.open import Run
from distill.run.setup import Shapes, plan_run
from distill.train.trainer import Trainer, build_trainer
from fsdp_cp.mesh import mesh_of_shape


def open_trainer(
    overrides: Sequence[str], device: torch.device, shapes: Shapes | None = None, data: ClipDataset | None = None
) -> Trainer:
    """Build the trainer of the run of ``overrides``, before its first step.

    Args:
        overrides: settings, as for ``train.py``.
        device: this rank's device.
        shapes: shapes of a sample's latents and condition. If given, the run's data are not read.
        data: data to use instead of the run's.

    Raises:
        UserError: settings that a run refuses.
    """
    config = compose_config(list(overrides))
    plan = plan_run(config, shapes=shapes)
    mesh = mesh_of_shape(plan.mesh, device_type=device.type)
    if data is None:
        data = config.data.build(seed=config.seed, device=device, run_dir=plan.run_dir)
    return build_trainer(Run(config=config, plan=plan, device=device, mesh=mesh), data)
