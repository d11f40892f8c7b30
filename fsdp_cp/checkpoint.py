"""Sharded checkpoints: save to a temporary folder, publish by renaming, load in place on any mesh.

A checkpoint is ``step_00000100/`` with torch.distributed.checkpoint's files and ``state.json`` for plain numbers.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp_cp.checkpoint_reader import readable, reader
from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import barrier, together

__all__ = [
    "branch_name",
    "find_checkpoint",
    "find_resume",
    "leave_branch",
    "load",
    "published_steps",
    "read_numbers",
    "readable",
    "reader",
    "save",
    "step_folder",
]

log = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{8,})")


def step_folder(folder: Path, step: int) -> Path:
    """``folder/step_00000100`` for step 100."""
    return folder / f"step_{step:08d}"


def published_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints under ``folder``, ascending. One that was being written is not among them."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(p.name) for p in folder.iterdir() if (p / "state.json").is_file()]
    return sorted(int(m.group(1)) for m in matches if m)


def save(folder: Path, step: int, tensors: Mapping[str, Any], numbers: Mapping[str, Any], keep: int) -> None:
    """Write a checkpoint of ``step`` under ``folder``, then delete all but the newest ``keep``. Called by all ranks.

    Args:
        folder: on a file system that all ranks see.
        step: the step after which this is the state.
        tensors: nested dict of tensors and DTensors.
        numbers: JSON-serialisable state, the same on every rank.
        keep: how many checkpoints to keep; 0 keeps all.
    """
    target = step_folder(folder, step)
    unfinished = target.with_suffix(".tmp")

    def failed(error: Exception) -> UserError:
        newest = (published_steps(folder) or ["none"])[-1]
        # Of a full disk torch's writer says "unexpected pos": what is free says more.
        free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
        return UserError(
            f"the checkpoint of step {step} cannot be written to {folder} ({_first_line(error)}; {free / 1e9:.1f} GB"
            f" are free there); the newest complete one is of step {newest}: make room and start the same command again"
        )

    def begin() -> None:
        if rank() == 0:
            try:
                shutil.rmtree(unfinished, ignore_errors=True)  # of a save that was killed
                unfinished.mkdir(parents=True)
            except OSError as error:
                raise failed(error) from error

    def publish() -> None:
        if rank() == 0:
            try:
                (unfinished / "state.json").write_text(json.dumps(dict(numbers), indent=1))
                if target.exists():
                    _leave(target)
                unfinished.rename(target)
                for old in published_steps(folder)[:-keep] if keep else []:
                    shutil.rmtree(step_folder(folder, old))
            except OSError as error:
                raise failed(error) from error

    together(begin)
    try:
        dcp.save(dict(tensors), checkpoint_id=str(unfinished))
    except CheckpointException as error:
        if rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # a part of a checkpoint would keep the disk full
        raise failed(error) from error
    together(publish)


def _first_line(error: BaseException) -> str:
    """What went wrong, in one line; of a failed collective save or load, on the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        failed, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {failed}: {_first_line(cause)}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def leave_branch(checkpoint: Path) -> None:
    """Rename the checkpoints beside ``checkpoint`` that are later to ``left_step_*``. Called by all ranks.

    A run that goes on from an earlier step leaves them: ``checkpoint.resume=auto`` must not pick them up, and ``keep``
    must not count them.
    """
    if rank() == 0:
        for step in published_steps(checkpoint.parent):
            later = step_folder(checkpoint.parent, step)
            if later.name > checkpoint.name:
                _leave(later)
    barrier()


def _leave(folder: Path) -> None:
    """Rename a checkpoint that the run does not go on from; what was left earlier stays too."""
    left = folder.with_name(f"left_{folder.name}")
    number = 2
    while left.exists():
        left, number = folder.with_name(f"left_{folder.name}_{number}"), number + 1
    folder.rename(left)
    log.warning("%s is of a branch that is left here; renamed to %s", folder.name, left)


