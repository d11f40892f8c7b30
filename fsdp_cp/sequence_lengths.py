"""Token counts of the sequences that a forward splits. From them, attention knows which positions are pads.

A rank's slice has ``ceil(S / cp)`` positions, which do not determine ``S``. The split knows it: each forward of a
network of :func:`fsdp_cp.context_parallel.parallelize_context` has a :class:`Lengths` record, which its splits fill and
its attention reads. A block recomputed in backward reads the record of its forward, which
:mod:`fsdp_cp.sharding.activations` enters again; under any other activation checkpointing, the records of all forwards
so far. If no count or several counts fit, attention asks for ``total_tokens``.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations

import torch

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import ContextGroups
from fsdp_cp.runtime.torch_versions import in_backward
from fsdp_cp.sequence import is_count
from fsdp_cp.tiles import Tiles


class Lengths:
    """Token counts of one forward of one network: the number of tokens split under each name of the plan."""

    def __init__(self, groups: ContextGroups, owner: object):
        self.groups, self.owner = groups, owner
        self.totals: dict[str, int] = {}
        self.tiles: dict[str, Tiles] = {}
        """Tiles of sequences, and so the order of their tokens, by the names under which the plan splits them."""
        self.padded = False
        """Whether some rank holds pads. Stored, since a compiled graph that reads the counts recompiles for each."""
        self.gathered: str | None = None
        """Name of the first module whose output was gathered."""

    def note(self, name: str, total: int) -> None:
        """Record that ``total`` tokens were split under ``name``."""
        self.totals[name] = total
        self.padded = self.padded or total % self.groups.cp_size != 0

    def tiles_of(self, name: str) -> Tiles | None:
        """Return the tiles of a sequence. ``rope[0]`` is part of ``rope``."""
        return self.tiles.get(name, self.tiles.get(name.partition("[")[0]))

    def __str__(self) -> str:
        return ", ".join(f"{name} ({total} tokens)" for name, total in self.totals.items()) or "nothing"


_entered: list[Lengths] = []
"""Records of the running forwards, outermost first. Not thread-local: CUDA's backward runs in other threads."""
_ended: dict[tuple, Lengths] = {}
"""Records of the forwards that have ended, one for each set of counts."""


def enter(record: Lengths) -> None:
    """Begin the forward of ``record``."""
    _entered.append(record)


def leave(owner: object) -> None:
    """End the forward of ``owner`` and all forwards inside it that did not end (an interrupt skips hooks)."""
    for i, record in enumerate(_entered):
        if record.owner is owner:
            ended = copy.copy(record)
            ended.owner = None  # otherwise its mesh would live as long as this process
            _ended[
                record.groups.cp_size, record.groups.cp_rank, *sorted(record.totals.items()), *record.tiles.items()
            ] = ended
            del _entered[i:]
            return


def entered() -> tuple[Lengths, ...]:
    """Return the records of the running forwards, for :func:`within`."""
    return tuple(_entered)


@contextmanager
def within(records: tuple[Lengths, ...]) -> Iterator[None]:
    """Within this context, recompute a block in backward as if the forwards of ``records`` were running."""
    before = list(_entered)
    _entered[:] = records
    try:
        yield
    finally:
        _entered[:] = before


def records_of(groups: ContextGroups) -> list[Lengths]:
    """Return the records that a call may belong to: the innermost running forward's, or in backward all ended ones.

    Only records with the same ``cp`` size and rank count. Group names may differ: a ``DeviceMesh`` has others.
    """

    def is_alike(record: Lengths) -> bool:
        return record.groups.cp_size == groups.cp_size and record.groups.cp_rank == groups.cp_rank

    for record in reversed(_entered):
        if is_alike(record):
            return [record]
    return [record for record in _ended.values() if is_alike(record)] if in_backward() else []


def split_names(names: Sequence[str], groups: ContextGroups) -> tuple[str, ...]:
    """Return those of ``names`` under which the running forward has split a sequence, in order."""
    records = records_of(groups)
    return tuple(name for name in names if any(name in record.totals for record in records))


