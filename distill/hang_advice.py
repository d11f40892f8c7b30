"""A run's timeouts, and what it adds to the report of a hang: the step, and how to go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import wraps
from typing import TypeVar

from distill.saved_state import same_command
from distill.training_state import TrainingState
from fsdp_cp.checkpoint import published_steps, step_folder
from fsdp_cp.signals import StopSignal
from fsdp_cp.timeouts import report_hang, shorten, watch_for_hangs

Run = TypeVar("Run", bound=TrainingState)


def reports_hangs(run: Callable[[Run, StopSignal], None]) -> Callable[[Run, StopSignal], None]:
    """A trainer's ``run``, of which a collective that timed out is reported with the step and how to go on."""

    @wraps(run)
    def reporting(trainer: Run, stop: StopSignal) -> None:
        on_nccl = trainer.device.type == "cuda"
        # What the user has set stays, by its older name too.
        if on_nccl and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(trainer.run_dir.resolve() / "flight_recorder_"))
        try:
            with watch_for_hangs() if on_nccl else nullcontext():
                run(trainer, stop)
        except Exception as error:
            steps = trainer.config.steps
            step = f"in step {trainer.step + 1} of {steps}" if trainer.step < steps else "after the last step"
            report_hang(error, step=step, advice=_advice(trainer))
            raise

    return reporting


def shorten_timeout(trainer: TrainingState) -> None:
    """From the step on in which the last role had its first update in this process; each may compile in its first."""
    if trainer.last_loss.keys() == trainer.roles.keys():
        shorten(timedelta(minutes=trainer.config.timeout.step))


def _advice(trainer: TrainingState) -> str:
    saved = published_steps(trainer.run_dir / "checkpoints")
    if not saved:
        return "there is no checkpoint yet: the same command starts afresh"
    return f"{same_command(trainer.config)} resumes from {step_folder(trainer.run_dir, saved[-1]).name}"
