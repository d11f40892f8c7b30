"""References of a clip: pictures, clips and sounds that condition it, which a column of a table names.

A value is ``KIND:FILE;KIND:FILE``, in the order in which the network reads them: ``image:cat.png;clip:walk.mp4``.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp_cp.errors import UserError

COLUMN = "references"
KINDS = ("image", "video", "clip", "sound")
"""Kinds: a picture, a video without its sound, a video with its sound, a sound (of a video too)."""
MOST = {"image": 9, "video": 3, "sound": 3}
"""References of each kind that MiniMax-H3's pipeline takes; a ``clip`` counts as a video."""
MOST_OF_ALL = 12


class Reference(NamedTuple):
    """One reference."""

    kind: str
    file: str


def parse(text: Any) -> list[Reference]:
    """Return the references of a value of the column. Raises ``UserError``, without the setting, for another value."""
    found = [part.strip().partition(":") for part in text.split(";")] if isinstance(text, str) and text.strip() else []
    for kind, _, file in found:
        if kind.strip() not in KINDS or not file.strip():
            raise UserError(f"has the reference {kind}:{file}; use KIND:FILE of {', '.join(KINDS)}, and ; between them")
    return [Reference(kind.strip(), file.strip()) for kind, _, file in found]


def with_files(text: str, change: Callable[[str], str]) -> str:
    """Return a value of the column with each file changed."""
    return ";".join(f"{kind}:{change(file)}" for kind, file in parse(text))


def check_kinds(kinds: Sequence[str]) -> None:
    """Refuse what the network was not made for: too many references, and sounds alone."""
    counts = Counter("video" if kind == "clip" else kind for kind in kinds)
    for kind, most in MOST.items():
        if counts[kind] > most:
            raise UserError(f"has {counts[kind]} references of kind {kind}; use {most} at most")
    if len(kinds) > MOST_OF_ALL:
        raise UserError(f"has {len(kinds)} references; use {MOST_OF_ALL} at most")
    if not counts.keys() - {"sound"}:
        raise UserError("has no reference with a picture; add an image or a video")


def problem_of(text: Any, exists: Callable[[str], bool]) -> str:
    """Return the reason to leave out a row with this value of the column, or ``""``."""
    try:
        references = parse(text)
        check_kinds([reference.kind for reference in references])
    except UserError as error:
        return str(error)
    missing = next((reference.file for reference in references if not exists(reference.file)), None)
    return "" if missing is None else f"has the reference {missing}, which is missing"
