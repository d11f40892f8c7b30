"""``train.py dry_run=true``: what a run would check, hold and write, without a process group or a GPU."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from distill.config import Config
from distill.data import sample_shapes
from distill.setup import RunPlan, check_resume, world_of
from fsdp_cp.checkpoint import find_resume, read_numbers
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.mesh import MeshShape, resolve_mesh
from fsdp_cp.sequence import local_token_count
from models.additions import build_additions
from models.load import RolePlan

log = logging.getLogger(__name__)
_ADAM = 8
"""Bytes of AdamW's two moments, fp32."""
_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBytes:
    """One role's states, by arithmetic: activations, gathered units and buffers come on top."""

    parameters: int
    """How many the network has."""
    rank: int
    """Bytes of weights, optimizer state and average on a rank."""
    gradients: int
    """Bytes of gradients on a rank while the role trains; 0 for a frozen one. One role trains at a time."""
    checkpoint: int
    """Bytes in a checkpoint, over all ranks; 0 for a frozen role."""


def role_bytes(role: RolePlan, *, trained: bool, averaged: bool, shape: MeshShape) -> RoleBytes:
    """The states of ``role`` on a rank of a mesh of ``shape``.

    Args:
        role: the planned role.
        trained: does it have gradients and an optimizer?
        averaged: does it have an average of its weights?
        shape: of the mesh.
    """
    with torch.device("meta"):
        network = role.family.build(role.config, f"{role.name}.checkpoint")
        network.additions = build_additions(role.additions, role.config)
    count = sum(p.numel() for p in network.parameters())
    settings = role.sharding
    ranks = shape.dp_shard * shape.cp * (1 if settings.replicate else shape.dp_replicate)
    stored = {"keep": 4, "fp32": 4, "bf16": 2}[settings.master_dtype] if trained else _BYTES[settings.precision]
    computed = _BYTES[settings.precision]
    if settings.strategy == "no_shard":
        ranks = 1
    held = stored / ranks
    if settings.strategy in ("optim", "optim_grads"):
        held += computed  # gathered for the whole step
    gradients = 0.0
    if trained:
        held += (_ADAM + (stored if averaged else 0)) / ranks
        gradients = stored / (1 if settings.strategy in ("no_shard", "optim") else ranks)
    saved = stored + _ADAM + (stored if averaged else 0) if trained else 0
    return RoleBytes(
        parameters=count, rank=round(count * held), gradients=round(count * gradients), checkpoint=count * saved
    )


def dry_run(config: Config, plan: RunPlan) -> None:
    """Print what the run of ``config`` would be, after the checks that :func:`distill.setup.plan_run` made.

    Raises:
        UserError: a checkpoint that cannot be resumed, a table of the data that cannot be read, a disk without room.
    """
    if rank() != 0:
        return
    shape = resolve_mesh(world_size=world_of(config), heads=plan.heads, **plan.mesh_settings)
    resume_from = find_resume(config.checkpoint.resume, plan.run_dir / "checkpoints")
    if resume_from is not None:
        check_resume(config, resume_from, plan.roles)
    clips = _data(config)
    latents, _ = sample_shapes(config.data)
    tokens = {role.family.tokens(role.config, latents, f"{role.name}.checkpoint") for role in plan.roles}.pop()
    log.info("dry run of %s on %d ranks: nothing is started or written", plan.run_dir, world_of(config))
    log.info("mesh: %s", shape)
    saved, total, gradients = 0, 0, 0
    for role in plan.roles:
        trained = role.name in plan.method.trained_roles
        averaged = role.name == "student" and config.student.ema.enabled
        states = role_bytes(role, trained=trained, averaged=averaged, shape=shape)
        saved, total = saved + states.checkpoint, total + states.rank
        gradients = max(gradients, states.gradients)
        log.info(
            "%s: %s, %s parameters, %s, strategy %s, states %s a rank",
            role.name,
            role.folder.path if role.folder else "random weights",
            f"{states.parameters:,}",
            f"trained in {role.sharding.precision}" if trained else f"frozen in {role.sharding.precision}",
            role.sharding.strategy,
            _size(states.rank),
        )
    log.info(
        "%s a rank with the gradients of the role that trains; activations, gathered units and buffers come on top",
        _size(total + gradients),
    )
    log.info(
        "latents %s, %d tokens a sample, %d on each rank; %s",
        "x".join(map(str, latents)),
        tokens,
        local_token_count(tokens, shape.cp),
        clips,
    )
    log.info(
        "batch %d = %d micro-batches of %d on %d data-parallel ranks; %d steps",
        config.batch_size,
        config.batch_size // shape.dp // plan.micro,
        plan.micro,
        shape.dp,
        config.steps,
    )
    first = 0 if resume_from is None else read_numbers(resume_from)["step"]
    log.info("starts %s", "afresh" if resume_from is None else f"from step {first} ({resume_from})")
    _check_disk(config, plan.run_dir, saved, config.steps - first)
    log.info("nothing is wrong with it so far; clips and captions are decoded and encoded by the run itself")


def _data(config: Config) -> str:
    """The data set's table in words; its clips are not decoded.

    Raises:
        UserError: a table that is missing or damaged, or names no clip that is there.
    """
    data = config.data
    if data.name == "moving_shapes":
        return f"{data.num_clips} clips, rendered on the fly"
    path = Path(data.path).expanduser()
    if data.name == "captions":
        from distill.data.captions import read_captions

        return f"{len(read_captions(path))} captions in {path}"
    from distill.data.video_folder import read_metadata

    rows = read_metadata(path)
    missing = [name for name, _ in rows if not (path / name).is_file()]
    if len(missing) == len(rows):
        raise UserError(f"data.path={path}: none of the {len(rows)} clips is there, first {missing[0]}")
    note = f", {len(missing)} of them missing (first {missing[0]})" if missing else ""
    return f"{len(rows)} clips in {path}{note}"


def _check_disk(config: Config, run_dir: Path, size: int, steps: int) -> None:
    """Room for the checkpoints that are alive at once: those that are kept, and the one that is being written."""
    settings = config.checkpoint
    written = (steps // settings.every if settings.every else 0) + int(settings.at_end)
    alive = min(written, settings.keep + 1) if settings.keep else written
    existing = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    log.info(
        "a checkpoint has %s; at most %d at once (checkpoint.keep=%d, every=%d): %s of %s that are free on %s",
        _size(size),
        alive,
        settings.keep,
        settings.every,
        _size(size * alive),
        _size(free),
        existing,
    )
    if size * alive > free:
        raise UserError(
            f"run_dir={run_dir}: the checkpoints need {_size(size * alive)}, and {_size(free)} are free; use another"
            " disk, or checkpoint.keep=1"
        )


def _size(count: float) -> str:
    """Bytes in words, decimal as disks and GPUs are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
