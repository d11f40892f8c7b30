"""Video sparse attention written out densely in float64 in one process, and the same case over ranks."""

import math
from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fsdp_cp.attention import context_parallel_attention
from fsdp_cp.sequence import gather_tokens, local_token_range, split_tokens
from fsdp_cp.tiles import Tiles, sparse_tiles
from tests.oracles.attention import context_mesh

NAMES = ("out", "dq", "dk", "dv", "dgate", "tangent")


@dataclass(frozen=True, kw_only=True)
class SparseCase:
    """Sparse self-attention over ``ring x ulysses`` ranks."""

    ring: int = 1
    ulysses: int = 1
    grid: tuple[int, int, int] = (5, 6, 7)
    dense: tuple[int, ...] = ()
    """Number of rows of each segment before the video."""
    tile: tuple[int, int, int] = (4, 4, 4)
    sparsity: float = 0.6
    is_ordered: bool = False
    heads: int = 1
    """Number of heads of each rank and head group."""
    head_groups: int = 1
    head_dim: int = 4
    size: float = 1.0
    """Factor on q and k."""
    is_tied: bool = False
    """Whether all keys are equal, so that all scores of a row are."""
    has_gate: bool = True
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def segments(self) -> tuple[int, ...]:
        return (*self.dense, math.prod(self.grid))

    @property
    def world(self) -> int:
        return self.ring * self.ulysses


def make_inputs(case: SparseCase) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return q, k, v and the gate over all tokens in raster order, their tangents, and the weight of the output."""
    generator = torch.Generator().manual_seed(case.seed)
    heads = case.heads * case.ulysses * case.head_groups
    shape = (2, sum(case.segments), heads, case.head_dim)
    q, k, *others = (torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for _ in range(9))
    q, k = q * case.size, k * case.size
    if case.is_tied:
        k = k[:, :1].bfloat16().to(k).repeat(1, k.shape[1], 1, 1)  # means of 16-bit numbers are exact
    return [q, k, *others[:2]], others[2:6], others[6]


def largest_logit(case: SparseCase) -> float:
    """Return the largest absolute logit between any two tokens."""
    q, k, *_ = make_inputs(case)[0]
    return torch.einsum("bshd,bthd->bhst", q, k).abs().max().item() * case.head_dim**-0.5


def tile_numbers(case: SparseCase) -> tuple[Tensor, int]:
    """Return the tile of each token in raster order, and the number of tiles of the dense segments, which are first."""
    parts, first = [], 0
    for rows in case.dense:
        parts.append(first + torch.arange(rows) // math.prod(case.tile))
        first = int(parts[-1].max()) + 1
    boxes = [torch.arange(n) // step for n, step in zip(case.grid, case.tile, strict=True)]
    _, numbers = torch.cartesian_prod(*boxes).reshape(-1, 3).unique(dim=0, return_inverse=True)
    return torch.cat([*parts, first + numbers]), first


def chosen_tiles(case: SparseCase, scores: Tensor) -> Tensor:
    """Choose tiles, bool like ``scores`` ``(B, H, T, T)``, by sorting; equal scores in the order of their tiles."""
    first = tile_numbers(case)[1]
    video = scores.detach()[..., first:].float()
    count = min(max(math.ceil((1 - case.sparsity) * video.shape[-1]), 1), video.shape[-1])
    best = video.argsort(dim=-1, descending=True, stable=True)[..., :count]
    chosen = torch.ones_like(scores, dtype=torch.bool)
    chosen[..., first:] = torch.zeros_like(video, dtype=torch.bool).scatter(-1, best, True)
    chosen[:, :, :first] = True
    return chosen


def dense_sparse_attention(case: SparseCase, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Return ``fine + gate * coarse`` ``(B, S, H, D)``, with every logit written out."""
    tiles, scale = tile_numbers(case)[0], case.head_dim**-0.5
    pool = torch.nn.functional.one_hot(tiles).T.to(q)
    pool = pool / pool.sum(1, keepdim=True)
    q_mean, k_mean, v_mean = (torch.einsum("ts,bshd->bhtd", pool, x) for x in (q, k, v))
    scores = q_mean @ k_mean.mT * scale
    seen = chosen_tiles(case, scores)[:, :, tiles][..., tiles]
    logits = (torch.einsum("bshd,bthd->bhst", q, k) * scale).masked_fill(~seen, -torch.inf)
    fine = torch.einsum("bhst,bthd->bshd", logits.softmax(-1), v)
    coarse = (scores.softmax(-1) @ v_mean)[:, :, tiles].transpose(1, 2)
    return fine + gate * coarse if case.has_gate else fine + 0 * gate


