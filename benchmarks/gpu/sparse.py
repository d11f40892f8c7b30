"""Triton kernels of sparse attention on a GPU: their check, the exactness of scores, and times next to dense."""

from functools import partial
from typing import Any

import torch

from benchmarks.attention_kernels import timed, world_of_one
from benchmarks.gpu.child import Context
from benchmarks.gpu.networks import Peak, gib
from benchmarks.sparse_attention import passes
from fsdp_cp.attention.kernels.choose import choose_sparse
from fsdp_cp.attention.sparse import exact_scores
from fsdp_cp.mesh import build_mesh
from fsdp_cp.tiles import Tiles

SIZES, TINY_SIZES = (((21, 30, 52), 12), ((21, 45, 80), 5)), (((4, 5, 6), 2),)
"""Grid of tokens and heads of a rank: Wan 1.3B at 480p on one rank (32,760 tokens), 14B at 720p on 8 (75,600)."""
HEAD_DIM = 128
SPARSITIES = (0.9, None, 0.8)
"""Sparsities, the most informative first; ``None`` for dense attention."""


def sparse(context: Context) -> None:
    """Write the chosen kernels for both head sizes, whether scores equal the CPU's bits, and times with dense ones."""
    device, peak = context.device, Peak(context.device)
    for head_dim in (64, HEAD_DIM):
        for dtype in (torch.bfloat16, torch.float32):
            q = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
            context.attempt(f"kernels, {dtype}, heads of {head_dim}", lambda q=q: {"chosen": _name(q)})
    context.attempt("scores", lambda: {"equal the CPU's": _scores_are_equal(device)})
    with world_of_one(context.device_type), peak.watched():
        mesh = build_mesh(device_type=context.device_type)
        for grid, heads in TINY_SIZES if context.tiny else SIZES:
            for sparsity in SPARSITIES:
                name = "dense" if sparsity is None else f"sparsity {sparsity:g}"
                runs = passes(mesh, grid, heads, HEAD_DIM, sparsity, torch.bfloat16)
                for title, run in runs.items():
                    cells = {"tokens": Tiles(grid).tokens, "heads": heads, "pass": title}
                    context.attempt(name, partial(_measured, context, peak, run), **cells)


def _name(q: torch.Tensor) -> str:
    return choose_sparse("auto", q, 64).kernel.name


def _scores_are_equal(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 1716, HEAD_DIM, dtype=torch.float64, generator=generator) for _ in range(2))
    return torch.equal(exact_scores(q.to(device), k.to(device)).cpu(), exact_scores(q, k))


def _measured(context: Context, peak: Peak, run: Any) -> dict[str, Any]:
    peak.reset()
    run()
    most = peak.read()
    return {"ms": 1e3 * timed(run, context.device_type, limit=0.5), "peak GiB": gib(most)}
