"""The one exception that means "the user can fix this"."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What an ``OSError`` says of a full disk, a quota, a limit on files, or a disk that became read-only."""


class UserError(ValueError):
    """A user's mistake: one line that names the setting and says what would work.

    ``train.py`` and the other commands print it without a traceback and exit with code 2.
    """


@contextmanager
def paths_of_the_user() -> Iterator[None]:
    """Around what only looks at paths that were given, as a decorator too: those that cannot be looked at are mistakes.

    ``Path.exists`` and its like say ``False`` of what is not there, and raise for what lies in a folder of somebody
    else's; ``Path.resolve`` raises for links in a circle (Python 3.11 and 3.12).

    Raises:
        UserError: naming the path.
    """
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read or written ({error.strerror}); give another path") from error
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):
            raise
        raise UserError(f"{error}: the links lead to each other; give another path") from error


def shown(value: Any) -> str:
    """A setting's value as one would type it: ``null``, ``true``, ``[4, 2]``."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
