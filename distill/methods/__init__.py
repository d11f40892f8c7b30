"""Distillation methods, one file each. A method never touches a process group, an optimizer or FSDP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distill.methods.base import Batch, Loss, Method
from distill.methods.dcm import Dcm, DcmSettings
from distill.methods.dmd2 import Dmd2, Dmd2Settings
from distill.methods.flow_matching import FlowMatching, FlowMatchingSettings
from distill.methods.meanflow import MeanFlow, MeanFlowSettings
from distill.methods.ode_regression import OdeRegression, OdeRegressionSettings
from distill.methods.rcm import Rcm, RcmSettings
from distill.methods.scm import Scm, ScmSettings

if TYPE_CHECKING:
    from models.role import Role

__all__ = ["METHODS", "Batch", "Loss", "Method", "build_method"]

METHODS: dict[str, tuple[type[Method], type]] = {
    "flow_matching": (FlowMatching, FlowMatchingSettings),
    "dmd2": (Dmd2, Dmd2Settings),
    "scm": (Scm, ScmSettings),
    "rcm": (Rcm, RcmSettings),
    "meanflow": (MeanFlow, MeanFlowSettings),
    "dcm": (Dcm, DcmSettings),
    "ode_regression": (OdeRegression, OdeRegressionSettings),
}


def build_method(settings: Any, roles: Mapping[str, Role]) -> Method:
    """The method of ``settings.name`` over ``roles``."""
    method, _ = METHODS[settings.name]
    return method(settings, roles)
