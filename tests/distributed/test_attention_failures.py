"""An exception inside attention, on one rank or on all: nobody hangs, and the next call is exact.

Whoever fails still takes part in what the others wait for in that call, so they come to its end. They see NaN where
the rank that failed had something to compute, and the right values everywhere else.
"""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fsdp_cp.attention import context_parallel_attention, reference, ring
from fsdp_cp.attention.cpu_kernels import CpuFlash
from fsdp_cp.attention.layout import Chunk
from tests.oracles.attention import Case, attend_on_rank, context_mesh, make_inputs
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

KINDS = ("forward", "backward", "dual")
PLACES = [
    ("forward", CpuFlash, "forward"),
    ("forward", ring._Merged, "add"),
    ("backward", CpuFlash, "backward"),
    ("backward", Chunk, "add_into"),
    ("dual", reference, "attention_dual"),
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


def _fail(case, wanted):
    """Every place, at its first, middle and last call, on each rank alone and on all: ``[(what, NaNs by tensor)]``."""
    mesh, rank = context_mesh(case.world, case.ulysses, case.kv_heads), dist.get_rank()
    found = []
    for kind, owner, name in PLACES:
        if kind != wanted:
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
                    with pytest.raises(_Broken):
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
    _Even(ring=3, tokens=(12,)),
    _Uneven(ring=3, tokens=(7,), masked=True),  # chunks of 3, 3 and 1
    pytest.param(_Uneven(ring=3, tokens=(12,), block=3), marks=pytest.mark.slow),  # later chunks do not travel
    pytest.param(_Uneven(ring=3, tokens=(2,)), marks=pytest.mark.slow),  # the last rank has pads alone
]
ULYSSES = [
    _Even(ulysses=2, tokens=(8,), head_groups=2),
    pytest.param(_Even(ulysses=2, tokens=(8,), block=2), marks=pytest.mark.slow),  # several tiles in a ring of one
    pytest.param(_Even(ring=2, ulysses=2, tokens=(8,), text=4), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", RINGS, ids=_name)
def test_a_ring(pools, case):
    """K and V go on truthfully, so outputs are right; NaN is in the gradients that the one who failed had a part in."""
    for kind in KINDS:
        for rank, found in enumerate(pools[case.world].run(_fail, case, kind)):
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


@pytest.mark.parametrize("case", ULYSSES, ids=_name)
def test_an_exchange(pools, case):
    """The exchange back takes place, with NaN for the heads of the one who failed."""
    for kind in KINDS:
        for rank, found in enumerate(pools[case.world].run(_fail, case, kind)):
            assert found
            for (_, _, _, who), nans in found:
                if nans is not None and who // case.ulysses == rank // case.ulysses:
                    assert all(nans)


# --- recomputation ---


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


def test_a_recomputation(pools):
    case = Case(ring=2, ulysses=2, head_groups=2)
    for at in (0, 1):
        assert all(pools[case.world].run(_recomputed, case, at))