def oracle(case: SparseCase) -> list[Tensor]:
    """Return the tensors of :data:`NAMES`, in float64."""
    primals, tangents, weight = make_inputs(case)
    leaves = [x.double().requires_grad_() for x in primals]
    out = dense_sparse_attention(case, *leaves)
    grads = torch.autograd.grad((out * weight.double()).sum(), leaves)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.double(), t.double()) for x, t in zip(primals, tangents, strict=True)]
        tangent = forward_ad.unpack_dual(dense_sparse_attention(case, *duals)).tangent
        return [out.detach(), *grads, tangent.clone()]


def attend(case: SparseCase, mesh, *tensors: Tensor) -> Tensor:
    """Attend over the ranks of ``mesh`` from the full inputs to the full output, both in raster order."""
    tiles = Tiles(case.grid, case.tile, case.is_ordered)

    def own(x: Tensor) -> Tensor:
        *dense, video = x.split(case.segments, dim=1)
        shares = []
        for part in (*dense, tiles.reorder(video, 1)):
            start, stop = local_token_range(part.shape[1], mesh.cp_size, mesh.cp_rank)
            share = split_tokens(part, mesh)
            pads = torch.arange(share.shape[1]) >= stop - start
            shares.append(share + 7.0 * pads[:, None, None])  # networks put numbers there
        return torch.cat(shares, dim=1)

    q, k, v, gate = map(own, tensors)
    out = context_parallel_attention(
        q,
        k,
        v,
        mesh=mesh,
        total_tokens=case.segments,
        sparse=sparse_tiles(tiles, case.sparsity),
        gate=gate if case.has_gate else None,
        head_groups=case.head_groups,
    )
    parts = out.split([-(-rows // case.world) for rows in case.segments], dim=1)
    *dense, video = (gather_tokens(x, mesh, rows) for x, rows in zip(parts, case.segments, strict=True))
    return torch.cat([*dense, tiles.restore(video, 1)], dim=1)


def on_ranks(case: SparseCase) -> list[Tensor]:
    """Return the tensors of :func:`oracle` over the ranks of this process group, gradients summed.

    The last tensor is the largest difference between the gradients and those of a recomputed forward.
    """
    mesh = context_mesh(case.world, case.ulysses, case.ulysses)
    primals, tangents, weight = make_inputs(case)
    found = []
    for recomputed in (False, True):
        leaves = [x.clone().requires_grad_() for x in primals]
        if recomputed:
            out = checkpoint(attend, case, mesh, *leaves, use_reentrant=False)
        else:
            out = attend(case, mesh, *leaves)
        (out * weight).sum().backward()
        found.append([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])
    grads, again = found
    difference = torch.stack([(a - b).abs().max() for a, b in zip(grads, again, strict=True)]).max()
    grads = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in grads]
    for grad in grads:
        dist.all_reduce(grad)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        tangent = forward_ad.unpack_dual(attend(case, mesh, *duals)).tangent.clone()
        return [out.detach(), *grads, tangent, difference]


def all_on_ranks(cases: list[SparseCase]) -> list[list[Tensor]]:
    return [on_ranks(case) for case in cases]


def errors(ours: list[Tensor], truth: list[Tensor], case: SparseCase) -> dict[str, float]:
    """Return the largest differences, relative to the largest number of a tensor or of its terms.

    The terms of a gradient or tangent are as large as q and k, even where their sum cancels.
    """
    return {
        name: ((a.double() - b).abs().max() / b.abs().max().clamp_min(case.size)).item()
        if a.isfinite().all()
        else math.inf
        for name, a, b in zip(NAMES, ours, truth, strict=True)
    }


def random_case(seed: int) -> SparseCase:
    """Draw a case: mesh, grid, tiles, sparsity, segments, order, size of the inputs, ties."""
    random = Random(seed)
    ring, ulysses = random.choice([(1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (4, 1), (1, 4)])
    tile = tuple(random.randint(1, 4) for _ in range(3))
    dense = tuple(random.choice((1, 3, 17, 70)) for _ in range(random.randint(0, 2)))
    return SparseCase(
        ring=ring,
        ulysses=ulysses,
        grid=(random.randint(1, 6), random.randint(1, 7), random.randint(1, 8)),
        dense=dense,
        tile=tile,
        sparsity=random.choice((0.0, 0.3, 0.5, 0.8, 0.9, 0.99)),
        is_ordered=random.random() < 0.5,
        heads=random.randint(1, 2),
        head_groups=random.choice((1, 1, 2)),
        head_dim=random.choice((1, 4, 7)),
        size=random.choice((1.0, 2.0, 8.0, 32.0)),
        is_tied=random.random() < 0.2,
        has_gate=random.random() < 0.8,
        seed=seed,
    )
