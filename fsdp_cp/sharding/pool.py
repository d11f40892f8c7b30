"""Shared memory for the staging buffers of all sharded networks on a mesh (``communication_buffers=pooled``).

The pool works like the traced allocator of Megatron-FSDP. The first steps record the requested buffers and the pairs
that are alive at once. Then each buffer gets a fixed place in one block of memory. The plan covers the union of all
steps, and is made per buffer rather than per position in a step: the trained role and the number of forwards in a
rollout differ between steps, but neighboring units do not.
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
from fsdp_cp.runtime.torch_versions import in_backward

log = logging.getLogger(__name__)

POOL = "_buffer_pool"
"""Attribute that holds the pool, on a root whose units use it and on the mesh."""
ALIGNMENT = 512
"""Alignment in bytes, as in torch's CUDA allocator; NCCL and vectorized copies need at least 16."""
LET_GO = 0.01
"""Seconds to wait on the CPU before recording two buffers as alive at once: gloo's threads hold them a bit longer."""
PATIENCE = 1.0
"""Maximum seconds that a planned buffer waits for gloo's threads on the CPU."""


class Buffer:
    """Memory that a unit requests repeatedly, for one purpose and size. Requests alive at once are separate buffers."""

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self.name, self.size, self.device = name, size, device
        self.conflicts: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Buffers that were alive at the same time as this one in any step."""
        self.offset: int | None = None
        """Offset in the pool's memory; ``None`` before it is planned."""
        self.neighbours: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Buffers whose memory overlaps with this one's, including itself."""
        self.storage: weakref.ref[Any] | None = None
        self.stream: Any = None
        """CUDA stream of the latest request."""
        self.let_go: Any = None
        """Event on that stream, recorded when the buffer was last freed."""

    def overlaps(self, other: Buffer) -> bool:
        """Return whether the two planned places overlap."""
        assert self.offset is not None and other.offset is not None, "planned"
        return self.offset < other.offset + other.size and other.offset < self.offset + self.size


class BufferPool:
    """Allocator in which a buffer is free when no view of it is alive, so that FSDP2 can hold buffers for any time.

    Each buffer is a separate storage over the pool's memory (by DLPack). Python reports the storage's end even if C++
    or a gloo thread held the last view. A buffer that is not planned, or would overlap a living one, gets separate
    memory, and the end of the step plans again (:meth:`end_step`).

    Streams: like torch's allocator the pool relies on FSDP2 to drop a buffer only after the requesting stream waits for
    all other streams that use it. An event marks that moment, for which other streams with overlapping memory wait.
    """

    def __init__(self) -> None:
        self.allocations = 0
        """Number of buffers with separate memory."""
        self.plans = 0
        """Number of plans made."""
        self.broken_off = 0
        """Number of steps that ended in an exception."""
        self.put_off = False
        """Whether the end of a step defers planning."""
        self._memory: Tensor | None = None
        self._known: list[weakref.ref[Buffer]] = []
        self._alive: dict[int, Buffer] = {}
        self._unforeseen: str | None = None
        """Name of the first unplanned buffer since the last plan."""
        self._patient = False
        """Whether gloo's threads may hold buffers."""
        # Freeing a buffer must not take this lock: gloo's thread and a thread that waits for it would deadlock.
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers that living networks have requested, in the order of first use."""
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
        """Return ``torch.empty`` for one of the buffers of a ``kind`` (unit, purpose, size), which grows if all are
        alive."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype, device=device)
        with self._lock:
            buffer = self._planned(kind)
            if buffer is not None:
                assert self._memory is not None and buffer.offset is not None
                view = self._memory[buffer.offset : buffer.offset + size].view(dtype).view(*shape)
                if isinstance(view, FakeTensor):  # no address and no data, so nothing to watch
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
        """Return a buffer of ``kind`` whose place is free, or ``None``; on the CPU wait for gloo if needed."""
        planned = [buffer for buffer in kind if buffer.offset is not None]
        deadline = time.monotonic() + PATIENCE
        while planned:
            in_the_way = [[other for other in buffer.neighbours if self._is_alive(other)] for buffer in planned]
            for buffer, others in zip(planned, in_the_way, strict=True):
                if not others:
                    return buffer
            # Do not wait for a recorded conflict that the plan does not include yet.
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
        for other in list(self._alive.values()):
            buffer.conflicts.add(other)
            other.conflicts.add(buffer)
        stream = _stream_now(tensor.device)
        if stream is not None:
            for other in buffer.neighbours:
                if other.let_go is not None and other.stream != stream:
                    stream.wait_event(other.let_go)
            buffer.stream = stream
        self._alive[id(buffer)] = buffer

        def gone(_: object) -> None:  # runs in the thread that held it last
            if sys.is_finalizing():
                return
            if buffer.stream is not None:
                buffer.let_go = buffer.let_go or torch.cuda.Event()
                buffer.let_go.record(buffer.stream)
            self._alive.pop(id(buffer), None)

        buffer.storage = weakref.ref(tensor.untyped_storage(), gone)

    def end_step(self) -> None:
        """Plan again if this step requested a buffer that is not in the plan."""
        if self._unforeseen is None or self.put_off:
            return
        with self._lock:
            self._known = [known for known in self._known if known() is not None]
            buffers = self.buffers
            position = {id(buffer): i for i, buffer in enumerate(buffers)}
            conflicts = [{position[id(o)] for o in b.conflicts if id(o) in position} for b in buffers]
            offsets, total = place([buffer.size for buffer in buffers], conflicts)
            for buffer in buffers:  # if allocating the new memory fails, the next step plans again
                buffer.offset = None
            self._renew(total, buffers[0].device)
            for buffer, offset in zip(buffers, offsets, strict=True):
                buffer.offset = offset
            for buffer in buffers:
                buffer.neighbours = weakref.WeakSet(filter(buffer.overlaps, buffers))
            name, self._unforeseen = self._unforeseen, None
            self.plans += 1
        if not isinstance(self._memory, FakeTensor) and not (dist.is_initialized() and dist.get_rank()):
            whole, shared = (size / 2**20 for size in (sum(buffer.size for buffer in buffers), total))
            saved = f"{len(buffers)} buffers of collectives, {whole:.1f} MiB in all, share {shared:.1f} MiB"
            log.info("communication_buffers=pooled: %s (plan %d, made for %s)", saved, self.plans, name)

    def _renew(self, total: int, device: torch.device) -> None:
        """Replace the memory by ``total`` bytes. Living buffers keep the old memory alive."""
        if device.type == "cuda":
            # Other streams may still use the old memory. Also, torch's allocator reserves the memory of the first
            # steps' buffers for their streams, so that it cannot reuse it for the new block.
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


