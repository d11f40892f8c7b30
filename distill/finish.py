"""What a run does after its last step: export, samples and report."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from distill.evaluate import write_scheduler
from distill.training_state import TrainingState
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import barrier, on_all_ranks
from fsdp_cp.timeouts import long_timeout
from models.export_folder import export_adapters, export_weights
from models.published import withdraw
from models.role import EXPERTS

log = logging.getLogger(__name__)


@long_timeout()
def finish(trainer: TrainingState) -> None:
    """Export, samples and report, with the averaged student where there is one.

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
            _report(trainer)
    barrier()


def _export(trainer: TrainingState) -> None:
    averaged = trainer.config.export.weights != "raw" and trainer.has_average("student")
    networks = trainer.weights_of("student", averaged=averaged)
    dtype = torch.bfloat16 if trainer.config.export.dtype == "bf16" else torch.float32
    about = {"run": str(trainer.run_dir.resolve()), "step": trainer.step, "role": "student"}
    about["weights"] = "ema" if averaged else "raw"
    folder = trainer.run_dir / "export"
    role = trainer.roles["student"]
    bases: list[dict[str, Any] | None] | None = None
    scale = 1.0
    if role.adapters is not None:
        role.rest()
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
    trained = [networks[i] for i in role.trained_experts]
    whole = [name for weights in trained for name in weights if ".lora_" not in name]
    # Of each expert a folder of its own, for load_lora_weights(..., load_into_transformer_2=True); of one network one.
    names = [f"student_lora_{expert}" for expert in EXPERTS] if role.boundaries else ["student_lora"]
    for name in ("student_lora", *(f"student_lora_{expert}" for expert in EXPERTS)):
        if name in names and not whole and (bases or [None])[names.index(name)] is not None:
            weights = networks[names.index(name)]
            export_adapters(folder / name, weights, role.family, scale=scale, dtype=dtype, about=about)
        else:  # an earlier run in this folder may have left one
            on_all_ranks(lambda name=name: withdraw(folder / name) if rank() == 0 else None)
    if role.adapters is not None and whole and rank() == 0:
        log.info("no export/student_lora: %s and %d others fit no such file", whole[0], len(whole) - 1)
    on_all_ranks(lambda: write_scheduler(trainer.method, folder / "scheduler") if rank() == 0 else None)
    if rank() == 0:
        if not averaged and trainer.has_average("student"):
            log.info("export.weights=raw: samples and report are of the average, the exported student is not")
        merged = "" if role.adapters is None else ", merged into its base,"
        log.info("exported the student (%s weights)%s to %s", about["weights"], merged, folder / "student")


def _report(trainer: TrainingState) -> None:
    memory = trainer.peak_memory()
    facts = {
        "steps": trainer.step,
        "minutes of training": round(trainer.seconds / 60, 2),
        "updates": ", ".join(f"{name} {count}" for name, count in trainer.updates.items()),
        "peak memory per rank, GiB": round(memory, 3),
        **trainer.facts,
    }
    with trainer.method.student_average():
        trainer.evaluator.write_report(facts)
