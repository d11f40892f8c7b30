"""Splitting and gathering of tokens, against plain slicing in one process: forward, backward, forward mode."""

import pytest
import torch
from torch.autograd import forward_ad

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import gather_tokens, local_token_count, local_token_range, split_tokens

CASES = [  # ranks, tokens, dim: uneven, fewer tokens than ranks, a rank without true tokens (5 on 4 ranks: 2 2 1 0)
    (1, 5, 1), (2, 6, 1), (2, 7, 0), (2, 1, 1), (3, 12, 0), (3, 8, 1), (3, 2, 2), (4, 8, 2), (4, 5, 1), (4, 3, -2),
    (6, 4, 1), (6, 13, 0),
]  # fmt: skip


def _tensors(total, dim, dtype=torch.float64):
    """The sequence, its tangent, and a weight on the gathered sequence for each of 6 ranks."""
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
    with pytest.raises(UserError, match="0 tokens cannot be split; use one of at least 1"):
        local_token_count(0, 2)


def _split_and_gather(world, total, dim, dtype):
    mesh = build_mesh(cp=world)
    x, _, weights = _tensors(total, dim, dtype)
    x.requires_grad_()
    local = split_tokens(x, mesh, dim)
    own_storage = local.untyped_storage().nbytes() == local.numel() * local.element_size()
    full = gather_tokens(local.sin(), mesh, total, dim)
    (full * weights[0]).sum().backward()
    return local.detach(), full.detach(), x.grad, own_storage


def _own(x, world, rank, dim):
    """The rank's own slice, padded with zeros; and the same with zeros elsewhere, in the full shape."""
    (start, stop), total = local_token_range(x.shape[dim], world, rank), x.shape[dim]
    padded = x.narrow(dim, start, stop - start)
    shape = list(x.shape)
    shape[dim] = local_token_count(total, world) - (stop - start)
    mine = torch.zeros_like(x)
    mine.narrow(dim, start, stop - start).copy_(padded)
    return torch.cat((padded, x.new_zeros(shape)), dim), mine


@pytest.mark.parametrize(("world", "total", "dim"), CASES)
def test_split_gather_and_their_gradients(pools, world, total, dim):
    x, _, weights = _tensors(total, dim)
    expected = torch.cos(x) * weights[0]
    ranks = pools[world].run(_split_and_gather, world, total, dim, torch.float64)
    for rank, (local, full, grad, own_storage) in enumerate(ranks):
        torch.testing.assert_close(local, _own(x, world, rank, dim)[0], rtol=0, atol=0)
        torch.testing.assert_close(full, x.sin(), rtol=1e-15, atol=1e-15)
        # Each rank's gradient is the part that is its own; zeros elsewhere. Their sum is the gradient.
        torch.testing.assert_close(grad, _own(expected, world, rank, dim)[1], rtol=1e-15, atol=1e-15)
        assert world == 1 or own_storage, "a view would keep the full sequence alive"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_move_exactly(pools, dtype):
    x, _, weights = _tensors(7, 1, dtype)
    for rank, (local, full, grad, _) in enumerate(pools[3].run(_split_and_gather, 3, 7, 1, dtype)):
        assert local.dtype == full.dtype == grad.dtype == dtype
        torch.testing.assert_close(local, _own(x, 3, rank, 1)[0], rtol=0, atol=0)
        torch.testing.assert_close(full, x.sin(), rtol=0, atol=0)
        torch.testing.assert_close(grad, _own(torch.cos(x) * weights[0], 3, rank, 1)[1], rtol=0, atol=0)


def _partial(world, total, dim):
    mesh = build_mesh(cp=world)
    x, _, weights = _tensors(total, dim)
    local = split_tokens(x, mesh, dim).requires_grad_()
    full = gather_tokens(local, mesh, total, dim, partial_grad=True)
    (full.sin() * weights[mesh.cp_rank]).sum().backward()
    return local.grad


@pytest.mark.parametrize(("world", "total", "dim"), CASES)
def test_gather_into_split_computation(pools, world, total, dim):
    """Each rank has a function of its own of the gathered sequence; the gradient is that of their sum."""
    x, _, weights = _tensors(total, dim)
    x.requires_grad_()
    (x.sin() * weights[:world].sum(0)).sum().backward()
    for rank, grad in enumerate(pools[world].run(_partial, world, total, dim)):
        torch.testing.assert_close(grad, _own(x.grad, world, rank, dim)[0], rtol=1e-14, atol=1e-14)


def _round_trip(x, mesh, total, dim):
    return gather_tokens(split_tokens(x, mesh, dim).sin() * 2, mesh, total, dim).cos()


def _forward_mode(world, total, dim):
    mesh = build_mesh(cp=world)
    x, tangent, _ = _tensors(total, dim)
    with forward_ad.dual_level():
        with torch.no_grad():
            out = forward_ad.unpack_dual(_round_trip(forward_ad.make_dual(x, tangent), mesh, total, dim))
        if world > 1:  # never a tangent that is silently dropped
            with pytest.raises(RuntimeError, match=r"compute it under torch\.no_grad"):
                gather_tokens(forward_ad.make_dual(x.clone().requires_grad_(), tangent), mesh, dim=dim)
            with torch.no_grad(), pytest.raises(RuntimeError, match="no forward-mode AD in a compiled graph"):
                torch.compile(gather_tokens, backend="eager")(forward_ad.make_dual(x, tangent), mesh, dim=dim)
        plain = gather_tokens(split_tokens(x, mesh, dim), mesh, total, dim)
        assert forward_ad.unpack_dual(plain).tangent is None
    return out.primal, out.tangent


@pytest.mark.parametrize(("world", "total", "dim"), CASES)
def test_forward_mode(pools, world, total, dim):
    x, tangent, _ = _tensors(total, dim)
    primal, derivative = torch.func.jvp(lambda x: (x.sin() * 2).cos(), (x,), (tangent,))
    for out, tangent_out in pools[world].run(_forward_mode, world, total, dim):
        torch.testing.assert_close(out, primal, rtol=1e-15, atol=1e-15)
        torch.testing.assert_close(tangent_out, derivative, rtol=1e-14, atol=1e-15)


def _compiled(world, total):
    mesh = build_mesh(cp=world)
    x, _, weights = _tensors(total, 1)
    grads = []
    for function in (_round_trip, torch.compile(_round_trip, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        (function(leaf, mesh, total, 1) * weights[0]).sum().backward()
        grads.append(leaf.grad)
    return grads


def test_compiled_whole(pools):
    for eager, compiled in pools[3].run(_compiled, 3, 7):
        torch.testing.assert_close(compiled, eager, rtol=1e-15, atol=1e-15)


def _misfits():
    mesh = build_mesh(cp=3)
    with pytest.raises(ValueError, match="total=8 tokens on cp=3 ranks are 3 on each, but here are 2"):
        gather_tokens(torch.zeros(1, 2), mesh, total=8)
    with pytest.raises(ValueError, match="total=4 tokens on cp=3 ranks are 2 on each, but here are 3"):
        gather_tokens(torch.zeros(1, 3), mesh, total=4)
    with pytest.raises(ValueError, match="0 tokens"):
        split_tokens(torch.zeros(1, 0), mesh)
    return True


def test_misfits_are_refused(pools):
    assert all(pools[3].run(_misfits))
