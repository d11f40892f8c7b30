"""Which model families exist."""

from __future__ import annotations

from fsdp_cp.errors import UserError
from models.wan import Wan

FAMILIES = {Wan.name: Wan}


def family_of(name: str, setting: str) -> type[Wan]:
    """The family called ``name``.

    Raises:
        UserError: no such family.
    """
    if name not in FAMILIES:
        raise UserError(f"{setting}.family={name} is unknown; use {' or '.join(FAMILIES)}")
    return FAMILIES[name]
