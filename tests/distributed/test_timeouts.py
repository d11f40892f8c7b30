"""All groups have one timeout, which can be changed. A rank that times out names the place."""

import logging
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdp_cp.measure.phases import phase
from fsdp_cp.mesh import build_mesh
from fsdp_cp.reduce import all_gather_single, barrier
from fsdp_cp.runtime import hangs, timeouts
from fsdp_cp.runtime.timeouts import inherited_timeout, long_timeout, process_groups, set_timeout, shorten, timeout_of
from tests.pools import run_ranks
from tests.tiers import slow

HSDP = {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "heads": 4}
RING = {"dp_shard": 2, "cp": 2, "ring": 2, "heads": 4}
POOL = 77.0
"""Timeout of the default group of the ranks, in seconds. No backend has this default."""


def _timeouts_of_a_mesh(sizes):
    mesh = build_mesh(**sizes)
    views = [mesh.world, mesh.dp, mesh.cp, mesh.ring, mesh.ulysses, mesh.fsdp, mesh.within(1)]
    groups = [view.get_group(axis) for view in views for axis in range(view.ndim)]
    assert all(any(group is known for known in process_groups()) for group in groups), "none is forgotten"
    return {timeout_of(group) for group in [*process_groups(), *groups]}


def test_groups_of_a_mesh_have_the_timeout_of_all_ranks():
    for sizes in (HSDP, RING):
        assert run_ranks(4, _timeouts_of_a_mesh, sizes, timeout=POOL) == [{timedelta(seconds=POOL)}] * 4


def _groups_of_others():
    theirs = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    with inherited_timeout():
        ours = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    return timeout_of(theirs).total_seconds(), timeout_of(ours).total_seconds()


def test_groups_of_others_keep_theirs():
    assert run_ranks(2, _groups_of_others, timeout=POOL) == [(5.0, POOL)] * 2


def _changing():
    mesh = build_mesh(dp_replicate=2, dp_shard=1, cp=1, sharded=False)
    seen = []

    def look():
        (timeout,) = {timeout_of(group) for group in process_groups()}
        seen.append(timeout.total_seconds())

    with long_timeout():  # not shortened yet
        look()
    for _ in range(2):
        shorten(timedelta(seconds=2))
        look()
    with long_timeout():
        look()
        with long_timeout():
            look()
        look()
        if dist.get_rank() == 0:
            time.sleep(4)  # the other rank has left the block; with the short timeout its barrier would fail
    look()
    assert mesh.within(1).size(0) == 2
    look()  # a group that is made now
    timeouts.forget()
    return seen


@slow
def test_long_and_short():
    assert run_ranks(2, _changing, timeout=POOL) == [[POOL, 2, 2, POOL, POOL, POOL, 2, 2]] * 2


def _waits_in_vain():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fsdp_cp.runtime.hangs").addHandler(handler)
    mesh = build_mesh(dp_shard=2, cp=2, ulysses=2)
    for _ in range(3):
        dist.all_reduce(torch.ones(3), group=mesh.cp.get_group())
    with phase("earlier"):
        barrier()
    set_timeout(timedelta(seconds=5))
    with hangs.watch_for_hangs(lambda: "after 6 of 9 steps"):
        if dist.get_rank() != 2:
            with pytest.raises(RuntimeError), phase("outer"), phase("inner"):
                dist.all_reduce(torch.ones(3), group=mesh.cp.get_group())
                all_gather_single(torch.ones(6), torch.ones(3), mesh.dp.get_group())
        else:
            with phase("absent"):
                time.sleep(7)
    dist.barrier = lambda *_, **__: None
    return lines


@slow
def test_a_rank_that_waits_in_vain_says_where():
    (dp,), (_,), (absent,), (cp,) = run_ranks(4, _waits_in_vain, timeout=POOL)
    assert all(fact in dp for fact in ("rank 0", "6 of 9", "inner", "all_gather", "mesh_dp"))
    assert all(fact in cp for fact in ("rank 3", "inner", "all_reduce", "mesh_cp"))
    assert "absent" in absent


def _long_in_place():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fsdp_cp.runtime.hangs").addHandler(handler)
    barrier()
    with hangs.watch_for_hangs():
        set_timeout(timedelta(seconds=1))  # while the watch waits in the long timeout
        with phase("short"):
            time.sleep(0.3)
        with phase("outer"), phase("long"):
            time.sleep(1.6)
        with phase("again"):
            time.sleep(1.6)
    set_timeout(timedelta(seconds=POOL))
    return lines


def test_a_rank_that_stays_in_one_place_says_so_before_the_timeout():
    (lines,) = run_ranks(1, _long_in_place, timeout=POOL)
    assert len(lines) == 2 and "long" in lines[0] and "again" in lines[1]
