"""Memory of attention on a rank: the forward-mode derivative is linear in tokens, backward keeps no second copy."""

import time

import pytest
import torch
from torch.autograd import forward_ad

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.local_ranks import run_ranks
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.mesh import build_mesh

HEADS, DIM = 2, 8


def _derivative(ring, ulysses, counts):
    mesh = build_mesh(cp=ring * ulysses, ulysses=ulysses, heads=HEADS)
    peaks = []
    for tokens in counts:
        local = tokens // (ring * ulysses)
        q, k, v, *tangents = (torch.randn(1, local, HEADS, DIM) for _ in range(6))
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip((q, k, v), tangents, strict=True)]
            with LiveStorages() as live:
                context_parallel_attention(*duals, mesh=mesh)
        peaks.append(live.peak_bytes)
    return peaks


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 2)])
def test_the_derivative_takes_memory_linear_in_tokens(ring, ulysses):
    counts = [1024, 2048, 4096, 8192]
    for peaks in run_ranks(ring * ulysses, _derivative, ring, ulysses, counts):
        assert all(b <= 2 * a for a, b in zip(peaks, peaks[1:], strict=False)), peaks
        # The attention matrix of one head alone would be four times as large.
        assert peaks[-1] < (counts[-1] / (ring * ulysses)) ** 2, peaks


def _kept(ring, ulysses, tokens):
    mesh = build_mesh(cp=ring * ulysses, ulysses=ulysses, heads=HEADS)
    q, k, v = (torch.randn(1, tokens, HEADS, DIM, requires_grad=True) for _ in range(3))
    with LiveStorages() as live:
        out = context_parallel_attention(q, k, v, mesh=mesh)
    time.sleep(0.5)  # gloo's threads let go of a message a little later than they report it
    return live.bytes / (out.numel() * 4)


@pytest.mark.parametrize(("ring", "ulysses", "bound"), [(1, 1, 1), (2, 1, 1), (1, 2, 5), (2, 2, 5)])
def test_what_backward_keeps(ring, ulysses, bound):
    """In units of the output: itself (a ring alone keeps its inputs); after an all-to-all, also q, k and v and the
    output before the one back. And the log-sum-exp, 1 / head_dim of it."""
    for kept in run_ranks(ring * ulysses, _kept, ring, ulysses, 512):
        assert kept <= bound + 1.01 / DIM, kept
