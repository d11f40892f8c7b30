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
from torch.distributed.checkpoint import FileSystemReader

from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import all_gather_objects, barrier

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
    if rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()
    dcp.save(dict(tensors), checkpoint_id=str(unfinished))
    if rank() == 0:
        (unfinished / "state.json").write_text(json.dumps(dict(numbers), indent=1))
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        for old in published_steps(folder)[:-keep] if keep else []:
            shutil.rmtree(step_folder(folder, old))
    barrier()


def leave_branch(checkpoint: Path) -> None:
    """Rename the checkpoints beside ``checkpoint`` that are later to ``left_step_*``. Called by all ranks.

    A run that goes on from an earlier step leaves them: ``checkpoint.resume=auto`` must not pick them up, and ``keep``
    must not count them.
    """
    if rank() == 0:
        for step in published_steps(checkpoint.parent):
            later = step_folder(checkpoint.parent, step)
            if later.name > checkpoint.name:
                left = later.with_name(f"left_{later.name}")
                shutil.rmtree(left, ignore_errors=True)
                later.rename(left)
                log.warning("step %d is of a branch that is left here; renamed to %s", step, left)
    barrier()


def read_numbers(checkpoint: Path) -> dict[str, Any]:
    """The ``numbers`` that :func:`save` was given."""
    return json.loads((checkpoint / "state.json").read_text())


def load(checkpoint: Path, tensors: Mapping[str, Any]) -> None:
    """Load into ``tensors`` in place, whatever mesh the checkpoint was written on. Called by all ranks.

    Raises:
        UserError: a tensor that the checkpoint lacks, has in addition, or has in another shape.
    """
    saved = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    wanted = _flat(tensors)
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"has {name} in addition" for name in sorted(saved.keys() - wanted.keys())]
    problems += [
        f"has {name} as {tuple(saved[name].size)}, not {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & saved.keys())
        if tuple(saved[name].size) != tuple(wanted[name].shape)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"checkpoint.resume: {checkpoint} {problems[0]}{more}; resume with the settings it was made with"
        )
    dcp.load(dict(tensors), checkpoint_id=str(checkpoint))


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def find_resume(setting: str, checkpoints: Path) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means, the same on every rank; ``None`` to start afresh.

    Args:
        setting: ``auto`` (the newest under ``checkpoints``, if any), ``never``, a run folder or a step folder.
        checkpoints: this run's own checkpoint folder.

    Raises:
        UserError: a folder without a complete checkpoint.
    """
    if setting == "never":
        return None
    if setting == "auto":
        # Rank 0 decides: on a network file system ranks may see a rename at different times.
        newest = all_gather_objects((published_steps(checkpoints) or [None])[-1])[0]
        return None if newest is None else step_folder(checkpoints, newest)
    folder = Path(setting)
    if _STEP.fullmatch(folder.name) and (folder / "state.json").is_file():
        return folder
    steps = published_steps(folder / "checkpoints")
    if not steps:
        raise UserError(
            f"checkpoint.resume={setting} has no complete checkpoint; use auto, never, a run folder"
            " (with checkpoints/step_*/ in it) or one step_* folder"
        )
    return step_folder(folder / "checkpoints", steps[-1])
