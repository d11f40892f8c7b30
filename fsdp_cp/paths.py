"""Paths as a user types them."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_cp.errors import UserError


def user_path(text: str, setting: str) -> Path:
    """Return ``text`` as a path with a leading ``~`` expanded: shells do not expand it after ``=``.

    ``setting`` is its name in messages.

    Raises:
        UserError: the home directory of an unknown user, or a path so long that file calls would raise ``OSError``.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{setting}={text}: there is no such user; give the whole path") from error
    if len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise UserError(f"{setting}={text[:60]}... is longer than a path can be; a name has 255 bytes at most")
    return path
