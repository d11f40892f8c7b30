"""Ring attention as one opaque torch operator with its backward: ``torch.ops.fsdp_cp.ring_attention``.

Opaque, so that handles, buffers in flight and the choice of a kernel stay out of ``torch.compile``'s sight, and so that
a selective-checkpointing policy can name it. Its arguments are tensors, numbers and the name of a process group. It has
no forward-mode derivative: :mod:`fsdp_cp.attention` takes tangents another way, before they get here.

A call of an operator written in Python costs the host more than a small kernel does. So :func:`attend_in_ring` calls
it where somebody looks at operators, and where nobody does, the same two functions as an ``autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_cp.attention.failures import Failure, is_local
from fsdp_cp.attention.kernel import Kernel, accumulation_dtype
from fsdp_cp.attention.kernels import choose_kernel
from fsdp_cp.attention.layout import Layout
from fsdp_cp.attention.ring import Ring, ring_backward, ring_forward

_FAILURE = "_fsdp_cp_failure"
"""Attribute of the operator's node in autograd's graph."""


def group_by_name(name: str) -> dist.ProcessGroup:
    """The group of a ``ProcessGroup.group_name``. ``_resolve_process_group`` is private (torch 2.11 to 2.13)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # GroupName, a str


def make_ring(layout: Layout, rank: int, group: str) -> Ring:
    """The place of a rank in the ring of ``group``; the name is not looked at for a ring of one."""
    return Ring(layout, rank, group_by_name(group) if layout.ring > 1 else None)


def _layout(segments: list[int], keys: list[int], causal_block: int, ulysses: int, ring: int) -> Layout:
    return Layout(tuple(segments), tuple(keys), ulysses=ulysses, ring=ring, causal_block=causal_block or None)


def attend_in_ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *settings) -> Tensor:
    """The output of :func:`ring_attention`, whose arguments these are: by the operator where it is looked at."""
    if _looked_at(q, k, v):
        return ring_attention(q, k, v, mask, *settings)[0]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _RingAttention.apply(q, k, v, mask, *settings)[0]
    return _forward(q, k, v, mask, *settings)[0]


def _looked_at(*tensors: Tensor) -> bool:
    """Does anything act on operators: a compiler, a dispatch mode (selective checkpointing, fake tensors, counters of
    operations or bytes), a tensor subclass, a transform of ``torch.func``, the profiler?

    The three questions to ``torch._C`` are private (torch 2.11 to 2.13).
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in tensors)
    )


@torch.library.custom_op("fsdp_cp::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    segments: list[int],
    keys: list[int],
    causal_block: int,
    ulysses: int,
    ring: int,
    rank: int,
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """:func:`fsdp_cp.attention.ring.ring_forward`; ``segments`` and so on are :class:`Layout`'s, with 0 for no
    ``causal_block``."""
    return _forward(q, k, v, mask, scale, segments, keys, causal_block, ulysses, ring, rank, group, backend)


@ring_attention.register_fake
def _(q, k, v, mask, scale, segments, keys, causal_block, ulysses, ring, rank, group, backend):
    b, s, h, _ = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (b, h, s), dtype=accumulation_dtype(q.dtype)
    )


@torch.library.custom_op("fsdp_cp::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    segments: list[int],
    keys: list[int],
    causal_block: int,
    ulysses: int,
    ring: int,
    rank: int,
    group: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fsdp_cp.attention.ring.ring_backward`."""
    settings = (scale, segments, keys, causal_block, ulysses, ring, rank, group, backend)
    dq, dk, dv = _backward(grad_out, q, k, v, out, lse, mask, *settings)
    # Views of one buffer, which a kernel may return, would be refused as aliases.
    if len({x.untyped_storage()._cdata for x in (dq, dk, dv)}) < 3:
        dk, dv = dk.clone(), dv.clone()
    return dq, dk, dv


@ring_attention_backward.register_fake
def _(grad_out, q, k, v, out, lse, mask, *_settings):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _forward(q, k, v, mask, scale, segments, keys, causal_block, ulysses, ring, rank, group, backend):
    place = make_ring(_layout(segments, keys, causal_block, ulysses, ring), rank, group)
    out, lse = ring_forward(q, k, v, mask, scale, place, _kernel(q, mask, backend, ring))
    return out.contiguous(), lse.contiguous()


def _backward(
    grad_out, q, k, v, out, lse, mask, scale, segments, keys, causal_block, ulysses, ring, rank, group, backend
):
    place = make_ring(_layout(segments, keys, causal_block, ulysses, ring), rank, group)
    grads = ring_backward(grad_out, q, k, v, out, lse, mask, scale, place, _kernel(q, mask, backend, ring))
    return tuple(x.contiguous() for x in grads)


def _kernel(q: Tensor, mask: Tensor | None, backend: str, ring: int) -> Kernel:
    kernel = choose_kernel(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=mask is not None)
    return kernel.beside_messages() if ring > 1 else kernel


def _keep_for_backward(ctx, inputs, output):
    q, k, v, mask, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, mask)


def _differentiate(ctx, grad_out, _grad_lse):
    return _gradients(torch.ops.fsdp_cp.ring_attention_backward, ctx, grad_out)


def _gradients(backward: Callable[..., tuple[Tensor, ...]], ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Of all arguments of the forward, by ``backward``; NaN where it fails and the failure is to be kept."""
    q, k, v, out, lse, mask = ctx.saved_tensors  # read once: a second read breaks checkpointing
    try:
        grads = backward(grad_out.contiguous(), q, k, v, out, lse, mask, *ctx.settings)
    except Exception as error:
        failure = getattr(ctx, _FAILURE, None)
        if failure is None or not is_local(error):
            raise
        failure.keep(error)
        grads = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    return (*grads, *[None] * 10)


class _RingAttention(torch.autograd.Function):
    """The operator's forward and backward, without the operator."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _keep_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor, _grad_lse: Tensor):
        return _gradients(_backward, ctx, grad_out)


def keep_failure_of_backward(out: Tensor, failure: Failure) -> None:
    """Of the backward that belongs to this output of the operator: NaN goes on to the exchanges that follow it."""
    if out.grad_fn is not None:
        setattr(out.grad_fn, _FAILURE, failure)


ring_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)
