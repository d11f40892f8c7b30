"""The derivative of a network along a direction: exact, by forward-mode AD, or by a finite difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fsdp_cp.attention.duals import norms_keep_tangent_dtypes
from fsdp_cp.errors import UserError

Mode = Literal["exact", "finite_difference"]
MODES: tuple[str, ...] = get_args(Mode)


@torch.no_grad()
def directional_derivative(
    function: Callable[..., Tensor],
    primals: tuple[Tensor, ...],
    tangents: tuple[Tensor, ...],
    *,
    mode: str,
    step: float,
) -> Tensor:
    """``d/dh function(primals + h tangents)`` at ``h = 0``, without a graph.

    Args:
        function: of as many tensors as there are ``primals``.
        primals: where.
        tangents: along what, in the shapes of ``primals``.
        mode: ``exact`` (one dual forward) or ``finite_difference`` (two plain forwards, central:
            the error is of order ``step^2``, and of the rounding of the network's output over ``step``).
        step: ``h`` of the finite difference.
    """
    if mode == "exact":
        with norms_keep_tangent_dtypes(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, d) for p, d in zip(primals, tangents, strict=True)]
            tangent = forward_ad.unpack_dual(function(*duals)).tangent
        assert tangent is not None, "the function does not depend on its arguments, or an operation dropped the tangent"
        return tangent
    assert mode == "finite_difference", mode
    after = function(*(p + step * d for p, d in zip(primals, tangents, strict=True)))
    before = function(*(p - step * d for p, d in zip(primals, tangents, strict=True)))
    return (after - before) / (2 * step)


def check_exact(config: Any) -> None:
    """Refuse a ``method.jvp`` that would be wrong, or fail, for how the student computes.

    Args:
        config: a :class:`distill.config.Config` whose method has the setting ``jvp``.

    Raises:
        UserError: naming the settings and what works.
    """
    if config.method.jvp == "finite_difference":
        if config.student.precision != "fp32":
            # Measured on Wan: the rounding of a bf16 network is larger than the difference, whatever the step.
            raise UserError(
                f"method.jvp=finite_difference with student.precision={config.student.precision}: the difference"
                " drowns in rounding; use student.precision=fp32 or method.jvp=exact"
            )
        if config.student.fp8 != "none":
            raise UserError(
                f"method.jvp=finite_difference with student.fp8={config.student.fp8}: the difference drowns in"
                " rounding; use student.fp8=none or method.jvp=exact"
            )
