"""Distillation methods, one file each. A method never touches a process group, an optimizer or FSDP.

A package adds a method without touching this one (docs/extending.md)::

    [project.entry-points."fsdp_cp.methods"]
    mine = "my_package.method:METHOD"

``METHOD`` is ``(Mine, MineSettings)``, as in each file here; the package's YAML is in ``configs/`` next to the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.methods import dcm, dmd2, flow_matching, meanflow, ode_regression, pdd, rcm, scm, self_forcing
from distill.methods.base import Batch, Loss, Method
from fsdp_cp.choices import add_installed
from fsdp_cp.errors import UserError

if TYPE_CHECKING:
    from models.roles.role import Role

__all__ = ["METHODS", "Batch", "Loss", "Method", "add_installed_methods", "build_method"]

_MODULES = (flow_matching, dmd2, scm, rcm, meanflow, dcm, pdd, ode_regression, self_forcing)
METHODS: dict[str, tuple[type[Method], type]] = {module.METHOD[1].name: module.METHOD for module in _MODULES}
"""Class and settings of each method, by name."""
INSTALLED: dict[str, Path] = {}
"""Folder with the YAML of each method from another package, by name."""
BROKEN: dict[str, UserError] = {}
"""Error of each installed method that could not be loaded, by name."""


def add_installed_methods() -> None:
    """Add the methods of other packages to :data:`METHODS`. Methods that cannot be loaded go to :data:`BROKEN`."""

    def add(name: str, registered: Any) -> None:
        method, settings = registered
        if not issubclass(method, Method) or settings().name != name:
            raise TypeError(f"{registered!r} is not (a subclass of Method, its settings with name={name})")
        folder = Path(inspect.getfile(method)).parent / "configs"
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        METHODS[name], INSTALLED[name] = (method, settings), folder

    BROKEN.update(add_installed("fsdp_cp.methods", "method", METHODS, add))


def build_method(settings: Any, roles: Mapping[str, Role]) -> Method:
    method, _ = METHODS[settings.name]
    return method(settings, roles)
