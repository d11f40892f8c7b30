"""Exception for mistakes that the user can fix."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""``OSError`` codes for a full disk, an exceeded quota, a file-size limit, and a read-only disk."""


class UserError(ValueError):
    """Mistake of a user. The message is one line that names the setting and a value that works.

    ``train.py`` and the other commands print it without a traceback and exit with code 2.
    """


@contextmanager
def paths_of_the_user() -> Iterator[None]:
    """Turn errors for inaccessible paths that the user gave into ``UserError``; also usable as a decorator.

    Use it only around code that reads paths. ``Path.exists`` returns ``False`` for a missing path, but raises for one
    in a folder without permission. ``Path.resolve`` raises for circular links (Python 3.11 and 3.12).

    Raises:
        UserError: a path cannot be accessed.
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
    """Return a setting's value as a user types it: ``null``, ``true``, ``[4, 2]``."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