def pool_buffers(root: nn.Module, pool: BufferPool, ranks: int) -> None:
    """Let every unit of ``root`` take the buffers of its collectives from ``pool``, which other networks can share.

    The pool serves outputs of all-gathers, which contain the inputs, and inputs of reduce-scatters. Outputs of
    reduce-scatters come from torch: FSDP2 (torch 2.11 to 2.13) uses views of them as sharded gradients, so the next
    step's reduction would overwrite a gradient in use. ``ranks`` hold one copy of the parameters.

    ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter`` are public. torch's default collectives,
    which run here too, are private classes of ``_fsdp_collectives``. Each unit has its own objects.
    """
    assert ranks > 1, "no collective to serve"
    for name, unit in root.named_modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(_AllGather(pool, name or "the root"))
            unit.set_custom_reduce_scatter(_ReduceScatter(pool, name or "the root", ranks))
    vars(root)[POOL] = pool


def pool_at(root: nn.Module) -> BufferPool | None:
    """Return the pool that the units of ``root`` use, if any."""
    return vars(root).get(POOL)


class _AllGather(DefaultAllGather):
    def __init__(self, pool: BufferPool, unit: str) -> None:
        super().__init__()
        self._pool, self._name = pool, f"the all-gather of {unit}"
        self._kinds: defaultdict[tuple[int, bool], list[Buffer]] = defaultdict(list)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Use separate buffers in forward and backward, since different units and gradients are alive then. One place
        # for both would enlarge the pool by a unit.
        kind = self._kinds[math.prod(size) * dtype.itemsize, in_backward()]
        return self._pool.allocate(kind, self._name, size, dtype=dtype, device=device)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, pool: BufferPool, unit: str, ranks: int) -> None:
        super().__init__()
        self._pool, self._name, self._ranks = pool, f"the reduce-scatter of {unit}", ranks
        self._kinds: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._input: tuple[int, int] | None = None
        """Elements of the latest input and the pool's ``broken_off`` at that time, until its output is requested."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input, which FSDP2 requests first (a failed step alone), from the pool, and the output from
        torch."""
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
    """Return offsets of buffers in one block of memory, multiples of :data:`ALIGNMENT`, and the end of the last buffer.

    The result is the best of several greedy orders. In each, a buffer gets the tightest or the lowest gap between the
    placed buffers that conflict with it. The optimum is NP-hard (Chlebikova and Chlebik 2010). If lifetimes form a
    chain, as for units gathered in sequence, largest first is close to it.

    ``sizes`` are bytes, in the order of first use; ``conflicts`` the positions that each must not overlap, symmetric.
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
