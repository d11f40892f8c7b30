"""Random draws that do not depend on the mesh: keyed by seed, purpose, step and position in the global batch.

A sample draws the same numbers on every rank. So the ranks of a ``cp`` group agree, data-parallel ranks differ, and a
run can resume on another mesh. Numbers are drawn on the CPU in fp32 (uniform ones in fp64) and then moved, so that
they are the same for every device and precision.
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
    """Return the seed of the random stream with this ``key``. The order of the key's parts matters."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(*key: int | str) -> torch.Generator:
    """Return the random stream with this ``key``."""
    return torch.Generator().manual_seed(stream_seed(*key))


_NO_SAMPLE = -1
"""Position that no sample has; no sample has a smaller one either."""


@dataclass(frozen=True, kw_only=True)
class StepRandom:
    """Random streams of one step, for the samples that this rank holds.

    Every method takes a ``purpose``. Two draws with the same purpose in one step return the same numbers, so every loss
    and every rollout step needs a different purpose.
    """

    seed: int
    step: int
    positions: Sequence[int]
    """Positions of the samples in the global batch, one per sample of the micro-batch."""
    device: torch.device | str = "cpu"
    part: int = 0
    """Index of the batch's part that the samples belong to. Each part has separate draws that its samples share."""
    ahead: DrawsAhead | None = None
    """Object that makes draws before they are needed; ``None`` to draw on demand."""

    @property
    def shared(self) -> StepRandom:
        """Streams of one sample outside of the batch, on the CPU: the same on every rank, different in each part of the
        batch."""
        return replace(self, positions=(_NO_SAMPLE - self.part,), device="cpu", ahead=None)

    def normal(self, purpose: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw standard normal numbers, ``(samples, *shape)``."""
        return self._moved(Draw(self.step, tuple(self.positions), purpose, tuple(shape), dtype))

    def uniform(self, purpose: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw uniform numbers in [0, 1), ``(samples,)``."""
        return self._moved(Draw(self.step, tuple(self.positions), purpose, None, dtype))

    def _moved(self, draw: Draw) -> Tensor:
        drawn = draw.make(self.seed) if self.ahead is None else self.ahead.take(draw)
        # A copy from pinned memory joins the device's queue; from other memory the host would wait for it.
        return drawn.to(self.device, non_blocking=drawn.is_pinned())

    def shared_integer(self, purpose: str, low: int, high: int) -> int:
        """Draw one integer from ``low`` to ``high`` inclusive for this part of the batch, the same on every rank.

        A draw that decides how many forward passes run must use this method: ranks that disagree would deadlock.
        """
        part = ("part", self.part) if self.part else ()  # part 0 draws the same as a batch without parts
        return int(torch.randint(low, high + 1, (), generator=stream(self.seed, purpose, self.step, *part)))


class Draw(NamedTuple):
    """Key of one draw, for some samples of a step."""

    step: int
    positions: tuple[int, ...]
    """Positions of the samples in the global batch."""
    purpose: str
    shape: tuple[int, ...] | None
    """Shape of one sample's standard normal numbers; ``None`` for one uniform number."""
    dtype: torch.dtype

    def make(self, seed: int) -> Tensor:
        """Draw ``(samples, *shape)`` on the CPU in fp32, or for a uniform draw ``(samples,)`` in fp64."""
        streams = [stream(seed, self.purpose, self.step, position) for position in self.positions]
        if self.shape is None:
            drawn = torch.stack([torch.rand((), generator=each, dtype=torch.float64) for each in streams])
        else:
            drawn = torch.stack([torch.randn(self.shape, generator=each) for each in streams])
        return drawn.to(self.dtype)


class DrawsAhead:
    """Draws of the next step, made by a thread into pinned memory while the device works on the current step.

    Drawing Wan's latents takes the host 10 ms at 480p and 27 ms at 720p, for which the device would wait. A step is
    expected to draw what the last step of its kind drew. Numbers depend only on the key of a draw, so a wrong guess
    costs time but changes no result.
    """

    def __init__(self, seed: int, *, pin: bool) -> None:
        """
        Args:
            seed: seed of the run.
            pin: whether to use pinned memory.
        """
        self._seed, self._pin = seed, pin
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="draws")
        self._made: dict[Draw, Future[Tensor]] = {}
        self._drawn: dict[str, list[Draw]] = {}
        self._now: list[Draw] = []
        self.guessed = 0
        """Number of draws that were started before they were needed."""

    def begin(self, step: int, kind: str, following: str) -> None:
        """Begin a step and start the draws of the next one.

        Args:
            step: number of this step.
            kind: role that this step trains. Steps of one kind make the same draws.
            following: kind of the next step.
        """
        for draw in [draw for draw in self._made if draw.step != step]:  # wrong guesses of earlier steps
            self._made.pop(draw).cancel()
        expected = [draw._replace(step=step + 1) for draw in self._drawn.get(following, ())]
        self._now = self._drawn[kind] = []
        for draw in dict.fromkeys(expected):
            self._made[draw] = self._pool.submit(self._make, draw)

    def take(self, draw: Draw) -> Tensor:
        """Return the numbers of ``draw``, on the CPU."""
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
    """Return a permutation of ``range(n)`` that depends only on the arguments."""
    return torch.randperm(n, generator=stream(seed, purpose, epoch)).tolist()
