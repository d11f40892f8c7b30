"""FSDP2's door for buffers of one's own: which of them may come from a pool, and which may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from fsdp_cp.sharding.pool import POOL, Buffer, BufferPool
from fsdp_cp.sharding.state import ShardedModule, fsdp_modules


def pool_buffers(root: ShardedModule, pool: BufferPool, ranks: int) -> None:
    """Let every unit of ``root`` take the buffers of its collectives from ``pool``.

    Outputs of all-gathers, of which the inputs are a part, and inputs of reduce-scatters. Not their outputs: FSDP2
    (torch 2.11 to 2.13) makes the sharded gradients of them, views without a copy, and the next step's reduction would
    write into a gradient that still counts.

    ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter`` are public; the collectives that torch calls
    by default, which stay as they are, are private classes of ``_fsdp_collectives``. There is one of each for a unit,
    so that a request tells which unit it is of.

    Args:
        root: its units, and itself.
        pool: shared with other networks.
        ranks: that hold one copy of the parameters, at least 2: with one there is no collective.
    """
    assert ranks > 1, "no collective to serve"
    names = {id(module): name for name, module in root.named_modules()}
    for unit in fsdp_modules(root):
        name = names[id(unit)] or "the root"
        unit.set_custom_all_gather(_AllGather(pool, name))
        unit.set_custom_reduce_scatter(_ReduceScatter(pool, name, ranks))
    vars(root)[POOL] = pool


class _Kinds(dict[tuple[int, bool], list[Buffer]]):
    """Of one unit and one purpose, by bytes: it may reduce all gradients in one step, and few of them in another."""

    def of(self, shape: Sequence[int], dtype: torch.dtype, again: bool = False) -> list[Buffer]:
        """Those of one size; of a gather in backward (``again``) others than of one in forward.

        Another unit is gathered before it there, and gradients wait beside it: with one place for both passes a pool
        would hold a unit more.
        """
        (count,) = shape
        return self.setdefault((count * dtype.itemsize, again), [])


def _in_backward() -> bool:
    """As FSDP2 asks, by a private call of torch 2.11 to 2.13; nothing but where a buffer lies depends on it."""
    return torch._C._current_graph_task_id() != -1


class _AllGather(DefaultAllGather):
    def __init__(self, pool: BufferPool, name: str) -> None:
        super().__init__()
        self._pool, self._name, self._kinds = pool, f"the all-gather of {name}", _Kinds()

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        kind = self._kinds.of(size, dtype, _in_backward())
        return self._pool.allocate(kind, self._name, size, dtype=dtype, device=device)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, pool: BufferPool, name: str, ranks: int) -> None:
        super().__init__()
        self._pool, self._name, self._ranks, self._kinds = pool, f"the reduce-scatter of {name}", ranks, _Kinds()
        self._input: tuple[int, int] | None = None
        """Elements of the input that was asked for last, if it has no output yet; and how many steps had been broken
        off by then."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input first, and for the output then. A step that broke off between the two leaves an
        input without one."""
        (count,) = size
        expected, self._input = self._input, None
        if expected == (count * self._ranks, self._pool.broken_off):
            return torch.empty(*size, dtype=dtype, device=device)
        self._input = (count, self._pool.broken_off)
        kind = self._kinds.of(size, dtype)
        return self._pool.allocate(kind, self._name, size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self._pool.owns(output_tensor):
            raise RuntimeError(f"{self._name}: torch {torch.__version__} asks for its output in another order")
        return super().__call__(output_tensor, input_tensor, group, op, async_op)
