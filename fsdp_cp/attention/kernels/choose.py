"""Choice of a local attention kernel, and of the implementation of attention with its forward-mode derivative.

Two implementations compute attention with its derivative: one fused Triton kernel
(:mod:`fsdp_cp.attention.kernels.triton_dual`), only on CUDA, and chunked torch
(:mod:`fsdp_cp.attention.kernels.kernel`), on every device.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_cp.attention.kernels.cuda import CUDA_KERNELS, preferred
from fsdp_cp.attention.kernels.kernel import CpuFlash, Dual, Kernel, Reference, attention_dual
from fsdp_cp.attention.kernels.self_check import check_dual, check_sparse, self_check
from fsdp_cp.attention.kernels.sparse import PLAIN_SPARSE, SparseKernels
from fsdp_cp.errors import UserError, first_line
from fsdp_cp.launch import local_rank
from fsdp_cp.measure.fake_world import device_type

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


def choose_dual(backend: str, q: Tensor) -> AttendDual:
    """Return the implementation that computes attention with tangents for queries like ``q``.

    On CUDA, ``auto`` selects the fused kernel if it passes a self-check on this rank, once per device, dtype and head
    size. Ranks may differ: their results merge alike, and no kernel communicates.
    """
    if backend not in ("auto", "reference"):
        raise ValueError(f"backend={backend!r} has no forward-mode derivative (JVP); use backend='auto' or 'reference'")
    fits = device_type(q) == "cuda" and q.dtype in FUSED_DTYPES and q.shape[-1] <= FUSED_HEAD_DIM
    if backend == "reference" or not fits:
        return attention_dual
    if isinstance(q, FakeTensor):
        return _fused_shapes
    return _fused("triton_dual", check_dual, q.device, q.dtype, q.shape[-1]) or attention_dual


def choose_sparse(backend: str, q: Tensor, width: int) -> SparseKernels:
    """Return the kernels of attention to chosen pieces, of up to ``width`` tokens, for queries like ``q``.

    ``auto`` selects the Triton kernels as :func:`choose_dual` does.
    """
    check_sparse_backend(backend)
    fits = q.dtype in (*FUSED_DTYPES, torch.float32) and max(q.shape[-1], width) <= FUSED_HEAD_DIM
    if backend == "reference" or device_type(q) != "cuda" or not fits:
        return PLAIN_SPARSE
    if isinstance(q, FakeTensor):
        return PLAIN_SPARSE._replace(dual=_fused_shapes)
    return _fused("triton_sparse", check_sparse, q.device, q.dtype, q.shape[-1], width) or PLAIN_SPARSE


def check_sparse_backend(backend: str) -> None:
    """Refuse a ``backend`` that sparse attention does not have."""
    if backend not in ("auto", "reference"):
        raise UserError(f"backend={backend!r} has no sparse attention; use auto or reference")


@lru_cache(maxsize=64)
def _fused(module: str, check: Callable[..., str | None], *sizes: Any) -> Any:
    """Return ``FUSED`` of a module of Triton kernels if it passes its ``check``; else log why, and return ``None``."""
    try:
        fused = import_module(f"fsdp_cp.attention.kernels.{module}").FUSED
        problem = check(fused, *sizes)
    except Exception as error:  # Triton is missing or too old, or its compiler fails
        problem = f"{type(error).__name__}: {first_line(error)}"
    what = ", ".join(map(str, sizes))
    if problem is not None:
        log.warning("attention: plain torch for %s, not the kernels of %s: %s", what, module, problem)
        return None
    log.info("attention: the kernels of %s for %s", module, what)
    return fused


def _fused_shapes(q: Tensor, *_: object) -> Dual:
    """Stand in for the fused kernel on fake tensors, with the same allocations."""
    batch, queries, heads, head_dim = q.shape
    out = q.new_empty((batch, queries, heads, head_dim), dtype=torch.float32)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    return Dual(out, lse, torch.empty_like(out), torch.empty_like(lse))
