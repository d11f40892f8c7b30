"""Atomic writing of files."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_cp.errors import UserError


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, locked: bool = False) -> Iterator[Path]:
    """Yield a path next to ``path`` with the same suffix; on success flush it to the disk and rename it to ``path``.

    A reader never sees half a file, also after a power failure. After an exception, the old file is unchanged and the
    new one removed. With ``locked``, only this process writes in the folder: the next write replaces what a kill left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is random: nodes that share the folder may have equal process ids.
    unique = "" if locked else f".{uuid.uuid4().hex}"
    temporary = path.with_name(f".{path.stem}{unique}.tmp{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(where: object, hint: str) -> Iterator[None]:
    """Turn a failed write, such as of a full disk, into one line: ``where`` cannot be written, and the ``hint``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{where} cannot be written ({error.strerror}); {hint}") from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file by :func:`atomic_path`. Lone surrogates (of paths, or of escapes in JSON) become "?"."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")
