"""Opening of a run: device, mesh, checkpoint, run directory and summary, before data and networks; dry runs."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from distill.config import Config
from distill.config.trained_method import sampling_in_words, trained_method
from distill.run.checkpoint_checks import Start, check_start
from distill.run.folder import command_line, held_run_dir, recorded_end, resume_setting, start_run
from distill.run.setup import RunPlan, device_of
from fsdp_cp.checkpoint.folder import refuse_overtaken, saved_steps, step_folder
from fsdp_cp.errors import UserError, counted
from fsdp_cp.launch import choose_allocator, choose_threads, process_group, rank, refuse_separate_worlds
from fsdp_cp.mesh import Mesh, mesh_of_shape
from fsdp_cp.progress import first_rank_log
from fsdp_cp.reduce import on_first_rank
from fsdp_cp.runtime.hangs import watch_for_hangs
from fsdp_cp.sequence import local_token_count
from models.roles.role import EXPERTS
from models.roles.role_plan import RolePlan
from models.sample import PartShapes, part_name

log = first_rank_log(__name__)


def open_device(config: Config) -> torch.device:
    """Return this rank's device, and configure CUDA's allocator before the checks of a plan start CUDA."""
    refuse_separate_worlds()
    device = device_of(config)
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        log.warning("CUDA_DEVICE_MAX_CONNECTIONS=1 prevents FSDP's communication from overlapping compute; unset it")
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
    command: list[str] = field(default_factory=list)
    """Words of the command that starts the run again."""
    start: Start | None = None
    """Checkpoint that the run resumes, and its data; ``None`` for steps that are only measured."""

    @contextmanager
    def started(self, step: Callable[[], int]) -> Iterator[None]:
        """Log a summary, and record the start, the log and the end of the run, after all checks. ``step`` counts."""
        run_dir = self.plan.run_dir
        # Keep the user's own setting, also under its older name.
        if self.device.type == "cuda" and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run_dir.resolve() / "flight_recorder_"))
        start_run(self.config, run_dir, resume_from=self.start.resume_from, step=step(), command=self.command)
        for line in summary(self.config, self.plan, self.start.data):
            log.info("%s", line)

        def progress() -> str:
            saved = saved_steps(run_dir / "checkpoints")
            newest = f"newest checkpoint {step_folder(run_dir, saved[-1]).name}" if saved else "no checkpoint yet"
            return f"after {step()} of {self.config.steps} steps ({newest})"

        with recorded_end(run_dir), watch_for_hangs(progress):
            yield
        log.info("finished %s; all output is in %s", counted(step(), "step"), run_dir)


@contextmanager
def open_run(config: Config, plan: RunPlan, *, device: torch.device, arguments: list[str]) -> Iterator[Run]:
    """Open the run of ``config`` on all ranks: start process group and mesh; read the data's table, compare the
    checkpoint to resume with settings and files, and check the disk; lock the directory, to which no other run may have
    added a checkpoint meanwhile. Each may refuse. Log, start and status follow in :meth:`Run.started`, once networks
    are built: a refused run does not change files of an earlier one."""
    with open_mesh(config, plan, device) as mesh:
        checkpoints = plan.run_dir / "checkpoints"
        resume, existing = resume_setting(config, plan.run_dir), saved_steps(checkpoints)
        start = on_first_rank(lambda: check_start(config, plan, resume))
        with held_run_dir(plan.run_dir):
            refuse_overtaken(existing, checkpoints)
            command = command_line(arguments)
            yield Run(config=config, plan=plan, device=device, mesh=mesh, command=command, start=start)


def dry_run(config: Config, plan: RunPlan) -> None:
    """Make the checks that follow :func:`distill.run.setup.plan_run`, without a process group, and log the run."""
    if rank() != 0:
        return
    if config.device == "cuda" and not torch.cuda.is_available():
        log.warning("device=cuda, but torch sees no GPU here; checking as on the CPU, without checks that need a GPU")
    start = check_start(config, plan, config.checkpoint.resume)
    lines = [
        "dry run: nothing is started or written",
        *summary(config, plan, start.data),
        f"start    {'from scratch' if start.resume_from is None else f'from step {start.step} ({start.resume_from})'}",
        f"disk     {start.space}",
        "all checks passed; a dry run does not decode clips and captions, and plan=true predicts the memory",
    ]
    for line in lines:
        log.info("%s", line)


def summary(config: Config, plan: RunPlan, data: str) -> list[str]:
    """Return the roles, the mesh, the batch and the data of a run as aligned lines."""
    cells = [_role(plan, role, config.method) for role in plan.roles]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for role, (count, *others) in zip(plan.roles, cells, strict=True):
        texts = [count.rjust(widths[0]), *(text.ljust(width) for text, width in zip(others, widths[1:], strict=True))]
        lines.append(f"{role.name:<8} {'  '.join(texts)}".rstrip())
    micro_batches = counted(config.batch_size // plan.mesh.dp // plan.micro_batch_size, "micro-batch", "micro-batches")
    draws = f", in {config.expert_draws} parts with a draw of the expert each" if config.expert_draws > 1 else ""
    ranks = counted(plan.mesh.dp, "data-parallel rank")
    buckets = [(plan.shapes, plan.tokens), *plan.others]
    return [
        *lines,
        f"mesh     {counted(plan.mesh.world, 'rank')}: {plan.mesh}",
        *(f"sample   {_sample(parts, tokens, plan.mesh.cp)}" for (parts, _), tokens in buckets),
        f"batch    {config.batch_size} = {micro_batches} of {plan.micro_batch_size} on {ranks}{draws}",
        f"data     {data}",
        f"run      {counted(config.steps, 'step')} in {plan.run_dir}",
    ]


def _sample(parts: PartShapes, tokens: int, cp: int) -> str:
    """Return the shapes of a sample's latents and its tokens in words."""
    local = local_token_count(tokens, cp)
    pads = local * cp - tokens
    note = f" ({pads} of them padding)" if pads else ""
    latents = ", ".join(part_name("x".join(map(str, shape)), part) for part, shape in parts.items())
    return f"latents {latents}, {tokens:,} tokens, {local:,} on a rank{note}"


