"""Paths as a user types them."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_cp.errors import UserError


def user_path(text: str, setting: str) -> Path:
    """``text`` with a ``~`` at its beginning expanded, which no shell does behind ``=``.

    Args:
        text: what was typed.
        setting: what the user calls it, for messages.

    Raises:
        UserError: the home of a user whom there is not, or a name that is too long to ask for: that is an ``OSError``,
            not a file that is missing.
    """
    try:
        path = Path(text).expanduser() if text.startswith("~") else Path(text)
    except RuntimeError as error:
        raise UserError(f"{setting}={text}: there is no such user's home; give the whole path") from error
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > 255 or len(os.fsencode(path)) > 4000:
        raise UserError(f"{setting}={text[:60]}... is longer than a path can be; a name has 255 bytes at most")
    return path
