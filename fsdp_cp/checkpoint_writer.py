"""torch.distributed.checkpoint's writer of files, which sums each file while it writes and knows when all are there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FileSum = dict[str, Any]
"""``bytes`` and ``sha256`` of a file."""


class SummedStream:
    """A file that is written from its beginning to its end, and summed on the way."""

    def __init__(self, stream: IO[bytes]):
        self.stream, self.sum = stream, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sum.update(data)
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        if name in ("seek", "truncate", "writelines"):  # what these write or drop would not be in the sum
            raise AttributeError(name)
        return getattr(self.stream, name)


class _SummedFiles(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = SummedStream(cast(IO[bytes], stream))
            yield summed
            size = stream.tell() if not stream.closed else None
        self.sums[Path(path).name] = {
            "bytes": Path(path).stat().st_size if size is None else size,
            "sha256": summed.sum.hexdigest(),
        }


@dataclass(frozen=True)
class _Summed(WriteResult):
    """What was written, with the sum of the file that it is in: so that it reaches the coordinator with the rest."""

    file: FileSum


class SummingWriter(FileSystemWriter):
    """Writes to ``folder``; when every rank's files and ``.metadata`` are there, ``publish`` is called on rank 0.

    Args:
        folder: of this checkpoint alone.
        publish: is given each file's size and sum by name. What it raises is raised by the save on every rank.
        staged: the tensors are on the host.
    """

    def __init__(self, folder: Path, publish: Callable[[dict[str, FileSum]], None], *, staged: bool):
        # For tensors that are on the host torch would still wait for a CUDA stream, in a thread whose device is 0.
        super().__init__(folder, per_thread_copy_ahead=0 if staged else 10_000_000)
        self.fs = _SummedFiles()  # as torch's own writers for other storage replace it (torch 2.11 to 2.13)
        self.publish = publish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        sums = cast(_SummedFiles, self.fs).sums
        future: Future[list[WriteResult]] = Future()
        future.set_result([_Summed(**vars(item), file=sums[item.storage_data.relative_path]) for item in written])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        written = [cast(_Summed, item) for each in results for item in each]  # write_data's, of every rank
        files = {item.storage_data.relative_path: item.file for item in written}
        self.publish({**files, ".metadata": cast(_SummedFiles, self.fs).sums[".metadata.tmp"]})
