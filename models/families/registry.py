"""Registry of model families: those in this package and those that other packages provide as entry points.

A package adds a family without changes here::

    [project.entry-points."fsdp_cp.families"]
    mine = "my_package.family:Mine"

``Mine`` is a subclass of :class:`models.families.base.Family`, and ``ROLE.family=mine`` chooses it.
"""

from contextlib import suppress
from typing import Any

from fsdp_cp.choices import installed_names, load_installed
from fsdp_cp.errors import UserError
from models.families.base import Family
from models.families.hunyuan import Hunyuan
from models.families.ltx import LTX
from models.families.ltx2 import LTX2
from models.families.minimax_h3 import MiniMaxH3
from models.families.wan import Wan

ENTRY_POINTS = "fsdp_cp.families"
FAMILIES: dict[str, Family] = {family.name: family for family in (Wan(), LTX(), LTX2(), MiniMaxH3(), Hunyuan())}


def family_names() -> list[str]:
    """Return the names of all installed families, without importing other packages."""
    return [*FAMILIES, *(name for name in installed_names(ENTRY_POINTS) if name not in FAMILIES)]


def family_of(name: str, setting: str) -> Family:
    """Return the family called ``name``; ``setting`` is the role's name, for messages."""
    if name in FAMILIES:
        return FAMILIES[name]
    if name not in installed_names(ENTRY_POINTS):
        raise UserError(f"{setting}.family={name} is unknown; use {' or '.join(family_names())}")
    return load_installed(ENTRY_POINTS, name, f"{setting}.family={name}", _family)


def family_of_class(class_name: str) -> Family | None:
    """Return the family whose networks are of this class; ``None`` if no installed one can be imported that has it."""
    for name in family_names():
        with suppress(UserError):
            if (family := family_of(name, "family")).class_name == class_name:
                return family
    return None


def _family(kind: Any) -> Family:
    family = kind()
    if not isinstance(family, Family):
        raise TypeError(f"{kind!r} is not a subclass of models.families.base.Family")
    return family
