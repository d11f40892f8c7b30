"""Splitting and gathering of tokens, against plain slicing in one process: forward, backward, forward mode."""

import pytest
import torch
from torch.autograd import forward_ad

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import gather_tokens, local_token_count, local_token_range, split_tokens
from tests.tiers import slow, slow_case

# Tokens and dim, by ranks: uneven, fewer tokens than ranks, a rank without true tokens (5 on 4 ranks: 2 2 1 0).
CASES = {
    1: [(5, 1)], 2: [(6, 1), (7, 0), (1, 1)], 3: [(12, 0), (8, 1), (2, 2)], 4: [(5, 1), (3, -2)],
}  # fmt: skip


def _tensors(total, dim, dtype=torch.float64):
    """Return the sequence, its tangent, and a weight on the gathered sequence for each of 6 ranks."""
    generator = torch.Generator().manual_seed(total + 10 * dim)
    shape = [2, 3, 5]
    shape[dim] = total
    x, tangent = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, tangent, torch.randn(6, *shape, generator=generator, dtype=torch.float64).to(dtype)


def test_token_counts():
    assert [local_token_range(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    for total in range(1, 20):
        for cp in range(1, 9):
            local = local_token_count(total, cp)
            owned = [local_token_range(total, cp, rank) for rank in range(cp)]
            assert local * cp >= total > (local - 1) * cp
            assert [i for start, stop in owned for i in range(start, stop)] == list(range(total))
            assert all(stop - start <= local for start, stop in owned)
            assert all(start == min(rank * local, total) for rank, (start, _) in enumerate(owned))
    with pytest.raises(UserError):
        local_token_count(0, 2)


def _round_trip(x, mesh, total, dim):
    return gather_tokens(split_tokens(x, mesh, dim).sin() * 2, mesh, total, dim).cos()


def _all_modes(world, total, dim, dtype):
    """Return split and gathered tensors, gradients, the derivative, and whether the split tensor owns its storage."""
    mesh = build_mesh(cp=world)
    x, tangent, weights = _tensors(total, dim, dtype)
    leaf = x.clone().requires_grad_()
    local = split_tokens(leaf, mesh, dim)
    own_storage = local.untyped_storage().nbytes() == local.numel() * local.element_size()
    full = gather_tokens(local.sin(), mesh, total, dim)
    (full * weights[0]).sum().backward()
    # Each rank computes a different function of the gathered sequence.
    share = split_tokens(x, mesh, dim).requires_grad_()
    (gather_tokens(share, mesh, total, dim, partial_grad=True).sin() * weights[mesh.cp_rank]).sum().backward()
    with forward_ad.dual_level():
        with torch.no_grad():
            dual = forward_ad.unpack_dual(_round_trip(forward_ad.make_dual(x, tangent), mesh, total, dim))
        if world > 1:  # a tangent is never dropped silently
            with pytest.raises(RuntimeError, match="no_grad"):
                gather_tokens(forward_ad.make_dual(x.clone().requires_grad_(), tangent), mesh, dim=dim)
        plain = gather_tokens(split_tokens(x, mesh, dim), mesh, total, dim)
        assert forward_ad.unpack_dual(plain).tangent is None
    return (local.detach(), full.detach(), leaf.grad, share.grad, dual.tangent.clone()), own_storage


def _own(x, world, rank, dim):
    """Return the rank's slice padded with zeros, and the slice within zeros of the full shape."""
    (start, stop), total = local_token_range(x.shape[dim], world, rank), x.shape[dim]
    padded = x.narrow(dim, start, stop - start)
    shape = list(x.shape)
    shape[dim] = local_token_count(total, world) - (stop - start)
    mine = torch.zeros_like(x)
    mine.narrow(dim, start, stop - start).copy_(padded)
    return torch.cat((padded, x.new_zeros(shape)), dim), mine


@pytest.mark.parametrize("world", [n if n < 4 else slow_case(n) for n in CASES])
def test_split_gather_gradients_and_tangents(pools, world):
    """Each rank's gradient is nonzero only in its own slice, and the sum over ranks is the gradient."""
    for total, dim in CASES[world]:
        x, tangent, weights = _tensors(total, dim)
        _, derivative = torch.func.jvp(lambda x: (x.sin() * 2).cos(), (x,), (tangent,))
        ranks = pools[world].run(_all_modes, world, total, dim, torch.float64)
        for rank, ((local, full, grad, partial, dual), own_storage) in enumerate(ranks):
            torch.testing.assert_close(local, _own(x, world, rank, dim)[0], rtol=0, atol=0)
            torch.testing.assert_close(full, x.sin(), rtol=1e-15, atol=1e-15)
            torch.testing.assert_close(grad, _own(x.cos() * weights[0], world, rank, dim)[1], rtol=1e-15, atol=1e-15)
            summed = _own(x.cos() * weights[:world].sum(0), world, rank, dim)[0]
            torch.testing.assert_close(partial, summed, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(dual, derivative, rtol=1e-14, atol=1e-15)
            assert world == 1 or own_storage, "a view would keep the full sequence alive"


def test_bf16_moves_exactly(pools):
    x, _, weights = _tensors(7, 1, torch.bfloat16)
    for rank, ((local, full, grad, *_), _) in enumerate(pools[3].run(_all_modes, 3, 7, 1, torch.bfloat16)):
        assert local.dtype == full.dtype == grad.dtype == torch.bfloat16
        torch.testing.assert_close(local, _own(x, 3, rank, 1)[0], rtol=0, atol=0)
        torch.testing.assert_close(full, x.sin(), rtol=0, atol=0)
        torch.testing.assert_close(grad, _own(torch.cos(x) * weights[0], 3, rank, 1)[1], rtol=0, atol=0)


def _compiled(world, total):
    mesh = build_mesh(cp=world)
    x, tangent, weights = _tensors(total, 1)
    grads = []
    for function in (_round_trip, torch.compile(_round_trip, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        (function(leaf, mesh, total, 1) * weights[0]).sum().backward()
        grads.append(leaf.grad)
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(RuntimeError):
        torch.compile(gather_tokens, backend="eager")(forward_ad.make_dual(x, tangent), mesh, dim=1)
    return grads


@slow
def test_compiled_whole(pools):
    for eager, compiled in pools[3].run(_compiled, 3, 7):
        torch.testing.assert_close(compiled, eager, rtol=1e-15, atol=1e-15)


def _misfits():
    mesh = build_mesh(cp=3)
    for local, total in ((2, 8), (3, 4)):
        with pytest.raises(ValueError, match="total"):
            gather_tokens(torch.zeros(1, local), mesh, total=total)
    with pytest.raises(ValueError):
        split_tokens(torch.zeros(1, 0), mesh)
    return True


def test_misfits_are_refused(pools):
    assert all(pools[3].run(_misfits))
