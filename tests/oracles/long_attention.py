"""Attention written out in float64 for some queries of a long sequence, piece by piece, and its inputs."""

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative errors up to which a contender counts as correct. The flash kernel's errors are 5e-7 and 4e-3."""


def exact_attention(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return output and dq ``(B, Sq, H, D)``, and these queries' parts of dk and dv ``(B, Sk, H, D)``, in float64."""
    q, k, v, grad = (x.detach().double().transpose(1, 2) for x in (q, k, v, grad))
    out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = q.shape[-1] ** -0.5
    for head in range(q.shape[1]):
        for start in range(0, q.shape[2], 256):
            at = (slice(None), head, slice(start, start + 256))
            p = (q[at] @ k[:, head].mT * scale).softmax(-1)
            out[at] = p @ v[:, head]
            dp = grad[at] @ v[:, head].mT
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            dq[at] = ds @ k[:, head] * scale
            dk[:, head] += ds.mT @ q[at] * scale
            dv[:, head] += p.mT @ grad[at]
    return [x.transpose(1, 2) for x in (out, dq, dk, dv)]


def exact_tangent(q: Tensor, k: Tensor, v: Tensor, *tangents: Tensor) -> Tensor:
    """Return the tangent of the output of these queries, in float64."""
    q, k, v, tq, tk, tv = (x.double().transpose(1, 2) for x in (q, k, v, *tangents))
    scale = q.shape[-1] ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    ts = (tq @ k.mT + q @ tk.mT) * scale
    return ((p * (ts - (p * ts).sum(-1, keepdim=True))) @ v + p @ tv).transpose(1, 2)


def random_inputs(count: int, tokens: int, heads: int, head_dim: int, device: str = "cpu") -> list[Tensor]:
    """Return normal random tensors whose values are exact in bf16, so that one oracle serves every dtype."""
    generator = torch.Generator(device).manual_seed(tokens)
    shape = (1, tokens, heads, head_dim)
    return [torch.randn(shape, generator=generator, device=device).bfloat16().float() for _ in range(count)]
