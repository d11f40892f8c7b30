"""How many tokens the sequences of a forward have, so that attention knows its pads without being told.

A rank's slice has ``ceil(S / cp)`` positions and doesn't say what ``S`` is. The split does: each forward of a network
that :func:`fsdp_cp.context_parallel.parallelize_context` was given has a :class:`Lengths`, which its splits fill and
its attention reads. Such a record is found

- during the forward, as the innermost network's on the same mesh (the forward of another network changes nothing);
- in a block that runs again in backward, by the record that was the forward's own
  (:mod:`fsdp_cp.sharding.activations` enters it again), or, under anybody else's activation checkpointing, by the graph
  that backward is in, which keeps it. ``use_reentrant=True`` makes none: then it is among those of the graphs that are
  alive, and where these leave two answers, attention refuses to guess.

Where it can't be told which of a forward's sequences attention is over, it refuses too. What never pads is never asked.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import ContextGroups


class Lengths:
    """Token counts of one forward of one network: the plan's names, and how many tokens were split under each."""

    def __init__(self, groups: ContextGroups):
        self.groups = groups
        self.owner: object = None
        self.totals: dict[str, int] = {}
        self.padded = False
        """Whether some rank holds pads. Kept, since a compiled graph that asks each number is one for each number."""
        self.features: set[str] = set()
        """Names of what has channels: no masks, no positions."""
        self.outputs: set[str] = set()
        """Names of what modules returned, rotary tables among them, which go with a sequence of another name."""
        self.gathered: str | None = None
        """The first module whose output was gathered."""

    @property
    def streams(self) -> dict[str, int]:
        """The sequences that attention may be over, and their token counts."""
        inputs = {name: total for name, total in self.totals.items() if name in self.features - self.outputs}
        tables = self.features & self.outputs
        outputs = {name: total for name, total in self.totals.items() if name in tables}
        return inputs | {name: total for name, total in outputs.items() if total not in inputs.values()}

    def __str__(self) -> str:
        return ", ".join(f"{name} ({total} tokens)" for name, total in self.totals.items()) or "nothing"


_KEY = "fsdp_cp.lengths"
"""Of a record in the metadata of an autograd node."""
_entered: list[Lengths] = []
"""Of the forwards that run now, outermost first. No thread-local: CUDA's backward has threads of its own."""
_alive: weakref.WeakSet[Lengths] = weakref.WeakSet()
_split_by_hand: list[tuple[weakref.ref[Tensor], ContextGroups, int, int]] = []
"""Slices with pads that are alive: groups, tokens on a rank, tokens."""
_last_by_hand: dict[tuple[ContextGroups, int], int] = {}
"""Tokens of the sequence that was split last, by groups and tokens on a rank."""


def enter(record: Lengths) -> None:
    """Make ``record`` the one of the forward that begins now."""
    _entered.append(record)
    _alive.add(record)


def leave(record: Lengths) -> None:
    """End its forward, and what began inside and was never ended (an interrupt skips hooks)."""
    if record in _entered:
        del _entered[_entered.index(record) :]


def entered() -> tuple[Lengths, ...]:
    """The records of the forwards that run now, for :func:`within`."""
    return tuple(_entered)


@contextmanager
def within(records: tuple[Lengths, ...]) -> Iterator[None]:
    """As if the forwards of ``records`` were running: for what is computed again in backward."""
    before = list(_entered)
    _entered[:] = records
    try:
        yield
    finally:
        _entered[:] = before


def in_backward() -> bool:
    """Whether a backward runs this: checkpointing, which computes a part of a forward again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _metadata(node: Node) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]  # a property, which torch declares as a method


def keep_with(output: object, record: Lengths) -> None:
    """Keep ``record`` findable for as long as the graph of ``output`` lives, when its blocks may run again."""
    if torch.compiler.is_compiling():
        return
    for x in tree_leaves(output):
        if isinstance(x, Tensor) and x.grad_fn is not None:
            _metadata(x.grad_fn).setdefault(_KEY, []).append(record)


def remember_split_by_hand(x: Tensor, groups: ContextGroups, local: int, total: int) -> None:
    """Note a slice with pads that was made outside a network's forward; attention refuses to guess their number."""
    if torch.compiler.is_compiling():
        return
    _last_by_hand[(groups, local)] = total
    if total % groups.cp_size:
        _split_by_hand[:] = [known for known in _split_by_hand if known[0]() is not None]
        _split_by_hand.append((weakref.ref(x), groups, local, total))


def _same(record: Lengths, groups: ContextGroups) -> bool:
    """Whether ranks share tokens alike; the groups' names differ where attention was given a ``DeviceMesh``."""
    return record.groups.cp_size == groups.cp_size and record.groups.cp_rank == groups.cp_rank


def running(groups: ContextGroups) -> Lengths | None:
    """The record of the innermost forward on such a mesh."""
    for record in reversed(_entered):
        if _same(record, groups):
            return record
    return None


