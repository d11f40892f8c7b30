"""Forward-mode tangents at the entry of an operator that communicates.

Collectives and opaque operators drop tangents silently. An operator therefore unpacks its arguments with this module,
sends primals and tangents in one exchange, and builds its results with ``torch.autograd.forward_ad.make_dual``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


@torch.library.custom_op("fsdp_cp::refuse_compiled_duals", mutates_args=())
def _refuse_compiled_duals(x: Tensor) -> Tensor:
    return x.clone()


@_refuse_compiled_duals.register_fake
def _(x):
    # Raised outside of a fake kernel it would only make Dynamo break the graph, and inductor's graphs lose tangents.
    raise RuntimeError("context parallelism has no forward-mode AD in a compiled graph; call the module uncompiled")


def inside_dual_level() -> bool:
    """Return whether this runs inside ``forward_ad.dual_level()`` (or ``torch.func.jvp``), where tangents can exist.

    ``forward_ad._current_level`` is private (torch 2.11 to 2.13). Dynamo guards on it, so a graph compiled without
    tangents is not reused inside a dual level.
    """
    return forward_ad._current_level >= 0


def may_be_dual(x: Tensor) -> bool:
    """Return whether ``x`` may have a tangent; raise ``RuntimeError`` while Dynamo compiles the caller."""
    if not inside_dual_level():
        return False
    if torch.compiler.is_compiling():
        _refuse_compiled_duals(x)
    return True


def unpack_duals(
    tensors: Sequence[Tensor], operator: str
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...] | None]:
    """Return primals and tangents of an operator's arguments.

    A missing tangent is ``None``; if all are missing, the tuple of tangents is ``None``. Tangents are cast to their
    primal's dtype: some CUDA operators return tangents of another dtype, which an exchange would promote.

    Raises:
        RuntimeError: gradients are enabled (forward over reverse is not supported).
    """
    duals = [forward_ad.unpack_dual(x) for x in tensors]
    if all(dual.tangent is None for dual in duals):
        return tuple(tensors), None
    if torch.is_grad_enabled():
        raise RuntimeError(f"forward-mode AD through {operator} has no backward; compute it under torch.no_grad()")
    tangents = (None if dual.tangent is None else dual.tangent.to(dual.primal.dtype) for dual in duals)
    return tuple(dual.primal for dual in duals), tuple(tangents)


@contextmanager
def norms_keep_tangent_dtypes() -> Iterator[None]:
    """Within this context, make ``layer_norm`` and ``rms_norm`` return tangents of their primal's dtype.

    On CUDA both keep statistics of bf16 inputs in fp32, so the tangent is fp32 and the next linear layer raises.
    """
    functional = nn.functional
    with (
        mock.patch.object(functional, "layer_norm", partial(_in_primal_dtype, functional.layer_norm)),
        mock.patch.object(functional, "rms_norm", partial(_in_primal_dtype, functional.rms_norm)),
    ):
        yield


def _in_primal_dtype(norm: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    out = norm(*args, **kwargs)
    if not inside_dual_level():
        return out
    primal, tangent = forward_ad.unpack_dual(out)
    if tangent is None or tangent.dtype == primal.dtype:
        return out
    return forward_ad.make_dual(primal, tangent.to(primal.dtype))
