"""Values that settings take: one of a few words (fields whose hint is a ``Literal``), numbers of a range."""

from __future__ import annotations

import dataclasses
import operator
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdp_cp.errors import UserError, shown


def members(hint: Any) -> tuple[Any, ...]:
    """The hints that ``hint`` allows: those of a union, ``None`` as its type, or ``hint`` alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def words(hint: Any) -> tuple[Any, ...]:
    """The values that the ``Literal`` in ``hint`` lists, none where there is none."""
    return tuple(value for member in members(hint) if get_origin(member) is Literal for value in get_args(member))


@cache
def _choices(settings: type) -> dict[str, Any]:
    """Hints of the fields that take nothing but words, a switch and ``None``, by name."""
    hints = get_type_hints(settings)
    own = {item.name: hints[item.name] for item in dataclasses.fields(settings) if words(hints[item.name])}
    others = {name: {m for m in members(hint) if get_origin(m) is not Literal} for name, hint in own.items()}
    return {name: hint for name, hint in own.items() if others[name] <= {bool, types.NoneType}}


def check_choices(settings: Any, where: str = "") -> None:
    """Refuse what the ``Literal`` of a field of ``settings``, a dataclass, does not list.

    Fields that take numbers or lists too, as ``auto`` or a number, are left to whoever knows which are right.

    Args:
        settings: the dataclass.
        where: what stands before a field's name in the message, e.g. ``"student."``.

    Raises:
        UserError: with the words that are there.
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
    """Refuse numbers of ``settings``, a dataclass, outside of a range; ``None`` and a missing value (``"???"``) pass.

    Args:
        settings: the dataclass.
        names: its fields: a number, or a list of numbers.
        where: prefix of a field's name in the message, e.g. ``"method."``.
        least, above: lower bound, included or not.
        most, below: upper bound, included or not.

    Raises:
        UserError: with the range.
    """
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    inside = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
    words = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    for name in names:
        value = getattr(settings, name)
        for number in value if isinstance(value, list) else [value]:
            # NaN compares as False.
            if number not in (None, "???") and not all(
                inside[word](number, bound) for word, bound in bounds.items() if bound is not None
            ):
                raise UserError(f"{where}{name}={shown(value)} must be {words}")
