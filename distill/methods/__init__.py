"""Distillation methods, one file each. A method never touches a process group, an optimizer or FSDP.

A package adds a method without touching this one (docs/extending.md)::

    [project.entry-points."fsdp_cp.methods"]
    mine = "my_package.method:METHOD"

``METHOD`` is ``(Mine, MineSettings)``, as in :data:`METHODS`; the package's YAML is in ``configs/`` next to the file.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.methods.base import Batch, Loss, Method
from distill.methods.dcm import Dcm, DcmSettings
from distill.methods.dmd2 import Dmd2, Dmd2Settings
from distill.methods.flow_matching import FlowMatching, FlowMatchingSettings
from distill.methods.meanflow import MeanFlow, MeanFlowSettings
from distill.methods.ode_regression import OdeRegression, OdeRegressionSettings
from distill.methods.pdd import Pdd, PddSettings
from distill.methods.rcm import Rcm, RcmSettings
from distill.methods.scm import Scm, ScmSettings
from distill.methods.self_forcing import SelfForcing, SelfForcingSettings
from fsdp_cp.choices import add_installed
from fsdp_cp.errors import UserError

if TYPE_CHECKING:
    from models.roles.role import Role

__all__ = ["METHODS", "Batch", "Loss", "Method", "add_installed_methods", "build_method"]

METHODS: dict[str, tuple[type[Method], type]] = {
    "flow_matching": (FlowMatching, FlowMatchingSettings),
    "dmd2": (Dmd2, Dmd2Settings),
    "scm": (Scm, ScmSettings),
    "rcm": (Rcm, RcmSettings),
    "meanflow": (MeanFlow, MeanFlowSettings),
    "dcm": (Dcm, DcmSettings),
    "pdd": (Pdd, PddSettings),
    "ode_regression": (OdeRegression, OdeRegressionSettings),
    "self_forcing": (SelfForcing, SelfForcingSettings),
}
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