def read_numbers(checkpoint: Path) -> dict[str, Any]:
    """The ``numbers`` that :func:`save` was given; ``step`` is that of the folder's name where they have none.

    Raises:
        UserError: a file that cannot be read, or is not what :func:`save` writes.
    """
    file = checkpoint / "state.json"
    try:
        numbers = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({_first_line(error)}); use an earlier checkpoint") from error
    match = _STEP.fullmatch(checkpoint.name)
    if isinstance(numbers, dict) and match:  # save does not ask its caller for it
        numbers.setdefault("step", int(match.group(1)))
    if not isinstance(numbers, dict) or not isinstance(numbers.get("step"), int):
        raise UserError(f"{file} is not the state of a checkpoint; use an earlier checkpoint")
    return numbers


def load(checkpoint: Path, tensors: Mapping[str, Any]) -> None:
    """Load into ``tensors`` in place, whatever mesh the checkpoint was written on. Called by all ranks.

    Raises:
        UserError: a tensor that the checkpoint lacks, has in addition, or has in another shape; a damaged file.
    """
    saved = together(lambda: reader(checkpoint).read_metadata().state_dict_metadata if rank() == 0 else None)[0]
    wanted = _flat(tensors)
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"has {name} in addition" for name in sorted(saved.keys() - wanted.keys())]
    problems += [
        f"has {name} as {_shape(saved[name])}, not {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & saved.keys())
        if _shape(saved[name]) != tuple(wanted[name].shape)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"checkpoint.resume: {checkpoint} {problems[0]}{more}; resume with the settings it was made with"
        )
    with readable(checkpoint):
        dcp.load(dict(tensors), storage_reader=reader(checkpoint))


def _shape(about: TensorStorageMetadata) -> tuple[int, ...]:
    return tuple(about.size)


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def find_checkpoint(folder: str | Path, setting: str) -> Path:
    """The newest complete checkpoint of a run folder; or the one that ``folder`` is.

    Args:
        folder: a run folder or a step folder.
        setting: what the user calls it, for messages.

    Raises:
        UserError: a folder without a complete checkpoint.
    """
    path = Path(folder).expanduser()
    if _STEP.fullmatch(path.name) and (path / "state.json").is_file():
        return path
    steps = published_steps(path / "checkpoints")
    if not str(folder) or not steps:
        words = "auto, never, " if setting == "checkpoint.resume" else ""
        raise UserError(
            f"{setting}={folder} has no complete checkpoint; use {words}a run folder (with checkpoints/step_*/ in it)"
            " or one step_* folder"
        )
    return step_folder(path / "checkpoints", steps[-1])


def find_resume(setting: str, checkpoints: Path) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means, the same on every rank; ``None`` to start afresh.

    A folder that is named is where a run begins. Started again by the same command (by a scheduler, say), it goes on
    from its own newest checkpoint, which knows by ``branch_of`` in its numbers where the run began.

    Args:
        setting: ``auto`` (the newest under ``checkpoints``, if any), ``never``, a run folder or a step folder.
        checkpoints: this run's own checkpoint folder.

    Raises:
        UserError: a folder without a complete checkpoint; another run's, where this run has checkpoints of its own.
    """
    if setting == "never":
        return None
    # Rank 0 decides: on a network file system ranks may see a rename at different times.
    return together(lambda: _find_resume(setting, checkpoints) if rank() == 0 else None)[0]


def _find_resume(setting: str, checkpoints: Path) -> Path | None:
    own = published_steps(checkpoints)
    newest = step_folder(checkpoints, own[-1]) if own else None
    if setting == "auto":
        return newest
    named = find_checkpoint(setting, "checkpoint.resume")
    if newest is None:
        return named
    if read_numbers(newest).get("branch_of") == branch_name(setting):
        log.info("the run began from %s and goes on from its own newest checkpoint", setting)
        return newest
    if named.parent.resolve() == checkpoints.resolve():
        return named
    raise UserError(
        f"checkpoint.resume={setting} is another run's, but {checkpoints.parent} has checkpoints of its own, the newest"
        f" of step {own[-1]}; use another run_dir, or checkpoint.resume=auto to go on from them"
    )


def branch_name(setting: str) -> str | None:
    """What the numbers of a checkpoint call the ``checkpoint.resume`` with which its run began."""
    return None if setting in ("auto", "never") else str(Path(setting).expanduser().resolve())
