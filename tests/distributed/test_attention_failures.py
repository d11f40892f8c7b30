"""An exception inside attention, on one rank or on all: nobody hangs, and the next call is exact.

Whoever fails still takes part in what the others wait for in that call, so they come to its end. They see NaN where
the rank that failed had something to compute, and the right values everywhere else.
"""

import json
import os
import socket
import time
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fsdp_cp import discard_step
from fsdp_cp.attention import context_parallel_attention, ring
from fsdp_cp.attention.cpu_kernels import CpuFlash
from fsdp_cp.attention.layout import Chunk
from fsdp_cp.local_ranks import RankPool
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sharding.state import gathered_units, has_gradients
from models.condition import text_condition
from tests.oracles.attention import Case, attend_on_rank, context_mesh, make_inputs
from tests.oracles.wan64 import LATENTS, sample, sharded_role
from tests.pools import Pools

TIMEOUT = 60  # a rank that hangs is killed after that


@pytest.fixture(scope="module")
def pools():
    with Pools(timeout=TIMEOUT) as opened:
        yield opened


class _Broken(Exception):
    pass


@contextmanager
def _calls(owner, name, broken=None):
    """Counts the calls of ``owner.name``; the ``broken``-th raises."""
    counted, original = [], getattr(owner, name)

    def call(*args):
        counted.append(name)
        if len(counted) - 1 == broken:
            raise _Broken(name)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield counted


# --- one attention ---

PLACES = [
    ("forward", CpuFlash, "forward"),
    ("forward", ring._Merged, "add"),
    ("backward", CpuFlash, "backward"),
    ("backward", Chunk, "add_into"),
    ("dual", ring, "attention_dual"),
    ("dual", ring, "_weight"),
]


def _results(kind, case, mesh, breaking=None):
    """What the rank gets from its forward, its backward or its forward-mode derivative, the last under ``breaking``."""
    breaking = breaking or nullcontext()
    inputs = make_inputs(case)
    if kind == "dual":
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs.primals, inputs.tangents, strict=True)]
            with breaking:
                outs = attend_on_rank(case, mesh, duals, inputs.mask)
            parts = (forward_ad.unpack_dual(x) for x in outs if x is not None)
            return [x.clone() for part in parts for x in part]
    leaves = [x.clone().requires_grad_() for x in inputs.primals]
    with breaking if kind == "forward" else nullcontext():
        outs = [x for x in attend_on_rank(case, mesh, leaves, inputs.mask) if x is not None]
    if kind == "forward":
        return [x.detach() for x in outs]
    with breaking:
        return torch.autograd.grad(sum(x.sin().sum() for x in outs), leaves)


def _same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _everyone_is_there(mesh):
    """Collectives work over all ranks and over the groups of the call that failed, and no exchange is left behind."""
    for group in (None, mesh.cp.get_group(), mesh.ring.get_group(), mesh.ulysses.get_group()):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [dist.get_world_size(group)] * 3
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


