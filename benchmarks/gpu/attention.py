"""Local attention kernels and the forward-mode derivative at the sizes of real videos, compared with plain torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_kernels import (
    FACTORS,
    HEAD_DIM,
    MIB,
    Attend,
    contenders,
    matmul_rate,
    measure_passes,
    world_of_one,
)
from benchmarks.gpu.child import Context
from benchmarks.gpu.kernels import refused_at_once
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.attention.kernels.choose import KERNELS, prepare_kernels
from fsdp_cp.mesh import build_mesh

SIZES, TINY_SIZES = ((32760, 12), (75600, 5), (32760, 3), (8192, 12)), ((384, 2), (512, 2))
"""Tokens and heads of a rank: Wan 1.3B at 480p on one rank, 14B at 720p on 8, 1.3B at 480p on 4, and a short clip.

As in real clips, token counts are not multiples of a tile. The most informative size comes first.
"""
DERIVATIVES = ("auto", "reference")
"""Kernels whose derivative is timed: the default choice on this device, and chunked torch."""
TIMED = 0.5
"""Seconds of timing per pass. At least three runs are timed."""
OWN_TARGET, OTHER_TARGET = 3.5, 6.0
"""Target ratios of the derivative's time to the same kernel's forward (six matrix products to two), and to the fastest
kernel's forward."""
JOINT, TINY_JOINT = (1256, 300, 32760, 16), (12, 5, 372, 2)
"""Text tokens, shown text tokens, video tokens and heads of HunyuanVideo 1.5 at 480p on one rank: 1,000 of a caption
and 256 of quoted text."""
MATH = "torch SDPA, math"
MATH_TOKENS = 8192
"""Tokens for torch's math backend. It stores ten whole attention matrices, 1.5 GiB each here, 26 GiB at 32,760."""


def attention(context: Context) -> None:
    """Measure the ceiling, each kernel in a separate process, and ratios of derivatives to forwards."""
    context.isolated("matrix products", "benchmarks.gpu.attention:ceiling", seconds=30)
    rates = [row["TFLOP/s"] for row in context.written() if "TFLOP/s" in row]
    rate = repr(rates[0] * 1e12) if rates else "nan"
    # What decides comes first: if time runs out, only kernels to compare with may be missing.
    first = ("flash_attn_4", "cudnn", "auto")
    names = [*first, *(name for name in (*KERNELS, "torch SDPA", MATH) if name not in first)]
    for i, name in enumerate(names):
        kernel = KERNELS.get(name)
        refusal = refused_at_once(kernel, context.device_type, HEAD_DIM) if kernel else None
        if refusal is not None:
            context.row(name, refused=refusal)
            continue
        # Give each kernel at most half of the remaining time, so that a slow or hanging one leaves time for the others.
        share = context.left() if i == len(names) - 1 else context.left() / 2
        context.isolated(name, "benchmarks.gpu.attention:one_kernel", name, rate, seconds=share)
    for row in ratios(context.written()):
        context.row(row.pop("what"), **row)


def ceiling(context: Context) -> None:
    """Write the row of the fastest matrix product."""
    rate = matmul_rate(context.device_type)
    context.row("fastest bf16 matrix product", **{"TFLOP/s": rate / 1e12, "share": 1.0})


def one_kernel(context: Context, name: str, rate: str) -> None:
    """Write the rows of one kernel.

    Args:
        context: the part's context.
        name: name of a kernel, or of torch's attention.
        rate: operations per second of the fastest matrix product.
    """
    device = context.device_type
    sizes = TINY_SIZES if context.tiny else ((MATH_TOKENS, 12),) if name == MATH else SIZES
    with world_of_one(device):
        attend, refusal = _attend(device, name)
        if attend is None:
            context.row(name, refused=refusal)
            return
        if name in ("auto", "flash_attn_4"):
            _setup(context, name, attend)
        titles = ["JVP"] if name == MATH else [*FACTORS] if name in DERIVATIVES else [*FACTORS][:2]
        for n, h in sizes:
            if context.left() < 10:
                context.row(name, tokens=n, heads=h, error="left out: its time was over")
                continue
            for result in measure_passes(device, attend, n, h, titles, limit=TIMED):
                cells: dict[str, Any] = {"tokens": n, "heads": h, "pass": result.title}
                if result.failure:
                    context.row(name, **cells, error=result.failure)
                    context.let_go()
                    continue
                cells |= {"ms": result.seconds * 1e3, "TFLOP/s": result.rate / 1e12}
                cells |= {"share": result.rate / float(rate), "peak MiB": result.peak / MIB}
                context.row(name, **cells, **{"largest error": result.error, "right": result.is_right})


