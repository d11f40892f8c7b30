"""Choice of a local attention kernel, and of the implementation of attention with its forward-mode derivative.

Two implementations compute attention with its derivative: one fused Triton kernel
(:mod:`fsdp_cp.attention.kernels.triton_dual`), only on CUDA, and chunked torch
(:mod:`fsdp_cp.attention.kernels.kernel`), on every device.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_cp.attention.kernels.cuda import CUDA_KERNELS, preferred
from fsdp_cp.attention.kernels.kernel import CpuFlash, Dual, Kernel, Reference, attention_dual
from fsdp_cp.attention.kernels.self_check import check_dual, check_sparse, self_check
from fsdp_cp.attention.kernels.sparse import SparseReference, sparse_dual
from fsdp_cp.errors import UserError, first_line
from fsdp_cp.launch import local_rank
from fsdp_cp.measure.fake_world import device_type
from fsdp_cp.mesh import ContextGroups, group_by_name

log = logging.getLogger("fsdp_cp.attention")

AttendDual = Callable[..., Dual]
"""Function with the arguments and results of :func:`fsdp_cp.attention.kernels.kernel.attention_dual`."""
FUSED_DTYPES, FUSED_HEAD_DIM = (torch.bfloat16, torch.float16), 128
"""Dtypes that the fused kernel takes on CUDA, and its largest head size."""
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Reference())}
"""Every kernel by its name, installed or not."""
_checked_kernels: dict[tuple[str, torch.dtype, int], str | None] = {}
"""Results of :func:`prepare_kernels` by kernel, dtype and head size: ``None``, or why a kernel must not be used."""


@lru_cache(maxsize=256)
def _explain(name: str, what: str, why: str) -> None:
    """Log each choice once. Do not cache the choice itself: deterministic algorithms may be switched on later."""
    log.info("attention backend auto: %s for %s (%s)", name, what, why)


def check_backend(backend: str) -> None:
    """Refuse a ``backend`` that is neither ``"auto"`` nor the name of a kernel."""
    names = ("auto", *KERNELS)
    if backend not in names:
        raise UserError(f"backend={backend!r} is unknown; use {', '.join(names)}")


def choose_kernel(
    backend: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    masked: bool,
    tokens: int | None = None,
    gradients: bool = False,
) -> Kernel:
    """Return the kernel named ``backend``; for ``"auto"``, return the best that can run and log the reason once.

    It issues no collective, since ranks may call it at different moments.

    Args:
        tokens: number of queries or of keys of the call, the smaller one; ``None`` for a check, which logs nothing.
        gradients: whether the call is part of a forward and backward.
    """
    check_backend(backend)
    if backend != "auto":
        if reason := KERNELS[backend].refuses(device, dtype, head_dim, masked):
            able = [name for name, other in KERNELS.items() if not other.refuses(device, dtype, head_dim, masked)]
            raise UserError(f"backend={backend!r} {reason}; use auto or {', '.join(able)}")
        return KERNELS[backend]
    reasons: list[str] = []
    for name in (*(preferred(device) if device.type == "cuda" else ("cpu_flash",)), "reference"):
        kernel = KERNELS[name]
        reason = kernel.refuses(device, dtype, head_dim, masked) or kernel.slower_than_others(tokens or 0, gradients)
        if reason is None and kernel.checked_at_setup:
            reason = _checked_kernels.get((name, dtype, head_dim), "was not checked at setup (prepare_kernels)")
        if reason is None:
            if tokens is not None:
                kind = ", masked" * masked + ", with gradients" * gradients
                _explain(name, f"{dtype} on {device.type}{kind}", "; ".join(reasons) or "first choice")
            return kernel
        reasons.append(f"{name} {reason}")
    raise UserError(f"no attention kernel takes q of {dtype} on {device.type}: {'; '.join(reasons)}; cast q, k and v")


def prepare_kernels(backend: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compile and check the kernels that need it, before the first step. A collective of all ranks.

    ``auto`` takes such a kernel only if its self-check passed on every rank. Compiled kernels are kept on the disk, so
    one process of each node compiles first and the others load the result. If ``backend`` names a kernel that failed on
    some rank, all ranks raise a ``UserError``.
    """
    if device.type != "cuda":  # not by what is installed or by the GPU: all ranks must decide the same
        return
    for kernel in KERNELS.values():
        if kernel.checked_at_setup and backend in ("auto", kernel.name):
            _check_on_all_ranks(kernel, device, dtype, head_dim, required=backend != "auto")


