"""Context-parallel attention against attention written out in float64 in one process."""

import pytest
import torch

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.mesh import build_mesh
from fsdp_cp.sequence import gather_tokens, split_tokens


def _inputs(tokens, heads):
    generator = torch.Generator().manual_seed(tokens * heads)
    return [torch.randn(2, tokens, heads, 6, generator=generator, dtype=torch.float64) for _ in range(4)]


def _oracle(tokens, heads, scale):
    q, k, v, weight = _inputs(tokens, heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    logits = torch.einsum("bshd,bthd->bhst", q, k) * (scale if scale is not None else 6**-0.5)
    out = torch.einsum("bhst,bthd->bshd", logits.softmax(-1), v)
    (out * weight).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def _attention(world, tokens, heads, scale):
    mesh = build_mesh(cp=world, heads=heads)
    q, k, v, weight = _inputs(tokens, heads)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    local = [split_tokens(x, mesh) for x in leaves]
    out = context_parallel_attention(*local, mesh=mesh, total_tokens=tokens, scale=scale)
    full = gather_tokens(out, mesh, tokens)
    (full * weight).sum().backward()
    return [full.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize(
    ("world", "tokens", "heads", "scale"),
    [(1, 7, 3, None), (2, 8, 4, None), (3, 12, 6, 0.3), (4, 8, 4, None), (4, 20, 12, None), (6, 18, 12, 0.7)],
)
def test_output_and_gradients(world, tokens, heads, scale):
    oracle = _oracle(tokens, heads, scale)
    ranks = run_ranks(world, _attention, world, tokens, heads, scale)
    for rank in ranks:
        assert torch.equal(rank[0], ranks[0][0])
    ours = [ranks[0][0], *(sum(rank[i] for rank in ranks) for i in (1, 2, 3))]
    for name, value, truth in zip(("out", "dq", "dk", "dv"), ours, oracle, strict=True):
        assert (value - truth).norm() <= 1e-12 * truth.norm(), name


def _forward_ad(world):
    mesh = build_mesh(cp=world, heads=4)
    q, k, v, t = (torch.randn(1, 3, 4, 6) for _ in range(4))
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(q, t)
        with pytest.raises((RuntimeError, NotImplementedError), match="forward"):
            context_parallel_attention(dual, k, v, mesh=mesh)
    with pytest.raises(ValueError, match=r"mesh\.ulysses=2 does not divide 3 heads"):
        context_parallel_attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], mesh=mesh)
    return True


def test_tangents_are_refused_rather_than_dropped():
    assert all(run_ranks(2, _forward_ad, 2))
