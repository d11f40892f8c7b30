"""Kernels of sparse attention against attention written out in float64, and the self-checks at large logits.

``make test-triton`` runs the Triton kernels in Triton's interpreter, which shows what they compute in fp32.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from fsdp_cp.attention.kernels.kernel import CpuFlash, Kernel, Reference
from fsdp_cp.attention.kernels.self_check import LOGITS, check_sparse, hard_inputs, self_check
from fsdp_cp.attention.kernels.sparse import PLAIN_SPARSE
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.pieces import Chosen, cut
from fsdp_cp.attention.sparse import exact_scores
from fsdp_cp.tiles import Tiles

HAS_TRITON = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
KINDS = ["plain", pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="make test-triton"))]
CPU = torch.device("cpu")


def _kernels(kind):
    if kind == "plain":
        return PLAIN_SPARSE
    from fsdp_cp.attention.kernels import triton_sparse

    return triton_sparse.FUSED


def _chosen(grid, tile, dense):
    """Return a random choice of the pieces of one ring rank among those of another, and which tokens see which."""
    video = Tiles(grid, tile)
    layout = Layout((*dense, video.tokens), (*dense, video.tokens), ulysses=1, ring=2, tiles=video)
    queries, keys = cut(layout, CPU).of_rank
    allowed = torch.rand(2, 2, len(queries.sizes), len(keys.sizes), generator=torch.Generator().manual_seed(0)) < 0.4
    allowed &= keys.sizes > 0
    allowed[0, 0, :2] = False  # rows without a key
    of_token = [x.places // x.tokens.shape[1] for x in (queries, keys)]
    return Chosen(queries, keys, allowed, allowed.shape[-1]), allowed[:, :, of_token[0]][..., of_token[1]]


def _written_out(q, k, v, seen, scale):
    """Return output and log-sum-exp ``(B, S, H, D)``, ``(B, H, S)``; a row without a key has 0 and -inf."""
    logits = (torch.einsum("bshd,bthd->bhst", q, k) * scale).masked_fill(~seen, -torch.inf)
    dead = ~seen.any(-1, keepdim=True)
    lse = logits.masked_fill(dead, 0).logsumexp(-1).masked_fill(dead[..., 0], -torch.inf)
    p = logits.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return torch.einsum("bhst,bthd->bshd", p, v), lse


CASES = [
    # grid, tile, dense rows, head size
    ((5, 6, 7), (4, 4, 4), (), 64),
    ((3, 5, 4), (2, 2, 2), (5,), 12),
    ((3, 4, 9), (1, 2, 3), (40,), 24),
    ((2, 3, 3), (1, 1, 1), (), 128),
]


def _relative(a, b):
    return ((a.double() - b).norm() / b.norm().clamp_min(1e-6)).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, 8.0, 32.0])
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_float64(kind, size, case):
    """Pieces of 1 to 64 tokens, partial ones, rows without a key; gradients take a log-sum-exp over further keys."""
    grid, tile, dense, head_dim = case
    kernel, dual = _kernels(kind)
    chosen, seen = _chosen(grid, tile, dense)
    generator = torch.Generator().manual_seed(1)

    def draw(rows, factor=1.0):
        return torch.randn(2, rows, 2, head_dim, generator=generator) * factor

    rows, keys = seen.shape[2:]
    q, k, v, t_q, t_k, t_v = draw(rows, size), draw(keys, size), *map(draw, (keys, rows, keys, keys))
    g, scale = draw(rows), head_dim**-0.5
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    (out, lse), (t_out, _) = torch.func.jvp(
        lambda *x: _written_out(*x, seen, scale), tuple(wide), tuple(x.double() for x in (t_q, t_k, t_v))
    )
    bound = 2e-6 * size**2  # an error of 1e-7 in logits of size^2
    computed = dual(q, k, v, t_q, t_k, t_v, chosen, scale)
    assert _relative(computed.out, out) < bound and _relative(computed.t_out, t_out) < bound
    alive = lse > -torch.inf
    assert torch.equal(computed.lse > -torch.inf, alive)
    assert (computed.lse.double() - lse)[alive].abs().max() < bound
    plain_out, plain_lse = kernel.forward(q, k, v, chosen, scale)
    assert _relative(plain_out, out) < bound and torch.equal(plain_lse > -torch.inf, alive)
    # The keys of other ranks double each row's sum, and add 1 to its output.
    whole_lse, whole_out = lse + torch.tensor(2.0).log(), 0.5 * out + 1
    p = (torch.einsum("bshd,bthd->bhst", *wide[:2]) * scale - whole_lse[..., None]).exp().masked_fill(~seen, 0)
    delta = (g.double() * whole_out).sum(-1).transpose(1, 2)
    ds = p * (torch.einsum("bshd,bthd->bhst", g.double(), wide[2]) - delta[..., None]) * scale
    truth = [
        torch.einsum("bhst,bthd->bshd", ds, wide[1]),
        torch.einsum("bhst,bshd->bthd", ds, wide[0]),
        torch.einsum("bhst,bshd->bthd", p, g.double()),
    ]
    grads = kernel.backward(
        g, q, k, v, whole_out.float(), whole_lse.masked_fill(~alive, torch.inf).float(), chosen, scale
    )
    for name, a, b in zip("qkv", grads, truth, strict=True):
        assert _relative(a, b) < bound, name


class _RoundsKeys(Kernel):
    """Kernel that scales keys in their own dtype, before the product."""

    name = "rounds_keys"

    def __init__(self, inner):
        self.inner = inner

    def refuses(self, device, dtype, head_dim, masked):
        return None

    def forward(self, q, k, v, mask, scale):
        return self.inner.forward(q, k * scale, v, mask, 1.0)

    def backward(self, g, q, k, v, out, lse, mask, scale):
        dq, dk, dv = self.inner.backward(g, q, k * scale, v, out, lse, mask, 1.0)
        return dq, dk * scale, dv


@pytest.mark.parametrize("head_dim", [24, 96, 128])
def test_self_checks_see_keys_that_are_rounded_before_the_product(head_dim):
    q, k, *_ = hard_inputs(10, 12, 1, 1, head_dim)
    logits = torch.einsum("bshd,bthd->bhst", q, k) * head_dim**-0.5
    assert logits.min() > 100 and logits.mean() == pytest.approx(LOGITS, rel=0.1)
    for kernel in (CpuFlash(), Reference()):
        assert self_check(kernel, CPU, torch.bfloat16, head_dim) is None
        assert self_check(_RoundsKeys(kernel), CPU, torch.bfloat16, head_dim)
    for width in (1, 64):
        sizes = (CPU, torch.bfloat16, head_dim, width)
        assert check_sparse(PLAIN_SPARSE, *sizes) is None
        assert check_sparse(PLAIN_SPARSE._replace(kernel=_RoundsKeys(PLAIN_SPARSE.kernel)), *sizes)


@pytest.mark.skipif(not HAS_TRITON, reason="make test-triton")
def test_triton_kernels_pass_their_self_check():
    for head_dim, width, dtype in ((64, 64, torch.bfloat16), (128, 3, torch.float32)):
        assert check_sparse(_kernels("triton"), CPU, dtype, head_dim, width) is None


def test_scores_are_exact_for_any_part_of_the_rows():
    """Scores equal float64 to its rounding of 32 bits, and do not depend on how rows are split or summed."""
    generator = torch.Generator().manual_seed(0)
    for head_dim, size in ((4, 1.0), (128, 1e4), (256, 1e-6)):
        q, k = (torch.randn(1, 2, n, head_dim, generator=generator, dtype=torch.float64) * size for n in (9, 13))
        scores = exact_scores(q, k)
        largest = q.abs().amax(-1, keepdim=True) * k.abs().amax(-1)[:, :, None] * head_dim
        assert ((scores - q @ k.mT).abs() / largest).max() < 2.0**-29
        assert torch.equal(exact_scores(q[:, :, 3:5], k), scores[:, :, 3:5])
        order = torch.randperm(head_dim, generator=generator)
        assert torch.equal(exact_scores(q[..., order], k[..., order]), scores)
        assert torch.equal(exact_scores(q[:, :, :1] * 0, k), 0 * scores[:, :, :1])
    broken = k.clone()
    broken[0, 0, 1] = torch.nan
    assert exact_scores(q, broken)[0, 0, :, 1].isnan().all() and exact_scores(q, broken)[0, 1].isfinite().all()


def test_pairs_are_those_that_a_choice_computes():
    video = Tiles((4, 4, 8), (2, 2, 2))
    segments = (5, 9, video.tokens)
    tile_of, dense = torch.from_numpy(video.tile_of(segments)), video.dense_tiles(segments)
    chosen = torch.zeros(dense + video.count, dense + video.count, dtype=torch.bool)
    chosen[:, :dense] = chosen[:dense] = True
    chosen[dense:, dense : dense + 3] = True
    assert video.pairs(segments, 3) == (int(chosen[tile_of][:, tile_of].sum()), chosen.numel())
