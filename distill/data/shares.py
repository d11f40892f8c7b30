"""Work on many items, shared over the ranks in rounds, and files that threads read ahead."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from fsdp_cp.launch import rank, share_of_cores, world_size
from fsdp_cp.reduce import all_gather_objects, on_all_ranks

Item = TypeVar("Item")
T = TypeVar("T")

_ROUND = 4
_MOST_THREADS = 4  # a clip of 81 frames at 720p is 0.9 GB as the VAE takes it


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Assignment of items to ``ranks``, the same on every rank. Each does neighbors, which often share a file."""

    ranks: Sequence[int] = field(default_factory=lambda: range(world_size()))
    """Ranks that work; by default all."""

    def assigned(self, count: int) -> range:
        if rank() not in self.ranks:
            return range(0)
        place, size = self.ranks.index(rank()), len(self.ranks)
        return range(count * place // size, count * (place + 1) // size)

    @classmethod
    def one_per_node(cls) -> Shares:
        """Return shares for one rank of each node; a collective."""
        node = os.environ.get("GROUP_RANK", ""), socket.gethostname()
        return cls(ranks=first_of_each(all_gather_objects(node)))

    def run(
        self, items: Sequence[Item], work: Callable[[Item], T], advance: Callable[[int], object] = lambda n: None
    ) -> list[T]:
        """Call ``work`` for each item, on its rank and in order; return all results on every rank. The ranks meet after
        every few items, so that failures are heard soon and no wait exceeds the group's timeout."""
        results: dict[int, T] = {}
        assigned, most = self.assigned(len(items)), -(-len(items) // len(self.ranks))
        for first in range(0, most, _ROUND):
            mine = assigned[first : first + _ROUND]
            parts = on_all_ranks(lambda mine=mine: {i: work(items[i]) for i in mine})
            advance(sum(map(len, parts)))
            results |= {i: result for part in parts for i, result in part.items()}
        return [results[i] for i in range(len(items))]


def first_of_each(nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the lowest rank of each node, where ``nodes[i]`` identifies the node of rank i."""
    return tuple(sorted({name: rank for rank, name in reversed(list(enumerate(nodes)))}.values()))


def read_ahead(read: Callable[[int], T], items: Iterable[int]) -> Iterator[T]:
    """Yield ``read(item)`` for each item in order, or raise what it raised; threads, which suffice since decoding holds
    no interpreter lock, read as many items ahead. Close the generator to stop them."""
    threads, waiting = min(_MOST_THREADS, share_of_cores()), deque[Future[T]]()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="read")
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
