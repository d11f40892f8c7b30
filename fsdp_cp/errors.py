"""The one exception that means "the user can fix this"."""

from __future__ import annotations

import errno
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What an ``OSError`` says of a full disk, a quota, a limit on files, or a disk that became read-only."""


class UserError(ValueError):
    """A user's mistake: one line that names the setting and says what would work.

    ``train.py`` and the other commands print it without a traceback and exit with code 2.
    """


def shown(value: Any) -> str:
    """A setting's value as one would type it: ``null``, ``true``, ``[4, 2]``."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
