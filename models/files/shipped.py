"""Files that come with the project, from any working directory."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def find_shipped(path: str | Path) -> Path:
    """``path``; or, where it is relative and not there, the same in the project's own folder if it is there.

    So ``assets/quickstart_teacher`` means the shipped folder wherever a command is run, and settings keep the short
    name. What exists from the working directory comes first.
    """
    given = Path(path)
    # An empty setting is the working directory to Path, and would become the project's own folder.
    if not given.is_absolute() and given.parts and ".." not in given.parts and not given.exists():
        shipped = PROJECT / given
        if shipped.exists():
            return shipped
    return given
