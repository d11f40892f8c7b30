"""Traffic of a rank: calls and bytes of the collectives in a block of code, including backward."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from fsdp_cp.measure.memory import call_in_sight

# Kinds of collectives: their operators in torch.ops.c10d, the index of the counted argument, and how many times a rank
# sends that argument's bytes in a group of a given size. Every collective ends in one of these operators, including
# functional collectives and those of DTensors (torch 2.11 to 2.13).
_KINDS: dict[str, tuple[tuple[str, ...], int, Callable[[int], float]]] = {
    "all_gather": (
        ("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
        1, lambda size: size - 1,
    ),
    "reduce_scatter": (
        ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"),
        1, lambda size: (size - 1) / size,
    ),
    "all_reduce": (("allreduce_", "allreduce_coalesced_"), 0, lambda size: 2 * (size - 1) / size),
    "all_to_all": (("alltoall_base_", "alltoall_"), 1, lambda size: (size - 1) / size),
    "broadcast": (("broadcast_",), 0, lambda size: (size - 1) / size),
    "reduce": (("reduce_",), 0, lambda size: (size - 1) / size),
    "gather": (("gather_",), 1, lambda size: (size - 1) / size),
    "scatter": (("scatter_",), 0, lambda size: (size - 1) / size),
    "send": (("send",), 0, lambda size: 1),
    "recv": (("recv_", "recv_any_source_"), 0, lambda size: 0),
    "barrier": (("barrier", "monitored_barrier_"), 0, lambda size: 0),
}  # fmt: skip
_OPERATORS = {name: (kind, at, share) for kind, (names, at, share) in _KINDS.items() for name in names}


class CollectiveCounter(TorchDispatchMode):
    """Collectives that this rank called inside the context, by kind (``"all_gather"``, ``"reduce_scatter"``, ...).

    Bytes are the average that a rank of the group sends if no byte is sent twice (a ring algorithm). For a tensor of
    ``n`` bytes in a group of ``W`` ranks, all-gather (of ``n`` input bytes) sends ``n (W - 1)``; reduce-scatter,
    all-to-all, broadcast and reduce send ``n (W - 1) / W``; all-reduce sends twice that; send sends ``n``. A backend
    may send more.

    Collectives inside custom operators and in backward count (on CUDA too: autograd's threads inherit the mode). Object
    collectives count as the all-gathers and broadcasts of bytes that they call, compiled code does not.

    >>> with CollectiveCounter() as sent:
    ...     loss.backward()
    >>> sent.calls["reduce_scatter"], sent.bytes["reduce_scatter"]
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        """Calls by kind."""
        self.bytes: Counter[str] = Counter()
        """Bytes sent, by kind."""
        self.by_group: Counter[tuple[str, str]] = Counter()
        """Bytes sent, by kind and group (``group_desc``; for a mesh the name of its axis)."""

        self.alone: Counter[tuple[str, str]] = Counter()
        """Calls in groups of one rank, by kind and group. With NCCL each such group costs a communicator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # DTensor's dispatch calls this again for its collectives
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "c10d":
            self._count(func, args)
            return func(*args, **kwargs)
        return call_in_sight(self, func, args, kwargs)

    def _count(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        name = func._schema.name.removeprefix("c10d::")
        if name not in _OPERATORS:
            raise RuntimeError(f"CollectiveCounter does not know torch {torch.__version__}'s collective c10d::{name}")
        kind, argument, share = _OPERATORS[name]
        size = sum(x.numel() * x.element_size() for x in tree_leaves(args[argument]))
        self.calls[kind] += 1
        group = _group(func, args)
        if group.size() == 1:
            self.alone[kind, group.group_desc] += 1
        sent = round(size * share(group.size()))
        self.bytes[kind] += sent
        self.by_group[kind, group.group_desc] += sent


def _group(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> dist.ProcessGroup:
    position = next(i for i, a in enumerate(func._schema.arguments) if a.name == "process_group")
    group = args[position]
    # The operator gets a TorchScript object. ``ProcessGroup.unbox`` is private (torch 2.11 to 2.13).
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