def _setup(context: Context, name: str, attend: Attend) -> None:
    """Write the seconds of FlashAttention 4's compilation and self-check, and of the first calls of further lengths."""
    began = time.perf_counter()
    prepare_kernels(name, device=context.device, dtype=torch.bfloat16, head_dim=HEAD_DIM)
    context.row(f"{name}: setup", seconds=time.perf_counter() - began)
    for tokens in (300, 1000, 3000):
        q, k, v = torch.randn(3, 1, tokens, 4, HEAD_DIM, device=context.device, dtype=torch.bfloat16)
        began = time.perf_counter()
        attend(q, k, v).float().sum().item()  # waits for the kernel
        context.row(f"{name}: first call", tokens=tokens, ms=1e3 * (time.perf_counter() - began))


def joint(context: Context) -> None:
    """Measure HunyuanVideo's attention with the default kernel: text and video attend to each other, text masked."""
    device, (text, shown, video, heads) = context.device_type, TINY_JOINT if context.tiny else JOINT
    visible = torch.arange(text + video, device=device)
    visible = (visible < shown) | (visible >= text)
    with world_of_one(device):
        mesh = build_mesh(cp=1, device_type=device)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            first, last = zip(*(x.split([text, video], dim=1) for x in (q, k, v)), strict=True)
            out, out_text = context_parallel_attention(*last, mesh=mesh, joint=first, key_mask=mask)
            return torch.cat([out_text, out], dim=1)

        contended = {"without a mask": (attend, None), "masked": (partial(attend, mask=visible[None]), visible)}
        for name, (run, mask) in contended.items():
            for result in measure_passes(device, run, text + video, heads, [*FACTORS], limit=TIMED, visible=mask):
                cells = {"tokens": text + video, "heads": heads, "pass": result.title}
                if result.failure:
                    context.row(name, **cells, error=result.failure)
                    continue
                cells |= {"ms": result.seconds * 1e3, "TFLOP/s": result.rate / 1e12, "peak MiB": result.peak / MIB}
                context.row(name, **cells, **{"largest error": result.error, "right": result.is_right})


def _attend(device: str, name: str) -> tuple[Attend | None, str | None]:
    """Return the attention for ``(1, S, H, D)`` tensors, or ``None`` and the reason of refusal."""
    if name == MATH:
        return _math, None
    mesh = build_mesh(cp=1, device_type=device)
    attend, refusal = next((attend, refusal) for known, attend, refusal in contenders(device, mesh) if known == name)
    return (attend if refusal is None else None), refusal


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with torch's math backend, its only one with a forward-mode derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def ratios(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratios of the derivative's time to forwards, for each size with both in ``rows``."""
    times: dict[tuple[int, int], dict[tuple[str, str], float]] = {}
    for row in rows:
        if "ms" in row and "pass" in row:
            times.setdefault((row["tokens"], row["heads"]), {})[row["what"], row["pass"]] = row["ms"]
    lines = []
    for (tokens, heads), ms_by_pass in times.items():
        forwards = {name: ms for (name, title), ms in ms_by_pass.items() if title == "forward"}
        fastest = min(forwards, key=forwards.__getitem__, default=None)
        for derived in DERIVATIVES:
            if (derived, "JVP") not in ms_by_pass:
                continue
            for name, target in (("reference", OWN_TARGET), (fastest, OTHER_TARGET)):
                if name in forwards and (name, target) != ("reference", OTHER_TARGET):
                    ratio = ms_by_pass[derived, "JVP"] / forwards[name]
                    cells = {"tokens": tokens, "heads": heads, "ratio": ratio, "target": target, "met": ratio <= target}
                    lines.append({"what": f"JVP of {derived} over the forward of {name}", **cells})
    return lines
