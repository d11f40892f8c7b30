"""Sampling on demand: threads of rank 0 order clips, and the main threads of all ranks sample them together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from distill.data.base import ClipDataset
from distill.evaluate.networks import MOST_SEED, RoleName, SampledNetwork, check_number, checked_steps
from fsdp_cp.errors import UserError, counted, first_line
from fsdp_cp.launch import rank, world_size
from fsdp_cp.mesh import Mesh, mesh_of_shape
from fsdp_cp.reduce import on_all_ranks
from fsdp_cp.runtime.signals import StopSignal
from models.sample import Sample

log = logging.getLogger(__name__)

MOST_CHARACTERS = 10_000
MOST_WAITING = 16
_HEARTBEAT = 1.0
"""Seconds after which ranks meet without an order, so that no collective times out and a lost rank is seen."""
_MOST_BYTES = 4 * 10**9
"""Memory of the frames of a clip."""
_LATE = 5.0
"""Seconds after a signal in which the main thread can say more exactly what ended it, unless it waits in vain."""
_SIGNAL = "the command was stopped, or another rank ended; see its log"


@dataclass(frozen=True, kw_only=True)
class Order:
    """A clip of each network, from the same noise."""

    caption: str
    steps: Mapping[RoleName, int]
    """Sampling steps of each network."""
    images: tuple[str, ...] = ()
    """Image files, where images condition."""
    seed: int = 0
    frames: int | None = None
    """Length of the clip of a causal student; ``None`` for that of the data."""


class Made(NamedTuple):
    """Part of an order that is sampled."""

    role: RoleName
    latents: Sample | None
    """Next chunk of the clip (the whole clip of a bidirectional network), on the CPU; ``None`` when it is complete."""
    start: float
    """Time of ``time.perf_counter`` at which the network began."""
    end: float


@dataclass(eq=False)
class _Job:
    order: Order
    replies: SimpleQueue[Made | UserError | None] = field(default_factory=SimpleQueue)
    stopped: threading.Event = field(default_factory=threading.Event)
    is_closed: bool = False
    """Whether nobody waits for it, as when a tab is closed."""


class _StoppedByUser(Exception):
    pass


class Studio:
    """Networks that make clips on demand. Rank 0's threads call :meth:`clips`, all main threads :meth:`serve`."""

    def __init__(
        self,
        networks: Mapping[RoleName, SampledNetwork],
        *,
        data: ClipDataset,
        mesh: Mesh,
        device: torch.device,
        folder: Path,
    ) -> None:
        """Load the ``networks``. ``folder``, of all ranks, is for temporary files. A collective."""
        self.networks, self.data, self._folder = networks, data, folder
        # Networks with different numbers of heads may share clips in different ways.
        shapes = {role: network.plan.mesh for role, network in networks.items()}
        self._samplers = {}
        for role, shape in shapes.items():
            own = mesh if shape == shapes["student"] else mesh_of_shape(shape, device_type=device.type)
            self._samplers[role] = networks[role].loaded(mesh=own, device=device, data=data)
        self.encoding = networks["student"].config.data.encoding()
        self.ended: str | None = None
        """Reason for which there are no more clips."""
        self._orders: SimpleQueue[_Job] = SimpleQueue()
        self._line: list[_Job] = []
        self._moved = threading.Condition()
        self._job: _Job | None = None
        self.signal = StopSignal(self._signaled)

    def is_causal(self, role: RoleName) -> bool:
        return self.networks[role].plan.roles[0].causal is not None

    def check(self, order: Order) -> None:
        """Refuse an order that cannot be made, before it waits."""
        if not order.caption.strip():
            raise UserError("the caption is empty; say what to show")
        check_number("length of the caption", len(order.caption), 1, MOST_CHARACTERS)
        check_number("the seed", order.seed, 0, MOST_SEED)
        for role, network in self.networks.items():
            checked_steps(network.config, role, order.steps[role], f"steps of the {role}:")
        if order.frames is not None:
            bytes_per_frame = 3 * self.encoding.height * self.encoding.width
            check_number("length", order.frames, 1, _MOST_BYTES // bytes_per_frame)
            self.networks["student"].shapes(order.frames, "length")
        if None in order.images:
            raise UserError("an image is missing; give one")

    # ---------------------------------------------------------------- threads of rank 0

    def clips(self, order: Order, stopped: threading.Event) -> Iterator[Made | int]:
        """Yield the number of clips to wait for, while there are some, and then what is made of ``order`` until it is
        complete or ``stopped``. Raises ``UserError``."""
        self.check(order)
        job = _Job(order, stopped=stopped)
        with self._moved:
            check_number("the number of waiting clips", len(self._line), 0, MOST_WAITING)
            self._line.append(job)
        try:
            while (ahead := self._line.index(job)) and not stopped.is_set() and self.ended is None:
                yield ahead
                with self._moved:
                    self._moved.wait(_HEARTBEAT)
            if stopped.is_set():
                return
            self._orders.put(job)
            while self.ended is None or not job.replies.empty():
                with suppress(Empty):
                    reply = job.replies.get(timeout=_HEARTBEAT)
                    if isinstance(reply, UserError):
                        raise reply
                    if reply is None:
                        return
                    yield reply
            raise UserError(self.ended)
        finally:
            job.is_closed = True
            with self._moved:
                self._line.remove(job)
                self._moved.notify_all()

    def end(self, reason: str) -> None:
        """End the page with a ``reason``, the first one."""
        self.ended = self.ended or reason

    def _signaled(self) -> None:
        timer = threading.Timer(_LATE, self.end, [_SIGNAL])
        timer.daemon = True
        timer.start()

    # ---------------------------------------------------------------- main threads of all ranks

    def serve(self) -> None:
        """Sample what is ordered until :attr:`signal`, which is deferred, comes. A collective: what breaks it on one
        rank ends it on all."""
        try:
            while True:
                meeting = on_all_ranks(self._meet)
                if any(is_over for is_over, _ in meeting):
                    self.end(_SIGNAL)
                    return
                if (order := meeting[0][1]) is not None:
                    self._make(order)
        except Exception as error:
            self._report(error)
            raise

    def _meet(self) -> tuple[bool, Order | None]:
        """Return whether this rank got a signal, and the next order of rank 0."""
        self._job = None
        if rank() == 0:
            with suppress(Empty):
                self._job = self._orders.get(timeout=_HEARTBEAT)
        return self.signal.received is not None, self._job and self._job.order

    def _make(self, order: Order) -> None:
        try:
            add_captions = getattr(self.data, "add_captions", None)  # other data know their captions
            if add_captions is not None:
                # The page has a picture as the only reference.
                kind = "image:" if self.encoding.image == "references" else ""
                images = [f"{kind}{file}" for file in order.images]
                add_captions([order.caption], images, self._folder / "cache")
            for role in self.networks:
                self._go_on()
                self._sample(role, order)
            self._reply(None)
        except UserError as error:  # of all ranks
            self._reply(error)
        except _StoppedByUser:
            self._reply(None)

    def _sample(self, role: RoleName, order: Order) -> None:
        network, start = self.networks[role], time.perf_counter()
        is_longer = order.frames is not None and network.plan.roles[0].causal is not None

        def chunk_done(latents: Sample) -> None:
            self._reply(Made(role, latents[:1].to("cpu", torch.float32), start, time.perf_counter()))
            self._go_on()

        self._samplers[role].generate(
            role,
            [order.caption],
            steps=order.steps[role],
            seed=order.seed,
            latent_shapes=network.shapes(order.frames, "length") if is_longer else None,
            chunk_done=chunk_done,
        )
        self._reply(Made(role, None, start, time.perf_counter()))

    def _reply(self, reply: Made | UserError | None) -> None:
        if self._job is not None:
            self._job.replies.put(reply)

    def _go_on(self) -> None:
        """Raise on all ranks if the user has stopped the order, or a signal has come."""
        job, signal = self._job, self.signal
        is_over = job is not None and (job.is_closed or job.stopped.is_set())
        if any(on_all_ranks(lambda: is_over or signal.received is not None)):
            raise _StoppedByUser

    def _report(self, error: Exception) -> None:
        """Say why a rank broke: in a file, which rank 0, that loses the connection after it, reads."""
        reason = f"{type(error).__name__}: {first_line(error)}"
        if rank() != 0:
            with suppress(OSError):
                (self._folder / f"rank_{rank()}.txt").write_text(reason)
            return
        others = sorted(self._folder.glob("rank_*.txt"))
        found = [f"rank {file.stem[5:]} failed: {file.read_text()}" for file in others]
        if not found and world_size() > 1:
            found = [f"rank 0 lost one of the {counted(world_size() - 1, 'other rank')}, or failed ({reason})"]
        self.end(f"{found[0] if found else f'the sampling failed: {reason}'}; see the log")
