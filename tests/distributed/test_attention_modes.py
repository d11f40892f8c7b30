"""Attention under autocast, anomaly mode, checkpointing and low precision, and its refusals."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.attention.mask import block_causal
from fsdp_cp.context.check_parallel import relative_error
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import gather_tokens, split_tokens
from tests.oracles.attention import Case, errors, make_inputs, on_ranks, oracle, plain_attention
from tests.tiers import slow

HEADS, TEXT = 4, 5


def _refused_tangents():
    mesh = build_mesh(cp=2, heads=HEADS)
    q, k, v, t = (torch.randn(1, 3, HEADS, 6) for _ in range(4))
    text = torch.randn(1, TEXT, HEADS, 6)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        for call in (
            lambda: context_parallel_attention(dual, k, v, mesh=mesh, total_tokens=6),
            lambda: context_parallel_attention(q, k, dual, mesh=mesh, total_tokens=6),
            lambda: cross_attention(dual, text, text),
            lambda: gather_tokens(dual, mesh),
        ):
            with pytest.raises(RuntimeError, match="no_grad"):
                call()
        with torch.no_grad():
            with pytest.raises(ValueError, match="backend"):
                context_parallel_attention(dual, k, v, mesh=mesh, total_tokens=6, backend="cpu_flash")
            out = context_parallel_attention(dual, k, v, mesh=mesh, total_tokens=6, backend="reference")
            assert forward_ad.unpack_dual(out).tangent is not None
    with pytest.raises(RuntimeError, match="no_grad"):
        torch.func.jvp(lambda q: context_parallel_attention(q, k, v, mesh=mesh, total_tokens=6), (q,), (t,))
    return True


def test_tangents_are_refused_rather_than_dropped(pools):
    assert all(pools[2].run(_refused_tangents))


def _some_move(which):
    """Compare tangents on only one of q, k and v, by the interfaces ``forward_ad`` and ``torch.func``."""
    case = Case(ring=2, ulysses=2, tokens=(9,), kv_heads=2)
    mesh = build_mesh(cp=4, ulysses=2, heads=2)
    inputs = make_inputs(case)
    tangents = [t if i == which else torch.zeros_like(t) for i, t in enumerate(inputs.tangents)]
    text = [x[:, :5] for x in inputs.primals]
    with torch.no_grad(), forward_ad.dual_level():
        xs = list(inputs.primals)
        xs[which] = forward_ad.make_dual(xs[which], inputs.tangents[which])
        own = [split_tokens(x, mesh) for x in xs]
        ours = forward_ad.unpack_dual(
            gather_tokens(context_parallel_attention(*own, mesh=mesh, total_tokens=9), mesh, 9)
        ).tangent.clone()
    _, truth = torch.func.jvp(lambda *x: plain_attention(*x, case, None), tuple(inputs.primals), tuple(tangents))
    plain = (inputs.primals[0], text[1], text[2])
    moves = tuple(t[:, : x.shape[1]] for t, x in zip(tangents, plain, strict=True))
    _, truth_cross = torch.func.jvp(lambda *x: plain_attention(*x, case, None), plain, moves)
    with torch.no_grad():
        _, ours_cross = torch.func.jvp(cross_attention, plain, moves)
    return max(relative_error(a, b) for a, b in ((ours, truth), (ours_cross, truth_cross)))


def test_tangents_on_some_arguments(pools):
    for which in range(3):
        assert max(pools[4].run(_some_move, which)) < 1e-12, which


def _mistakes():
    mesh = build_mesh(cp=4, ulysses=2, heads=4)
    q, k, v = (torch.zeros(2, 5, 4, 8) for _ in range(3))
    mask = torch.ones(2, 17, dtype=torch.bool)
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    for name, args, settings in (
        ("total_tokens", (q, k, v), {"total_tokens": 100}),
        ("total_tokens", (q, k, v), {"total_tokens": None}),
        ("total_tokens", (q, k, v), {"total_tokens": 0}),
        (r"\bk\b", (q, k.bfloat16(), v), {}),
        (r"\bv\b", (q, k, v.to("meta")), {}),
        (r"\bk\b", (q, k[:, :3], v), {}),
        (r"\bq\b", (q[0], k, v), {}),
        (r"\bk\b", (q, k[..., :4], v[..., :4]), {}),
        (r"\bk\b", (q, k[:, :, :3], v[:, :, :3]), {}),
        (r"mesh\.ulysses", (q, k[:, :, :1], v[:, :, :1]), {}),
        (r"\bq\b", (q[:0], k[:0], v[:0]), {}),
        ("head_groups", (q, k, v), {"head_groups": 3}),
        ("head_groups", (q, k, v), {"head_groups": 0}),
        ("key_mask", (q, k, v), {"key_mask": mask[:, :3]}),
        ("key_mask", (q, k, v), {"key_mask": mask.float()}),
        ("mask", (q, k, v), {"mask": mask}),
        ("mask", (q, k, v), {"mask": block_causal((8, 8))}),
        ("backend", (q, k, v), {"backend": "flashy"}),
        ("backend", (q, k, v), {"backend": "flash"}),
        ("total_tokens", (q, k, v), {"joint": (q, k, v), "total_tokens": (8, 12)}),
        ("joint k", (q, k, v), {"joint": (q, k[:, :, :2], v)}),
        ("joint v", (q, k, v), {"joint": (q, k, v[:, :4])}),
        ("joint k", (q, k, v), {"joint": (q, k.bfloat16(), v)}),
        ("joint", (q, k, v), {"mesh": device_mesh, "joint": (q, k, v)}),
        ("mesh", (q, k, v), {"mesh": None}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            context_parallel_attention(*args, **{"mesh": mesh, "total_tokens": 17} | settings)
    for name, args, settings in (
        ("key_mask", (q, k[:, :3], v[:, :3]), {"key_mask": mask[:, :5]}),
        (r"\bk\b", (q, k[:, :0], v[:, :0]), {}),
        (r"\bk\b", (q, k[0, 0, 0], v), {}),
        ("mesh", (q, k, v), {"total_tokens": 17}),
    ):
        with pytest.raises(ValueError, match=name):
            cross_attention(*args, **settings)
    return True


def test_mistakes_are_refused_on_every_rank_before_anything_is_sent(pools):
    assert all(pools[4].run(_mistakes))


def _with_device_meshes():
    case = Case(ring=2, ulysses=2, tokens=(9,))
    inputs = make_inputs(case)
    truth, worst = oracle(case)[0], 0.0
    for sizes, names in (((2, 2), ("ring", "ulysses")), ((4,), ("ring",)), ((4,), ("ulysses",))):
        axes = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        mesh = build_mesh(cp=4, heads=4)
        own = [split_tokens(x, mesh) for x in inputs.primals]
        full = gather_tokens(context_parallel_attention(*own, mesh=axes, total_tokens=9), mesh, 9)
        worst = max(worst, relative_error(full, truth))
    return worst


def test_any_device_mesh_of_ring_and_ulysses(pools):
    assert max(pools[4].run(_with_device_meshes)) < 1e-12


def _strided(ulysses):
    """Return q, k, v whose last dimension is not contiguous, as some projections produce them."""
    mesh = build_mesh(cp=2, ulysses=ulysses, heads=2)
    case = Case(ring=2 // ulysses, ulysses=ulysses, tokens=(8,), heads=2, kv_heads=2)
    inputs, truth = make_inputs(case), oracle(case)
    leaves = [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in inputs.primals]
    own = [x[:, mesh.cp_rank * 4 : mesh.cp_rank * 4 + 4] for x in leaves]
    assert all(x.stride(-1) != 1 for x in own)
    out = gather_tokens(context_parallel_attention(*own, mesh=mesh, total_tokens=8), mesh)
    text = cross_attention(leaves[0], own[1], own[2])
    plain = plain_attention(inputs.primals[0], *(x[:, mesh.cp_rank * 4 : mesh.cp_rank * 4 + 4]
                                                 for x in inputs.primals[1:]), case, None)  # fmt: skip
    (out * inputs.weight).sum().backward()
    grads = [x.grad.contiguous() for x in leaves]
    for grad in grads:
        dist.all_reduce(grad)
    pairs = zip((out, *grads, text), (*truth[:4], plain), strict=True)
    return max(relative_error(a, b) for a, b in pairs)


def test_inputs_whose_last_dimension_is_not_contiguous(pools):
    for ulysses in (1, 2):
        assert max(pools[2].run(_strided, ulysses)) < 1e-12, ulysses


def _anomaly():
    mesh = build_mesh(cp=2, heads=2)
    q = torch.randn(1, 2048, 2, 16, requires_grad=True)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=True):
        warnings.simplefilter("ignore")
        for _ in range(3):
            context_parallel_attention(q, q, q, mesh=mesh, total_tokens=4096, head_groups=1).sum().backward()
    return True


@slow
def test_anomaly_mode_sees_no_gradient_that_is_still_on_its_way(pools):
    assert all(pools[2].run(_anomaly))


def _early_stop():
    """Stop a recomputation inside its last exchange, as checkpointing does once it has what backward needs."""
    mesh = build_mesh(cp=2, heads=4)
    x = torch.randn(1, 64, 4, 16, requires_grad=True)

    def region(x):
        return context_parallel_attention(x, x, x, mesh=mesh, total_tokens=128, head_groups=2)

    counts = []
    for _ in range(3):
        checkpoint(region, x, use_reentrant=False).square().sum().backward()
        counts.append(torch._C._distributed_c10d._get_work_registry_size())
    return counts


def test_no_exchange_is_left_behind(pools):
    for counts in pools[2].run(_early_stop):
        assert counts == [0, 0, 0]


def _autocast():
    mesh = build_mesh(cp=2, heads=2)
    q, k, v = (torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    own = [split_tokens(x, mesh) for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = context_parallel_attention(own[0].bfloat16(), own[1], own[2], mesh=mesh, total_tokens=6)
        text = cross_attention(own[0], k, v)
    low, tangents = [x.bfloat16() for x in own], []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.sin()) for x in low]
            out = context_parallel_attention(*duals, mesh=mesh, total_tokens=6)
            tangents.append(forward_ad.unpack_dual(out).tangent.clone())
    assert torch.equal(*tangents), "the derivative is as precise under autocast"
    return mixed.dtype, torch.equal(mixed, context_parallel_attention(*low, mesh=mesh, total_tokens=6)), text.dtype


def test_autocast_as_for_torchs_own_attention(pools):
    assert pools[2].run(_autocast) == [(torch.bfloat16, True, torch.bfloat16)] * 2


@slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_ring_of_8_is_as_precise_as_one_kernel(pools, dtype):
    """Chunks are merged in fp32, so 8 of them cost no more than 1.3 times the error of one kernel over all tokens."""
    common = {"tokens": (400,), "heads": 2, "kv_heads": 2, "head_dim": 32, "batch": 1, "dtype": dtype}
    one, ring = Case(**common), Case(**common, ring=8)
    truth = oracle(one)
    single, merged = (errors(pools[case.world].run(on_ranks, case)[0], truth, case) for case in (one, ring))
    for name, error in merged.items():
        assert error <= 1.3 * single[name], (name, error, single[name])
