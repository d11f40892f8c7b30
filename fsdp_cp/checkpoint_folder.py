"""A run's ``checkpoints/`` folder: which checkpoints there are, which of them are whole, and which one to go on from.

A checkpoint is ``step_00000100/`` with torch.distributed.checkpoint's files, ``state.json`` for plain state and
``manifest.json``: every file's size in bytes and sha256 (as ``sha256sum`` prints it). A folder gets this name by a
rename when all of that is on the disk, so what is not whole was damaged later. Checkpoints of versions without a
manifest are read too; their sizes are those that ``.metadata`` asks for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_cp.checkpoint_reader import reader
from fsdp_cp.errors import UserError, paths_of_the_user
from fsdp_cp.launch import rank, world_size
from fsdp_cp.reduce import barrier, on_all_ranks

log = logging.getLogger(__name__)

STATE, MANIFEST = "state.json", "manifest.json"
_PLAIN = (STATE, MANIFEST, ".metadata")
"""A folder without any of these is none of ours; one that lacks some of them is damaged."""
_STEP = re.compile(r"step_(\d{8,})")
_READ = 2**22


def step_folder(folder: Path, step: int) -> Path:
    """``folder/step_00000100`` for step 100."""
    return folder / f"step_{step:08d}"


@paths_of_the_user()
def published_steps(folder: Path) -> list[int]:
    """Steps of the published checkpoints under ``folder``, ascending. One that is being written is not among them."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(p.name) for p in folder.iterdir() if any((p / name).exists() for name in _PLAIN)]
    return sorted(int(m.group(1)) for m in matches if m)


def unfinished_folders(folder: Path) -> list[Path]:
    """What killed saves and removals left under ``folder``: ``step_00000100.tmp``, and no name that is not ours."""
    return [path for path in folder.glob("step_*.tmp") if _STEP.fullmatch(path.stem)]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The ``state`` that was saved; ``step`` is that of the folder's name where it has none.

    Raises:
        UserError: a file that cannot be read, or is not what a save writes.
    """
    file = checkpoint / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file} is damaged ({reason}); use an earlier checkpoint") from error
    match = _STEP.fullmatch(checkpoint.name)
    if isinstance(state, dict) and match:  # save does not ask its caller for it
        state.setdefault("step", int(match.group(1)))
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UserError(f"{file} is not the state of a checkpoint; use an earlier checkpoint")
    return state


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in a line that names the file; ``None`` for a whole one.

    Reads the plain files and every file's size, no tensor: :func:`wrong_sums` does that.
    """
    try:
        read_state(checkpoint)
        for name, about in _manifest(checkpoint).items():
            file = checkpoint / name
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != about["bytes"]:
                return f"{file} has {file.stat().st_size:,} bytes where {about['bytes']:,} were written"
        reader(checkpoint).read_metadata()
    except (UserError, OSError) as error:
        return str(error).partition(";")[0]
    return None


def _manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Size and sum by name of file; empty for a checkpoint that was made before there were manifests.

    Raises:
        UserError: what no save writes.
    """
    file = checkpoint / MANIFEST
    if not file.exists():
        return {}
    try:
        files = json.loads(file.read_text())["files"]
        for name, about in files.items():
            if name != Path(name).name or not isinstance(about["bytes"], int) or not isinstance(about["sha256"], str):
                raise ValueError(f"its entry {name!r} is none")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file} is damaged ({reason}); use an earlier checkpoint") from error
    return files


def wrong_sums(checkpoint: Path) -> str | None:
    """Like :func:`damage` by the files' checksums, each rank reading its share. Called by all ranks."""

    def share() -> str | None:
        files = sorted(_manifest(checkpoint).items())
        for name, about in files[rank() :: world_size()]:
            try:
                with (checkpoint / name).open("rb") as stream:
                    summed = hashlib.sha256()
                    while block := stream.read(_READ):
                        summed.update(block)
            except OSError as error:
                return f"{checkpoint / name} cannot be read ({error.strerror})"
            if summed.hexdigest() != about["sha256"]:
                return f"{checkpoint / name} is not what was written (its sha256 is another)"
        return None

    return next((found for found in on_all_ranks(share) if found is not None), None)


def find_checkpoint(folder: str | Path, setting: str, known: Mapping[Path, str] | None = None) -> Path:
    """The newest whole checkpoint of a run folder; or the one that ``folder`` is.

    Args:
        folder: a run folder or a step folder.
        setting: what the user calls it, for messages.
        known: checkpoints that are known to be damaged, and how.

    Raises:
        UserError: a folder without a whole checkpoint.
    """
    path = Path(folder).expanduser()
    if _STEP.fullmatch(path.name) and (path / STATE).is_file():
        if (wrong := (known or {}).get(path) or damage(path)) is not None:
            raise UserError(f"{setting}={folder} is damaged: {wrong}; use an earlier checkpoint")
        return path
    steps = published_steps(path / "checkpoints")
    newest = _newest_whole(path / "checkpoints", known)
    if not str(folder) or newest is None:
        words = "auto, never, " if setting == "checkpoint.resume" else ""
        damaged = ""
        if steps:
            last = step_folder(path / "checkpoints", steps[-1])
            damaged = f" (that of step {steps[-1]} is damaged: {(known or {}).get(last) or damage(last)})"
        raise UserError(
            f"{setting}={folder} has no complete checkpoint{damaged}; use {words}a run folder (with"
            " checkpoints/step_*/ in it) or one step_* folder"
        )
    return newest


