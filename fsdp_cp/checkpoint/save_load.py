"""Sharded checkpoints: written during training to a temporary folder, published by a rename, loaded on any mesh.

``folder`` describes the files of a checkpoint and selects the checkpoint from which a run resumes.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult

from fsdp_cp.checkpoint.folder import (
    BEST,
    STATE,
    STORED_DTYPES,
    first_failure,
    leave,
    readable,
    reader,
    saved_steps,
    step_folder,
    unfinished_folders,
)
from fsdp_cp.errors import UserError, shown
from fsdp_cp.launch import rank
from fsdp_cp.measure.memory import available_host_memory
from fsdp_cp.progress import announced
from fsdp_cp.reduce import all_gather_objects, local_shard, on_all_ranks, on_first_rank
from fsdp_cp.runtime.timeouts import keep_timeout
from fsdp_cp.runtime.torch_versions import make_reusable

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(hours=2)
"""Timeout of the group that saves. It is long since ranks write at their own speed while training continues."""
_SPARE = 2**30
"""Bytes of host memory that staging leaves free."""


class _Writer(FileSystemWriter):
    """File writer that calls ``publish`` on rank 0 after all files; if it fails, the save raises on every rank."""

    def __init__(self, folder: Path, publish: Callable[[], None], *, staged: bool):
        # With copy-ahead, torch waits for a CUDA stream even for host tensors, in a thread whose device is 0.
        super().__init__(folder, per_thread_copy_ahead=0 if staged else 10_000_000)
        self.publish = publish

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.publish()


class Checkpoints:
    """Writer of a run's checkpoints, one after another. Created by all ranks.

    Args:
        folder: folder on a file system that all ranks see. Leftovers of killed saves are removed from it.
        keep: number of newest checkpoints to keep; 0 keeps all.
        keep_every: never delete checkpoints whose step is a multiple of this; 0 turns this off.
        asynchronous: copy the tensors to host memory and write from there while training continues. The memory of the
            copy is kept for the next checkpoint; for tensors on a GPU it is pinned. If the copy does not fit, training
            waits until that checkpoint is written.
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int = 0, asynchronous: bool = False):
        self.folder, self.keep, self.keep_every, self.asynchronous = folder, keep, keep_every, asynchronous
        self._writing: tuple[int, Future[Any]] | None = None
        self._stager: DefaultStager | None = None
        self._staged_bytes = 0
        # Saves need a separate group: on the default group collectives would mix with those of training.
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if distributed else None
        if self._group is not None:
            keep_timeout(self._group)
        if rank() == 0 and folder.is_dir():
            for unfinished in unfinished_folders(folder):
                shutil.rmtree(unfinished, ignore_errors=True)

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Wait for the pending checkpoint, then write the state after ``step``. Called by all ranks.

        ``tensors`` is a nested dict of tensors and DTensors; ``state`` is JSON-serializable and the same on every rank.
        The checkpoint that it names as :data:`BEST` stays.
        All ranks raise if this checkpoint or the previous one cannot be written.
        """
        _check_kinds(tensors)
        self.wait()
        unfinished = step_folder(self.folder, step).with_suffix(".tmp")

        def begin() -> None:
            if rank() == 0:
                try:
                    shutil.rmtree(unfinished, ignore_errors=True)  # left by a failed save
                    unfinished.mkdir(parents=True)
                except OSError as error:
                    raise self._failed(step, error) from error

        on_all_ranks(begin)
        staged = self.asynchronous and self._fits(tensors)
        publish = partial(self._publish, step, json.dumps(dict(state), indent=1), state.get(BEST))
        writer = _Writer(unfinished, publish, staged=staged)
        if staged:
            self._stager = self._stager or staging(on_gpu=any(x.is_cuda for x in _flat(tensors).values()))
            saving = dcp.async_save(
                dict(tensors), storage_writer=writer, process_group=self._group, async_stager=self._stager
            )
            assert isinstance(saving, Future), "only stagers that copy in a thread return two"
            self._writing = step, saving
            return
        done: Future[Any] = Future()
        try:
            done.set_result(dcp.save(dict(tensors), storage_writer=writer, process_group=self._group))
        except CheckpointException as error:
            done.set_exception(error)
        self._writing = step, done
        self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is published. Called by all ranks."""
        if self._writing is None:
            return
        (step, future), self._writing = self._writing, None
        try:
            with announced(f"the checkpoint of step {step}"):
                future.result()
        except CheckpointException as error:
            if rank() == 0:  # a partial checkpoint would keep the disk full
                shutil.rmtree(step_folder(self.folder, step).with_suffix(".tmp"), ignore_errors=True)
            raise self._failed(step, error) from error

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Wait for the pending checkpoint on exit; otherwise it would be lost with the process or its groups.

        After an exception, wait only if it is a ``UserError``, which all ranks raise, or if the world has one rank.
        After any other error the other ranks may never wait for the checkpoint.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, UserError) or self._group is None:
                with suppress(UserError):  # the first error is what the user must see
                    self.wait()
            raise
        self.wait()

    def has_failed(self) -> bool:
        """Return whether this rank failed to write; :meth:`wait` raises the error, on all ranks."""
        if self._writing is None or not self._writing[1].done():
            return False
        return self._writing[1].exception() is not None

    def _publish(self, step: int, state: str, best: int | None) -> None:
        """Write ``state.json``, rename the folder, and delete older checkpoints. Called last, on rank 0."""
        target = step_folder(self.folder, step)
        unfinished = target.with_suffix(".tmp")
        with (unfinished / STATE).open("w") as stream:
            stream.write(state)
            stream.flush()
            os.fsync(stream.fileno())
        _sync(unfinished)
        if target.exists():
            leave(target)
        unfinished.rename(target)
        _sync(self.folder)
        for old in saved_steps(self.folder)[: -self.keep] if self.keep else []:
            if old != best and (not self.keep_every or old % self.keep_every):
                _remove(step_folder(self.folder, old))

    def _fits(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether a copy of its ranks' tensors fits in every host's memory. Called by all ranks."""
        size = sum(shard.numel() * shard.element_size() for shard in map(local_shard, _flat(tensors).values()))
        needed = (size - self._staged_bytes) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        hosts = all_gather_objects((needed, available_host_memory()))
        full = [(missing, room) for missing, room in hosts if room is not None and missing + _SPARE > room]
        if full and rank() == 0:
            needed, room = (size / 1e9 for size in full[0])
            why = "a copy of the checkpoint needs %.1f GB of host memory, but only %.1f GB are free"
            log.warning(f"{why}; training waits while it is written", needed, room)
        if not full:
            self._staged_bytes = size
        return not full

    def _failed(self, step: int, error: BaseException) -> UserError:
        steps = saved_steps(self.folder)
        newest = steps[-1] if steps else "none"
        # On a full disk torch's writer only raises "unexpected pos", so add the free space.
        existing = next(parent for parent in (self.folder, *self.folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        reason = f"{first_failure(error)}; {free / 1e9:.1f} GB free; the newest complete one is of step {newest}"
        return UserError(f"the checkpoint of step {step} cannot be written to {self.folder} ({reason}); make room")


def staging(*, on_gpu: bool) -> DefaultStager:
    """Return a stager that keeps its copies: memory is pinned once, and a GPU copies to it at the bus's full rate."""
    host = {"use_shared_memory": False, "use_async_staging": False}
    stager = DefaultStager(StagingOptions(use_pinned_memory=on_gpu, use_non_blocking_copy=on_gpu, **host))
    make_reusable(stager)
    return stager


def _remove(checkpoint: Path) -> None:
    """Delete an old checkpoint. A failure is only logged, since the new checkpoint is saved."""
    try:
        # Rename first: a deletion that is killed halfway would leave a checkpoint that lacks files.
        shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".tmp")), ignore_errors=True)
    except OSError as error:
        log.warning("%s cannot be removed (%s)", checkpoint, error.strerror)


