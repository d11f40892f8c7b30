"""All groups have one timeout, which can be changed; a rank that waits in vain says where, and its process ends."""

import logging
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdp_cp import hangs, timeouts
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.measure.phases import phase, where
from fsdp_cp.mesh import build_mesh
from fsdp_cp.reduce import all_gather_single, barrier
from fsdp_cp.timeouts import inherited_timeout, long_timeout, process_groups, set_timeout, shorten, timeout_of
from tests.e2e.launch import ROOT, environment

HSDP = {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "heads": 4}
RING = {"dp_shard": 2, "cp": 2, "ring": 2, "heads": 4}
POOL = 77.0
"""Seconds: the timeout of the ranks' group of all, and no backend's default."""


def _timeouts_of_a_mesh(sizes):
    mesh = build_mesh(**sizes)
    views = [mesh.world, mesh.dp, mesh.cp, mesh.ring, mesh.ulysses, mesh.fsdp, mesh.replicas]
    groups = [view.get_group(axis) for view in views for axis in range(view.ndim)]
    assert all(any(group is known for known in process_groups()) for group in groups), "none is forgotten"
    return {timeout_of(group) for group in [*process_groups(), *groups]}


@pytest.mark.parametrize("sizes", [HSDP, RING])
def test_groups_of_a_mesh_have_the_timeout_of_all_ranks(sizes):
    assert run_ranks(4, _timeouts_of_a_mesh, sizes, timeout=POOL) == [{timedelta(seconds=POOL)}] * 4


def _groups_of_others():
    theirs = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    with inherited_timeout():
        ours = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    return timeout_of(theirs).total_seconds(), timeout_of(ours).total_seconds()


def test_groups_of_others_keep_theirs():
    assert run_ranks(2, _groups_of_others, timeout=POOL) == [(5.0, POOL)] * 2


def _join_all_but(absent, sizes):
    """Seconds until an all-reduce that rank ``absent`` leaves out has failed, by group; the groups are older."""
    mesh = build_mesh(**sizes)
    groups = {f"fsdp{axis}": mesh.fsdp.get_group(axis) for axis in range(mesh.fsdp.ndim)}
    groups |= {"cp": mesh.cp.get_group(), "replicas": mesh.replicas.get_group(0)}  # the last one is of all ranks
    for group in groups.values():
        dist.all_reduce(torch.ones(3), group=group)
    set_timeout(timedelta(seconds=1))
    found = {}
    for name, group in groups.items():
        started = time.monotonic()
        if dist.get_rank() != absent and absent in dist.get_process_group_ranks(group):
            with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
                dist.all_reduce(torch.ones(3), group=group)
            found[name] = time.monotonic() - started
        time.sleep(max(0.0, started + 2 - time.monotonic()))
    return found


def _without_the_last_barrier(*arguments):
    """The ranks' own barrier would fail: the group of all ranks is among those that were broken."""
    found = _join_all_but(*arguments)
    dist.barrier = lambda *_, **__: None
    return found


@pytest.mark.slow
def test_a_timeout_that_is_set_later_strikes_in_every_group():
    found = run_ranks(4, _without_the_last_barrier, 0, HSDP, timeout=POOL)
    assert [sorted(rank) for rank in found] == [[], ["cp", "fsdp1", "replicas"], ["fsdp0", "replicas"], ["replicas"]]
    assert all(0.9 < seconds < 4 for rank in found for seconds in rank.values()), found


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
            time.sleep(4)  # the other has left the work by now; with the short timeout its barrier would fail
    look()
    assert mesh.replicas.size() == 2
    look()  # a group that is made now
    timeouts.forget()
    return seen


def test_long_and_short():
    assert run_ranks(2, _changing, timeout=POOL) == [[POOL, 2, 2, POOL, POOL, POOL, 2, 2]] * 2


def _waits_in_vain():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fsdp_cp.hangs").addHandler(handler)
    mesh = build_mesh(dp_shard=2, cp=2, ulysses=2)
    for _ in range(3):
        dist.all_reduce(torch.ones(3), group=mesh.cp.get_group())
    set_timeout(timedelta(seconds=1))
    with phase("earlier"):
        barrier()
    if dist.get_rank() != 2:
        try:
            with phase("outer"), phase("inner"):
                dist.all_reduce(torch.ones(3), group=mesh.cp.get_group())
                all_gather_single(torch.ones(6), torch.ones(3), mesh.dp.get_group())
        except RuntimeError as error:
            hangs.report(error, step="in step 7 of 9", advice="do this")
            hangs.report(error)
            assert error.__notes__ == lines
    else:
        time.sleep(3)
    dist.barrier = lambda *_, **__: None
    return lines


def test_a_rank_that_waits_in_vain_says_where():
    found = run_ranks(4, _waits_in_vain, timeout=POOL)
    (dp,), (_,), absent, (cp,) = found
    assert not absent
    assert dp.startswith(
        "rank 0 waited 1 s in vain for another rank: in step 7 of 9, in phase inner; last collective: "
    )
    assert dp.endswith("; last collective: all_gather 1 of group mesh_dp; do this")
    assert cp.startswith("rank 3 ") and "; last collective: all_reduce 4 of group mesh_cp; " in cp


def test_only_what_comes_of_waiting_is_reported(caplog):
    for error in (ValueError("Timed out waiting"), RuntimeError("the file timed out"), KeyError("Connection closed")):
        hangs.report(error)
        assert not hasattr(error, "__notes__")
    assert not caplog.records
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51367.")
    hangs.report(lost)
    assert "rank 0 lost another rank" in caplog.text
    with pytest.raises(KeyError) as caught, phase("a"):
        with pytest.raises(ValueError), phase("b"):
            raise ValueError
        raise KeyError
    assert where(caught.value) == "in phase a" and where(lost) == "after phase a"


def _long_in_place():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fsdp_cp.hangs").addHandler(handler)
    barrier()
    set_timeout(timedelta(seconds=1))
    with hangs.watched():
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
    assert [line.partition(" for ")[0] for line in lines] == [
        "rank 0 has been in phase long",
        "rank 0 has been in phase again",
    ]
    assert "; last collective: " in lines[0] and "the timeout of 1 s ends it" in lines[0]


FAILING = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from fsdp_cp import hangs
from fsdp_cp.launch import process_group
hangs.GRACE = 3.0
with process_group(torch.device("cpu"), timeout=timedelta(seconds=300)):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    dist.barrier(group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    waits = dist.all_reduce(torch.ones(3), async_op=True)
    if sys.argv[1] == "bug":
        raise ZeroDivisionError("a bug")
    dist.all_reduce(torch.ones(3), group=group)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timeout", pytest.param("bug", marks=pytest.mark.slow)])
def test_a_process_with_collectives_on_their_way_ends(kind, tmp_path):
    """An interpreter that ends would wait 300 s for the all-reduce in which rank 1 is not."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    port = 29500 + os.getpid() % 10000 + (kind == "bug")
    around = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), kind],
            env=around | {"RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert ranks[0].returncode == 1, output
    expected = "ZeroDivisionError: a bug" if kind == "bug" else "rank 0 waited 2 s in vain for another rank: "
    assert expected in output and "Timeout (0:00:03)!" in output, output
