"""The ``checkpoints/`` folder of a run: its checkpoints, whole or damaged, and the one to resume from.

A checkpoint is ``step_00000100/`` with torch.distributed.checkpoint's files and ``state.json`` for plain state. A
folder is renamed to this once all its files are on disk, so a checkpoint that lacks files was damaged later.

The reader of torch's files runs no code from them and reports damage in one line. ``.metadata`` is a pickle, which
``FileSystemReader`` loads unchecked: a checkpoint from somebody else could run any code. This reader allows only the
classes that describe tensors (torch 2.11 to 2.13; private names are marked).
"""

import json
import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from fsdp_cp.errors import UserError, first_line, paths_of_the_user
from fsdp_cp.launch import rank
from fsdp_cp.reduce import barrier, on_all_ranks
from fsdp_cp.runtime.signals import Stopped

log = logging.getLogger(__name__)

STATE = "state.json"
BEST = "best"
"""Key of the state with the step of the checkpoint that retention never deletes, or null."""
_PLAIN = (STATE, ".metadata")
"""Files of a checkpoint. A folder with neither is not one; a folder with one of them is a damaged checkpoint."""
_STEP = re.compile(r"step_(\d{8,})")


def step_folder(folder: Path, step: int) -> Path:
    """Return ``folder/step_00000100`` for step 100."""
    return folder / f"step_{step:08d}"


@paths_of_the_user()
def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the published checkpoints under ``folder``, ascending."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(p.name) for p in folder.iterdir() if any((p / name).exists() for name in _PLAIN)]
    return sorted(int(m.group(1)) for m in matches if m)


def unfinished_folders(folder: Path) -> list[Path]:
    """Return the folders that killed saves and removals left under ``folder`` (``step_00000100.tmp``)."""
    return [path for path in folder.glob("step_*.tmp") if _STEP.fullmatch(path.stem)]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the saved ``state``. Its ``step`` defaults to the step in the folder's name."""
    file = checkpoint / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({first_line(error)}); use an earlier checkpoint") from error
    match = _STEP.fullmatch(checkpoint.name)
    if isinstance(state, dict) and match:  # callers of save need not write the step
        state.setdefault("step", int(match.group(1)))
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise UserError(f"{file} is not the state of a checkpoint; use an earlier checkpoint")
    return state


def damage(checkpoint: Path) -> str | None:
    """Describe a checkpoint's damage in one line; ``None`` if plain files and sizes of others, unread, are right."""
    try:
        read_state(checkpoint)
        reader(checkpoint).read_metadata()
    except (UserError, OSError) as error:
        return str(error).partition(";")[0]
    return None


def find_checkpoint(folder: str | Path, setting: str, *, best: bool = False) -> Path:
    """Return ``folder`` if it is a step folder, else the run folder's newest whole checkpoint, or its best one."""
    path = Path(folder).expanduser()
    if _STEP.fullmatch(path.name) and (path / STATE).is_file():
        if best:
            raise UserError(f"{setting}={folder} is one checkpoint; give the run folder to take its best one")
        if (wrong := damage(path)) is not None:
            raise UserError(f"{setting}={folder} is damaged: {wrong}; use an earlier checkpoint")
        return path
    newest = _newest_whole(path / "checkpoints") if str(folder) else None
    if newest is None:
        words = "auto, never, " if setting == "checkpoint.resume" else ""
        raise UserError(f"{setting}={folder} has no complete checkpoint; use {words}a run folder or one step_* folder")
    if best:
        step = read_state(newest).get(BEST)
        if step is None:
            raise UserError(f"{setting}={folder} has no best checkpoint; a run with guard.action=keep marks one")
        return find_checkpoint(step_folder(newest.parent, step), setting)
    return newest


def _newest_whole(checkpoints: Path) -> Path | None:
    """Return the newest whole checkpoint; warn about newer ones that are damaged."""
    for step in reversed(saved_steps(checkpoints)):
        checkpoint = step_folder(checkpoints, step)
        if (wrong := damage(checkpoint)) is None:
            return checkpoint
        log.warning("skipped the damaged checkpoint of step %d: %s", step, wrong)
    return None