def _fail(case, kinds):
    """Every place, at its first, middle and last call, on each rank alone and on all: ``[(what, NaNs by tensor)]``."""
    mesh, rank = context_mesh(case.world, case.ulysses, case.kv_heads), dist.get_rank()
    found = []
    for kind, owner, name in PLACES:
        if kind not in kinds:
            continue
        with _calls(owner, name) as counted:
            fresh = _results(kind, case, mesh)
        last = len(counted) - 1
        assert all(x.isfinite().all() for x in fresh)
        if case.is_even and last < 0:  # one chunk has nothing to merge
            continue
        for at in sorted({0, last // 2, last}) if case.is_even else (0, 1):
            for who in (*range(case.world), None):
                breaks = who in (None, rank) and at <= last
                breaking = _calls(owner, name, at if breaks else None)
                if breaks:
                    with pytest.raises(_Broken, match=name):
                        _results(kind, case, mesh, breaking)
                    ours = None
                else:
                    ours = _results(kind, case, mesh, breaking)
                    for a, b in zip(ours, fresh, strict=True):
                        assert ((a == b) | a.isnan()).all(), (kind, name, at, who)
                _everyone_is_there(mesh)
                assert _same(_results(kind, case, mesh), fresh), (kind, name, at, who)
                found.append(((kind, name, at, who), ours and [int(x.isnan().sum()) for x in ours]))
    return found


class _Even(Case):
    is_even = True
    """All ranks have as many calls of everything."""


class _Uneven(Case):
    is_even = False


def _name(case):
    plain = Case()
    return " ".join(f"{k}={v}" for k, v in vars(case).items() if v != getattr(plain, k))


RINGS = [
    _Even(ring=2, tokens=(8,)),
    _Even(ring=3, tokens=(12,)),
    _Uneven(ring=3, tokens=(7,), masked=True),  # chunks of 3, 3 and 1
    _Uneven(ring=3, tokens=(12,), block=3),  # later chunks do not travel
    _Uneven(ring=3, tokens=(2,)),  # the last rank has pads alone
]
ULYSSES = [
    _Even(ulysses=2, tokens=(8,)),
    _Even(ulysses=2, tokens=(8,), block=2),  # several tiles in a ring of one
    _Even(ulysses=2, tokens=(8,), head_groups=2),
    _Even(ring=2, ulysses=2, tokens=(8,)),
    _Even(ring=2, ulysses=2, tokens=(8,), head_groups=2),
    _Even(ring=2, ulysses=2, tokens=(8,), text=4),
]


@pytest.mark.parametrize("kind", ["forward", "backward", "dual"])
@pytest.mark.parametrize("case", RINGS, ids=_name)
def test_a_ring(pools, case, kind):
    """K and V go on truthfully, so outputs are right; NaN is in the gradients that the one who failed had a part in."""
    for rank, found in enumerate(pools[case.world].run(_fail, case, (kind,))):
        assert found
        for (_, name, at, who), nans in found:
            if nans is None:
                continue
            if kind != "backward":
                assert not any(nans)
                continue
            dq, dk, dv = nans
            assert not dq and dk == dv
            if name == "backward" and case.is_even:
                late = (who - 1 - rank) % case.ring >= at  # in the order in which `who` comes to the chunks
                assert dk == late * case.batch * case.tokens[0] // case.ring * case.kv_heads * case.head_dim


@pytest.mark.parametrize("kind", ["forward", "backward", "dual"])
@pytest.mark.parametrize("case", ULYSSES, ids=_name)
def test_an_exchange(pools, case, kind):
    """The exchange back takes place, with NaN for the heads of the one who failed."""
    for rank, found in enumerate(pools[case.world].run(_fail, case, (kind,))):
        assert found
        for (_, _, _, who), nans in found:
            if nans is not None and who // case.ulysses == rank // case.ulysses:
                assert all(nans)


# --- what else may happen ---


def _twice(case):
    """The second head group fails as well: the first exception is the one that is seen."""
    mesh = context_mesh(case.world, case.ulysses, case.kv_heads)
    calls = []

    def broken(*_args):
        calls.append(None)
        raise _Broken(f"number {len(calls)}")

    for kind, name in (("forward", "forward"), ("backward", "backward")):
        calls.clear()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(_Broken, match="number 1"):
            results = _results(kind, case, mesh, _patched(patch, name, broken))
            assert results is None
        assert len(calls) == case.head_groups
        _everyone_is_there(mesh)
    return True


@contextmanager
def _patched(patch, name, function):
    patch.setattr(CpuFlash, name, function)
    yield


def test_the_first_exception_is_raised(pools):
    assert all(pools[4].run(_twice, Case(ring=2, ulysses=2, tokens=(8,), head_groups=2)))


def _left_alone(own, outcome):
    """Rank 1 closes its connections; rank 0, whose kernel fails in its ``own``-th call, writes down what it sees."""
    mesh = build_mesh(cp=2, ring=2)
    q = torch.ones(1, 4, 2, 4)
    context_parallel_attention(q, q, q, mesh=mesh)
    begun = outcome.with_name("begun")
    if mesh.cp_rank == 0:
        start = time.monotonic()
        begun.touch()
        with _calls(CpuFlash, "forward", own), pytest.raises(Exception) as caught:
            context_parallel_attention(q, q, q, mesh=mesh)
        chain = (caught.value, caught.value.__context__)
        outcome.write_text(json.dumps([[type(x).__name__ for x in chain], time.monotonic() - start]))
        return
    while not begun.exists():
        time.sleep(0.05)
    time.sleep(2)  # until rank 0 waits for its hop: gone before, this rank would be what fails first
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                connection.shutdown(socket.SHUT_RDWR)
    while not outcome.exists():
        time.sleep(0.05)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="finds its connections in Linux's /proc")
@pytest.mark.parametrize(("own", "errors"), [(None, ["RuntimeError", "NoneType"]), (0, ["_Broken", "RuntimeError"])])
def test_a_neighbour_that_is_gone_is_not_waited_for(own, errors, tmp_path):
    """What failed first is what the user sees."""
    with RankPool(2, timeout=TIMEOUT) as pool, pytest.raises(RuntimeError, match="rank . failed"):
        pool.run(_left_alone, own, tmp_path / "outcome.json")
    seen, seconds = json.loads((tmp_path / "outcome.json").read_text())
    assert seen == errors and seconds < 20


def _recomputed(case, at):
    """The kernel fails while checkpointing runs the forward again."""
    mesh = context_mesh(case.world, case.ulysses, case.kv_heads)
    x = torch.randn(1, 8, 4, 6, generator=torch.Generator().manual_seed(mesh.cp_rank), requires_grad=True)

    def gradient(broken=None):
        out = checkpoint(
            lambda x: context_parallel_attention(x, x, x, mesh=mesh, head_groups=case.head_groups).sin(),
            x,
            use_reentrant=False,
        )
        with _calls(CpuFlash, "forward", broken):
            return torch.autograd.grad(out.sum(), x)

    fresh = gradient()
    with pytest.raises(_Broken):
        gradient(at)
    _everyone_is_there(mesh)
    return _same(gradient(), fresh)


@pytest.mark.parametrize("case", [Case(ring=2), Case(ring=2, ulysses=2, head_groups=2)], ids=_name)
def test_a_recomputation(pools, case):
    for at in (0, 1):
        assert all(pools[case.world].run(_recomputed, case, at))


# --- a network ---


def _step(role, mesh):
    samples = 2 // mesh.dp_size
    mine = slice(mesh.dp_rank * samples, (mesh.dp_rank + 1) * samples)
    x, t, text, target = (each[mine] for each in sample(LATENTS))
    return lambda: role.velocity(x, t, text_condition(text)), lambda out: (out - target).square().mean().backward()


def _broken_step(folder, sizes, checkpointing):
    role, mesh = sharded_role(folder, sizes, checkpointing=checkpointing)
    forward, backward = _step(role, mesh)

    def whole():
        out = forward()
        backward(out)
        shards = [out.detach(), *(p.grad.to_local().clone() for p in role.network.parameters())]
        role.network.zero_grad()
        return shards

    whole()  # FSDP2's state is as in any later step
    fresh = whole()
    outcomes = []
    for name in ("forward", "backward"):
        for at in (0, 1, 3):  # a chunk of the first block, or of the second
            with pytest.raises(_Broken), _calls(CpuFlash, name, at):
                backward(forward())
            discard_step(role.network)
            assert not gathered_units(role.network) and not has_gradients(role.network)
            _everyone_is_there(mesh)
            outcomes.append(_same(whole(), fresh))
    return outcomes


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"cp": 2, "ring": 2}, {"cp": 3, "ring": 3}, {"dp_shard": 2, "cp": 2, "ring": 2}, {"cp": 4, "ring": 2}]
)
def test_the_step_after_an_abandoned_one_of_wan_is_exact(pools, wan64, sizes, checkpointing):
    for outcomes in pools[sizes.get("dp_shard", 1) * sizes["cp"]].run(_broken_step, wan64, sizes, checkpointing):
        assert outcomes == [True] * 6
