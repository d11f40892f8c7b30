"""Dataclasses as OmegaConf takes them: 2.3 refuses a ``Literal``, so that it is shown ``str``, or ``Any``, there."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Any, Literal, get_origin, get_type_hints

from fsdp_cp.choices import members, words


@cache
def without_literals(cls: type) -> type:
    """A dataclass with the fields and defaults of ``cls`` for ``OmegaConf.structured``; it makes objects of ``cls``.

    What a ``Literal`` lists is checked by :func:`fsdp_cp.choices.check_choices` once an object is made.
    """
    hints = get_type_hints(cls)
    fields = []
    for item in dataclasses.fields(cls):
        hint, default = hints[item.name], item.default
        factory: Any = item.default_factory
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            # OmegaConf takes a class for a default, and refuses an object of a class other than the hint's.
            if factory is not hint:
                raise TypeError(f"{cls.__name__}.{item.name}: the default of a group of settings is its class")
            hint = without_literals(hint)
            factory = _returns(hint)
        else:
            hint = _widened(hint)
        made = {"default_factory": factory} if factory is not dataclasses.MISSING else {"default": default}
        fields.append((item.name, hint, dataclasses.field(kw_only=True, **made)))
    return dataclasses.make_dataclass(
        cls.__name__,
        fields,
        namespace={"__new__": lambda _, **values: cls(**values), "__module__": cls.__module__},
    )


def _returns(value: Any) -> Any:
    return lambda: value


def _widened(hint: Any) -> Any:
    """``hint`` with ``str`` in the place of a ``Literal``; ``Any`` where numbers, switches or lists may stand too."""
    kinds = [str if get_origin(member) is Literal else member for member in members(hint)]
    if not all(isinstance(value, str) for value in words(hint)):
        raise TypeError(f"{hint}: words alone are listed")
    if kinds == list(members(hint)):
        return hint
    if types.NoneType in kinds and len(kinds) == 2:
        return str | None
    return str if kinds == [str] else Any
