"""What each setting takes, in words and as a check, from the hints of the dataclasses."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_cp.choices import members, words

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}
_UNTYPED = {
    "architecture": "a network's configuration, as {num_layers: 4}",
    "lr_scale": "factors of at least 0 by pattern, as {patch_embedding.*: 0.1}",
    "columns": "names of the table's columns, as {caption: prompt}",
    "method": "the name of a method",
    "data": "the name of a data set",
}
"""Of fields that OmegaConf is told nothing about, by their name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A field of one of the dataclasses."""

    owner: type
    """Whose field it is."""
    types: tuple[Any, ...]
    """The hints that a value may have, without ``None``; the dataclass itself for a group of settings."""
    optional: bool
    """May it be null?"""
    default: Any
    """``dataclasses.MISSING`` where there is none."""

    @property
    def is_text(self) -> bool:
        """Does it take text alone, any or one of a few words?"""
        return all(kind is str or typing.get_origin(kind) is typing.Literal for kind in self.types)

    @property
    def group(self) -> bool:
        """Is it a group of settings?"""
        return dataclasses.is_dataclass(self.types[0])

    def words(self, name: str) -> str:
        """What the setting ``name`` takes; for a group, its settings."""
        if self.group:
            (kind,) = self.types
            keys = [f"{name}.{item.name}" for item in dataclasses.fields(kind)]
            return ", ".join(keys[:3]) + (", ..." if keys[3:] else "")
        text = " or ".join(self._kind_in_words(kind, name) for kind in self.types)
        return f"{text}, or null" if self.optional else text

    def _kind_in_words(self, kind: Any, name: str) -> str:
        if typing.get_origin(kind) is typing.Literal:
            return " or ".join(kind.__args__)
        if typing.get_origin(kind) is list:
            example = self.default or (["name", "other"] if kind.__args__[0] is str else [2, 4])
            return f"a list of {_SEVERAL[kind.__args__[0]]}, as [{','.join(map(str, example))}]"
        text = _WORDS.get(kind) or _UNTYPED[name.rpartition(".")[2]]
        # A word among whole numbers is no example of them.
        if kind in (int, float, str) and self.default not in (None, "", "???", "auto", dataclasses.MISSING):
            text += "" if "${" in str(self.default) else f", as {self.default}"
        return text


def settings_of(cls: type, prefix: str) -> Iterator[tuple[str, Setting]]:
    """(dotted key, setting) of every field of ``cls``, groups and theirs included."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        hint: Any = hints[item.name]
        kinds = members(hint)
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        setting = Setting(
            owner=cls,
            types=tuple(kind for kind in kinds if kind is not types.NoneType),
            optional=types.NoneType in kinds or (hint is Any and default is None),
            default=default,
        )
        yield f"{prefix}{item.name}", setting
        if setting.group:
            yield from settings_of(setting.types[0], f"{prefix}{item.name}.")


def known_settings(classes: Mapping[str, list[type]]) -> dict[str, list[Setting]]:
    """Every setting by its dotted key; of methods and data sets several may have one of a name.

    Args:
        classes: dataclasses by the prefix of their fields (``""``, ``"method."``, ``"data."``).
    """
    known: dict[str, list[Setting]] = {}
    for prefix, owners in classes.items():
        for owner in owners:
            for key, setting in settings_of(owner, prefix):
                known.setdefault(key, []).append(setting)
    return known


def fits(value: Any, hint: Any) -> bool:
    """Is ``value`` of the type that ``hint`` (of a field) says? OmegaConf lets lists into lists of numbers."""
    if hint is Any or dataclasses.is_dataclass(hint) or words(hint):  # whose words are check_choices'
        return True
    if len(members(hint)) > 1:
        return any(fits(value, each) for each in members(hint))
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(fits(each, hint.__args__[0]) for each in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)
