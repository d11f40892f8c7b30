"""Export of a run at its end."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distill.methods import Method
from distill.methods.common.few_step import FewStepMethod
from fsdp_cp.errors import UserError
from fsdp_cp.files.atomic_folder import withdraw
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_first_rank
from models.export_folder import export_adapters, export_scheduler, export_weights
from models.roles.role import EXPERTS

if TYPE_CHECKING:
    from distill.train.trainer import Trainer

log = logging.getLogger(__name__)

ADAPTER_FOLDERS = ("student_lora", *(f"student_lora_{expert}" for expert in EXPERTS))
"""Names of :attr:`Trained.adapter_folder` that a run's export may have."""


class Export:
    """Export of the student for diffusers: weights, adapters and scheduler, in ``export/``."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def at_end(self) -> None:
        config, step, run_dir = self.trainer.config, self.trainer.step, self.trainer.run_dir
        role, trained = self.trainer.roles["student"], self.trainer.trained_of("student")
        has_average = trained[0].average is not None
        averaged = config.export.weights != "raw" and has_average
        about = {"run": str(run_dir.resolve()), "step": step, "role": "student"}
        about["weights"] = "ema" if averaged else "raw"
        dtype = torch.bfloat16 if config.export.dtype == "bf16" else torch.float32
        scale = 1.0 if role.adapters is None else role.adapters["scale"]
        role.rest()
        # An expert that does not train has the weights of its base.
        weights: list[Any] = [network.base_parameters() for network in role.networks]
        bases: list[Any] | None = None if role.adapters is None else [None for _ in role.networks]
        for network in trained:
            if bases is not None:
                bases[network.index] = weights[network.index]
            weights[network.index] = network.weights(averaged=averaged)
        export_weights(
            run_dir / "export" / "student",
            weights,
            role.config,
            dtype=dtype,
            boundaries=role.boundaries,
            about=about,
            bases=bases,
            scale=scale,
            causal=role.causal_file,
        )
        whole = [name for network in trained for name in weights[network.index] if ".lora_" not in name]
        adapters = {} if role.adapters is None or whole else {network.adapter_folder: network for network in trained}
        for name in ADAPTER_FOLDERS:
            folder = run_dir / "export" / name
            if name in adapters:
                adapter_weights = weights[adapters[name].index]
                export_adapters(
                    folder, adapter_weights, role.family, scale=scale, dtype=dtype, about=about, causal=role.causal_file
                )
            else:  # an earlier run in this directory may have left such a folder
                on_first_rank(partial(withdraw, folder))
        scheduler = run_dir / "export" / "scheduler"
        on_first_rank(lambda: write_scheduler(self.trainer.method, scheduler))
        if rank() == 0:
            if role.adapters is not None and whole:
                log.info(
                    "skipped export/student_lora: an adapter file cannot hold %s and %d others",
                    whole[0],
                    len(whole) - 1,
                )
            if has_average and not averaged:
                log.info("export.weights=raw: exporting the raw student; samples and report use the average")
            merged = "" if role.adapters is None else ", merged into its base,"
            log.info("exported the student (%s weights)%s to %s", about["weights"], merged, run_dir / "export/student")


def write_scheduler(method: Method, folder: Path) -> None:
    """Write the scheduler with which a plain diffusers pipeline samples as ``method`` does, or log why none fits."""
    scheduler = None
    if isinstance(method, FewStepMethod):
        try:
            scheduler = method.scheduler(method.roles["student"].family.pipeline_times)
        except UserError as error:
            log.warning("could not write %s: %s", folder, error)
    export_scheduler(folder, scheduler)
