"""Types of settings: descriptions of the values that a field takes, and conversion of values to dataclasses."""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from omegaconf import MISSING

from fsdp_cp.choices import members
from fsdp_cp.errors import UserError, shown

_WORDS = {bool: "true or false", int: "a 64-bit integer", float: "a finite fp32 number", str: "a text"}
_PLURALS = {int: "integers", float: "numbers", str: "texts", list[int]: "lists of integers"}
_LISTS = {int: "[2,4]", float: "[0.5,0.25]", str: "[name,other]", list[int]: "[[81,480,832],[81,832,480]]"}
_MAPPINGS = {float: "{patch_embedding.*: 0.1}", str: "{caption: prompt}", Any: "{num_layers: 4}"}
_SWITCHES = {word: word in ("true", "yes", "on", "y", "1") for word in "true yes on y 1 false no off n 0".split()}
_LONGEST = 200
REMOVED = {  # by the last part of the key and the value
    ("communication_buffers", "pooled"): "was removed, as its effect was never measured; use default",
    ("backend", "flash_attn_3"): "was removed, as it was never run; use auto or flash_attn_4",
    ("backend", "transformer_engine"): "was removed, as it was never run; use auto or cudnn, which has the same kernel",
}
REMOVED_KEYS = {
    "gather_early": "was removed: it began the gather of one block early; leave it out",
    "mesh_check": "was removed; python -m models.verify compares meshes",
}
"""Messages for removed settings whose nearest name would mislead, by the last part of the key."""

RENAMED = {"data.colour_shares": "data.color_shares"}
"""Settings by their former key. Typed words and recipes must have the new one; runs and exports of before are read."""


def short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class NoSuchSetting(UserError):
    """Error for a composed key that no dataclass has. Its text is the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A field of a settings dataclass."""

    owner: type
    """Dataclass that has the field."""
    types: tuple[Any, ...]
    """Types of the values, without ``None``. For a group of settings, its dataclass."""
    optional: bool
    """Whether the value may be null."""
    default: Any
    """Default value; ``???`` if a value is required."""

    @property
    def is_text(self) -> bool:
        """Whether the setting takes only text (any text, or one of a few words)."""
        return all(kind is str or typing.get_origin(kind) is Literal for kind in self.types)

    @property
    def is_mapping(self) -> bool:
        return typing.get_origin(self.types[0]) is dict

    @property
    def group(self) -> bool:
        return dataclasses.is_dataclass(self.types[0])

    def words(self, name: str) -> str:
        """Describe the values that the setting ``name`` takes; for a group, list its settings."""
        if self.group:
            keys = [f"{name}.{item.name}" for item in dataclasses.fields(self.types[0])]
            return "given by its settings, " + ", ".join(keys[:3]) + (", ..." if keys[3:] else "")
        text = " or ".join(self._kind_in_words(kind) for kind in self.types)
        return f"{text}, or null" if self.optional else text

    def _kind_in_words(self, kind: Any) -> str:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is Literal:
            return " or ".join(arguments)
        if origin is dict:
            return f"a mapping, as {_MAPPINGS[arguments[1]]}"
        if origin is list:
            return f"a list of {_PLURALS[arguments[0]]}, as {_LISTS[arguments[0]]}"
        has_example = self.default not in ("", MISSING) and type(self.default) is kind and "${" not in str(self.default)
        return _WORDS.get(kind, "a value") + (f", as {shown(self.default)}" if has_example and kind is not bool else "")


def walk_settings(cls: type, prefix: str) -> Iterator[tuple[str, Setting]]:
    """Yield (dotted key, setting) for every field of ``cls`` and its groups."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        kinds = members(hints[item.name])
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        setting = Setting(
            owner=cls,
            types=tuple(kind for kind in kinds if kind is not NoneType),
            optional=NoneType in kinds,
            default=MISSING if default is dataclasses.MISSING else default,
        )
        yield f"{prefix}{item.name}", setting
        if setting.group:
            yield from walk_settings(setting.types[0], f"{prefix}{item.name}.")


def make(cls: type, values: Any, prefix: str = "") -> Any:
    """Build the dataclass ``cls`` from plain values by name; messages have ``prefix``, as ``"student."``, before the
    names. Raises :class:`NoSuchSetting` for a name that ``cls`` does not have, and ``UserError`` for a wrong value."""
    fields = {key: setting for key, setting in walk_settings(cls, "") if "." not in key}
    hints = typing.get_type_hints(cls)
    typed = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            raise NoSuchSetting(key)
        if value == MISSING:
            raise UserError(f"{key} is not set, and no recipe of this method sets it; give {key}=VALUE")
        if removed := REMOVED.get((name, str(value))):
            raise UserError(f"{key}={value} {removed}")
        if fields[name].group and isinstance(value, Mapping):
            typed[name] = make(fields[name].types[0], value, f"{key}.")
            continue
        try:
            typed[name] = _convert(value, hints[name])
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UserError(f"{key}={short(shown(value))} must be {fields[name].words(key)}") from None
    try:
        return cls(**typed)
    except UserError as error:
        raise UserError(str(error) if str(error).startswith(prefix) else f"{prefix}{error}") from error


def _convert(value: Any, hint: Any) -> Any:
    """Convert ``value`` to the type ``hint``, or raise one of the errors that :func:`make` catches."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (dataclasses.is_dataclass(hint) and isinstance(value, hint)):
        return value
    if len(members(hint)) > 1:
        for member in members(hint):
            with suppress(ValueError, TypeError, KeyError, OverflowError):
                return _convert(value, member)
    elif origin is Literal and isinstance(value, str) and value in arguments:
        return value
    elif origin is list and isinstance(value, list):
        return [_convert(item, arguments[0]) for item in value]
    elif origin is dict and isinstance(value, dict):
        return {str(key): _convert(item, arguments[1]) for key, item in value.items()}
    elif hint in _SCALARS:
        return _SCALARS[hint](value)
    raise ValueError(value)


def _none(value: Any) -> None:
    if value is not None:
        raise ValueError(value)


def _integer(value: Any) -> int:
    if type(value) not in (int, str) or abs(number := int(value)) >= 2**63:
        raise ValueError(value)
    return number


def _number(value: Any) -> float:
    if type(value) not in (int, float, str):
        raise ValueError(value)
    number = float(value)
    if number != 0 and not 1e-37 <= abs(number) <= 3e38:  # true for NaN
        raise ValueError(value)
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError(value)
    return str(value)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    NoneType: _none,
    bool: lambda value: _SWITCHES[str(value).lower()],
    int: _integer,
    float: _number,
    str: _text,
}
"""Converters of single values, by type. Each raises for a value of another type or out of range."""
