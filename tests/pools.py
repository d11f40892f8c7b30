"""Ranks that the tests of a file share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp_cp.runtime.local_ranks import RankPool

TIMEOUT = 240.0
"""Seconds for one function on the ranks."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 180.0,
    preload: Sequence[str] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` once on each of ``world_size`` new ranks; see :class:`RankPool`."""
    with RankPool(world_size, timeout=timeout, preload=preload) as pool:
        return pool.run(function, *args)


class Pools(dict[int, RankPool]):
    """Context whose ``pools[size]`` are ``size`` ranks, started at their first use."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        super().__init__()
        self.timeout = timeout

    def __missing__(self, size: int) -> RankPool:
        self[size] = RankPool(size, timeout=self.timeout)
        return self[size]

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: Any) -> None:
        for pool in self.values():
            pool.close()
