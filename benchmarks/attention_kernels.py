"""Measurements of local attention kernels on one device, through the public function at cp = 1.

The forward
counts as 4 S^2 H D operations, the backward as 2.5 times and the JVP (with its forward) as 3 times that number, without
recomputation. Shares are relative to the fastest bf16 matrix product of the same run.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.attention.kernels.choose import KERNELS
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.mesh import Mesh
from tests.oracles.long_attention import TOLERANCE, exact_attention, exact_tangent, random_inputs

HEAD_DIM = 128
MIB = 2**20
CHECKED = 128
"""Number of queries with a gradient in the check. So few make the float64 oracle affordable and cover all of dK, dV."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@contextmanager
def world_of_one(device: str) -> Iterator[None]:
    """Open a process group of this process alone, with NCCL or gloo."""
    if device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def matmul_rate(device: str) -> float:
    """Return the operations per second of the fastest of several bf16 matrix products."""
    best = 0.0
    for n in (4096, 8192, 16384) if device == "cuda" else (1024, 2048):
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        best = max(best, 2 * n**3 / timed(lambda a=a, b=b: a @ b, device))
    return best


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of one pass of one kernel."""

    title: str
    """``forward``, ``forward + backward`` or ``JVP``."""
    seconds: float = math.nan
    rate: float = math.nan
    """Operations per second."""
    peak: int = 0
    """Peak bytes in addition to the inputs; includes the results."""
    error: float = math.nan
    """Largest error against float64, relative by norm."""
    failure: str = ""
    """First line of a raised error. The other fields are then not set."""

    @property
    def is_right(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= TOLERANCE[torch.bfloat16]


FACTORS = {"forward": 1.0, "forward + backward": 3.5, "JVP": 3.0}
"""Operations of each pass, relative to a forward."""


def measure_passes(
    device: str,
    attend: Attend,
    tokens: int,
    heads: int,
    titles: Sequence[str],
    *,
    limit: float = 4.0,
    visible: Tensor | None = None,
) -> Iterator[Measured]:
    """Measure error, memory and time of the passes ``titles`` (of :data:`FACTORS`), in bf16 and heads of 128.

    Args:
        device: ``cpu`` or ``cuda``.
        attend: attention of ``(1, tokens, heads, 128)`` tensors.
        tokens, heads: sizes.
        titles: names of the passes.
        limit: seconds of timing per pass. At least three runs are timed.
        visible: keys that ``attend`` does not mask, ``(tokens,)`` bool; all by default. Operations count all keys.
    """
    flops = 4 * tokens**2 * heads * HEAD_DIM
    tensors = [x.bfloat16() for x in random_inputs(7, tokens, heads, HEAD_DIM, device)]
    primals, grad, tangents = tensors[:3], tensors[3], tensors[4:]
    passes: dict[str, Callable[[], object]] = {
        "forward": lambda: attend(*primals),
        "forward + backward": lambda: _gradients(attend, primals, grad),
        "JVP": lambda: _tangent(attend, primals, tangents),
    }
    for title in titles:
        failure = ""
        try:
            error = _error(title, attend, primals, grad, tangents, visible)
            peak = _peak(passes[title], device)
            seconds = timed(passes[title], device, limit=limit)
        except Exception as raised:  # a failing kernel becomes a row of the table
            failure = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0][:120]}"
        if failure:
            yield Measured(title=title, failure=failure)
        else:
            rate = FACTORS[title] * flops / seconds
            yield Measured(title=title, seconds=seconds, rate=rate, peak=peak, error=error)


def contenders(device: str, mesh: Mesh) -> list[tuple[str, Attend, str | None]]:
    """Return name, function and reason of refusal of plain SDPA (for comparison), "auto", and each kernel."""

    def ours(backend: str) -> Attend:
        return lambda q, k, v: context_parallel_attention(q, k, v, mesh=mesh, backend=backend)

    kernels = [("torch SDPA", _sdpa, None), ("auto", ours("auto"), None)]
    for name, kernel in KERNELS.items():
        refusal = kernel.refuses(torch.device(device), torch.bfloat16, HEAD_DIM, False)
        kernels.append((name, ours(name), refusal))
    return kernels


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _gradients(attend: Attend, primals: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in primals]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _tangent(attend: Attend, primals: list[Tensor], tangents: list[Tensor]) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        return forward_ad.unpack_dual(attend(*duals)).tangent


def _error(
    title: str,
    attend: Attend,
    primals: list[Tensor],
    grad: Tensor,
    tangents: list[Tensor],
    visible: Tensor | None,
) -> float:
    """Return the largest error against float64, relative by norm, of the first queries and their part of dK and dV."""
    few, keys = slice(0, CHECKED), slice(None) if visible is None else visible
    q, k, v = primals[0][:, few], *(x[:, keys] for x in primals[1:])
    if title == "JVP":
        result = [_tangent(attend, primals, tangents)[:, few]]
        truth = [exact_tangent(q, k, v, tangents[0][:, few], *(t[:, keys] for t in tangents[1:]))]
    elif title == "forward":
        result, truth = [attend(*primals)[:, few]], exact_attention(q, k, v, grad[:, few])[:1]
    else:
        only_few = torch.zeros_like(grad)
        only_few[:, few] = grad[:, few]
        out, dq, dk, dv = _gradients(attend, primals, only_few)
        result = [out[:, few], dq[:, few], dk[:, keys], dv[:, keys]]
        truth = exact_attention(q, k, v, grad[:, few])
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(result, truth, strict=True))


def _peak(run: Callable[[], object], device: str) -> int:
    """Return the peak bytes that ``run`` allocates, including its results."""
    gc.collect()
    if device == "cpu":
        with LiveStorages() as live:
            run()
        return live.peak_bytes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def timed(run: Callable[[], object], device: str, rounds: int = 11, limit: float = 4.0) -> float:
    """Return the median seconds of 3 to ``rounds`` runs, in about ``limit`` seconds, after one warm-up run."""
    run()
    times: list[float] = []
    start = time.monotonic()
    while len(times) < 3 or (len(times) < rounds and time.monotonic() - start < limit):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
