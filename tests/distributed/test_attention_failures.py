"""An exception inside attention: the ranks wait for their messages in flight, raise, and the next call is exact."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fsdp_cp.attention import context_parallel_attention, ring
from fsdp_cp.attention.kernels import choose
from fsdp_cp.attention.kernels import cuda as cuda_kernels
from fsdp_cp.attention.kernels.kernel import CpuFlash
from fsdp_cp.attention.layout import Chunk
from fsdp_cp.errors import UserError
from tests.oracles.attention import Case, attend_on_rank, context_mesh, make_inputs
from tests.pools import Pools
from tests.tiers import slow_case


@pytest.fixture(scope="module")
def pools():
    with Pools(timeout=60) as opened:  # a rank that hangs is killed after that
        yield opened


class _Broken(Exception):
    pass


@contextmanager
def _calls(owner, name, broken=None):
    """Count the calls of ``owner.name``; the ``broken``-th raises."""
    counted, original = [], getattr(owner, name)

    def call(*args):
        counted.append(name)
        if len(counted) - 1 == broken:
            raise _Broken(name)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield counted


PLACES = [
    ("forward", CpuFlash, "forward"),
    ("forward", ring.Merged, "add"),
    ("backward", CpuFlash, "backward"),
    ("backward", Chunk, "add_into"),
    ("dual", choose, "attention_dual"),
    ("dual", ring, "_weight"),
    ("recomputation", CpuFlash, "forward"),
]


def _results(kind, case, mesh, breaking=None):
    """Return the rank's forward, backward or derivative. The one of ``kind`` runs under ``breaking``."""
    breaking = breaking or nullcontext()
    inputs = make_inputs(case)
    if kind == "dual":
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs.primals, inputs.tangents, strict=True)]
            with breaking:
                out, _ = attend_on_rank(case, mesh, duals, inputs.mask)
            return [x.clone() for x in forward_ad.unpack_dual(out)]
    leaves = [x.clone().requires_grad_() for x in inputs.primals]
    with breaking if kind == "forward" else nullcontext():
        if kind == "recomputation":
            out = checkpoint(
                lambda *x: attend_on_rank(case, mesh, x, inputs.mask)[0].sin(), *leaves, use_reentrant=False
            )
        else:
            out, _ = attend_on_rank(case, mesh, leaves, inputs.mask)
    if kind == "forward":
        return [out.detach()]
    with breaking:
        return torch.autograd.grad(out.sin().sum(), leaves)


def _same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _fail(case):
    """Break every place on all ranks, at its first, middle and last call. Return the failures."""
    mesh, failed = context_mesh(case.world, case.ulysses, case.kv_heads), []
    for kind, owner, name in PLACES:
        with _calls(owner, name) as counted:
            truth = _results(kind, case, mesh)
        if not counted:  # one chunk has nothing to merge
            continue
        last = (len(counted) - 1) // (2 if kind == "recomputation" else 1)
        for at in sorted({0, last // 2, last}):
            with pytest.raises(_Broken):
                _results(kind, case, mesh, _calls(owner, name, at))
            assert _same(_results(kind, case, mesh), truth), (kind, name, at)
            failed.append((kind, name, at))
    return failed


@pytest.mark.parametrize(
    "case",
    [
        Case(ulysses=2, tokens=(8,), head_groups=2),
        slow_case(Case(ring=3, tokens=(12,))),
        slow_case(Case(ring=2, ulysses=2, tokens=(8,), head_groups=2)),
    ],
    ids=lambda case: f"{case.ring}x{case.ulysses}",
)
def test_ranks_whose_attention_fails_can_attend_again(pools, case):
    for failed in pools[case.world].run(_fail, case):
        assert {kind for kind, *_ in failed} == {"forward", "backward", "dual", "recomputation"}


def _fail_alone():
    """Break rank 0 while the only hop of a ring of 2 is in flight. Rank 1 has its result; both then attend again."""
    case = Case(ring=2, tokens=(9,))
    mesh = context_mesh(case.world, case.ulysses, case.kv_heads)
    truth = _results("forward", case, mesh)
    if dist.get_rank():
        assert _same(_results("forward", case, mesh), truth)
    else:
        with pytest.raises(_Broken):
            _results("forward", case, mesh, _calls(CpuFlash, "forward", 0))
    return _same(_results("forward", case, mesh), truth)


def test_a_rank_that_fails_alone_receives_what_is_in_flight(pools):
    assert all(pools[2].run(_fail_alone))


def _left_behind():
    mesh = context_mesh(2, 2, 4)
    x = torch.randn(1, 4, 4, 6)
    before = torch._C._distributed_c10d._get_work_registry_size()
    with pytest.raises(_Broken), _calls(CpuFlash, "forward", 0):
        context_parallel_attention(x, x, x, mesh=mesh, total_tokens=8, head_groups=2)
    return torch._C._distributed_c10d._get_work_registry_size() - before


def test_a_forward_that_fails_leaves_no_exchange_behind(pools):
    assert pools[2].run(_left_behind) == [0, 0]


class _OnTheCpu(cuda_kernels.FlashAttention4):
    """FlashAttention 4 by torch's flash attention for the CPU, wrong by ``factor`` in one result."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def refuses(self, device, dtype, head_dim, masked):
        return None

    def forward(self, *inputs):
        return CpuFlash().forward(*inputs)

    def backward(self, *inputs):
        dq, dk, dv = CpuFlash().backward(*inputs)
        return dq, dk, dv * self.factor


def _choices_with_a_check_of(factors):
    """Return the choices of ``auto`` for a call of 32,760 tokens in two dtypes, of which one was checked."""
    kernel = _OnTheCpu(factors[dist.get_rank()])
    device, dtypes = torch.device("cpu"), (torch.bfloat16, torch.float16)
    with (
        mock.patch.object(cuda_kernels, "_capability", lambda device: (9, 0)),
        mock.patch.object(torch.backends.cudnn, "version", lambda: 92000),
        mock.patch.dict(choose.KERNELS, flash_attn_4=kernel),
        mock.patch.dict(choose._checked_kernels, clear=True),
    ):
        choose._check_on_all_ranks(kernel, device, dtypes[0], 128)
        wanted = {"device": torch.device("cuda"), "head_dim": 128, "masked": False, "tokens": 32760, "gradients": True}
        chosen = [choose.choose_kernel("auto", dtype=dtype, **wanted).name for dtype in dtypes]
        try:
            choose._checked_kernels.clear()
            choose._check_on_all_ranks(kernel, device, dtypes[0], 128, required=True)
        except UserError:
            chosen.append("refused by name")
        return chosen


def test_one_rank_that_fails_its_self_check_decides_for_all(pools):
    assert pools[2].run(_choices_with_a_check_of, (1.0, 1.0)) == [["flash_attn_4", "cudnn"]] * 2
    assert pools[2].run(_choices_with_a_check_of, (1.0, 1.1)) == [["cudnn", "cudnn", "refused by name"]] * 2
