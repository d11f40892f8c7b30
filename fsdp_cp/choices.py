"""Values of settings: words (fields with a ``Literal`` hint), numbers in a range, paths, names of installed parts."""

import dataclasses
import operator
import os
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from fsdp_cp.errors import UserError, one_line, shown

T = TypeVar("T")


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
    chosen = {item.name: hints[item.name] for item in dataclasses.fields(settings) if words(hints[item.name])}
    others = {name: {m for m in members(hint) if get_origin(m) is not Literal} for name, hint in chosen.items()}
    return {name: hint for name, hint in chosen.items() if others[name] <= {bool, types.NoneType}}


def check_choices(settings: Any, where: str = "") -> None:
    """Refuse values of a dataclass that the field's ``Literal`` does not list; messages prefix names with ``where``.

    Fields that also take numbers or lists (``auto`` or a number) are not checked here.
    """
    owner: type = type(settings)
    for name, hint in _choices(owner).items():
        value, allowed, kinds = getattr(settings, name), words(hint), members(hint)
        if not (isinstance(value, str) and value in allowed) and type(value) not in kinds:
            texts = [*allowed, *(("true", "false") if bool in kinds else ())]
            none = ", or null for none" if types.NoneType in kinds else ""
            raise UserError(f"{where}{name} must be {' or '.join(texts)}{none}, got {shown(value)}")


class Bounds(NamedTuple):
    """Bounds of a number, or of the numbers of a list, in the hint of a setting."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None


_INSIDE = {"least": ("at least", operator.ge), "above": ("above", operator.gt),
           "most": ("at most", operator.le), "below": ("below", operator.lt)}  # fmt: skip
PositiveInt = Annotated[int, Bounds(least=1)]
NonNegativeInt = Annotated[int, Bounds(least=0)]
PositiveFloat = Annotated[float, Bounds(above=0)]
NonNegativeFloat = Annotated[float, Bounds(least=0)]
Share = Annotated[float, Bounds(least=0, most=1)]


class Checked:
    """Base of settings dataclasses that refuses words (:func:`check_choices`) and numbers that their hints do not
    allow; ``None`` and a missing value (``"???"``) pass for numbers. Messages have ``prefix`` before names."""

    __slots__ = ()
    prefix = ""

    def __post_init__(self) -> None:
        check_choices(self, self.prefix)
        owner: type = type(self)  # mypy takes type[Checked] for unhashable
        for name, bounds in _bounds(owner).items():
            limits = [(*_INSIDE[key], bound) for key, bound in bounds._asdict().items() if bound is not None]
            value = getattr(self, name)
            for number in value if isinstance(value, list) else [value]:
                # Negate the test for being inside: NaN compares as False and must be refused.
                if number not in (None, "???") and not all(inside(number, bound) for _, inside, bound in limits):
                    wanted = " and ".join(f"{word} {bound}" for word, _, bound in limits)
                    raise UserError(f"{self.prefix}{name} must be {wanted}, got {shown(value)}")


@cache
def _bounds(settings: type) -> dict[str, Bounds]:
    def of(hint: Any) -> Bounds | None:
        if get_origin(hint) is Annotated:
            all_bounds = [bounds._asdict() for bounds in hint.__metadata__ if isinstance(bounds, Bounds)]
            stated = {key: bound for bounds in all_bounds for key, bound in bounds.items() if bound is not None}
            return Bounds(**stated) if stated else None
        return next(filter(None, map(of, get_args(hint))), None)

    found = {name: of(hint) for name, hint in get_type_hints(settings, include_extras=True).items()}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def user_path(text: str, setting: str) -> Path:
    """Return ``text`` as a path with a leading ``~`` expanded: shells do not expand it after ``=``."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{setting}={text}: the user does not exist; give the whole path") from error
    if len(os.fsencode(path)) > 4000 or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise UserError(f"{setting} must be a path below 4000 bytes with names below 256 bytes, got {text[:60]}...")
    return path


def installed_names(group: str) -> list[str]:
    """Return the names in an entry-point group, sorted, without importing the packages."""
    return sorted({point.name for point in entry_points(group=group)})


def add_installed(
    group: str, kind: str, known: Mapping[str, Any], add: Callable[[str, Any], object]
) -> dict[str, UserError]:
    """Call ``add(name, object)`` for parts of other packages that ``known`` lacks; return the errors of broken ones."""
    broken = {}
    for name in set(installed_names(group)) - known.keys():
        try:
            load_installed(group, name, f"{kind}={name}", partial(add, name))
        except UserError as error:
            broken[name] = error
    return broken


def load_installed(group: str, name: str, word: str, make: Callable[[Any], T]) -> T:
    """Import the object that a package registers as ``name``, and ``make`` a part of it; ``word`` is for messages."""
    (point, *_) = (point for point in entry_points(group=group) if point.name == name)
    try:
        return make(point.load())
    except Exception as error:  # importing the package may raise anything
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{word}: {point.value} cannot be loaded ({reason})") from error
