"""Attention as opaque torch operators with a backward: ``fsdp_cp::ring_attention``, ``fsdp_cp::cached_attention``.

An operator hides work handles, buffers in flight and the choice of a kernel from ``torch.compile``, and gives
selective-checkpointing policies a name. Its arguments are tensors, numbers and the name of a process group. It has no
forward-mode derivative: :mod:`fsdp_cp.attention` handles tangents before calling it.

Calling an operator written in Python costs the host more than launching a small kernel. An
:class:`AttentionOperator` therefore calls the operator only if something observes operators. Otherwise it calls the
same two functions through an ``autograd.Function``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_cp.attention.kernels.choose import choose_kernel, choose_sparse
from fsdp_cp.attention.kernels.kernel import Kernel, accumulation_dtype
from fsdp_cp.attention.layout import make_layout
from fsdp_cp.attention.ring import Ring, make_ring, ring_attention, ring_backward

SETTINGS = (
    "float scale, SymInt[] segments, SymInt[] keys, SymInt[] block_mask, SymInt[] tiles, SymInt ulysses, "
    "SymInt ring, SymInt rank, str group, str backend, bool gradients"
)
"""Arguments that all operators share: the scale, the arguments of :func:`make_layout`, rank, group, kernel, and whether
a backward may follow, on which ``auto`` depends. Only the caller of an operator can know the last."""


class AttentionOperator:
    """Attention of a rank's queries to keys on all ranks of a ring, as an operator with a backward.

    Calling it with further tensors, the settings of the schema above up to the backend, and q, k and v returns the
    output ``(B, S, H, D)``, as :func:`fsdp_cp.attention.ulysses.with_all_tokens` asks for it.

    Further tensors have no gradients. ``forward`` and ``backward`` are functions as :func:`ring_attention
    <fsdp_cp.attention.ring.ring_attention>` and :func:`ring_backward <fsdp_cp.attention.ring.ring_backward>`. If
    ``forward`` also returns a choice of keys, ``choice`` makes an empty one from ``q`` and the further tensors;
    backward gets the choice and the last of them instead.
    """

    def __init__(self, name: str, forward: Callable, backward: Callable, choice: Callable[..., Tensor] | None = None):
        self.forward, self.backward, self.choice = forward, backward, choice
        tensors, further = "Tensor q, Tensor k, Tensor v", "Tensor[] further"
        schema = f"({tensors}, {further}, {SETTINGS}) -> (Tensor, Tensor{', Tensor' if choice else ''})"
        self.operator = torch.library.custom_op(f"fsdp_cp::{name}", self.compute, mutates_args=(), schema=schema)
        schema = f"(Tensor grad_out, {tensors}, Tensor out, Tensor lse, {further}, {SETTINGS})"
        self._backward_operator = torch.library.custom_op(
            f"fsdp_cp::{name}_backward",
            self._separate_gradients,
            mutates_args=(),
            schema=f"{schema} -> (Tensor, Tensor, Tensor)",
        )
        self.operator.register_fake(self._fake_forward)
        self._backward_operator.register_fake(_fake_backward)
        self.operator.register_autograd(self._differentiate, setup_context=self.keep_for_backward)

    def __call__(self, further: list[Tensor], settings: tuple[Any, ...], qkv: Sequence[Tensor]) -> list[Tensor]:
        """Compute the output, through the operator only if something observes operators."""
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in qkv)
        if is_observed(*qkv, *further):
            out, *_ = self.operator(*qkv, further, *settings, gradients)
        elif gradients:
            out, *_ = _Attention.apply(self, *qkv, further, *settings, gradients)
        else:
            out, *_ = self.compute(*qkv, further, *settings, gradients)
        return [out]

    def compute(self, q, k, v, further, scale, *settings) -> tuple[Tensor, ...]:
        """Compute the output, the log-sum-exp and, in sparse attention, the choice: the kernel of the operator."""
        ring, kernel = ring_and_kernel(q, k, further, *settings)
        return self.forward((q, k, v), further, scale, ring, kernel.forward)

    def compute_gradients(self, grad_out, q, k, v, out, lse, further, scale, *settings) -> tuple[Tensor, ...]:
        """Compute the gradients of q, k and v, the kernel of the backward operator."""
        ring, kernel = ring_and_kernel(q, k, further, *settings)
        grads = self.backward(grad_out, q, k, v, out, lse, further, scale, ring, kernel)
        return tuple(x.contiguous() for x in grads)

    def _separate_gradients(self, *inputs):
        """Clone gradients that share a buffer: an operator must not return aliases."""
        dq, dk, dv = self.compute_gradients(*inputs)
        if len({x.untyped_storage()._cdata for x in (dq, dk, dv)}) < 3:
            dk, dv = dk.clone(), dv.clone()
        return dq, dk, dv

    def keep_for_backward(self, ctx, inputs, output) -> None:
        """Save the arguments of the backward operator."""
        q, k, v, further, *ctx.settings = inputs
        out, lse, *choice = output
        ctx.further = len(further)
        if choice:  # backward needs the choice instead of what it was made from
            further = [*choice, further[-1]]
            ctx.mark_non_differentiable(*choice)
        ctx.save_for_backward(q, k, v, out, lse, *further)

    def _differentiate(self, ctx, grad_out, *_unused):
        grads = self._backward_operator(*_kept(ctx, grad_out))
        # Torch expects a list for each list of tensors, and takes an empty list for one.
        return (*grads, [None] * ctx.further, *[[] if setting == [] else None for setting in ctx.settings])

    def _fake_forward(self, q, k, v, further, *_settings):
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulation_dtype(q.dtype))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return (out, lse) if self.choice is None else (out, lse, self.choice(q, further))


class _Attention(torch.autograd.Function):
    """Forward and backward of an operator as an autograd function, without an operator call."""

    @staticmethod
    def forward(ctx, operator: AttentionOperator, *inputs):
        ctx.operator = operator
        output = operator.compute(*inputs)
        operator.keep_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor, *_unused: Tensor):
        grads = ctx.operator.compute_gradients(*_kept(ctx, grad_out))
        return (None, *grads, None, *[None] * len(ctx.settings))


def _kept(ctx, grad_out: Tensor) -> tuple[Any, ...]:
    """Return the arguments of the backward operator."""
    q, k, v, out, lse, *further = ctx.saved_tensors  # read once: a second read breaks checkpointing
    return grad_out.contiguous(), q, k, v, out, lse, further, *ctx.settings


def is_observed(*tensors: Tensor) -> bool:
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


def ring_and_kernel(
    q: Tensor, k: Tensor, further: Sequence[Tensor], segments, keys, block_mask, tiles, *settings: Any
) -> tuple[Ring, Kernel]:
    """Return the rank's place in the ring, and the kernel, for the settings of an operator."""
    ulysses, ring, rank, group, backend, gradients = settings
    layout = make_layout(tuple(segments), tuple(keys), tuple(block_mask), tuple(tiles), ulysses, ring)
    if layout.tiles is not None:
        return make_ring(layout, rank, group), choose_sparse(backend, q, layout.tiles.width).kernel
    masked = any(x.dtype == torch.bool for x in further)
    tokens = min(q.shape[1], k.shape[1])
    kernel = choose_kernel(
        backend, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], masked=masked, tokens=tokens, gradients=gradients
    )
    return make_ring(layout, rank, group), kernel


def _fake_backward(grad_out, q, k, v, *_settings):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


attend_in_ring = AttentionOperator("ring_attention", ring_attention, ring_backward)
"""Operator of :mod:`fsdp_cp.attention.ring`. Its further tensors are the key mask, or none."""
