"""Check of a folder before a command writes into it: it must not hold files of other programs."""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_cp.errors import UserError, paths_of_the_user


@paths_of_the_user()
def refuse_foreign(
    folder: Path,
    setting: str,
    names: Iterable[str],
    *,
    record: str,
    is_ours: Callable[[Any], object],
    maker: str,
    is_read: bool = False,
) -> Any:
    """Refuse a folder that cannot be made or written, or in which a command would overwrite files of other programs.

    Changes nothing, and needs no process group. ``names`` are the files that the command replaces, and ``record`` is
    the one whose first JSON value ``is_ours`` knows. ``setting`` and ``maker`` name folder and command in messages.
    With ``is_read`` the folder is only read. Return that value; ``None`` if the command has not written here yet.
    """
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise UserError(f"{setting}={folder}: {nearest} is not a directory; choose another {setting}")
    if not is_read and not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{setting}={folder} cannot be written (permission denied); choose another {setting}")
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        value, _ = json.JSONDecoder().raw_decode((folder / record).read_text(encoding="utf-8"))
        if is_ours(value):
            return value
    for name in (record, *names):
        if os.path.lexists(folder / name):
            reason = f"has a {name} that is damaged, or that {maker} did not write"
            raise UserError(f"{setting}={folder} {reason}; choose a new folder")
    return None
