"""Splitting and gathering of tokens, against plain slicing in one process, forward and backward."""

import pytest
import torch

from fsdp_cp.errors import UserError
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import gather_tokens, split_tokens


def _tensors(total, dim):
    generator = torch.Generator().manual_seed(total + dim)
    shape = [2, 3, 5]
    shape[dim] = total
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def _split_and_gather(world, total, dim):
    mesh = build_mesh(cp=world)
    x, weight, _ = _tensors(total, dim)
    x.requires_grad_()
    local = split_tokens(x, mesh, dim)
    own_storage = local.untyped_storage().nbytes() == local.numel() * 8
    full = gather_tokens(local.sin(), mesh, total, dim)
    (full * weight).sum().backward()
    return local.detach(), full.detach(), x.grad, own_storage


@pytest.mark.parametrize(("world", "total", "dim"), [(1, 5, 1), (2, 6, 1), (3, 12, 0), (4, 8, 2)])
def test_split_gather_and_their_gradients(world, total, dim):
    x, weight, _ = _tensors(total, dim)
    ranks = run_ranks(world, _split_and_gather, world, total, dim)
    expected = torch.cos(x) * weight
    for rank, (local, full, grad, own_storage) in enumerate(ranks):
        start = rank * total // world
        torch.testing.assert_close(local, x.narrow(dim, start, total // world), rtol=0, atol=0)
        torch.testing.assert_close(full, x.sin(), rtol=1e-15, atol=1e-15)
        # Each rank's gradient is the part that is its own; zeros elsewhere. Their sum is the gradient.
        partial = torch.zeros_like(x)
        partial.narrow(dim, start, total // world).copy_(expected.narrow(dim, start, total // world))
        torch.testing.assert_close(grad, partial, rtol=1e-15, atol=1e-15)
        assert world == 1 or own_storage, "a view would keep the full sequence alive"


def _uneven(world, total):
    mesh = build_mesh(cp=world)
    with pytest.raises(UserError, match=r"mesh\.cp=3 does not divide the 8 tokens .* use a mesh\.cp among 1, 2, 4, 8"):
        split_tokens(torch.zeros(1, total), mesh)
    with pytest.raises(ValueError, match="total=8 is not 2 local tokens x cp=3"):
        gather_tokens(torch.zeros(1, 2), mesh, total=8)
    return True


def test_token_counts_that_cp_does_not_divide_are_refused():
    assert all(run_ranks(3, _uneven, 3, 8))