def _check_on_all_ranks(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, required: bool = False
) -> None:
    """Store the reason why ``kernel`` must not be used, the same on all ranks. A collective."""
    from fsdp_cp.reduce import on_all_ranks  # lazily: DTensor takes most of the time of --help

    if (key := (kernel.name, dtype, head_dim)) in _checked_kernels:
        return
    problem: str | None = None
    for turn in (True, False):
        mine = (local_rank() == 0) is turn
        problems = on_all_ranks(partial(self_check, kernel, device, dtype, head_dim) if mine else lambda: None)
        problem = problem or next((f"{text}, on rank {i}" for i, text in enumerate(problems) if text), None)
    if problem is not None and required:
        raise UserError(f"attention.backend={kernel.name} {problem}; use auto")
    _checked_kernels[key] = problem


def choose_dual(backend: str, q: Tensor, groups: ContextGroups) -> AttendDual:
    """Return the implementation that computes attention with tangents for queries like ``q``.

    On CUDA, ``auto`` selects the fused kernel if it passes a self-check on every rank of the ``cp`` axis. The check
    runs once per device, dtype and head size. All ranks of the axis must call this function.
    """
    if backend not in ("auto", "reference"):
        raise ValueError(f"backend={backend!r} has no forward-mode derivative (JVP); use backend='auto' or 'reference'")
    fits = device_type(q) == "cuda" and q.dtype in FUSED_DTYPES and q.shape[-1] <= FUSED_HEAD_DIM
    if backend == "reference" or not fits:
        return attention_dual
    if isinstance(q, FakeTensor):
        return _fused_shapes
    return _fused_on_all_ranks(q.device, q.dtype, q.shape[-1], groups) or attention_dual


class SparseKernels(NamedTuple):
    """Implementations of attention to chosen pieces: forward and backward, and the derivative."""

    kernel: Kernel
    dual: AttendDual


PLAIN_SPARSE = SparseKernels(SparseReference(), sparse_dual)


def choose_sparse(backend: str, q: Tensor, width: int) -> SparseKernels:
    """Return the kernels of attention to chosen pieces, of up to ``width`` tokens, for queries like ``q``.

    On CUDA, ``auto`` selects the Triton kernels if they pass a self-check on this rank, once per device, dtype and
    sizes. Ranks may differ: their results merge alike, and no kernel communicates.
    """
    check_sparse_backend(backend)
    fits = q.dtype in (*FUSED_DTYPES, torch.float32) and max(q.shape[-1], width) <= FUSED_HEAD_DIM
    if backend == "reference" or device_type(q) != "cuda" or not fits:
        return PLAIN_SPARSE
    if isinstance(q, FakeTensor):
        return PLAIN_SPARSE._replace(dual=_fused_shapes)
    return _checked_sparse(q.device, q.dtype, q.shape[-1], width)


@lru_cache(maxsize=64)
def _checked_sparse(device: torch.device, dtype: torch.dtype, head_dim: int, width: int) -> SparseKernels:
    """Return the Triton kernels of sparse attention if they pass their check; else log why, and return plain torch."""
    try:
        from fsdp_cp.attention.kernels import triton_sparse

        fused = SparseKernels(triton_sparse.SparseTriton(), triton_sparse.sparse_dual)
        problem = check_sparse(*fused, device, dtype, head_dim, width)
    except Exception as error:  # Triton is missing or too old, or its compiler fails
        problem = f"{type(error).__name__}: {first_line(error)}"
    if problem is None:
        log.info("sparse attention: Triton kernels for %s, head size %d", dtype, head_dim)
        return fused
    log.warning("sparse attention: plain torch for %s, not the Triton kernels: %s", dtype, problem)
    return PLAIN_SPARSE


def check_sparse_backend(backend: str) -> None:
    """Refuse a ``backend`` that sparse attention does not have."""
    if backend not in ("auto", "reference"):
        raise UserError(f"backend={backend!r} has no sparse attention; use auto or reference")


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
    """Check the fused kernel. Return ``(kernel, None)`` or ``(None, reason)``."""
    try:
        from fsdp_cp.attention.kernels import triton_dual

        fused: AttendDual = triton_dual.attention_dual
        return fused, check_dual(fused, device, dtype, head_dim)
    except Exception as error:  # Triton is missing or too old, or its compiler fails: fall back to chunked torch
        return None, f"{type(error).__name__}: {first_line(error)}"


def _fused_shapes(q: Tensor, *_: object) -> Dual:
    """Stand in for the fused kernel on fake tensors, with the same allocations."""
    batch, queries, heads, head_dim = q.shape
    out = q.new_empty((batch, queries, heads, head_dim), dtype=torch.float32)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    return Dual(out, lse, torch.empty_like(out), torch.empty_like(lse))
