"""Choice of a local attention kernel, and of the implementation of attention with its forward-mode derivative.

Two implementations compute attention with its derivative: one fused Triton kernel
(:mod:`fsdp_cp.attention.kernels.triton_dual`), only on CUDA, and chunked torch
(:mod:`fsdp_cp.attention.kernels.kernel`), on every device.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdp_cp.attention.kernels.cuda import CUDA_KERNELS, preferred
from fsdp_cp.attention.kernels.kernel import CpuFlash, Dual, Kernel, Reference, attention_dual
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
_TOLERANCE = 2e-2
"""Relative difference that the self-check allows: both implementations round probabilities to half precision."""
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Reference())}
"""Every kernel by its name, installed or not."""
SPARSE_REFERENCE = SparseReference()
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


def self_check(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Compare ``kernel`` with plain torch on a part of the keys, as in a ring; return what is wrong, or ``None``."""
    if reason := kernel.refuses(device, dtype, head_dim, masked=False):
        return reason
    generator = torch.Generator().manual_seed(0)  # the global generator's state belongs to the run
    # Several tiles of queries and of keys: a backward of one tile is compiled separately.
    q, k, v, grad = (
        torch.randn(2, tokens, 2, head_dim, generator=generator).to(device, dtype) for tokens in (600, 800, 800, 600)
    )
    reference, scale, half = Reference(), head_dim**-0.5, slice(0, 400)
    out, lse = reference.forward(q, k, v, None, scale)
    names = ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v")

    def results(kernel: Kernel) -> tuple[Tensor, ...]:
        some = (q, k[:, half], v[:, half])
        return *kernel.forward(*some, None, scale), *kernel.backward(grad, *some, out, lse, None, scale)

    try:
        return _difference(names, results(kernel), results(reference))
    except Exception as error:  # the compiler, the driver or the package fails: use another kernel
        return f"fails in its self-check ({type(error).__name__}: {first_line(error)})"


def _difference(names: Sequence[str], computed: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Name the first tensor of a self-check that differs; return ``None`` if none does."""
    for name, a, b in zip(names, computed, expected, strict=True):
        difference = float((a.float() - b.float()).norm() / b.float().norm())
        if not difference < _TOLERANCE:
            return f"is off by {difference:.1e} in the {name} of its self-check"
    return None


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


def choose_sparse_kernel(backend: str, q: Tensor) -> Kernel:
    """Return the kernel of attention to chosen pieces for queries like ``q``."""
    check_sparse_backend(backend)
    return SPARSE_REFERENCE


def choose_sparse_dual(backend: str, q: Tensor) -> AttendDual:
    """Return the implementation of attention to chosen pieces with tangents, for queries like ``q``."""
    check_sparse_backend(backend)
    return sparse_dual


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
    """Compare the fused kernel with chunked torch on a small case. Return ``(kernel, None)`` or ``(None, reason)``."""
    try:
        from fsdp_cp.attention.kernels import triton_dual

        generator = torch.Generator().manual_seed(0)  # the global generator's state belongs to the run
        sizes = [(2, 150, 4, head_dim), *[(2, 200, 2, head_dim)] * 2] * 2
        tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
        mask = (torch.rand(2, 200, generator=generator) < 0.8).to(device)
        chunked: AttendDual = attention_dual
        fused: AttendDual = triton_dual.attention_dual
        expected, computed = (attend(*tensors, mask, head_dim**-0.5) for attend in (chunked, fused))
        return fused, _difference(Dual._fields, computed, expected)
    except Exception as error:  # Triton is missing or too old, or its compiler fails: fall back to chunked torch
        return None, f"{type(error).__name__}: {first_line(error)}"


def _fused_shapes(q: Tensor, *_: object) -> Dual:
    """Stand in for the fused kernel on fake tensors, with the same allocations."""
    batch, queries, heads, head_dim = q.shape
    out = q.new_empty((batch, queries, heads, head_dim), dtype=torch.float32)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    return Dual(out, lse, torch.empty_like(out), torch.empty_like(lse))
