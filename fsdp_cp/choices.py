"""Checks of setting values: one of a few words (fields with a ``Literal`` hint), and numbers in a range."""

from __future__ import annotations

import dataclasses
import operator
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdp_cp.errors import UserError, shown


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union hint (``None`` as its type), or ``hint`` alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def words(hint: Any) -> tuple[Any, ...]:
    """Return the values that the ``Literal`` in ``hint`` lists; empty without a ``Literal``."""
    return tuple(value for member in members(hint) if get_origin(member) is Literal for value in get_args(member))


@cache
def _choices(settings: type) -> dict[str, Any]:
    """Return by name the hints of the fields that take only words, a boolean or ``None``."""
    hints = get_type_hints(settings)
    own = {item.name: hints[item.name] for item in dataclasses.fields(settings) if words(hints[item.name])}
    others = {name: {m for m in members(hint) if get_origin(m) is not Literal} for name, hint in own.items()}
    return {name: hint for name, hint in own.items() if others[name] <= {bool, types.NoneType}}


def check_choices(settings: Any, where: str = "") -> None:
    """Refuse field values that the field's ``Literal`` does not list.

    Fields that also take numbers or lists (``auto`` or a number) are not checked here.

    Args:
        settings: a dataclass.
        where: prefix of a field's name in the message, for example ``"student."``.

    Raises:
        UserError: a value is not allowed.
    """
    owner: type = type(settings)
    for name, hint in _choices(owner).items():
        value, allowed = getattr(settings, name), words(hint)
        switch, nothing = bool in members(hint), types.NoneType in members(hint)
        if (isinstance(value, str) and value in allowed) or (switch and isinstance(value, bool)):
            continue
        if not (nothing and value is None):
            texts = [*allowed, *(("true", "false") if switch else ())]
            none = ", or null for none" if nothing else ""
            raise UserError(f"{where}{name}={shown(value)} is unknown; use {' or '.join(texts)}{none}")


def check_range(
    settings: Any,
    *names: str,
    where: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse numbers outside of a range. ``None`` and a missing value (``"???"``) pass.

    Args:
        settings: a dataclass.
        names: fields to check; each holds a number or a list of numbers.
        where: prefix of a field's name in the message, for example ``"method."``.
        least, above: inclusive or exclusive lower bound.
        most, below: inclusive or exclusive upper bound.

    Raises:
        UserError: a number is outside of the range.
    """
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    inside = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
    words = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    for name in names:
        value = getattr(settings, name)
        for number in value if isinstance(value, list) else [value]:
            # Negate the test for being inside: NaN compares as False and must be refused.
            if number not in (None, "???") and not all(
                inside[word](number, bound) for word, bound in bounds.items() if bound is not None
            ):
                raise UserError(f"{where}{name}={shown(value)} must be {words}")
