"""Memory of attention on a rank: the forward-mode derivative is linear in tokens, backward keeps no second copy."""

import time

import pytest
import torch
from torch.autograd import forward_ad

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.mesh import build_mesh

HEADS, DIM = 2, 8


def _derivative(counts):
    mesh = build_mesh(cp=2, ulysses=1, heads=HEADS)
    peaks = []
    for tokens in counts:
        q, k, v, *tangents = (torch.randn(1, tokens // 2, HEADS, DIM) for _ in range(6))
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip((q, k, v), tangents, strict=True)]
            with LiveStorages() as live:
                context_parallel_attention(*duals, mesh=mesh, total_tokens=tokens)
        peaks.append(live.peak_bytes)
    return peaks


@pytest.mark.slow
def test_the_derivative_takes_memory_linear_in_tokens(pools):
    counts = [1024, 2048, 4096]
    for peaks in pools[2].run(_derivative, counts):
        assert all(b <= 2 * a for a, b in zip(peaks, peaks[1:], strict=False)), peaks
        assert peaks[-1] < 4 * (counts[-1] / 2) ** 2, "one head's attention matrix in fp32"


def _kept(ulysses, tokens):
    mesh = build_mesh(cp=2, ulysses=ulysses, heads=HEADS)
    q, k, v = (torch.randn(1, tokens, HEADS, DIM, requires_grad=True) for _ in range(3))
    with LiveStorages() as live:
        out = context_parallel_attention(q, k, v, mesh=mesh, total_tokens=2 * tokens)
    time.sleep(0.5)  # gloo's threads free a message a little after they report it done
    return live.bytes / (out.numel() * 4)


@pytest.mark.parametrize(("ulysses", "bound"), [(1, 1), (2, 5)])
def test_backward_keeps_no_second_copy(pools, ulysses, bound):
    """A ring keeps only the output.

    After an all-to-all, attention also keeps q, k, v and the output before the second all-to-all. The log-sum-exp adds
    1 / head_dim of the output.
    """
    for kept in pools[2].run(_kept, ulysses, 512):
        assert kept <= bound + 1.01 / DIM, kept
