"""Which local attention kernels there are, and the choice among them."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from fsdp_cp.attention.cpu_kernels import CpuFlash
from fsdp_cp.attention.cuda_kernels import CUDA_KERNELS, preferred
from fsdp_cp.attention.kernel import Kernel
from fsdp_cp.attention.reference import Reference

log = logging.getLogger("fsdp_cp.attention")


@lru_cache(maxsize=1)
def all_kernels() -> dict[str, Kernel]:
    """Every kernel by its name, installed or not."""
    return {kernel.name: kernel for kernel in (CpuFlash(), *CUDA_KERNELS, Reference())}


@lru_cache(maxsize=256)
def _explain(name: str, what: str, why: str) -> None:
    """Once for each choice. The choice itself is made anew: deterministic algorithms may be switched on meanwhile."""
    log.info("attention backend auto: %s for %s (%s)", name, what, why)


def check_backend(backend: str) -> None:
    """Refuse a ``backend`` that is neither ``"auto"`` nor the name of a kernel.

    Raises:
        ValueError: an unknown name.
    """
    if backend != "auto" and backend not in all_kernels():
        raise ValueError(f"backend={backend!r} is unknown; use auto or {', '.join(all_kernels())}")


def choose_kernel(backend: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> Kernel:
    """Return the kernel called ``backend``, or for ``"auto"`` the best that can run; log once which and why.

    Raises:
        ValueError: an unknown name, or a kernel that cannot run these tensors.
    """
    check_backend(backend)
    kernels = all_kernels()
    if backend == "auto":
        order = preferred(device) if device.type == "cuda" else (kernels["cpu_flash"],)
        candidates = [*order, kernels["reference"]]
        reasons = []
        for kernel in candidates:
            reason = kernel.refuses(device, dtype, head_dim, masked)
            if reason is None:
                break
            reasons.append(f"{kernel.name} {reason}")
        else:
            raise ValueError(
                f"no attention kernel takes {dtype} on {device.type}: {'; '.join(reasons)}; cast q, k and v"
            )
        what = f"{dtype} on {device.type}{', masked' if masked else ''}"
        _explain(kernel.name, what, "; ".join(reasons) or "first choice")
        return kernel
    kernel = kernels[backend]
    reason = kernel.refuses(device, dtype, head_dim, masked)
    if reason is not None:
        able = [name for name, other in kernels.items() if other.refuses(device, dtype, head_dim, masked) is None]
        raise ValueError(f"backend={backend!r} {reason}; use auto or {', '.join(able)}")
    return kernel
