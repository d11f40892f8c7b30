"""Sharded checkpoints: written beside the training into a temporary folder, published by renaming, loaded on any mesh.

What a checkpoint consists of, and which one a run goes on from, is in ``checkpoint_folder``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from fsdp_cp.checkpoint_folder import (
    MANIFEST,
    STATE,
    branch_name,
    find_checkpoint,
    find_resume,
    leave,
    leave_branch,
    published_steps,
    read_state,
    refuse_overtaken,
    step_folder,
    unfinished_folders,
)
from fsdp_cp.checkpoint_reader import readable, reader
from fsdp_cp.checkpoint_writer import FileSum, SummedStream, SummingWriter
from fsdp_cp.errors import UserError
from fsdp_cp.host_memory import available_host_memory
from fsdp_cp.launch import rank
from fsdp_cp.progress import announced
from fsdp_cp.reduce import all_gather_objects, local_shard, on_all_ranks
from fsdp_cp.timeouts import keep_timeout

__all__ = [
    "Checkpoints",
    "branch_name",
    "find_checkpoint",
    "find_resume",
    "leave_branch",
    "load",
    "published_steps",
    "read_state",
    "readable",
    "reader",
    "refuse_overtaken",
    "step_folder",
]

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(hours=2)
"""Ranks write at their own pace, and nobody waits for them but the next checkpoint."""
_SPARE = 2**30
"""Bytes of a host that staging leaves free."""


class Checkpoints:
    """The checkpoints that a run writes, one at a time. Made by all ranks.

    Args:
        folder: on a file system that all ranks see. What a save that was killed left there is removed.
        keep: how many of the newest to keep; 0 keeps all.
        keep_every: those whose step is a multiple of this are kept for good; 0 for none.
        asynchronous: copy the tensors to the host's memory and write from there while training goes on; where the copy
            does not fit, that checkpoint is written while training waits.
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int = 0, asynchronous: bool = False):
        self.folder, self.keep, self.keep_every, self.asynchronous = folder, keep, keep_every, asynchronous
        self._writing: tuple[int, Future[Any]] | None = None
        # Of its own: on the default group its collectives would meet those of the training, in another order on
        # every rank.
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if distributed else None
        if self._group is not None:
            keep_timeout(self._group)
        if rank() == 0 and folder.is_dir():
            for unfinished in unfinished_folders(folder):
                shutil.rmtree(unfinished, ignore_errors=True)

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Write the state after ``step``; one that is still being written is waited for. Called by all ranks.

        Args:
            step: the step after which this is the state.
            tensors: nested dict of tensors and DTensors.
            state: what is no tensor, JSON-serialisable, the same on every rank.

        Raises:
            UserError: on all ranks; this checkpoint, or the one before, cannot be written.
        """
        self.wait()
        unfinished = step_folder(self.folder, step).with_suffix(".tmp")

        def begin() -> None:
            if rank() == 0:
                try:
                    shutil.rmtree(unfinished, ignore_errors=True)  # of a save that failed
                    unfinished.mkdir(parents=True)
                except OSError as error:
                    raise self._failed(step, error) from error

        on_all_ranks(begin)
        beside = self.asynchronous and self._fits(tensors)
        publish = partial(self._publish, step, json.dumps(dict(state), indent=1))
        writer = SummingWriter(unfinished, publish, staged=beside)
        if beside:
            begun = dcp.async_save(
                dict(tensors), storage_writer=writer, process_group=self._group, async_stager=BlockingAsyncStager()
            )
            assert isinstance(begun, Future), "only stagers that copy in a thread give two"
            self._writing = step, begun
            return
        done: Future[Any] = Future()
        try:
            done.set_result(dcp.save(dict(tensors), storage_writer=writer, process_group=self._group))
        except CheckpointException as error:
            done.set_exception(error)
        self._writing = step, done
        self.wait()

    def wait(self) -> None:
        """Until what is being written is published. Called by all ranks.

        Raises:
            UserError: on all ranks; it cannot be written.
        """
        if self._writing is None:
            return
        (step, future), self._writing = self._writing, None
        try:
            with announced(f"the checkpoint of step {step}"):
                future.result()
        except CheckpointException as error:
            if rank() == 0:  # a part of a checkpoint would keep the disk full
                shutil.rmtree(step_folder(self.folder, step).with_suffix(".tmp"), ignore_errors=True)
            raise self._failed(step, error) from error

    @contextmanager
    def completed(self) -> Iterator[None]:
        """On leaving, wait for what is being written, which would else go with the process or its groups.

        After a user's mistake, which all ranks know of, and in a world of one. What another error left behind on other
        ranks nobody knows.

        Raises:
            UserError: on all ranks; it cannot be written.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, UserError) or self._group is None:
                with suppress(UserError):  # what failed first is what the user must see
                    self.wait()
            raise
        self.wait()

    def is_writing(self) -> bool:
        """Is this rank still writing?"""
        return self._writing is not None and not self._writing[1].done()

    def has_failed(self) -> bool:
        """Has what this rank was writing failed? :meth:`wait` says how, on all ranks."""
        return self._writing is not None and not self.is_writing() and self._writing[1].exception() is not None

    def _publish(self, step: int, state: str, files: dict[str, FileSum]) -> None:
        """On rank 0, when every rank's files are there: the plain files, the name, and the end of older ones."""
        target = step_folder(self.folder, step)
        unfinished = target.with_suffix(".tmp")
        files[STATE] = _write(unfinished / STATE, state)
        _write(unfinished / MANIFEST, json.dumps({"files": files}, indent=1))
        _sync(unfinished)
        if target.exists():
            leave(target)
        unfinished.rename(target)
        _sync(self.folder)
        for old in published_steps(self.folder)[: -self.keep] if self.keep else []:
            if not self.keep_every or old % self.keep_every:
                self._remove(step_folder(self.folder, old))

    def _remove(self, checkpoint: Path) -> None:
        """Delete an old one; that it cannot be deleted is no fault of the one that has just been saved."""
        try:
            # First the name: killed half-way, this would leave a checkpoint without some of its files.
            shutil.rmtree(checkpoint.rename(checkpoint.with_suffix(".tmp")), ignore_errors=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s)", checkpoint, error.strerror)

    def _fits(self, tensors: Mapping[str, Any]) -> bool:
        """Does every host have room for a copy of its ranks' tensors? Asked by all ranks."""
        mine = sum(shard.numel() * shard.element_size() for shard in map(local_shard, _flat(tensors).values()))
        room = available_host_memory()
        needed = mine * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        short = next(
            (each for each in all_gather_objects((needed, room)) if each[1] is not None and each[0] + _SPARE > each[1]),
            None,
        )
        if short is not None and rank() == 0:
            log.warning(
                "a copy of the checkpoint takes %.1f GB of a host's memory, and %.1f GB are free: it is written while"
                " training waits",
                short[0] / 1e9,
                short[1] / 1e9,
            )
        return short is None

    def _failed(self, step: int, error: BaseException) -> UserError:
        steps = published_steps(self.folder)
        newest = steps[-1] if steps else "none"
        # Of a full disk torch's writer says "unexpected pos": what is free says more.
        existing = next(parent for parent in (self.folder, *self.folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        return UserError(
            f"the checkpoint of step {step} cannot be written to {self.folder} ({_first_line(error)}; {free / 1e9:.1f}"
            f" GB are free there); the newest complete one is of step {newest}: make room and start the same command"
            " again"
        )


def _write(file: Path, text: str) -> FileSum:
    """Write it to the disk; its size and sum."""
    with file.open("wb") as stream:
        summed = SummedStream(stream)
        summed.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
        return {"bytes": stream.tell(), "sha256": summed.sum.hexdigest()}


def _sync(folder: Path) -> None:
    """The names in ``folder`` to the disk: after a power failure a renamed folder could else be without its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems on which folders cannot be synced
            raise
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    """What went wrong, in one line; of a failed collective save or load, on the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        failed, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {failed}: {_first_line(cause)}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load(checkpoint: Path, tensors: Mapping[str, Any]) -> None:
    """Load into ``tensors`` in place, whatever mesh the checkpoint was written on. Called by all ranks.

    Raises:
        UserError: a tensor that the checkpoint lacks, has in addition, or has in another shape; a damaged file.
    """
    saved = on_all_ranks(lambda: reader(checkpoint).read_metadata().state_dict_metadata if rank() == 0 else None)[0]
    assert saved is not None, "rank 0 has answered"
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


def _shape(about: TensorStorageMetadata | BytesStorageMetadata) -> tuple[int, ...]:
    assert isinstance(about, TensorStorageMetadata), "a checkpoint holds tensors alone"
    return tuple(about.size)


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The tensors of a nested dict by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found
