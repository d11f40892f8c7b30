"""One process as rank 0 of a world that is not there: collectives return at once, and tensors have shapes alone.

``FakeTensorMode`` and the ``fake`` backend are torch's own, for its tests (torch 2.11 to 2.13); used here alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest import mock

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_cp.fake_operators import dual_layer_norms

_ADAM = import_module("torch.optim.adam")  # torch.optim has no such attribute: it deletes it


@contextmanager
def fake_world(size: int, stands_for: str = "cpu") -> Iterator[FakeTensorMode]:
    """A process group of ``size`` ranks, of which this process is the first and only one.

    Yields a mode to enter, also several times: tensors made inside it have shapes, dtypes and storages of a size, and
    no memory. They are on the CPU; attention's derivative takes the tiles of the device type ``stands_for``. AdamW
    reads its count of steps from a tensor, which has no value then; it is told 1, which changes no shape.

    Raises:
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group is there already; a world can be faked before it, or after it")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    with mock.patch.dict(os.environ, place), mock.patch.object(_ADAM, "_get_value", _one), dual_layer_norms():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            mode = fake_tensors()
            vars(mode)["stands_for"] = stands_for
            yield mode
        finally:
            dist.destroy_process_group()


def fake_tensors() -> FakeTensorMode:
    """A mode to enter: tensors made inside have shapes, dtypes and storages of a size, and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _one(value: object) -> float:
    return 1.0
