"""Attention as opaque torch operators with a backward: ``fsdp_cp::ring_attention``, ``fsdp_cp::cached_attention``.

An operator hides work handles, buffers in flight and the choice of a kernel from ``torch.compile``, and gives
selective-checkpointing policies a name. Its arguments are tensors, numbers and the name of a process group. It has no
forward-mode derivative: :mod:`fsdp_cp.attention` handles tangents before calling it.

Calling an operator written in Python costs the host more than launching a small kernel. :func:`attend_in_ring` and
:func:`attend_to_cache` therefore call the operator only if something observes operators. Otherwise they call the same
two functions through an ``autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_cp.attention.cached_ring import cached_backward, cached_forward
from fsdp_cp.attention.kernels.choose import choose_kernel
from fsdp_cp.attention.kernels.kernel import Kernel, accumulation_dtype
from fsdp_cp.attention.layout import Layout, make_layout
from fsdp_cp.attention.ring import Ring, ring_backward, ring_forward


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with a ``group_name``. ``_resolve_process_group`` is private (torch 2.11 to 2.13)."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # GroupName, a str


def make_ring(layout: Layout, rank: int, group: str) -> Ring:
    """Return the place of a rank in the ring of the named ``group``. A ring of one ignores the name."""
    return Ring(layout, rank, group_by_name(group) if layout.ring > 1 else None)


def attend_in_ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *settings) -> Tensor:
    """Compute the output of :data:`ring_attention`, through the operator only if something observes operators."""
    if _looked_at(q, k, v):
        return ring_attention(q, k, v, mask, *settings)[0]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _RingAttention.apply(q, k, v, mask, *settings)[0]
    return _forward(q, k, v, mask, *settings)[0]


def _looked_at(*tensors: Tensor) -> bool:
    """Return whether a compiler, dispatch mode, tensor subclass, ``torch.func`` or the profiler observes operators.

    Dispatch modes include selective checkpointing, fake tensors, and counters of operations or bytes. The three
    functions of ``torch._C`` are private (torch 2.11 to 2.13).
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in tensors)
    )


def _forward(q, k, v, mask, scale, *settings):
    ring, kernel = _ring_and_kernel(q, mask, *settings)
    out, lse = ring_forward(q, k, v, mask, scale, ring, kernel)
    return out.contiguous(), lse.contiguous()


def _backward(grad_out, q, k, v, out, lse, mask, scale, *settings):
    ring, kernel = _ring_and_kernel(q, mask, *settings)
    grads = ring_backward(grad_out, q, k, v, out, lse, mask, scale, ring, kernel)
    return tuple(x.contiguous() for x in grads)


def _ring_and_kernel(
    q: Tensor,
    mask: Tensor | None,
    segments: list[int],
    keys: list[int],
    block_mask: list[int],
    ulysses: int,
    ring: int,
    rank: int,
    group: str,
    backend: str,
) -> tuple[Ring, Kernel]:
    layout = make_layout(tuple(segments), tuple(keys), tuple(block_mask), ulysses, ring)
    kernel = choose_kernel(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=mask is not None)
    return make_ring(layout, rank, group), kernel.next_to_messages() if ring > 1 else kernel


def _separate(*inputs):
    return _unaliased(_backward(*inputs))