@paths_of_the_user()
def find_resume(setting: str, checkpoints: Path) -> Path | None:
    """Return the checkpoint that ``checkpoint.resume`` selects for a run; ``None`` to start from scratch.

    ``setting`` is ``auto`` (the newest whole checkpoint of the run), ``never``, a run folder or a step folder. One rank
    must decide for all: on a network file system ranks may see a rename at different times.

    A folder name starts a run from that folder. The same command started again resumes from this run's newest whole
    checkpoint; ``branch_of`` in its state records where the run began.
    """
    if setting == "never":
        return None
    newest = _newest_whole(checkpoints)
    steps = saved_steps(checkpoints)
    if steps and newest is None:  # starting from scratch would discard weeks of work
        from_scratch = "use checkpoint.resume=never to start from scratch, or another run_dir"
        raise UserError(f"no checkpoint in {checkpoints} is whole (the newest: step {steps[-1]}); {from_scratch}")
    if setting == "auto":
        return newest
    # Check this before looking for `setting`: that checkpoint may have been removed since, for example by `keep`.
    if newest is not None and read_state(newest).get("branch_of") == branch_name(setting):
        log.info("the run began from %s; resuming from its own newest checkpoint", setting)
        return newest
    named = find_checkpoint(setting, "checkpoint.resume")
    if newest is None or named.parent.resolve() == checkpoints.resolve():
        return named
    own = f"{checkpoints.parent} has checkpoints of its own (newest: step {steps[-1]})"
    raise UserError(f"checkpoint.resume={setting} is of another run, but {own}; use another run_dir, or resume=auto")


def refuse_overtaken(before: list[int], checkpoints: Path) -> None:
    """Refuse to start if ``checkpoints`` has later steps than ``before``. Called by all ranks, which hold the folder.

    Ranks whose torchrun was killed save before they exit, perhaps after this start has listed ``before``.
    """

    def look() -> None:
        later = [step for step in saved_steps(checkpoints) if step > max(before, default=-1)]
        if rank() == 0 and later:
            newest = step_folder(checkpoints, later[-1])
            raise UserError(f"{newest} was saved after this start looked for checkpoints; start it again")

    on_all_ranks(look)


def branch_name(setting: str) -> str | None:
    """Return the value of ``branch_of`` in the checkpoints of a run that began with this ``checkpoint.resume``."""
    return None if setting in ("auto", "never") else str(Path(setting).expanduser().resolve())


def leave_branch(checkpoint: Path) -> None:
    """Rename the checkpoints in the same folder that are later than ``checkpoint`` to ``left_step_*``.

    When a run resumes from an earlier step, ``checkpoint.resume=auto`` must not select the later checkpoints, and
    ``keep`` must not count them. Called by all ranks.
    """
    if rank() == 0:
        for step in saved_steps(checkpoint.parent):
            later = step_folder(checkpoint.parent, step)
            if later.name > checkpoint.name:
                leave(later)
    barrier()


def leave(folder: Path) -> None:
    """Rename a checkpoint of an abandoned branch to an unused ``left_*`` name."""
    names = (f"left_{folder.name}" + f"_{number}" * (number > 1) for number in count(1))
    left = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(left)
    log.warning("renamed %s to %s: the run resumes from an earlier step", folder.name, left)


# Names that start with _ are private to torch. _get_layout looks up a layout by name.
STORED_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
"""Dtypes of the tensors in a checkpoint."""
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device", *STORED_DTYPES),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # the module in Python 3.13
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed in a checkpoint of tensors")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """File reader whose ``.metadata`` cannot run code or name files outside of the checkpoint, and is read once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._metadata
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @cached_property
    def _metadata(self) -> Metadata:
        folder = Path(self.path)
        try:
            with (folder / ".metadata").open("rb") as stream:
                metadata = _Unpickler(stream).load()
            _check(metadata, folder)
        # A flipped bit in a pickle can make the unpickled classes raise any exception.
        except Exception as error:
            reason = first_line(error)
            raise UserError(f"{folder}/.metadata is damaged or unsafe ({reason}); use another checkpoint") from error
        return metadata


def _check(metadata: Any, folder: Path) -> None:
    """Raise ``ValueError`` for values that are not tensors, and for files that are missing or cut short."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError("it describes no state dict")
    for name, about in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(about, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")  # torch would unpickle other values
    if not isinstance(metadata.storage_data, dict):
        raise ValueError("it names no files")
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        file = info.relative_path
        if not isinstance(file, str) or file != Path(file).name:
            raise ValueError(f"it names the file {file!r}, which is not in the folder")
        needed[file] = max(needed.get(file, 0), int(info.offset) + int(info.length))
    for file, size in needed.items():
        if not (folder / file).is_file() or (folder / file).stat().st_size < size:
            raise ValueError(f"{file} is missing or cut short")


def reader(checkpoint: Path) -> FileSystemReader:
    """Return a reader of ``checkpoint``. Its ``read_metadata`` refuses damage and values that are not tensors."""
    return _Reader(str(checkpoint))


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Turn torch's exception for a damaged file, which lists all ranks, into one line.

    Raises:
        UserError: on every rank, if one of them could not read its part.
        Stopped: on every rank, if one of them received a signal.
    """
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, Stopped):  # torch wraps every exception, this one too
                raise cause from None
        raise UserError(f"{checkpoint} cannot be read ({first_failure(error)}); use another checkpoint") from error


def first_failure(error: BaseException) -> str:
    """Return the first line of an error; for a failed save or load, that of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        failed, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {failed}: {first_failure(cause)}"
    return first_line(error)