def _newest_whole(checkpoints: Path, known: Mapping[Path, str] | None) -> Path | None:
    """Damaged ones on the way to it are named."""
    for step in reversed(published_steps(checkpoints)):
        checkpoint = step_folder(checkpoints, step)
        if (wrong := (known or {}).get(checkpoint) or damage(checkpoint)) is None:
            return checkpoint
        log.warning("the checkpoint of step %d is damaged and not used: %s", step, wrong)
    return None


def find_resume(setting: str, checkpoints: Path, *, verify: bool = False) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means, the same on every rank; ``None`` to start afresh.

    A folder that is named is where a run begins. Started again by the same command (by a scheduler, say), it goes on
    from its own newest whole checkpoint, which knows by ``branch_of`` in its state where the run began.

    Args:
        setting: ``auto`` (the newest whole one under ``checkpoints``), ``never``, a run folder or a step folder.
        checkpoints: this run's own checkpoint folder.
        verify: compare every file's checksum, which reads all of it, not its size alone.

    Raises:
        UserError: a folder without a whole checkpoint; another run's, where this run has checkpoints of its own; own
            checkpoints of which none is whole.
    """
    if setting == "never":
        return None
    damaged: dict[Path, str] = {}
    while True:
        # Rank 0 decides: on a network file system ranks may see a rename at different times.
        found = on_all_ranks(lambda: _find_resume(setting, checkpoints, damaged) if rank() == 0 else None)[0]
        if found is None or not verify or (wrong := wrong_sums(found)) is None:
            return found
        damaged[found] = wrong


@paths_of_the_user()
def _find_resume(setting: str, checkpoints: Path, damaged: Mapping[Path, str]) -> Path | None:
    newest = _newest_whole(checkpoints, damaged)
    own = published_steps(checkpoints)
    if own and newest is None:  # begun anew, weeks of work would be moved aside without a word
        raise UserError(
            f"no checkpoint in {checkpoints} is whole (the newest: step {own[-1]}); use checkpoint.resume=never to"
            " begin anew, or another run_dir"
        )
    if setting == "auto":
        return newest
    # First: what the run began from may have been removed since, by `keep` for one.
    if newest is not None and read_state(newest).get("branch_of") == branch_name(setting):
        log.info("the run began from %s and goes on from its own newest checkpoint", setting)
        return newest
    named = find_checkpoint(setting, "checkpoint.resume", damaged)
    if newest is None:
        return named
    if named.parent.resolve() == checkpoints.resolve():
        return named
    raise UserError(
        f"checkpoint.resume={setting} is another run's, but {checkpoints.parent} has checkpoints of its own, the newest"
        f" of step {own[-1]}; use another run_dir, or checkpoint.resume=auto to go on from them"
    )


def refuse_overtaken(before: list[int], checkpoints: Path) -> None:
    """Refuse to go on if there are later checkpoints than ``before``. Called by all ranks, which hold the folder.

    Ranks whose torchrun was killed save and end by themselves, perhaps after this start has looked for checkpoints.

    Raises:
        UserError: there are.
    """

    def look() -> None:
        later = [step for step in published_steps(checkpoints) if step > max(before, default=-1)]
        if rank() == 0 and later:
            newest = step_folder(checkpoints, later[-1])
            raise UserError(f"{newest} was saved while this start looked for checkpoints: start it again")

    on_all_ranks(look)


def branch_name(setting: str) -> str | None:
    """What the state of a checkpoint calls the ``checkpoint.resume`` with which its run began."""
    return None if setting in ("auto", "never") else str(Path(setting).expanduser().resolve())


def leave_branch(checkpoint: Path) -> None:
    """Rename the checkpoints beside ``checkpoint`` that are later to ``left_step_*``. Called by all ranks.

    A run that goes on from an earlier step leaves them: ``checkpoint.resume=auto`` must not pick them up, and ``keep``
    must not count them.
    """
    if rank() == 0:
        for step in published_steps(checkpoint.parent):
            later = step_folder(checkpoint.parent, step)
            if later.name > checkpoint.name:
                leave(later)
    barrier()


def leave(folder: Path) -> None:
    """Rename a checkpoint that the run does not go on from; what was left earlier stays too."""
    left = folder.with_name(f"left_{folder.name}")
    number = 2
    while left.exists():
        left, number = folder.with_name(f"left_{folder.name}_{number}"), number + 1
    folder.rename(left)
    log.warning("%s is of a branch that is left here; renamed to %s", folder.name, left)