def _sync(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk, so that a renamed folder keeps its files after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def load(checkpoint: Path, tensors: Mapping[str, Any]) -> None:
    """Load into ``tensors`` in place, from a checkpoint of any mesh. Called by all ranks."""
    saved = on_first_rank(lambda: reader(checkpoint).read_metadata().state_dict_metadata)
    shapes = {name: tuple(cast(TensorStorageMetadata, about).size) for name, about in saved.items()}
    wanted = _flat(tensors)
    problems = [f"lacks {name}" for name in sorted(wanted.keys() - saved.keys())]
    problems += [f"has the unexpected {name}" for name in sorted(saved.keys() - wanted.keys())]
    problems += [
        f"has {name} as {shapes[name]}, not {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & saved.keys())
        if shapes[name] != tuple(wanted[name].shape)
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"checkpoint.resume: {checkpoint} {problems[0]}{more}; resume with the settings it was made with"
        )
    with readable(checkpoint):
        dcp.load(dict(tensors), storage_reader=reader(checkpoint))


def _check_kinds(tensors: Mapping[str, Any]) -> None:
    """Refuse what :func:`load` would refuse to read: no tensor, or of another dtype than checkpoints have."""
    for name, x in _flat(tensors).items():
        kind = str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
        if kind not in STORED_DTYPES:
            raise UserError(f"{name} of a checkpoint is of the kind {kind}; give tensors of {shown(STORED_DTYPES)}")


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the tensors of a nested dict by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tensors.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
