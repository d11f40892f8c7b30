"""Which model families there are: those here, and those of packages that name theirs as an entry point.

A package adds a family without touching this one::

    [project.entry-points."fsdp_cp.families"]
    mine = "my_package.family:Mine"

``Mine`` is a subclass of :class:`models.families.base.Family`, and ``ROLE.family=mine`` chooses it.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from fsdp_cp.errors import UserError
from models.families.base import Family
from models.families.hunyuan import Hunyuan
from models.families.ltx import LTX
from models.families.wan import Wan

ENTRY_POINTS = "fsdp_cp.families"
FAMILIES: dict[str, Family] = {Wan.name: Wan(), LTX.name: LTX(), Hunyuan.name: Hunyuan()}


def family_names() -> list[str]:
    """The names of all families that are installed, without importing those of other packages."""
    return [*FAMILIES, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - FAMILIES.keys())]


def family_of(name: str, setting: str) -> Family:
    """The family called ``name``; ``setting`` is the role's name, for messages.

    Raises:
        UserError: no such family, or one of another package that cannot be imported or is none.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    point = next((point for point in entry_points(group=ENTRY_POINTS) if point.name == name), None)
    if point is None:
        raise UserError(f"{setting}.family={name} is unknown; use {' or '.join(family_names())}")
    try:
        found = point.load()
        family = found()
    except Exception as error:  # the other package's own: whatever its import raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{setting}.family={name}: {point.value} cannot be loaded ({reason})") from error
    if not isinstance(family, Family):
        raise UserError(f"{setting}.family={name}: {point.value} is no models.families.base.Family")
    return family
