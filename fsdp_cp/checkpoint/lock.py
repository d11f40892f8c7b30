"""Lock of a directory that one program writes, on one node or on several."""

import fcntl
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from fsdp_cp.errors import UserError
from fsdp_cp.launch import rank
from fsdp_cp.reduce import on_all_ranks

log = logging.getLogger(__name__)

LOCK = ".lock"
"""File that is locked."""
_HOLDER = re.compile(r"(process \d+ on .*\n)?")
"""Content of a lock file. A kill during the write leaves it empty."""


@contextmanager
def held_directory(directory: Path, setting: str, *, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make a directory, lock it for the duration of the context, and check that every rank sees it. A collective.

    Rank 0 first calls ``check``, which raises a ``UserError`` if the directory must not be used. So do, on all ranks, a
    directory that cannot be written, that another process holds, or that nodes do not share (shards would be lost).
    """
    with ExitStack() as stack:

        def take() -> str | None:
            if rank() != 0:
                return None
            check()
            return stack.enter_context(locked_directory(directory, setting))

        holder = on_all_ranks(take)[0]

        def look() -> None:
            with suppress(OSError):
                if (directory / LOCK).read_text() == holder:
                    return
            raise UserError(f"{setting}={directory} must be the same directory on all nodes; use a shared file system")

        on_all_ranks(look)
        yield


@contextmanager
def locked_directory(directory: Path, setting: str) -> Iterator[str]:
    """Make a directory and lock it for the duration of the context, by one process; yield the lock file's content."""
    with ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            holder = _lock(stack.enter_context(_open_lock(directory)), directory, setting)
        except OSError as error:
            raise UserError(f"{setting}={directory} cannot be written ({error.strerror}); use another") from error
        yield holder


def _open_lock(directory: Path) -> IO[str]:
    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)  # a link could lead to another user's file

    return open(directory / LOCK, "a+", errors="replace", opener=opener)


def _lock(stream: IO[str], directory: Path, setting: str) -> str:
    """Lock the file, which the kernel unlocks when this process dies, and write this process into it."""
    stream.seek(0)
    holder = stream.read()
    if not _HOLDER.fullmatch(holder):
        raise UserError(f"{setting}={directory} contains a {LOCK} of another program; use another directory")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = holder.strip() or "another process"
        raise UserError(f"{setting}={directory} is in use by {who}; wait for it, or use another {setting}") from error
    except OSError as error:  # not every network file system has locks
        log.warning("%s=%s cannot be locked (%s): do not start a second one in it", setting, directory, error.strerror)
    holder = f"process {os.getpid()} on {socket.gethostname()}\n"
    stream.truncate(0)
    stream.write(holder)
    stream.flush()
    os.fsync(stream.fileno())  # other nodes read it
    return holder
