"""Directional derivative of a network: exact by forward-mode AD, or approximate by a finite difference."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fsdp_cp.duals import norms_keep_tangent_dtypes
from fsdp_cp.errors import UserError
from models.sample import Sample

Mode = Literal["exact", "finite_difference"]


@torch.no_grad()
def directional_derivative(
    function: Callable[[Sample, Tensor], Sample], x: Sample, t: Tensor, direction: Sample, *, mode: str, step: float
) -> Sample:
    """Return ``d/dh function(x + h direction, t + h)`` at ``h = 0``, without a graph: by one dual forward (``exact``),
    or by two plain ones with ``h = step`` to both sides (``finite_difference``), whose error is of order ``step^2``,
    plus rounding divided by ``step``."""
    if mode == "exact":
        with norms_keep_tangent_dtypes(), forward_ad.dual_level():
            out = function(x.map(forward_ad.make_dual, direction), forward_ad.make_dual(t, torch.ones_like(t)))
            return out.map(_tangent)
    after = function(x + step * direction, t + step)
    before = function(x - step * direction, t - step)
    return (after - before) / (2 * step)


def _tangent(value: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(value).tangent
    assert tangent is not None, "the function does not depend on its arguments, or an operation dropped the tangent"
    return tangent


def check_exact(config: Any) -> None:
    """Raise ``UserError`` for ``method.jvp=finite_difference`` of a student that computes in bf16 or fp8, and for an
    exact derivative of one that gathers its weights in fp8."""
    for name, works in (("precision", "fp32"), ("fp8", "none")):
        value = getattr(config.student, name)
        # Measured on Wan: at every step size, rounding in bf16 is larger than the difference.
        if config.method.jvp == "finite_difference" and value != works:
            lost = f"with student.{name}={value}: the difference drowns in rounding"
            raise UserError(f"method.jvp=finite_difference {lost}; use student.{name}={works} or method.jvp=exact")
    # FSDP2 allocates one buffer per gathered weight, so forwards without tangents use the dtype of those with tangents.
    if config.method.jvp == "exact" and config.student.fp8_gather:
        jvp = f"method={config.method.name} takes derivatives, which need weights in the compute dtype"
        raise UserError(f"student.fp8_gather=true: {jvp}; use student.fp8_gather=false")
