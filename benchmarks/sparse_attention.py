"""Sparse attention next to dense attention, on one rank: ``python -m benchmarks.sparse_attention``.

Random inputs, tiles of 4 x 4 x 4 tokens, a gate. Each pass runs once on a CPU after a small run that loads everything.
Times include the means, the scores and the choice. ``benchmarks.gpu`` measures the same on a GPU.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from benchmarks.attention_kernels import world_of_one
from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.tiles import Tiles, sparse_tiles

GRIDS = ((12, 20, 26), (19, 30, 52))
"""Grids of tokens of the table: 6,240 and 29,640 tokens."""
SPARSITIES = (None, 0.5, 0.8, 0.9)
"""Sparsities of the table; ``None`` for dense attention."""
HEAD_DIM = 64


def passes(
    mesh: Mesh, grid: tuple[int, int, int], heads: int, head_dim: int, sparsity: float | None, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return the forward, forward with backward, and derivative of attention over a video, dense without sparsity."""
    tiles, device = Tiles(grid), mesh.device_type
    shape = (1, tiles.tokens, heads, head_dim)
    generator = torch.Generator(device).manual_seed(0)
    draws = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(9)]
    primals, tangents, weight = draws[:4], draws[4:8], draws[8]
    sparse = None if sparsity is None else sparse_tiles(tiles, sparsity)
    call = partial(context_parallel_attention, mesh=mesh, total_tokens=tiles.tokens, sparse=sparse)

    def forward(tensors: Sequence[Tensor]) -> Tensor:
        q, k, v, gate = tensors
        out = call(q, k, v, gate=None if sparse is None else gate)
        assert isinstance(out, Tensor)
        return out

    def backward() -> object:
        leaves = [x.detach().requires_grad_() for x in primals]
        return torch.autograd.grad(forward(leaves), leaves if sparse is not None else leaves[:3], weight)

    def derivative() -> object:
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
            return forward_ad.unpack_dual(forward(duals)).tangent

    return {"forward": partial(forward, primals), "forward + backward": backward, "derivative": derivative}


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=1, help="number of heads (1)")
    parser.add_argument("--quick", action="store_true", help="a small grid, to test the benchmark")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    grids = ((4, 8, 9),) if arguments.quick else GRIDS
    with world_of_one("cpu"):
        mesh = build_mesh()
        for sparsity in (None, 0.5):
            for run in passes(mesh, (4, 8, 9), 1, HEAD_DIM, sparsity, torch.float32).values():
                run()
        print("| tokens | attention | forward, s | forward + backward, s | with its derivative, s |")
        print("|---|---|---|---|---|")
        for grid in grids:
            for sparsity in SPARSITIES:
                runs = passes(mesh, grid, arguments.heads, HEAD_DIM, sparsity, torch.float32)
                times = [f"{_seconds(run):.2f}" for run in runs.values()]
                name = "dense" if sparsity is None else f"sparsity {sparsity:g}"
                print(f"| {Tiles(grid).tokens:,} | {name} |", " | ".join(times), "|", flush=True)


if __name__ == "__main__":
    main()
