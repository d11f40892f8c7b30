"""Exception for mistakes that the user can fix, and words for messages."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""``OSError`` codes for a full disk, an exceeded quota, a file-size limit, and a read-only disk."""


class UserError(ValueError):
    """Mistake of a user. The message is one line that names the setting and a value that works.

    Commands print it without a traceback and exit with code 2. Every function that reads or checks what a user gave may
    raise it; docstrings repeat this only for the library and for collectives.
    """


class NotFinite(UserError):
    """Numbers of a network that are not finite."""


@contextmanager
def paths_of_the_user() -> Iterator[None]:
    """Turn errors for inaccessible paths that the user gave into ``UserError``; also usable as a decorator.

    Use it only around code that reads paths. ``Path.exists`` returns ``False`` for a missing path, but raises for one
    in a folder without permission. ``Path.resolve`` raises for circular links (Python 3.11 and 3.12).
    """
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read or written ({error.strerror}); give another path") from error
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):
            raise
        raise UserError(f"{error}: links form a circle; give another path") from error


def shown(value: Any) -> str:
    """Return a setting's value as a user types it: ``null``, ``true``, ``[4, 2]``."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: object, most: int = 200) -> str:
    """Return an error's message on one line, shortened, since libraries list every key or the whole file."""
    return " ".join(str(error).split())[:most]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 clip`` or ``2 clips``; ``plural`` is for nouns whose plural is irregular."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """Return ``4.2 s``, ``42 s``, ``4.2 min``, ``42 min``, ``4.2 h`` or ``4.2 days``."""
    units = ((100, 1, "s"), (100 * 60, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "days"))
    size, unit = next((size, unit) for limit, size, unit in units if seconds < limit)
    amount = seconds / size
    return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"
