"""One piece of memory for the staging buffers of all sharded networks of a mesh (``communication_buffers=pooled``).

As the traced allocator of Megatron-FSDP: what buffers are asked for, and which of them are alive at once, is noted in
the first steps; then each has a place in one piece of memory, the same in every later step. The plan is over the union
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
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from fsdp_cp.mesh import Mesh
from fsdp_cp.sharding.offsets import place

log = logging.getLogger(__name__)

POOL = "_buffer_pool"
"""Attribute of a root whose units share one, and of the mesh on which they do."""
LET_GO = 0.01
"""Seconds, on the CPU, before two buffers are noted as alive at once: gloo's threads hold one a little longer than
FSDP2 does, and it would seem to be needed for longer than it is."""
PATIENCE = 1.0
"""Seconds that a planned buffer waits for such a thread, on the CPU."""


class Buffer:
    """What one unit asks for, again and again, for one purpose and in one size.

    Where two of a kind are alive at once (a unit's gradients of two micro-batches) they are two buffers.
    """

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self.name, self.size, self.device = name, size, device
        self.conflicts: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Those that were ever alive together with this one."""
        self.offset: int | None = None
        """In the pool's memory; ``None`` until it has been planned."""
        self.neighbours: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Those whose memory overlaps with its own, itself among them."""
        self.storage: weakref.ref[Any] | None = None
        self.stream: Any = None
        """The stream in which it was asked for last, on CUDA."""
        self.let_go: Any = None
        """An event of that stream, recorded where the buffer was let go of last."""


class BufferPool:
    """Hands out memory that FSDP2 may keep for as long as it likes: it is free when no view of it is alive any more.

    Each buffer is a storage of its own over the pool's memory (by DLPack), which Python watches: whoever holds a view,
    in C++ and in gloo's threads too, keeps it. What would overlap a living buffer, and what was not foreseen, gets
    memory of its own, and all is planned anew at the end of the step (:meth:`end_step`).

    Streams: FSDP2 lets go of a buffer where the stream in which it asked for it waits for all others that use it, as
    torch's own allocator needs it. That moment is recorded, and another stream that gets a part of the same memory
    waits for it.
    """

    def __init__(self) -> None:
        self.requests = 0
        """Buffers handed out so far."""
        self.allocations = 0
        """Those of them that had memory of their own."""
        self.plans = 0
        """How often the memory was planned."""
        self.most_alive = 0
        """Most bytes alive at once where one of them was not planned yet: no plan holds less."""
        self.broken_off = 0
        """Steps that ended in an exception."""
        self.put_off = False
        """Note what is asked for, and do not plan yet where a step ends."""
        self._memory: Tensor | None = None
        self._known: list[weakref.ref[Buffer]] = []
        self._alive: dict[int, Buffer] = {}
        self._unforeseen: str | None = None
        """The first buffer since the last plan that was not in it."""
        self._patient = False
        """Are there threads of gloo to wait for?"""
        self._lock = (
            threading.RLock()
        )  # not taken where a buffer is let go of: gloo's thread would wait for a waiting one

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def buffers(self) -> list[Buffer]:
        """All that networks which are alive have asked for, in the order of their first use."""
        return [buffer for each in self._known if (buffer := each()) is not None]

    def owns(self, tensor: Tensor) -> bool:
        """Is ``tensor`` a part of the pool's memory?"""
        memory = self._memory
        if memory is None:
            return False
        if isinstance(memory, FakeTensor):
            return tensor.untyped_storage()._cdata == memory.untyped_storage()._cdata
        return memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.nbytes

    def allocate(
        self, kind: list[Buffer], name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for one buffer, as ``torch.empty``.

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
                if isinstance(view, FakeTensor):  # it has no address; nobody writes to it, so nobody needs to watch it
                    return view
                tensor = from_dlpack(to_dlpack(view))
            else:
                self.allocations += 1
                self._unforeseen = self._unforeseen or name
                tensor = torch.empty(*shape, dtype=dtype, device=device)
                self._patient = device.type == "cpu" and not isinstance(tensor, FakeTensor)
                if self._patient and all(map(self._is_alive, kind)):
                    time.sleep(LET_GO)
                buffer = next((each for each in kind if not self._is_alive(each)), None)
                if buffer is None:
                    buffer = Buffer(name, size, device)
                    kind.append(buffer)
                    self._known.append(weakref.ref(buffer))
            self._note(buffer, tensor)
        return tensor

    def _planned(self, kind: list[Buffer]) -> Buffer | None:
        """One of ``kind`` with a place where nothing is alive; on the CPU after waiting for gloo, if need be."""
        planned = [buffer for buffer in kind if buffer.offset is not None]
        deadline = time.monotonic() + PATIENCE
        while planned:
            in_the_way = [[other for other in buffer.neighbours if self._is_alive(other)] for buffer in planned]
            for buffer, others in zip(planned, in_the_way, strict=True):
                if not others:
                    return buffer
            # What is known to be alive at once, and has not been planned so yet, is not worth waiting for.
            known = any(other in b.conflicts for b, others in zip(planned, in_the_way, strict=True) for other in others)
            if not self._patient or known or len(planned) < len(kind) or time.monotonic() > deadline:
                return None
            time.sleep(0.0005)
        return None

    def _is_alive(self, buffer: Buffer) -> bool:
        return id(buffer) in self._alive

    def _note(self, buffer: Buffer, tensor: Tensor) -> None:
        """``buffer`` is alive from here until the storage of ``tensor`` has gone."""
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

        def gone(_: object) -> None:  # in whichever thread let go of it last
            if sys.is_finalizing():
                return
            if buffer.stream is not None:
                buffer.let_go = buffer.let_go or torch.cuda.Event()
                buffer.let_go.record(buffer.stream)
            self._alive.pop(id(buffer), None)

        buffer.storage = weakref.ref(tensor.untyped_storage(), gone)

    def end_step(self) -> None:
        """Plan anew, if something was asked for in this step that the plan does not have."""
        if self._unforeseen is None or self.put_off:
            return
        with self._lock:
            name = self._unforeseen
            self._known = [each for each in self._known if each() is not None]
            buffers = self.buffers
            position = {id(buffer): i for i, buffer in enumerate(buffers)}
            conflicts = [{position[id(o)] for o in b.conflicts if id(o) in position} for b in buffers]
            offsets, total = place([buffer.size for buffer in buffers], conflicts)
            again = self._memory is not None
            for buffer in buffers:  # without memory for the new plan there is none, and the next step asks for one
                buffer.offset = None
            self._renew(total, buffers[0].device)
            self._unforeseen = None
            for buffer, offset in zip(buffers, offsets, strict=True):
                buffer.offset = offset
            for buffer in buffers:
                buffer.neighbours = weakref.WeakSet(other for other in buffers if _overlap(buffer, other))
            self.plans += 1
        if not isinstance(self._memory, FakeTensor) and not (dist.is_initialized() and dist.get_rank()):
            log.info(
                "communication_buffers=pooled: %s%d buffers of collectives, %.1f MiB in all, share %.1f MiB; at most"
                " %.1f MiB of them were alive at once",
                f"{name} was not foreseen, planned anew: " if again else "",
                len(buffers),
                sum(buffer.size for buffer in buffers) / 2**20,
                total / 2**20,
                self.most_alive / 2**20,
            )

    def _renew(self, total: int, device: torch.device) -> None:
        """Other memory, of ``total`` bytes; what is still alive over the one before keeps that."""
        if device.type == "cuda":
            # Other streams may still use the memory that goes. And torch's allocator has kept what the first steps'
            # buffers had for the streams that asked for them, where the new memory cannot come from.
            torch.cuda.synchronize(device)
            self._memory = None
            torch.cuda.empty_cache()
        self._memory = None
        with torch.inference_mode(False):
            self._memory = torch.empty(total, dtype=torch.uint8, device=device)

    def break_off(self) -> None:
        """A step ended in an exception: FSDP2 may have let go of buffers that another stream still uses."""
        self.broken_off += 1
        if self._memory is not None and self._memory.device.type == "cuda":
            torch.cuda.synchronize(self._memory.device)


def _stream_now(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _overlap(one: Buffer, other: Buffer) -> bool:
    assert one.offset is not None and other.offset is not None, "planned"
    return one.offset < other.offset + other.size and other.offset < one.offset + one.size


def pool_of(mesh: Mesh) -> BufferPool:
    """The pool of all networks on ``mesh``; it is gone when they and the mesh are."""
    return vars(mesh).setdefault(POOL, BufferPool())


def pool_at(root: nn.Module) -> BufferPool | None:
    """The pool that the units of ``root`` take the buffers of their collectives from, if they do."""
    return vars(root).get(POOL)
