"""Lookup of files shipped with the project, from any working directory."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def find_shipped(path: str | Path) -> Path:
    """Return ``path``, or the same path in the project's folder if ``path`` is relative and exists only there.

    ``assets/quickstart_teacher`` thus means the shipped folder in any working directory. A path that exists in the
    working directory takes precedence.
    """
    relative = Path(path)
    # Skip an empty setting: Path reads it as the working directory, so it would become the project's folder.
    if not relative.is_absolute() and relative.parts and ".." not in relative.parts and not relative.exists():
        shipped = PROJECT / relative
        if shipped.exists():
            return shipped
    return relative
