"""Where buffers lie in one piece of memory: those that are ever alive at once lie apart, the others share."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

ALIGNMENT = 512
"""Bytes. As torch's allocator for CUDA aligns; NCCL and vectorised copies want 16 at least."""


def place(sizes: Sequence[int], conflicts: Sequence[Set[int]]) -> tuple[list[int], int]:
    """Offsets of buffers, and the bytes that hold all of them.

    The least of some greedy orders: every buffer in turn gets the tightest gap between those placed before it which
    conflict with it, or the lowest one. Finding the least possible is NP-hard (Chlebikova and Chlebik 2010); where
    lifetimes are a chain, as those of units that are gathered one after the other, the largest first is close to it.

    Args:
        sizes: bytes of each buffer, in the order of their first use.
        conflicts: for each buffer the positions of those that it must not overlap; symmetric.

    Returns:
        Offsets, multiples of :data:`ALIGNMENT`, and the end of the last buffer.
    """
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    beside = [size + sum(padded[other] for other in conflicts[i]) for i, size in enumerate(padded)]
    orders: list[Callable[[int], tuple[int, ...]]] = [
        lambda i: (-padded[i], i),
        lambda i: (-beside[i], -padded[i], i),
        lambda i: (i,),
    ]
    found = []
    for order in orders:
        chosen = sorted(range(len(padded)), key=order)
        for tightest in (True, False):
            offsets = _greedy(chosen, padded, conflicts, tightest)
            found.append((offsets, max((o + s for o, s in zip(offsets, padded, strict=True)), default=0)))
    return min(found, key=lambda each: each[1])


def _greedy(order: Sequence[int], sizes: Sequence[int], conflicts: Sequence[Set[int]], tightest: bool) -> list[int]:
    offsets: list[int | None] = [None] * len(sizes)
    for i in order:
        taken = sorted((offset, offset + sizes[j]) for j in conflicts[i] if (offset := offsets[j]) is not None)
        end, best, least = 0, None, None
        for start, stop in taken:
            gap = start - end
            if gap >= sizes[i] and (least is None or gap < least):
                best, least = end, gap
                if not tightest:
                    break
            end = max(end, stop)
        offsets[i] = end if best is None else best
    return [offset for offset in offsets if offset is not None]
