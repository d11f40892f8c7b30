"""Choice between the two implementations of attention with its forward-mode derivative.

The fused Triton kernel (:mod:`fsdp_cp.attention.kernels.triton_dual`) runs only on CUDA. Chunked torch
(:mod:`fsdp_cp.attention.kernels.reference`) runs on every device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_cp.attention.kernels import reference
from fsdp_cp.attention.kernels.reference import Dual
from fsdp_cp.attention.operators import group_by_name
from fsdp_cp.measure.fake_world import device_type, is_fake
from fsdp_cp.mesh import ContextGroups

log = logging.getLogger("fsdp_cp.attention")

AttendDual = Callable[..., Dual]
"""Function with the arguments and results of :func:`fsdp_cp.attention.kernels.reference.attention_dual`."""
FUSED_DTYPES, FUSED_HEAD_DIM = (torch.bfloat16, torch.float16), 128
"""Dtypes that the fused kernel takes on CUDA, and its largest head size."""
_TOLERANCE = 2e-2
"""Relative difference that the self-check allows: both implementations round probabilities to half precision."""


def choose_dual(backend: str, q: Tensor, groups: ContextGroups) -> AttendDual:
    """Return the implementation that computes attention with tangents for queries like ``q``.

    On CUDA, ``auto`` selects the fused kernel if it passes a self-check on every rank of the ``cp`` axis. The check
    runs once per device, dtype and head size. All ranks of the axis must call this function.

    Raises:
        ValueError: ``backend`` names a kernel without a forward-mode derivative.
    """
    if backend not in ("auto", "reference"):
        raise ValueError(f"backend={backend!r} has no forward-mode derivative (JVP); use backend='auto' or 'reference'")
    fits = device_type(q) == "cuda" and q.dtype in FUSED_DTYPES and q.shape[-1] <= FUSED_HEAD_DIM
    if backend == "reference" or not fits:
        return reference.attention_dual
    if is_fake(q):
        return _fused_shapes
    return _fused_on_all_ranks(q.device, q.dtype, q.shape[-1], groups) or reference.attention_dual


@lru_cache(maxsize=64)
def _fused_on_all_ranks(
    device: torch.device, dtype: torch.dtype, head_dim: int, groups: ContextGroups
) -> AttendDual | None:
    """Return the fused kernel if its self-check passes on all ranks of ``groups``; else log why and return None."""
    fused, problem = _checked(device, dtype, head_dim)
    agreed = torch.tensor(int(problem is None), device=device)
    for group, size in ((groups.ulysses_group, groups.ulysses_size), (groups.ring_group, groups.ring_size)):
        if size > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group_by_name(group))
    if agreed.item():
        log.info("attention with derivatives: the fused Triton kernel for %s, head size %d", dtype, head_dim)
        return fused
    reason = problem or "it failed on another rank"
    log.warning("attention with derivatives: chunked torch for %s, not the fused Triton kernel: %s", dtype, reason)
    return None


def _checked(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[AttendDual | None, str | None]:
    """Compare the fused kernel with chunked torch on a small case. Return ``(kernel, None)`` or ``(None, reason)``."""
    try:
        from fsdp_cp.attention.kernels.triton_dual import attention_dual

        generator = torch.Generator().manual_seed(0)  # the global generator's state belongs to the run
        sizes = [(2, 150, 4, head_dim), *[(2, 200, 2, head_dim)] * 2] * 2
        tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
        mask = (torch.rand(2, 200, generator=generator) < 0.8).to(device)
        chunked: AttendDual = reference.attention_dual
        fused: AttendDual = attention_dual
        expected, computed = (attend(*tensors, mask, head_dim**-0.5) for attend in (chunked, fused))
    except Exception as error:  # Triton is missing or too old, or its compiler fails: fall back to chunked torch
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for name, a, b in zip(Dual._fields, computed, expected, strict=True):
        assert a is not None and b is not None
        difference = float((a - b).norm() / b.norm())
        if not difference < _TOLERANCE:
            return None, f"its {name} is off by {difference:.1e} in the self-check"
    return fused, None


def _fused_shapes(q: Tensor, *_: object) -> Dual:
    """Stand in for the fused kernel on fake tensors, with the same allocations."""
    batch, queries, heads, head_dim = q.shape
    out = q.new_empty((batch, queries, heads, head_dim), dtype=torch.float32)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    return Dual(out, lse, torch.empty_like(out), torch.empty_like(lse))