def _unaliased(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Clone gradients that share a buffer: an operator must not return aliases."""
    dq, dk, dv = grads
    if len({x.untyped_storage()._cdata for x in (dq, dk, dv)}) < 3:
        dk, dv = dk.clone(), dv.clone()
    return dq, dk, dv


_SETTINGS = (
    "Tensor? mask, float scale, SymInt[] segments, SymInt[] keys, SymInt[] block_mask, SymInt ulysses, SymInt ring, "
    "SymInt rank, str group, str backend"
)
"""Arguments that both operators share: the key mask, the arguments of :func:`make_layout`, rank and group."""
ring_attention = torch.library.custom_op(
    "fsdp_cp::ring_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SETTINGS}) -> (Tensor, Tensor)",
)
"""Operator of :func:`fsdp_cp.attention.ring.ring_forward`."""
ring_attention_backward = torch.library.custom_op(
    "fsdp_cp::ring_attention_backward",
    _separate,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
"""Operator of :func:`fsdp_cp.attention.ring.ring_backward`."""


def _fake_forward(q, k, v, *_settings):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


def _fake_backward(grad_out, q, k, v, *_settings):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


ring_attention.register_fake(_fake_forward)
ring_attention_backward.register_fake(_fake_backward)


def _keep_for_backward(ctx, inputs, output):
    q, k, v, mask, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, mask)


def _differentiate(ctx, grad_out, _grad_lse):
    return _gradients(torch.ops.fsdp_cp.ring_attention_backward, ctx, grad_out)


def _gradients(backward: Callable[..., tuple[Tensor, ...]], ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of all arguments of the forward, computed by ``backward``."""
    q, k, v, out, lse, mask = ctx.saved_tensors  # read once: a second read breaks checkpointing
    grads = backward(grad_out.contiguous(), q, k, v, out, lse, mask, *ctx.settings)
    return (*grads, *[None] * 10)


class _RingAttention(torch.autograd.Function):
    """Forward and backward of the operator as an autograd function, without an operator call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _keep_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor, _grad_lse: Tensor):
        return _gradients(_backward, ctx, grad_out)


ring_attention.register_autograd(_differentiate, setup_context=_keep_for_backward)


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, past_k: list[Tensor], past_v: list[Tensor], *settings: Any
) -> Tensor:
    """Compute the output of :data:`cached_attention`, through the operator only if something observes operators."""
    if _looked_at(q, k, v, *past_k, *past_v):
        return cached_attention(q, k, v, past_k, past_v, *settings)[0]
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _CachedAttention.apply(q, k, v, past_k, past_v, *settings)[0]
    return _cached_forward(q, k, v, past_k, past_v, *settings)[0]


def _cached_forward(q, k, v, past_k, past_v, scale, *settings):
    ring, kernel = _cached_ring_and_kernel(q, *settings)
    out, lse = cached_forward(q, k, v, list(zip(past_k, past_v, strict=True)), scale, ring, kernel)
    return out.contiguous(), lse.contiguous()


def _cached_backward(grad_out, q, k, v, out, lse, past_k, past_v, scale, *settings):
    ring, kernel = _cached_ring_and_kernel(q, *settings)
    past = list(zip(past_k, past_v, strict=True))
    grads = cached_backward(grad_out, q, k, v, out, lse, past, scale, ring, kernel)
    return tuple(x.contiguous() for x in grads)


def _cached_ring_and_kernel(
    q: Tensor, tokens: int, ulysses: int, ring: int, rank: int, group: str, backend: str
) -> tuple[Ring, Kernel]:
    layout = make_layout((tokens,), (tokens,), (), ulysses, ring)
    kernel = choose_kernel(backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=False)
    return make_ring(layout, rank, group), kernel  # no message is in flight during attention


def _cached_separate(*inputs):
    return _unaliased(_cached_backward(*inputs))


_CACHED_SETTINGS = (
    "Tensor[] past_k, Tensor[] past_v, float scale, SymInt tokens, SymInt ulysses, SymInt ring, SymInt rank, "
    "str group, str backend"
)
cached_attention = torch.library.custom_op(
    "fsdp_cp::cached_attention",
    _cached_forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_CACHED_SETTINGS}) -> (Tensor, Tensor)",
)
"""Operator of :func:`fsdp_cp.attention.cached_ring.cached_forward`. The cached keys and values are constants."""
cached_attention_backward = torch.library.custom_op(
    "fsdp_cp::cached_attention_backward",
    _cached_separate,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_CACHED_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
"""Operator of :func:`fsdp_cp.attention.cached_ring.cached_backward`."""
cached_attention.register_fake(_fake_forward)
cached_attention_backward.register_fake(_fake_backward)


def _keep_cache_for_backward(ctx, inputs, output):
    q, k, v, past_k, past_v, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, *past_k, *past_v)


def _cached_gradients(backward: Callable[..., tuple[Tensor, ...]], ctx, grad_out: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *past = ctx.saved_tensors  # read once: a second read breaks checkpointing
    count = len(past) // 2
    grads = backward(grad_out.contiguous(), q, k, v, out, lse, past[:count], past[count:], *ctx.settings)
    return (*grads, [None] * count, [None] * count, *[None] * 7)


def _differentiate_cached(ctx, grad_out, _grad_lse):
    return _cached_gradients(torch.ops.fsdp_cp.cached_attention_backward, ctx, grad_out)


class _CachedAttention(torch.autograd.Function):
    """Forward and backward of the operator as an autograd function, without an operator call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _cached_forward(*inputs)
        _keep_cache_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor, _grad_lse: Tensor):
        dq, dk, dv, *_ = _cached_gradients(_cached_backward, ctx, grad_out)
        return (dq, dk, dv, *[None] * 9)  # an autograd function takes no list of gradients


cached_attention.register_autograd(_differentiate_cached, setup_context=_keep_cache_for_backward)