def records_of(groups: ContextGroups, owner: object = None) -> list[Lengths]:
    """Those that a call may belong to: the running forward's, or in backward those of live graphs, by ``owner`` if any.

    Several mean that nobody can tell: they differ, and the graph that backward is in leads to none of them.
    """
    record = running(groups)
    if record is not None:
        return [record]
    if not in_backward():
        return []
    records = _alive_ones(groups, owner)
    if len(records) > 1:
        record = _upstream(records)
        if record is not None:
            return [record]
        # Checkpointing leaves graphs behind in cycles, each rank until another moment: they are no longer to come.
        del records
        gc.collect()
        records = _alive_ones(groups, owner)
    return records


def _alive_ones(groups: ContextGroups, owner: object) -> list[Lengths]:
    """The live records for such a mesh, one of those that are equal."""
    found = [record for record in _alive if _same(record, groups) and (owner is None or record.owner is owner)]
    return list({tuple(sorted(record.totals.items())): record for record in found}.values())


def _upstream(records: list[Lengths]) -> Lengths | None:
    """The record of the forward that made the graph in which backward is: the nearest one towards its inputs."""
    totals = [record.totals for record in records]
    nodes: deque[Node | None] = deque([torch._C._current_autograd_node()])  # private; torch 2.11 to 2.13
    seen = set(nodes)
    while nodes:
        node = nodes.popleft()
        if node is None:
            continue
        for record in _metadata(node).get(_KEY, ()):
            if record.totals in totals:
                return record
        following = [following for following, _ in node.next_functions if following not in seen]
        seen.update(following)
        nodes.extend(following)
    return None


def total_of(name: str, groups: ContextGroups, argument: str) -> int:
    """How many tokens were split under ``name``.

    Raises:
        UserError: none, or several numbers in the graphs that may be running again.
    """
    records = records_of(groups)
    totals = {record.totals[name] for record in records if name in record.totals}
    if len(totals) != 1:
        known = f"has split {records[0]}" if len(records) == 1 else f"may be one of {len(records)}"
        known = f"this forward {known}" if records else "no network of parallelize_context is in its forward"
        raise UserError(f"{argument} names {name!r}, but {known}; use a number of tokens")
    return totals.pop()


def known_total(local: int, groups: ContextGroups, what: str, argument: str) -> int:
    """How many tokens a sequence has of which each rank holds ``local`` positions.

    Args:
        local: positions on each rank.
        groups: the ``cp`` axis.
        what: the tensor's name, and
        argument: what gives the number instead, both for the message.

    Raises:
        UserError: there are pads, and no or more than one answer.
    """
    cp = groups.cp_size
    if cp == 1:
        return local
    records = records_of(groups)
    if not any(record.padded for record in records):
        _refuse_split_by_hand(local, groups, what, argument)
        return local * cp
    fitting = {total for record in records for total in record.totals.values() if -(-total // cp) == local}
    if len(fitting) == 1 and not any(_may_be_joined(record, local) for record in records):
        return fitting.pop()
    known = "; or ".join(map(str, records))
    raise UserError(
        f"{what} has {local} tokens on each of cp={cp} ranks, and the forward's plan has split {known}: which of them,"
        f" and so where the pads are, cannot be told; give {argument}, a number or a name out of these, or several in"
        " their order where sequences are joined"
    )


def _may_be_joined(record: Lengths, local: int) -> bool:
    counts = [-(-total // record.groups.cp_size) for total in record.streams.values()]
    return any(sum(some) == local for n in range(2, len(counts) + 1) for some in itertools.combinations(counts, n))


def _refuse_split_by_hand(local: int, groups: ContextGroups, what: str, argument: str) -> None:
    if torch.compiler.is_compiling():
        return
    alive = [total for x, *of, total in _split_by_hand if x() is not None and of == [groups, local]]
    # Without gradients nothing keeps a slice alive, but what was split last may be what attention is over.
    for total in (*alive, _last_by_hand.get((groups, local), 0)):
        if total % groups.cp_size:
            raise UserError(
                f"{what} has {local} tokens on each of cp={groups.cp_size} ranks, as many as a sequence of {total} that"
                f" split_tokens has padded; give {argument}={total}, or {local * groups.cp_size} if it is another one"
            )


def refuse_split_keys(queries: int, keys: int) -> None:
    """Refuse keys that look like a rank's slice of another sequence than the queries'.

    Raises:
        UserError: they do.
    """
    if torch.compiler.is_compiling():
        return
    for record in _entered[-1:]:
        cp = record.groups.cp_size
        streams = record.streams
        fitting = {name: total for name, total in streams.items() if -(-total // cp) == keys}
        own = [name for name, total in streams.items() if -(-total // cp) == queries]
        others = [name for name in fitting if own != [name]]
        if others:
            raise UserError(
                f"k has {keys} tokens, as many as each rank has of {others[0]!r} ({streams[others[0]]} tokens), which"
                " the plan splits; give mesh=mesh to attend to all of them, or total_keys="
                f"{keys} if every rank holds these keys in full"
            )


def segments_of(
    total_tokens: int | str | Sequence[int | str] | None, local: int, groups: ContextGroups
) -> tuple[int, ...]:
    """The true token counts of the joined sequences that ``total_tokens`` names, counts, or leaves to be found out."""
    if total_tokens is None:
        return (known_total(local, groups, "q", "total_tokens"),)
    given = (total_tokens,) if isinstance(total_tokens, (int, str, torch.SymInt)) else tuple(total_tokens)
    return tuple(total_of(x, groups, "total_tokens") if isinstance(x, str) else x for x in given)
