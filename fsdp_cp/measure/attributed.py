"""Live storages by what they are for, and what they were for when most was alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.reduce import local_shard


@dataclass(frozen=True)
class Peak:
    """The moment at which most was alive."""

    bytes: int
    by: dict[Hashable, int]
    """By label."""


class AttributedStorages(LiveStorages):
    """:class:`LiveStorages` in which every storage has a label, that of the moment of its birth unless told otherwise.

    Args:
        place: names the part of the work that is under way; a peak is kept for each.
        elsewhere: says of a label whether its storages are in another memory, whatever torch takes their device for:
            :attr:`bytes` and the peaks are without them.
        fakes: see :class:`LiveStorages`.
    """

    def __init__(
        self,
        *,
        place: Callable[[], str] = lambda: "",
        elsewhere: Callable[[Hashable], bool] = lambda label: False,
        fakes: bool = False,
    ) -> None:
        super().__init__(fakes=fakes)
        self.place, self.elsewhere = place, elsewhere
        self.label: Hashable = None
        """Of storages that are born now."""
        self.by: Counter[Hashable] = Counter()
        """Bytes alive now, by label."""
        self.peaks: dict[str, Peak] = {}
        """By place."""
        self.away = Peak(0, {})
        """The most that was alive elsewhere."""
        self._labels: dict[int, Hashable] = {}

    @contextmanager
    def labelled(self, label: Hashable) -> Iterator[None]:
        """What is born inside gets ``label``."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def relabel(self, tensor: Tensor, label: Hashable) -> None:
        """``tensor``'s storage (of a DTensor, its shard's) has ``label`` from here on."""
        key = local_shard(tensor).untyped_storage()._cdata
        if key in self._sizes:
            size = self._sizes[key]
            self._changed(key, -size)
            self._labels[key] = label
            self._changed(key, size)

    def reset_peaks(self) -> None:
        """Let the peaks of all places start from here."""
        self.reset_peak()
        self.peaks, self.away = {}, Peak(0, {})
        self._note_peak_away()

    def _see(self, storage: torch.UntypedStorage, counts: bool) -> None:
        if counts and storage._cdata not in self._watched:
            self._labels[storage._cdata] = self.label
        super()._see(storage, counts)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._labels.pop(key, None)

    def _changed(self, key: int, change: int) -> None:
        if not change:
            return
        label = self._labels[key]
        self.by[label] += change
        if not self.elsewhere(label):
            super()._changed(key, change)
        else:
            self._note_peak_away()
        place = self.place()
        if place not in self.peaks or self.bytes > self.peaks[place].bytes:
            self.peaks[place] = Peak(self.bytes, self._alive(elsewhere=False))

    def _note_peak_away(self) -> None:
        alive = self._alive(elsewhere=True)
        if (size := sum(alive.values())) > self.away.bytes:
            self.away = Peak(size, alive)

    def _alive(self, elsewhere: bool) -> dict[Hashable, int]:
        return {label: size for label, size in self.by.items() if size and self.elsewhere(label) == elsewhere}