def _role(plan: RunPlan, role: RolePlan, method: Any) -> tuple[str, ...]:
    """Return a role's number of parameters that train, or are frozen, its precision, strategy and weights."""
    is_trained = role.name in plan.method.trained_roles
    if is_trained:
        count = len(role.trained_experts) * sum(map(math.prod, role.own_shapes.values()))
    else:
        count = role.experts * sum(p.numel() for p in role.network.parameters())
    weights = " and ".join(str(folder.path) for folder in role.folders) or "random weights"
    if role.name == "student" and (earlier := _earlier(role, method)):
        weights += f" (until now {earlier})"
    if role.lora is not None:
        weights = f"adapters of rank {role.lora.settings.rank} on {weights}"
    if role.training is not None and role.training.saved is not None:
        weights += f" with the training adapter {role.training.saved.file.parent}"
    if role.boundaries:
        weights += f"; two experts, the first for times from {role.boundaries[0]:g}"
        if is_trained and len(role.trained_experts) == 1:
            weights += f"; only the one for {EXPERTS[role.trained_experts[0]]} noise trains"
    return (
        f"{count:,} parameters",
        "trained" if is_trained else "frozen",
        role.sharding.precision + (" with fp8 products" if role.sharding.fp8 != "none" else ""),
        role.sharding.strategy,
        weights,
    )


def _earlier(role: RolePlan, method: Any) -> str | None:
    """Describe how the export that the student starts from was sampled, where ``method`` samples it in another way."""
    with suppress(UserError):
        before = trained_method(role.folders[0].path) if role.folders else None
        if before is not None and sampling_in_words(before) != sampling_in_words(method):
            return sampling_in_words(before)
    return None
