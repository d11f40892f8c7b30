"""What a checkpoint of a run holds, and how a trainer gets it back."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distill.config import Config
from distill.resume_checks import accepts_other_data, boundaries_of
from distill.training_state import TrainingState
from fsdp_cp.checkpoint import leave_branch, load, read_state
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from models.checkpoint_files import defining

log = logging.getLogger(__name__)


def same_command(config: Config) -> str:
    """What goes on with a run, as words of a sentence."""
    return "the same command" + (", with checkpoint.resume=auto," if config.checkpoint.resume == "never" else "")


def saved_tensors(trainer: TrainingState) -> dict[str, Any]:
    """Everything that trains, by role; the teacher is not among it, since it does not change."""
    tensors: dict[str, Any] = {
        name: {"weights": part.weights(), "adamw": trainer.optimizers[name].state()}
        for name, part in trainer.trained.items()
    }
    for name, average in trainer.averages.items():
        tensors[name]["ema"] = average.weights
    return tensors


def saved_state(trainer: TrainingState) -> dict[str, Any]:
    """Plain state. Random streams are functions of seed, step and position, so these restore them too."""
    return {
        "step": trainer.step,
        "samples": trainer.samples,
        "seed": trainer.config.seed,
        "updates": trainer.updates,
        "skipped": trainer.skipped,
        "seconds": trainer.seconds,
        "unlogged": trainer.unlogged,
        "branch_of": trainer.branch_of,
        "settings": asdict(trainer.config),
        "sources": trainer.sources,
        "method": trainer.method.settings.name,
        "data": trainer.training_data.fingerprint,
        "configs": {name: role.config for name, role in trainer.roles.items()},
        "boundaries": boundaries_of(trainer.roles.values()),
        "adapters": {name: role.adapters for name, role in trainer.roles.items() if role.adapters is not None},
    }


def restore(trainer: TrainingState, folder: Path) -> None:
    state = read_state(folder)
    # Checkpoints of earlier versions hold diffusers' own notes beside what defines a network.
    networks = {name: defining(config) for name, config in state["configs"].items()}
    for what, before, now in (
        ("other data", state["data"], trainer.training_data.fingerprint),
        ("other networks", networks, {name: defining(role.config) for name, role in trainer.roles.items()}),
    ):
        if before != now and not (what == "other data" and accepts_other_data(trainer.config)):
            raise UserError(
                f"checkpoint.resume: {folder} was made with {what};"
                " use the same settings, another run_dir, or checkpoint.resume=never"
            )
    load(folder, saved_tensors(trainer))
    if folder.parent.resolve() == (trainer.run_dir / "checkpoints").resolve():
        leave_branch(folder)
    trainer.step, trainer.samples, trainer.seconds = state["step"], state["samples"], state["seconds"]
    for name in ("updates", "skipped", "unlogged"):
        setattr(trainer, name, dict(state[name]))
    trainer.branch_of = trainer.branch_of or state.get("branch_of")
    if rank() == 0:
        log.info("resumed from step %d (%s)", trainer.step, folder)
