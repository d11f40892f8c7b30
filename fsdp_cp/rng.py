"""Random draws that do not depend on the mesh: keyed by seed, purpose, step and position in the global batch.

A sample draws the same numbers whichever rank holds it, so the ranks of a ``cp`` group agree, data-parallel ranks
differ, and a run resumed on another mesh goes on as if nothing had happened. Draws are made on the CPU in fp32
(uniform ones in fp64) and moved, so that every device and precision sees the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


def stream_seed(*key: int | str) -> int:
    """The seed of the random stream that belongs to ``key``; the order of its parts counts."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(*key: int | str) -> torch.Generator:
    """The random stream that belongs to ``key``."""
    return torch.Generator().manual_seed(stream_seed(*key))


_NO_SAMPLE = -1
"""A position that no sample has, nor has one below it."""


@dataclass(frozen=True, kw_only=True)
class StepRandom:
    """The random streams of one step, for the samples that this rank holds.

    Every method takes a ``purpose``: two draws with the same purpose in one step are the same numbers, so every loss
    and every rollout step needs a purpose of its own.
    """

    seed: int
    step: int
    positions: Sequence[int]
    """Positions of the samples in the global batch, one per sample of the micro-batch."""
    device: torch.device | str = "cpu"
    part: int = 0
    """Of the batch's parts, each of which draws for itself what its samples share, the one that these are of."""
    ahead: DrawsAhead | None = None
    """Makes the draws, where they are to be made before they are asked for."""

    @property
    def shared(self) -> StepRandom:
        """The streams of one sample that is none of the batch's, on the CPU: the same numbers on every rank, others in
        each of the batch's parts."""
        return replace(self, positions=(_NO_SAMPLE - self.part,), device="cpu", ahead=None)

    def normal(self, purpose: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal, ``(samples, *shape)``."""
        return self._moved(Draw(self.step, tuple(self.positions), purpose, tuple(shape), dtype))

    def uniform(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in [0, 1), ``(samples,)``."""
        return self._moved(Draw(self.step, tuple(self.positions), purpose, None, dtype))

    def _moved(self, draw: Draw) -> Tensor:
        drawn = draw.make(self.seed) if self.ahead is None else self.ahead.take(draw)
        # From pinned memory the copy queues behind what the device has to do; the host would wait for it otherwise.
        return drawn.to(self.device, non_blocking=drawn.is_pinned())

    def shared_integer(self, purpose: str, low: int, high: int) -> int:
        """Uniform in ``low`` to ``high`` inclusive; one for the part of the batch, the same on every rank.

        Whatever decides how many forward passes run must come from here: ranks that disagree would deadlock.
        """
        part = ("part", self.part) if self.part else ()  # the first one's draw is that of a batch that is not parted
        return int(torch.randint(low, high + 1, (), generator=stream(self.seed, purpose, self.step, *part)))


class Draw(NamedTuple):
    """A draw of some samples of a step."""

    step: int
    positions: tuple[int, ...]
    """Of the samples in the global batch."""
    purpose: str
    shape: tuple[int, ...] | None
    """Of a sample's standard normal numbers; ``None`` for a uniform one."""
    dtype: torch.dtype

    def make(self, seed: int) -> Tensor:
        """``(samples, *shape)`` on the CPU, drawn in fp32; a uniform one ``(samples,)``, drawn in fp64."""
        streams = [stream(seed, self.purpose, self.step, position) for position in self.positions]
        if self.shape is None:
            drawn = torch.stack([torch.rand((), generator=each, dtype=torch.float64) for each in streams])
        else:
            drawn = torch.stack([torch.randn(self.shape, generator=each) for each in streams])
        return drawn.to(self.dtype)


class DrawsAhead:
    """Draws of the next step, made by a thread while the device works on this one, into pinned memory.

    A draw of Wan's latents takes the host 10 ms at 480p and 27 at 720p, for which the device would wait at a step's
    begin. What a step will draw is taken to be what the last one of its kind drew; its numbers depend on its key alone,
    so that a wrong guess costs time and changes nothing.
    """

    def __init__(self, seed: int, *, pin: bool) -> None:
        """
        Args:
            seed: of the run.
            pin: page-locked memory, for a device that copies from it.
        """
        self._seed, self._pin = seed, pin
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="draws")
        self._made: dict[Draw, Future[Tensor]] = {}
        self._drawn: dict[str, list[Draw]] = {}
        self._now: list[Draw] = []
        self.guessed = 0
        """Draws that were made, or being made, before they were asked for."""

    def begin(self, step: int, kind: str, following: str) -> None:
        """A step begins.

        Args:
            step: its number.
            kind: what steps that draw alike have in common: the role that they train.
            following: the same of the next step.
        """
        for draw in [draw for draw in self._made if draw.step != step]:  # nobody has asked for it
            self._made.pop(draw).cancel()
        expected = [draw._replace(step=step + 1) for draw in self._drawn.get(following, ())]
        self._now = self._drawn[kind] = []
        for draw in dict.fromkeys(expected):
            self._made[draw] = self._pool.submit(self._make, draw)

    def take(self, draw: Draw) -> Tensor:
        """The numbers of ``draw``, on the CPU."""
        self._now.append(draw)
        made = self._made.pop(draw, None)
        if made is None:
            return self._make(draw)
        self.guessed += 1
        return made.result()

    def _make(self, draw: Draw) -> Tensor:
        drawn = draw.make(self._seed)
        return drawn.pin_memory() if self._pin else drawn


def permutation(seed: int, purpose: str, epoch: int, n: int) -> list[int]:
    """A permutation of ``range(n)`` that depends on the arguments alone."""
    return torch.randperm(n, generator=stream(seed, purpose, epoch)).tolist()
