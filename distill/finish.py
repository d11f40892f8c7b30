"""What a run does after its last step: export, samples and report."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from distill.evaluate import write_scheduler
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import barrier, on_all_ranks
from fsdp_cp.timeouts import long_timeout
from models.export_folder import export_adapters, export_weights
from models.published import withdraw
from models.role import EXPERTS

if TYPE_CHECKING:
    from distill.trainer import Trainer

log = logging.getLogger(__name__)


@long_timeout()
def finish(trainer: Trainer) -> None:
    """Write export, samples and report, with the averaged student if there is one.

    Raises:
        UserError: a run that ended with a loss that is not finite: its student is not shown as a result.
    """
    broken = [name for name, loss in trainer.last_loss.items() if not math.isfinite(loss)]
    if broken:
        name = broken[0]
        raise UserError(
            f"the run ended at step {trainer.step} with a loss of the {name} that is not finite"
            f" ({trainer.skipped[name]} of its updates were skipped): nothing is exported; lower optim.{name}.lr and"
            " begin again with checkpoint.resume=never, or from an earlier checkpoint"
        )
    if trainer.config.export.at_end:
        _export(trainer)
    if trainer.config.sample.at_end:
        trainer.sample()
        if trainer.config.sample.report_clips:
            facts = {
                "steps": trainer.step,
                "minutes of training": round(trainer.seconds / 60, 2),
                "updates": ", ".join(f"{name} {count}" for name, count in trainer.updates.items()),
                "peak memory per rank, GiB": round(trainer.memory()["memory/peak_gib"], 3),
                **trainer.facts,
            }
            with trainer.method.student_average():
                trainer.evaluator.write_report(facts)
    barrier()


def _export(trainer: Trainer) -> None:
    role, folder = trainer.roles["student"], trainer.run_dir / "export"
    has_average = role.trained_names[0] in trainer.averages
    averaged = trainer.config.export.weights != "raw" and has_average
    networks = trainer.weights_of("student", averaged=averaged)
    dtype = torch.bfloat16 if trainer.config.export.dtype == "bf16" else torch.float32
    about = {"run": str(trainer.run_dir.resolve()), "step": trainer.step, "role": "student"}
    about["weights"] = "ema" if averaged else "raw"
    bases: list[dict[str, Any] | None] | None = None
    scale = 1.0
    if role.adapters is not None:
        scale = role.adapters["scale"]
        bases = [
            network.base_parameters() if i in role.trained_experts else None for i, network in enumerate(role.networks)
        ]
    export_weights(
        folder / "student",
        networks,
        role.config,
        dtype=dtype,
        boundaries=role.boundaries,
        about=about,
        bases=bases,
        scale=scale,
    )
    whole = [name for i in role.trained_experts for name in networks[i] if ".lora_" not in name]
    # Write one folder per expert, since load_lora_weights(..., load_into_transformer_2=True) takes one expert at a
    # time. A single network gets one folder.
    names = [f"student_lora_{expert}" for expert in EXPERTS] if role.boundaries else ["student_lora"]
    for name in ("student_lora", *(f"student_lora_{expert}" for expert in EXPERTS)):
        if name in names and not whole and (bases or [None])[names.index(name)] is not None:
            weights = networks[names.index(name)]
            export_adapters(folder / name, weights, role.family, scale=scale, dtype=dtype, about=about)
        else:  # an earlier run in this directory may have left one
            on_all_ranks(lambda name=name: withdraw(folder / name) if rank() == 0 else None)
    on_all_ranks(lambda: write_scheduler(trainer.method, folder / "scheduler") if rank() == 0 else None)
    if rank() == 0:
        if role.adapters is not None and whole:
            log.info("no export/student_lora: %s and %d others fit no such file", whole[0], len(whole) - 1)
        if has_average and not averaged:
            log.info("export.weights=raw: samples and report are of the average, the exported student is not")
        merged = "" if role.adapters is None else ", merged into its base,"
        log.info("exported the student (%s weights)%s to %s", about["weights"], merged, folder / "student")
