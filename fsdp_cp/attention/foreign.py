"""Private functions of optional packages: imported when first asked for, called by the names of their arguments.

Such functions change their arguments from version to version. What a version asks for and we don't know is a reason
to refuse it, in one clause; it never becomes a call with arguments in the wrong places.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch.library import CustomOpDef


@dataclass(frozen=True)
class Foreign:
    """A pair of functions, or the clause that says why there is none ("is not installed (pip install ...)")."""

    module: ModuleType | None = None
    forward: Callable | None = None
    backward: Callable | None = None
    problem: str | None = None


@lru_cache(maxsize=32)
def parameters(function: Callable) -> dict[str, bool]:
    """The names of a function's parameters, and whether each must be given."""
    if isinstance(function, CustomOpDef):  # calls itself (*args, **kwargs)
        return {a.name: not a.has_default_value() for a in function._opoverload._schema.arguments}
    return {p.name: p.default is p.empty for p in inspect.signature(function).parameters.values()}


def bind(function: Callable | None, **offered: Any) -> Any:
    """Call ``function`` with those of the ``offered`` arguments that it has."""
    assert function is not None, "a kernel that is not there has refused every tensor"
    names = parameters(function)
    return function(**{name: value for name, value in offered.items() if name in names})


@lru_cache(maxsize=32)
def load(
    modules: tuple[str, ...],
    functions: tuple[str, str],
    known: tuple[frozenset[str], frozenset[str]],
    essential: tuple[frozenset[str], frozenset[str]],
    at_least: tuple[str, tuple[int, int]] | None,
    install: str,
) -> Foreign:
    """The forward and backward function of the first of ``modules`` that is installed.

    Args:
        functions: their names.
        known: for each, the arguments that the caller can give.
        essential: for each, those without which a call would mean something else.
        at_least: package and lowest version.
        install: the command that installs it, for the message.
    """
    name = next((m for m in modules if importlib.util.find_spec(m.partition(".")[0]) is not None), None)
    if name is None:
        return Foreign(problem=f"is not installed ({install})")
    try:
        module = importlib.import_module(name)
        package = importlib.import_module(at_least[0]) if at_least else None
    except Exception as error:  # built for another torch or CUDA, it may raise anything; the user reads it
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return Foreign(problem=f"is installed but does not load ({first_line})")
    if at_least and _version(package) < at_least[1]:
        wanted = ".".join(map(str, at_least[1]))
        return Foreign(problem=f"needs {at_least[0]} {wanted} or later, not {getattr(package, '__version__', '?')}")
    found = [getattr(module, f, None) for f in functions]
    for function, label, can, must in zip(found, functions, known, essential, strict=True):
        if function is None:
            return Foreign(problem=f"has no {label} in {name}, an unknown version of it")
        names = parameters(function)
        strange = sorted({n for n, required in names.items() if required and n not in can} | (must - names.keys()))
        if strange:
            return Foreign(problem=f"has an unknown signature of {label} (about {', '.join(strange)})")
    return Foreign(module, *found)


def _version(package: ModuleType | None) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", getattr(package, "__version__", ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)