def segments_of(
    total_tokens: int | str | Sequence[int | str] | None,
    local: int,
    groups: ContextGroups,
    tensor: str = "q",
    argument: str = "total_tokens",
) -> tuple[int, ...]:
    """Return the true token counts of the joined sequences of which each rank holds ``local`` positions.

    ``total_tokens`` are counts, or names from the plan; ``None`` stands for the only sequence of the plan that fits.
    ``tensor`` and ``argument`` are for messages.
    """
    names = _listed(total_tokens, argument)
    counts = [name for name in names if not isinstance(name, str)]
    if names and len(counts) == len(names):
        return tuple(counts)
    cp = groups.cp_size
    if cp == 1:
        return (local,)
    records = records_of(groups)
    if not names and records and not any(record.padded for record in records):
        return (local * cp,)
    fitting: set[tuple[int, ...]] = set()
    for record in records:
        joined = _joined_totals(record.totals, names)
        fitting.update(totals for totals in joined if sum(-(-total // cp) for total in totals) == local)
    if len(fitting) == 1:
        (totals,) = fitting
        if names or len(totals) == 1:
            return totals
    splits = "; or ".join(map(str, records)) or "nothing, as no parallel network is running"
    raise UserError(
        f"{argument}={total_tokens!r} does not determine the tokens of {tensor}, which has {local} on each of cp={cp}"
        f" ranks: the plan has split {splits}; set {argument} to the number of tokens, or to names of the plan in order"
    )


def _listed(total_tokens: int | str | Sequence[int | str] | None, argument: str) -> Sequence[int | str]:
    """Return the counts or names of joined sequences; none for ``None``."""
    if total_tokens is None:
        return ()
    names = total_tokens if isinstance(total_tokens, (tuple, list)) else (total_tokens,)
    if not names or not all(isinstance(name, str) or is_count(name) for name in names):
        raise UserError(f"{argument} must be an int >= 1, a name of the plan, or a list of these, got {total_tokens!r}")
    return names


def _joined_totals(totals: dict[str, int], names: Sequence[int | str]) -> Iterator[tuple[int, ...]]:
    """Yield the counts that ``names`` stand for, if the forward has split all of them.

    Without names, yield all counts of one to three sequences. Joined ones are detected to refuse them: their order
    needs names.
    """
    if names:
        counts = [totals.get(name, 0) if isinstance(name, str) else name for name in names]
        if all(counts):
            yield tuple(counts)
        return
    known = sorted(set(totals.values()))
    for number in (1, 2, 3):
        yield from combinations(known, number)


def check_order(tiles: Tiles, groups: ContextGroups) -> None:
    """Refuse tiles in another order than that in which the running forward has split this grid."""
    if torch.compiler.is_compiling():
        return
    for record in records_of(groups):
        split = [x for x in record.tiles.values() if (x.grid, x.tile) == (tiles.grid, tiles.tile)]
        if split and tiles not in split:
            orders = {True: "tile order", False: "raster order"}
            given, wanted = orders[tiles.is_ordered], orders[split[0].is_ordered]
            raise UserError(
                f"sparse has its tokens in {given}, but the plan splits them in {wanted}; use tiles.on(mesh)"
            )


def refuse_split_keys(queries: int, keys: int) -> None:
    """Refuse keys whose count equals a rank's slice of a sequence other than the queries' in the running forward."""
    if torch.compiler.is_compiling():
        return
    for record in _entered[-1:]:
        shares = {total: -(-total // record.groups.cp_size) for total in record.totals.values()}
        same = [total for total, share in shares.items() if share == queries]
        for name, total in record.totals.items():
            if shares[total] == keys and same != [total]:
                advice = f"give mesh=mesh to attend to all, or total_keys={keys} if every rank holds all keys"
                raise UserError(f"k has {keys} tokens, as each rank has of the split {name!r} ({total}); {advice}")
