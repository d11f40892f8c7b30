"""Fake tensors: which device they stand for, and derivatives that torch 2.13 gets wrong on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

_LAYER_NORM: Callable[..., Tensor] = nn.functional.layer_norm


def is_fake(x: Tensor) -> bool:
    """Has ``x`` a shape alone?"""
    return isinstance(x, FakeTensor)


def device_type(x: Tensor) -> str:
    """``cpu`` or ``cuda``; of a tensor of a :func:`fsdp_cp.fake_world.fake_world`, what it stands for."""
    return getattr(x.fake_mode, "stands_for", x.device.type) if isinstance(x, FakeTensor) else x.device.type


@contextmanager
def dual_layer_norms() -> Iterator[None]:
    """Inside, ``torch.nn.functional.layer_norm`` of fake tensors has tangents on their own device.

    torch multiplies with the weights' tangent, a zero without memory, whose views are no fake tensors any more: the
    tangent comes out on the meta device, and the next operation refuses it. Real tensors, and fake ones without a
    tangent, go to torch's own function.
    """
    with mock.patch.object(nn.functional, "layer_norm", _layer_norm):
        yield


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # ``_current_level`` as in fsdp_cp.duals.
    primal, tangent = forward_ad.unpack_dual(input) if forward_ad._current_level >= 0 else (input, None)
    if tangent is None or weight is None or not is_fake(primal):
        return _LAYER_NORM(input, normalized_shape, weight, bias, eps)
    out, mean, scale = torch.native_layer_norm(primal, normalized_shape, weight, bias, eps)
    return forward_ad.make_dual(out, _tangent(primal, tangent, mean, scale, weight, bias))


def _tangent(x: Tensor, t: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of a layer norm whose weights have none: what torch allocates for it under a dispatch mode, and as long.

    Operands have names since C++ holds them to the end of an expression.
    """
    dims = list(range(x.ndim - weight.ndim, x.ndim))
    count = prod(weight.shape)

    def of_scale() -> Tensor:
        cubed, t_mean = scale.pow(3), t.mean(dims, keepdim=True)
        x_centred, t_centred = x - mean, t - t_mean
        product = -cubed * t_centred
        return (product * x_centred).sum(dims, keepdim=True).div_(count)

    def normalised() -> Tensor:
        t_scale, t_mean = of_scale(), t.mean(dims, keepdim=True)
        x_centred, t_centred = x - mean, t - t_mean
        first, second = t_centred * scale, x_centred * t_scale
        return first + second

    tangent, x_normalised = normalised(), (x - mean) * scale
    scaled = tangent * weight
    del tangent
    summed = scaled.clone()  # with what the weights' own tangent adds, which is 0
    del scaled, x_normalised
    return summed if bias is None else summed.clone()
