"""Fake tensors, which have shapes but no data, and a simulated world in which this process is rank 0.

``FakeTensorMode`` and the ``fake`` backend are torch's test utilities (torch 2.11 to 2.13). Only this module uses them.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad

from fsdp_cp.duals import inside_dual_level

_LAYER_NORM: Callable[..., Tensor] = nn.functional.layer_norm


@contextmanager
def fake_world(size: int, stands_for: str = "cpu") -> Iterator[FakeTensorMode]:
    """Initialize a process group of ``size`` ranks, of which this process is the first and only one.

    Yields a mode to enter, once or several times: tensors created inside have shapes, dtypes and storage sizes, but no
    memory. They are on the CPU; attention's derivative uses the tile sizes of the device type ``stands_for``, and
    the choice of a kernel for the CPU is not logged.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("fake_world() needs a process without a process group; destroy the existing one first")
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    with (
        mock.patch.dict(os.environ, env),
        mock.patch.object(logging.getLogger("fsdp_cp.attention"), "disabled", True),
        mock.patch.object(nn.functional, "layer_norm", layer_norm),
    ):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            mode = fake_tensors()
            vars(mode)["stands_for"] = stands_for
            yield mode
        finally:
            dist.destroy_process_group()


def fake_tensors() -> FakeTensorMode:
    """Return a mode to enter: tensors created inside have shapes, dtypes and storage sizes, but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> AbstractContextManager[Any]:
    """Within this context, created tensors have data, also inside a mode of :func:`fake_tensors`: constants to keep."""
    return unset_fake_temporarily()


def device_type(x: Tensor) -> str:
    """Return ``cpu`` or ``cuda``; for a tensor of a :func:`fake_world`, the device type that it stands for."""
    return getattr(x.fake_mode, "stands_for", x.device.type) if isinstance(x, FakeTensor) else x.device.type


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Replace ``torch.nn.functional.layer_norm``, to keep tangents of fake tensors on their device.

    To weights without a tangent torch 2.13 gives a zero without memory, whose views are not fake tensors. The result
    would be on the meta device, and the next operation would raise.
    """
    if inside_dual_level() and isinstance(input, FakeTensor) and forward_ad.unpack_dual(input).tangent is not None:
        weight, bias = (None if x is None else forward_ad.make_dual(x, torch.zeros_like(x)) for x in (weight, bias))
    return _LAYER_NORM(input, normalized_shape, weight, bias, eps)
