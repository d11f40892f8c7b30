"""Opening of a run: device, mesh, checkpoint and run directory, before ``train.py`` builds data and networks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distill.config import Config
from distill.run.disk_space import check_disk
from distill.run.folder import command_line, held_run_dir, recorded_end, resume_setting, same_command, start_run
from distill.run.loggers import log_in
from distill.run.resume_checks import check_resume, find_sources
from distill.run.setup import RunPlan, device_of
from fsdp_cp.checkpoint.save_load import find_resume, published_steps, read_state, refuse_overtaken, step_folder
from fsdp_cp.launch import choose_allocator, choose_threads, process_group, rank, refuse_separate_worlds
from fsdp_cp.mesh import Mesh, mesh_of_shape
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.runtime.hangs import report_hang, watch_for_hangs


def open_device(config: Config) -> torch.device:
    """Return this rank's device, and configure CUDA's allocator before the checks of a plan start CUDA.

    Raises:
        UserError: several tasks of a launcher other than torchrun; see also :func:`distill.run.setup.device_of`.
    """
    refuse_separate_worlds()
    device = device_of(config)
    choose_allocator(device, config.cuda_allocator)
    return device


@contextmanager
def open_mesh(config: Config, plan: RunPlan, device: torch.device) -> Iterator[Mesh]:
    """Start the process group for the duration of the context, and yield the planned mesh."""
    offloaded = [role.name for role in plan.roles if role.sharding.offload == "cpu"]
    choose_threads(device, host_optimizer=any(name in plan.method.trained_roles for name in offloaded))
    with process_group(device, timeout=timedelta(minutes=config.timeout.start)):
        yield mesh_of_shape(plan.mesh, device_type=device.type)


@dataclass(kw_only=True)
class Run:
    """An opened run. No other run writes into its directory, and its checkpoint fits its settings."""

    config: Config
    plan: RunPlan
    device: torch.device
    mesh: Mesh
    command: list[str]
    """Words of the command that starts the run again."""
    resume_from: Path | None
    """Folder of the checkpoint that the run resumes, if any."""
    sources: dict[str, Any]
    """Result of :func:`distill.run.resume_checks.check_resume`, for the run's checkpoints."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts for the report, in addition to those of every run."""

    @contextmanager
    def started(self, step: Callable[[], int]) -> Iterator[None]:
        """Record the start, the log and the end of the run. Enter this context after all checks.

        Args:
            step: number of steps done so far.
        """
        run_dir = self.plan.run_dir
        start_run(self.config, run_dir, resume_from=self.resume_from, step=step(), command=self.command)
        with recorded_end(run_dir), self._reported_hangs(step):
            yield

    @contextmanager
    def _reported_hangs(self, step: Callable[[], int]) -> Iterator[None]:
        """Report a collective that timed out, with the step and the command that resumes."""
        on_nccl, run_dir = self.device.type == "cuda", self.plan.run_dir
        # Keep the user's own setting, also under its older name.
        if on_nccl and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run_dir.resolve() / "flight_recorder_"))
        try:
            with watch_for_hangs() if on_nccl else nullcontext():
                yield
        except Exception as error:
            done, steps, saved = step(), self.config.steps, published_steps(run_dir / "checkpoints")
            place = f"in step {done + 1} of {steps}" if done < steps else "after the last step"
            advice = "there is no checkpoint yet: the same command starts from scratch"
            if saved:
                advice = f"{same_command(self.config)} resumes from {step_folder(run_dir, saved[-1]).name}"
            report_hang(error, step=place, advice=advice)
            raise


@contextmanager
def open_run(config: Config, plan: RunPlan, *, device: torch.device, arguments: list[str]) -> Iterator[Run]:
    """Open the run of ``config`` on all ranks.

    Each of these steps may refuse the run:

    1. Log in to the logging services, start the process group and the mesh, and read the data's table.
    2. Compare the checkpoint to resume with the settings and with the files that they name.
    3. Check the disk space for checkpoints.
    4. Make and lock the run directory. No other run may have added a checkpoint since step 2.

    The log, the record of the start and the status follow in :meth:`Run.started`, once the networks are built, so that
    a refused run does not change the files of an earlier one.

    Args:
        config: the composed settings.
        plan: their plan.
        device: this rank's device.
        arguments: words of the command line that ``config`` is composed of.

    Raises:
        UserError: a run that one of the steps refuses.
    """
    log_in(config.log)
    with open_mesh(config, plan, device) as mesh:
        # Check the table before the checkpoint: check_resume would report a faulty table as changed data.
        on_all_ranks(lambda: config.data.table_in_words() if rank() == 0 else None)
        checkpoints = plan.run_dir / "checkpoints"
        resume, existing = resume_setting(config, plan.run_dir), published_steps(checkpoints)
        resume_from = find_resume(resume, checkpoints)
        sources = on_all_ranks(lambda: find_sources(config, plan.roles) if rank() == 0 else None)[0]
        if resume_from is not None:
            sources = check_resume(config, resume_from, plan.roles, sources)
        steps = config.steps - (read_state(resume_from)["step"] if resume_from else 0)
        on_all_ranks(lambda: check_disk(config, plan, steps, resume) if rank() == 0 else None)
        with held_run_dir(plan.run_dir):
            refuse_overtaken(existing, checkpoints)
            yield Run(
                config=config,
                plan=plan,
                device=device,
                mesh=mesh,
                command=command_line(arguments),
                resume_from=resume_from,
                sources=sources,
            )
