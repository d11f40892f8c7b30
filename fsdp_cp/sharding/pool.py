"""One piece of memory for the staging buffers of all sharded networks of a mesh (``communication_buffers=pooled``).

Like the traced allocator of Megatron-FSDP: the first steps record which buffers are asked for and which of them are
alive at once; then each has a place in one piece of memory, the same in every later step. The plan is over the union
of all steps, and by buffer rather than by position in a step: which role trains, and how many forwards a rollout has,
differ from step to step, but the units next to each other do not.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils.dlpack import from_dlpack, to_dlpack

from fsdp_cp.mesh import Mesh

log = logging.getLogger(__name__)

POOL = "_buffer_pool"
"""Attribute of a root whose units share one, and of the mesh on which they do."""
ALIGNMENT = 512
"""Bytes, as torch's allocator for CUDA aligns; NCCL and vectorized copies want at least 16."""
LET_GO = 0.01
"""Seconds, on the CPU, before two buffers are recorded as alive at once: gloo's threads hold one a little longer than
FSDP2 does."""
PATIENCE = 1.0
"""Seconds that a planned buffer waits for such a thread, on the CPU."""


class Buffer:
    """Memory that one unit asks for again and again, for one purpose and in one size.

    Where two of a kind are alive at once (a unit's gradients of two micro-batches) they are two buffers.
    """

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self.name, self.size, self.device = name, size, device
        self.conflicts: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Buffers that were ever alive together with this one."""
        self.offset: int | None = None
        """Offset in the pool's memory; ``None`` until it has been planned."""
        self.neighbours: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Buffers whose memory overlaps with its own, itself among them."""
        self.storage: weakref.ref[Any] | None = None
        self.stream: Any = None
        """CUDA stream of the latest request."""
        self.let_go: Any = None
        """Event of that stream, recorded where the buffer was freed last."""

    def overlaps(self, other: Buffer) -> bool:
        """Return whether the two planned places overlap."""
        assert self.offset is not None and other.offset is not None, "planned"
        return self.offset < other.offset + other.size and other.offset < self.offset + self.size


class BufferPool:
    """Allocator of memory that FSDP2 may keep as long as it likes: a buffer is free when no view of it is alive.

    Each buffer is a storage of its own over the pool's memory (by DLPack), whose end Python reports, whoever held the
    last view, C++ and gloo's threads included. A buffer that would overlap a living one, or that was not foreseen, gets
    memory of its own, and the end of the step plans again (:meth:`end_step`).

    Streams: like torch's allocator the pool relies on FSDP2 dropping a buffer only where the stream that asked for it
    waits for all others that use it. That moment is recorded, and another stream that gets a part of the same memory
    waits for it.
    """

    def __init__(self) -> None:
        self.requests = 0
        """Number of buffers handed out so far."""
        self.allocations = 0
        """Number of buffers with memory of their own."""
        self.plans = 0
        """Number of plans made."""
        self.most_alive = 0
        """Most bytes alive at once where one of them was not planned yet: no plan holds less."""
        self.broken_off = 0
        """Number of steps that ended in an exception."""
        self.put_off = False
        """Whether the end of a step only records what was asked for, and plans nothing."""
        self._memory: Tensor | None = None
        self._known: list[weakref.ref[Buffer]] = []
        self._alive: dict[int, Buffer] = {}
        self._unforeseen: str | None = None
        """Name of the first buffer since the last plan that was not in it."""
        self._patient = False
        """Whether gloo's threads may hold buffers."""
        # Freeing a buffer does not take it: gloo's thread would wait for a thread that waits for it.
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers that living networks have asked for, in the order of their first use."""
        return [buffer for known in self._known if (buffer := known()) is not None]

    def owns(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a part of the pool's memory."""
        memory = self._memory
        if memory is None:
            return False
        if isinstance(memory, FakeTensor):
            return tensor.untyped_storage()._cdata == memory.untyped_storage()._cdata
        return memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.nbytes

    def allocate(
        self, kind: list[Buffer], name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for one buffer, as ``torch.empty``.

        Args:
            kind: all buffers of this unit, purpose and size; it grows where more are alive at once than before.
            name: of the purpose and the unit, for the log.
            shape, dtype, device: of ``torch.empty``.
        """
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype, device=device)
        with self._lock:
            self.requests += 1
            buffer = self._planned(kind)
            if buffer is not None:
                assert self._memory is not None and buffer.offset is not None
                view = self._memory[buffer.offset : buffer.offset + size].view(dtype).view(*shape)
                if isinstance(view, FakeTensor):  # without an address; nobody writes to it, so it needs no watch
                    return view
                tensor = from_dlpack(to_dlpack(view))
            else:
                self.allocations += 1
                self._unforeseen = self._unforeseen or name
                tensor = torch.empty(*shape, dtype=dtype, device=device)
                self._patient = device.type == "cpu" and not isinstance(tensor, FakeTensor)
                if self._patient and all(map(self._is_alive, kind)):
                    time.sleep(LET_GO)
                buffer = next((known for known in kind if not self._is_alive(known)), None)
                if buffer is None:
                    buffer = Buffer(name, size, device)
                    kind.append(buffer)
                    self._known.append(weakref.ref(buffer))
            self._watch(buffer, tensor)
        return tensor

    def _planned(self, kind: list[Buffer]) -> Buffer | None:
        """Return one of ``kind`` whose place is free; on the CPU wait for gloo, if need be."""
        planned = [buffer for buffer in kind if buffer.offset is not None]
        deadline = time.monotonic() + PATIENCE
        while planned:
            in_the_way = [[other for other in buffer.neighbours if self._is_alive(other)] for buffer in planned]
            for buffer, others in zip(planned, in_the_way, strict=True):
                if not others:
                    return buffer
            # Waiting does not help for a buffer that is known to be alive at once, and was not planned so yet.
            known = any(other in b.conflicts for b, others in zip(planned, in_the_way, strict=True) for other in others)
            if not self._patient or known or len(planned) < len(kind) or time.monotonic() > deadline:
                return None
            time.sleep(0.0005)
        return None

    def _is_alive(self, buffer: Buffer) -> bool:
        return id(buffer) in self._alive

    def _watch(self, buffer: Buffer, tensor: Tensor) -> None:
        """Count ``buffer`` as alive until the storage of ``tensor`` is gone."""
        if self._patient and any(other not in buffer.conflicts for other in list(self._alive.values())):
            time.sleep(LET_GO)
        alive = list(self._alive.values())
        for other in alive:
            buffer.conflicts.add(other)
            other.conflicts.add(buffer)
        if not self.owns(tensor):
            self.most_alive = max(self.most_alive, buffer.size + sum(other.size for other in alive))
        stream = _stream_now(tensor.device)
        if stream is not None:
            for other in buffer.neighbours:
                if other.let_go is not None and other.stream != stream:
                    stream.wait_event(other.let_go)
            buffer.stream = stream
        self._alive[id(buffer)] = buffer

        def gone(_: object) -> None:  # in whichever thread held it last
            if sys.is_finalizing():
                return
            if buffer.stream is not None:
                buffer.let_go = buffer.let_go or torch.cuda.Event()
                buffer.let_go.record(buffer.stream)
            self._alive.pop(id(buffer), None)

        buffer.storage = weakref.ref(tensor.untyped_storage(), gone)

    def end_step(self) -> None:
        """Plan again, if this step asked for something that the plan does not have."""
        if self._unforeseen is None or self.put_off:
            return
        with self._lock:
            self._known = [known for known in self._known if known() is not None]
            buffers = self.buffers
            position = {id(buffer): i for i, buffer in enumerate(buffers)}
            conflicts = [{position[id(o)] for o in b.conflicts if id(o) in position} for b in buffers]
            offsets, total = place([buffer.size for buffer in buffers], conflicts)
            for buffer in buffers:  # if the memory for the new plan cannot be had, the next step asks again
                buffer.offset = None
            self._renew(total, buffers[0].device)
            for buffer, offset in zip(buffers, offsets, strict=True):
                buffer.offset = offset
            for buffer in buffers:
                buffer.neighbours = weakref.WeakSet(filter(buffer.overlaps, buffers))
            name, self._unforeseen = self._unforeseen, None
            self.plans += 1
        if not isinstance(self._memory, FakeTensor) and not (dist.is_initialized() and dist.get_rank()):
            log.info(
                "communication_buffers=pooled: %d buffers of collectives, %.1f MiB in all, share %.1f MiB; at most"
                " %.1f MiB of them were alive at once (plan %d, made for %s)",
                len(buffers),
                sum(buffer.size for buffer in buffers) / 2**20,
                total / 2**20,
                self.most_alive / 2**20,
                self.plans,
                name,
            )

    def _renew(self, total: int, device: torch.device) -> None:
        """Replace the memory by ``total`` bytes; living buffers over the old memory keep that."""
        if device.type == "cuda":
            # Other streams may still use the old memory. And torch's allocator keeps the memory of the first steps'
            # buffers for the streams that asked for them, where the new memory cannot come from.
            torch.cuda.synchronize(device)
            self._memory = None
            torch.cuda.empty_cache()
        self._memory = None
        with torch.inference_mode(False):
            self._memory = torch.empty(total, dtype=torch.uint8, device=device)

    def break_off(self) -> None:
        """End a step after an exception: FSDP2 may have dropped buffers that another stream still uses."""
        self.broken_off += 1
        if self._memory is not None and self._memory.device.type == "cuda":
            torch.cuda.synchronize(self._memory.device)


def _stream_now(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def pool_of(mesh: Mesh) -> BufferPool:
    """Return the pool of all networks on ``mesh``; it lives as long as they and the mesh."""
    return vars(mesh).setdefault(POOL, BufferPool())


def pool_at(root: nn.Module) -> BufferPool | None:
    """Return the pool that the units of ``root`` use, if any."""
    return vars(root).get(POOL)


def pool_buffers(root: nn.Module, pool: BufferPool, ranks: int) -> None:
    """Let every unit of ``root`` take the buffers of its collectives from ``pool``.

    Outputs of all-gathers, of which the inputs are a part, and inputs of reduce-scatters. Not their outputs: FSDP2
    (torch 2.11 to 2.13) makes the sharded gradients of them, views without a copy, and the next step's reduction would
    write into a gradient that is still used.

    ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter`` are public; torch's default collectives,
    which do the work here too, are private classes of ``_fsdp_collectives``. Each unit has its own, so that a request
    tells its unit.

    Args:
        root: its units, and itself.
        pool: shared with other networks.
        ranks: that hold one copy of the parameters, at least 2: with one there is no collective.
    """
    assert ranks > 1, "no collective to serve"
    for name, unit in root.named_modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(_AllGather(pool, name or "the root"))
            unit.set_custom_reduce_scatter(_ReduceScatter(pool, name or "the root", ranks))
    vars(root)[POOL] = pool


def _in_backward() -> bool:
    """Ask as FSDP2 does, by a private call of torch 2.11 to 2.13; only the place of a buffer depends on it."""
    return torch._C._current_graph_task_id() != -1


class _AllGather(DefaultAllGather):
    def __init__(self, pool: BufferPool, unit: str) -> None:
        super().__init__()
        self._pool, self._name = pool, f"the all-gather of {unit}"
        self._kinds: defaultdict[tuple[int, bool], list[Buffer]] = defaultdict(list)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Another buffer in backward than in forward: another unit is gathered before this one there, and gradients are
        # alive. With one place for both the pool would hold a unit more.
        kind = self._kinds[math.prod(size) * dtype.itemsize, _in_backward()]
        return self._pool.allocate(kind, self._name, size, dtype=dtype, device=device)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, pool: BufferPool, unit: str, ranks: int) -> None:
        super().__init__()
        self._pool, self._name, self._ranks = pool, f"the reduce-scatter of {unit}", ranks
        self._kinds: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._input: tuple[int, int] | None = None
        """Elements of the latest input, if its output was not asked for yet, and the pool's ``broken_off`` then."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input, which FSDP2 asks for first, from the pool, and the output from torch.

        A step that broke off between the two leaves an input without an output.
        """
        (count,) = size
        expected, self._input = self._input, None
        if expected == (count * self._ranks, self._pool.broken_off):
            return torch.empty(*size, dtype=dtype, device=device)
        self._input = (count, self._pool.broken_off)
        return self._pool.allocate(self._kinds[count * dtype.itemsize], self._name, size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        if self._pool.owns(output_tensor):
            raise RuntimeError(f"{self._name}: torch {torch.__version__} asks for its output in another order")
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def place(sizes: Sequence[int], conflicts: Sequence[Set[int]]) -> tuple[list[int], int]:
    """Return offsets of buffers in one piece of memory, and its size in bytes.

    The best of some greedy orders: every buffer in turn gets the tightest gap between those placed before it which
    conflict with it, or the lowest one. Finding the least possible is NP-hard (Chlebikova and Chlebik 2010); where
    lifetimes are a chain, as those of units that are gathered one after the other, the largest first is close to it.

    Args:
        sizes: bytes of each buffer, in the order of their first use.
        conflicts: for each buffer the positions of those that it must not overlap; symmetric.

    Returns:
        Offsets, multiples of :data:`ALIGNMENT`, and the end of the last buffer.
    """
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    with_conflicts = [size + sum(padded[other] for other in conflicts[i]) for i, size in enumerate(padded)]
    orders: list[Callable[[int], tuple[int, ...]]] = [
        lambda i: (-padded[i], i),
        lambda i: (-with_conflicts[i], -padded[i], i),
        lambda i: (i,),
    ]
    plans = []
    for order in orders:
        chosen = sorted(range(len(padded)), key=order)
        for tightest in (True, False):
            offsets = _greedy(chosen, padded, conflicts, tightest)
            plans.append((offsets, max((o + s for o, s in zip(offsets, padded, strict=True)), default=0)))
    return min(plans, key=lambda plan: plan[1])


def _greedy(order: Sequence[int], sizes: Sequence[int], conflicts: Sequence[Set[int]], tightest: bool) -> list[int]:
    offsets: dict[int, int] = {}
    for i in order:
        end, best, least = 0, None, None
        for start, stop in sorted((offsets[j], offsets[j] + sizes[j]) for j in conflicts[i] if j in offsets):
            gap = start - end
            if gap >= sizes[i] and (least is None or gap < least):
                best, least = end, gap
                if not tightest:
                    break
            end = max(end, stop)
        offsets[i] = end if best is None else best
    return [offsets[i] for i in range(len(sizes))]
