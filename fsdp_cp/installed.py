"""Parts that other installed packages register by an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fsdp_cp.errors import UserError

T = TypeVar("T")


def installed_names(group: str) -> list[str]:
    """Return the names in an entry-point group, sorted, without importing the packages."""
    return sorted({point.name for point in entry_points(group=group)})


def load_installed(group: str, name: str, word: str, make: Callable[[Any], T]) -> T:
    """Import the object that a package registers as ``name`` in an entry-point group, and make a part of it.

    Args:
        group, name: entry-point group, and one of its :func:`installed_names`.
        word: the setting and its value, for messages.
        make: function that turns the object into a part, and raises if it cannot.

    Raises:
        UserError: the package's import or ``make`` fails.
    """
    (point, *_) = (point for point in entry_points(group=group) if point.name == name)
    try:
        return make(point.load())
    except Exception as error:  # importing the package may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{word}: {point.value} cannot be loaded ({reason})") from error
