"""Ranks that the tests of a file share."""

from __future__ import annotations

from typing import Any

from fsdp_cp.runtime.local_ranks import RankPool

TIMEOUT = 240.0
"""Seconds for one function on the ranks."""


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
