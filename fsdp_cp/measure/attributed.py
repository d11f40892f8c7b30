"""Live bytes by label, now and at their peak."""

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
    """Bytes alive at the peak."""

    bytes: int
    by: dict[Hashable, int]
    """Bytes by label."""


class AttributedStorages(LiveStorages):
    """:class:`LiveStorages` with a label for every storage: the label current at its allocation, unless relabeled.

    Args:
        place: function that returns the name of the current part of the work. Each part has a separate peak.
        elsewhere: function that returns whether storages with a label are in another memory, whatever their torch
            device. :attr:`bytes` and the peaks exclude them.
        fakes: whether fake tensors count (:class:`LiveStorages`).
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
        """Label for new storages."""
        self.by: Counter[Hashable] = Counter()
        """Bytes alive now, by label."""
        self.peaks: dict[str, Peak] = {}
        """Peak of each place."""
        self.away = Peak(0, {})
        """Peak of the storages in another memory."""
        self._labels: dict[int, Hashable] = {}

    @contextmanager
    def labelled(self, label: Hashable) -> Iterator[None]:
        """Within this context, give new storages ``label``."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def relabel(self, tensor: Tensor, label: Hashable) -> None:
        """Give ``tensor``'s storage (for a DTensor, its shard's) another ``label``."""
        key = local_shard(tensor).untyped_storage()._cdata
        if key in self._sizes:
            size = self._sizes[key]
            self._changed(key, -size)
            self._labels[key] = label
            self._changed(key, size)

    def reset_peaks(self) -> None:
        """Restart the peaks of all places from the bytes alive now."""
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
