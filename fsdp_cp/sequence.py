"""Split a full sequence into the rank's own tokens, and gather it back, with the project's gradient convention.

Every rank of a ``cp`` group holds the same full tensor and the same loss (docs/gradients.md). So splitting needs no
communication in either direction (its backward pads with zeros: the gradient is a partial sum), and gathering needs
none in backward (each rank takes the slice that is its own). The parameter gradients that follow are partial sums
over the rank's own tokens, and the true gradient is their SUM over all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh
from fsdp_cp.reduce import all_gather_single


def local_token_count(total: int, cp: int) -> int:
    """Tokens per rank.

    Raises:
        UserError: if ``cp`` does not divide ``total``.
    """
    if total % cp:
        fitting = ", ".join(str(d) for d in range(1, min(total, 64) + 1) if total % d == 0)
        raise UserError(
            f"mesh.cp={cp} does not divide the {total} tokens of a sample; use a mesh.cp among {fitting},"
            " or other data.num_frames, data.height or data.width"
        )
    return total // cp


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rank: int, local: int, dim: int) -> Tensor:
        ctx.shape, ctx.start, ctx.local, ctx.dim = x.shape, rank * local, local, dim
        # A copy: a view would keep the full sequence alive for as long as autograd keeps this slice.
        return x.narrow(dim, ctx.start, local).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad: Tensor):
        full = grad.new_zeros(ctx.shape)
        full.narrow(ctx.dim, ctx.start, ctx.local).copy_(grad)
        return full, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.rank, ctx.local, ctx.dim = dist.get_rank(group), x.shape[dim], dim
        size = dist.get_world_size(group)
        x = x.contiguous()
        chunks = x.new_empty((size, *x.shape))
        # gloo and NCCL lay the ranks out along the first axis: gather there, then move the ranks next to `dim`.
        all_gather_single(chunks.view(-1), x.view(-1), group)
        return chunks.movedim(0, dim).flatten(dim, dim + 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.narrow(ctx.dim, ctx.rank * ctx.local, ctx.local).contiguous(), None, None


def split_tokens(x: Tensor, mesh: Mesh, dim: int = 1) -> Tensor:
    """The rank's own slice of a sequence that every rank of its ``cp`` group holds in full.

    Args:
        x: ``(..., S, ...)`` with the ``S`` tokens along ``dim``, equal on all ranks of the ``cp`` group.
        mesh: the mesh; ``mesh.cp`` is split over.
        dim: the token dimension.

    Returns:
        ``(..., S / cp, ...)``, contiguous. Backward pads the other ranks' positions with zeros.

    Raises:
        UserError: if ``cp`` does not divide ``S``.
    """
    if mesh.cp_size == 1:
        return x
    dim = dim % x.ndim
    return _Split.apply(x, mesh.cp_rank, local_token_count(x.shape[dim], mesh.cp_size), dim)


def gather_tokens(x: Tensor, mesh: Mesh, total: int | None = None, dim: int = 1) -> Tensor:
    """The full sequence out of every rank's slice. Use it where a loss that all ranks hold follows.

    Args:
        x: ``(..., S / cp, ...)``, the rank's own tokens.
        mesh: the mesh; ``mesh.cp`` is gathered over.
        total: ``S``, checked when given.
        dim: the token dimension.

    Returns:
        ``(..., S, ...)``, equal on all ranks of the ``cp`` group. Backward takes the rank's own slice.

    Raises:
        ValueError: if ``total`` is not the number of tokens that the slices make.
    """
    dim = dim % x.ndim
    if total is not None and total != x.shape[dim] * mesh.cp_size:
        raise ValueError(f"total={total} is not {x.shape[dim]} local tokens x cp={mesh.cp_size}")
    if mesh.cp_size == 1:
        return x
    return _Gather.apply(x, mesh.cp.get_group(), dim)
