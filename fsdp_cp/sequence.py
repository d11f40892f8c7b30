"""Splitting of a full sequence into the rank's own tokens, and gathering, with the project's gradient convention.

Every rank of a ``cp`` group holds ``ceil(S / cp)`` tokens, in rank order. Only the tail of the whole sequence is
padded, so the last ranks may hold fewer true tokens, or none. Each rank can compute all counts without communication.

Every rank of a ``cp`` group starts from the same full tensor and ends with the same loss (docs/gradients.md). So a
split needs no communication in forward or backward; its backward pads with zeros, which gives a partial sum. A gather
needs none in backward: each rank takes its own slice. Parameter gradients are partial sums over the rank's own tokens,
and the true gradient is their SUM over all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from fsdp_cp.duals import may_be_dual, unpack_duals
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, check_mesh
from fsdp_cp.runtime.torch_versions import all_gather_single, reduce_scatter_single


def is_count(x: Any) -> bool:
    """Return whether ``x`` is an integer of at least 1."""
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool) and x >= 1


def local_token_count(total: int, cp: int) -> int:
    """Return the number of tokens on each rank, pads included: ``ceil(total / cp)``."""
    if not is_count(total):
        raise UserError(f"total must be a number of tokens >= 1, got {total!r}")
    return -(-total // cp)


def local_token_range(total: int, cp: int, rank: int) -> tuple[int, int]:
    """Return ``(start, stop)`` of the true tokens of ``cp`` rank ``rank``. They are equal if it holds only pads."""
    local = local_token_count(total, cp)
    return min(rank * local, total), min((rank + 1) * local, total)


def split_tokens(x: Tensor, mesh: Mesh, dim: int = 1) -> Tensor:
    """Return the rank's own slice of a sequence that every rank of its ``cp`` group holds in full.

    Args:
        x: ``(..., S, ...)`` with the ``S`` tokens along ``dim``, equal on all ranks of the ``cp`` group of ``mesh``.

    Returns:
        ``(..., ceil(S / cp), ...)``, the sequence's tail padded with zeros; a copy (``x`` itself when ``cp`` is 1). The
        gradient is zero at other ranks' positions. Forward-mode AD and ``torch.compile`` work.

    Raises:
        UserError: a sequence without tokens, an invalid ``dim``, or a ``mesh`` that is not a :class:`Mesh`.
    """
    dim = _checked_dim(x, mesh, dim)
    cp = mesh.context.cp_size
    local_token_count(x.shape[dim], cp)  # check on one rank too, so that mistakes show before a run on a cluster
    if cp == 1:
        return x
    return _share(x, dim, cp, mesh.context.cp_rank)


def _share(x: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    """Return the slice of ``cp`` rank ``rank``, padded with zeros."""
    start, stop = local_token_range(x.shape[dim], cp, rank)
    pads = local_token_count(x.shape[dim], cp) - (stop - start)
    share = x.narrow(dim, start, stop - start)
    # Copy: a view would keep the full sequence alive as long as autograd keeps this slice.
    return _padded(share, dim, pads) if pads else share.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, dim: int, pads: int) -> Tensor:
    return torch.cat((x, x.new_zeros((*x.shape[:dim], pads, *x.shape[dim + 1 :]))), dim)


def gather_tokens(
    x: Tensor, mesh: Mesh, total: int | None = None, dim: int = 1, *, partial_grad: bool = False
) -> Tensor:
    """Gather the full sequence from every rank's slice, without pads.

    Args:
        x: ``(..., ceil(S / cp), ...)``, the rank's own tokens along ``dim``.
        total: ``S``; by default the sequence has no pads.
        partial_grad: whether the gradient of the result is a partial sum on each rank. ``False``: all ranks compute the
            same loss from it, the gradient is the same on all, and backward takes the rank's own slice. ``True``: split
            computation follows (keys and values, features), and backward sums and splits it (reduce-scatter).

    Returns:
        ``(..., S, ...)``, equal on all ranks of the ``cp`` group. For a dual tensor the result is dual; one collective
        gathers the primal and the tangent.

    Raises:
        ValueError: ``total`` does not fit ``x``'s number of tokens per rank, ``dim`` is invalid, or ``mesh`` is not a
            :class:`Mesh`.
        RuntimeError: a dual tensor with gradients enabled.
    """
    dim = _checked_dim(x, mesh, dim)
    cp = mesh.context.cp_size
    total = x.shape[dim] * cp if total is None else total
    if (local := local_token_count(total, cp)) != x.shape[dim]:
        raise ValueError(f"total={total} tokens on cp={cp} ranks need {local} tokens on each, got {x.shape[dim]}")
    if cp == 1:
        return x
    group = mesh.cp.get_group()
    if may_be_dual(x):
        (x,), tangents = unpack_duals((x,), "gather_tokens")
        if tangents is not None:
            (tangent,) = tangents
            assert tangent is not None, "a single tensor has the only tangent"
            full = _gather(torch.stack((x, tangent)), group, total, dim + 1)
            # Clone both: make_dual would copy a tangent that shares the primal's storage into a storage as large.
            return forward_ad.make_dual(full[0].clone(), full[1].clone())
    if not torch.is_grad_enabled():  # torch.func transforms refuse a Function without jvp even without gradients
        return _gather(x, group, total, dim)
    return _Gather.apply(x, group, total, dim, partial_grad)


def with_whole_gradient(x: Tensor, mesh: Mesh) -> Tensor:
    """Return ``x``, whose gradient becomes the whole gradient on every rank of the ``cp`` group: the sum of the parts.

    Use it on the full input of a split network if something else than this network's split follows in backward, such
    as the gather of a clip that was made in chunks: a rank's tokens of a chunk are not its tokens of the clip.
    """
    if mesh.cp_size == 1 or not x.requires_grad:
        return x

    def summed(gradient: Tensor) -> Tensor:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=mesh.cp.get_group())
        return whole

    x = x.view_as(x)  # a hook on x itself would also see gradients that reach it on other ways
    x.register_hook(summed)
    return x


def _checked_dim(x: Tensor, mesh: Mesh, dim: int) -> int:
    """Check the arguments that splitting and gathering share; return ``dim`` as a non-negative index."""
    check_mesh(mesh)
    if not isinstance(x, Tensor):
        raise UserError(f"x must be a tensor with the tokens along dim, got a {type(x).__name__}")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.ndim <= dim < x.ndim:
        raise UserError(f"dim must be 0 to {x.ndim - 1} for x of shape {tuple(x.shape)}, got {dim!r}")
    return dim % x.ndim


def _gather(x: Tensor, group: dist.ProcessGroup, total: int, dim: int) -> Tensor:
    local, x = x.shape[dim], x.contiguous()
    chunks = x.new_empty((dist.get_world_size(group), *x.shape))
    # gloo and NCCL gather along the first dimension. Gather there, then concatenate along `dim`.
    all_gather_single(chunks.view(-1), x.view(-1), group)
    lengths = [min(local, total - rank * local) for rank in range(len(chunks)) if rank * local < total]
    return torch.cat([chunk.narrow(dim, 0, n) for chunk, n in zip(chunks, lengths, strict=False)], dim)


class _Gather(torch.autograd.Function):
    """Gather with its backward. It has no ``jvp``, so forward-mode AD raises here instead of losing the tangent."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, total: int, dim: int, partial_grad: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.partial_grad = group, dim, partial_grad
        return _gather(x, group, total, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a backward with create_graph=True
            # Each rank would only have the derivative by its own tokens, and the reduce-scatter is not differentiable.
            kind = "a backward with create_graph=True (a gradient penalty) through split tokens"
            raise UserError(f"{kind} is partial; take a finite difference (docs/gradients.md, 'Gradient penalties')")
        size, dim = dist.get_world_size(ctx.group), ctx.dim
        if not ctx.partial_grad:
            return _share(grad, dim, size, dist.get_rank(ctx.group)), None, None, None, None
        pads = -grad.shape[dim] % size
        whole = _padded(grad, dim, pads) if pads else grad
        shares = whole.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
        result = torch.empty_like(shares[0])
        reduce_scatter_single(result.view(-1), shares.view(-1), ctx.group)
        return result, None, None, None, None
