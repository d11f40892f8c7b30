"""Context-parallel attention of other libraries, each as one function that returns ``attend(q, k, v) -> out``.

Inputs and outputs are ``(B, S_local, H, D)``, as in our attention. All libraries are written for CUDA. *As shipped* is
the library's entry point on this device. *CPU kernel* is the library's exchange, ring and merging around
``aten::_scaled_dot_product_flash_attention_for_cpu``, which is also our CPU kernel. It is the library's strongest form
on a CPU, and compares only the context parallelism. The private names below are those of diffusers 0.42.1, torch 2.13.0
and yunchang 0.6.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """Attention implementation on one factorization of the ranks."""

    name: str
    ring: int
    ulysses: int
    build: Callable[[int, int], Attend]
    """``build(ring, ulysses)``, called once on every rank. An error here or in the attention becomes the row."""
    ours: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({self.ring} x {self.ulysses})"


def peers(world: int, heads: int) -> list[Contender]:
    """Return every peer on every (ring, ulysses) whose product is ``world`` and where ``ulysses`` divides ``heads``."""
    contenders = []
    for ulysses in (n for n in range(1, world + 1) if world % n == 0 and heads % n == 0):
        ring = world // ulysses
        builders: dict[str, Callable[[int, int], Attend]] = {
            "diffusers, as shipped": _diffusers_shipped,
            "diffusers, CPU kernel": _diffusers_cpu,
            "yunchang, CPU kernel": _yunchang_cpu,
        }
        if ulysses == 1:
            builders |= {
                "torch all-gather, CPU kernel": _torch_all_gather_cpu,
                "torch all-to-all, CPU kernel": _torch_all_to_all_cpu,
            }
        contenders += [Contender(name, ring, ulysses, build) for name, build in builders.items()]
    return contenders


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attend over ``(B, S, H, D)``; return the output and the log-sum-exp ``(B, H, S)``."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale
    )
    return out.transpose(1, 2), lse


def _cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None = None
) -> tuple[Tensor, ...]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, 0.0, False, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in grads)


# --- diffusers 0.42.1 ---


def _diffusers_config(ring: int, ulysses: int):
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    return config


def _diffusers_shipped(ring: int, ulysses: int) -> Attend:
    """Build diffusers' attention with its ``native`` backend (plain SDPA).

    No other backend with context parallelism takes CPU tensors. ``native`` returns no log-sum-exp, so the ring refuses
    it. Its Ulysses backward runs the forward again.
    """
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config = _diffusers_config(ring, ulysses)
    return lambda q, k, v: dispatch_attention_fn(q, k, v, backend="native", parallel_config=config)


def _diffusers_cpu(ring: int, ulysses: int) -> Attend:
    """Build diffusers' templates around the CPU kernel.

    The two operators are like its ``_native_flash_attention_*_op``, without their copies to contiguous layouts, which
    this kernel does not need. With three or more ring ranks its dK and dV are wrong: K and V come from rank + i, but
    the accumulators are sent to rank + 1.
    """
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    config = _diffusers_config(ring, ulysses)

    def forward(ctx, query, key, value, *options, _save_ctx=True, _parallel_config=None):
        out, lse = _cpu_flash(query, key, value)
        lse = lse.transpose(1, 2)  # the templates keep (B, S, H)
        if _save_ctx:
            ctx.save_for_backward(query, key, value, out, lse)
        wants_lse = options[-1]
        return (out, lse) if wants_lse else out

    def backward(ctx, grad_out, *_, query=None, key=None, value=None, out=None, lse=None):
        tensors = (query, key, value, out, lse)
        saved = ctx.saved_tensors
        query, key, value, out, lse = (s if x is None else x for x, s in zip(tensors, saved, strict=True))
        return _cpu_flash_backward(grad_out, query, key, value, out, lse.transpose(1, 2))

    return lambda q, k, v: _templated_context_parallel_attention(
        q, k, v, forward_op=forward, backward_op=backward, _parallel_config=config
    )


# --- torch.distributed.tensor.experimental, torch 2.13.0 ---


def _torch_all_gather_cpu(ring: int, ulysses: int) -> Attend:
    """Build torch's templates with one all-gather of K and V, the default."""
    return _torch_templates(ring, "ALL_GATHER")


def _torch_all_to_all_cpu(ring: int, ulysses: int) -> Attend:
    """Build torch's templates with K and V passed around the ring."""
    return _torch_templates(ring, "ALL_TO_ALL")


def _torch_templates(ring: int, rotation: str) -> Attend:
    """Build the two template functions to which torch passes CUDA operators, with the CPU operators."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as templates

    templates._cp_options.enable_load_balance = False
    group = init_device_mesh("cpu", (ring,), mesh_dim_names=("ring",)).get_group()
    rotate = templates._RotateMethod[rotation]
    aten = torch.ops.aten

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            templates._cp_options.rotate_method = rotate
            out, lse = templates._templated_ring_attention(
                group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=False
            )
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            templates._cp_options.rotate_method = rotate
            q, k, v, out, lse = ctx.saved_tensors
            return templates._templated_ring_attention_backward(
                group,
                2,
                aten._scaled_dot_product_flash_attention_for_cpu_backward,
                grad_out=grad,
                grad_out_name="grad_out",
                query=q,
                key=k,
                value=v,
                out=out,
                logsumexp=lse,
                is_causal=False,
                dropout_p=0.0,
            )

    return lambda q, k, v: Ring.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


# --- yunchang 0.6.4 ---


def _yunchang_groups(ring: int, ulysses: int) -> None:
    import yunchang

    yunchang.set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())


def _yunchang_cpu(ring: int, ulysses: int) -> Attend:
    """Build yunchang's Ulysses module around SDPA or, with a ring, its hybrid module around the CPU kernel.

    The hybrid module gets its kernels from ``select_flash_attn_impl``, which is replaced here. With fp32 inputs its
    gradients are wrong: their accumulators are the kernel's buffers, which the next step overwrites. It is made for
    bf16; flash_attn does not support fp32.
    """
    import yunchang
    from yunchang.kernels import AttnType
    from yunchang.ring import ring_flash_attn

    _yunchang_groups(ring, ulysses)
    if ring == 1:
        module = yunchang.UlyssesAttention(yunchang.globals.PROCESS_GROUP.ULYSSES_PG, attn_type=AttnType.TORCH_FLASH)
        module.attn_fn = _sdpa
        return module

    def forward(q, k, v, *, softmax_scale, **options):
        return _cpu_flash(q, k, v, softmax_scale)

    def backward(grad, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, *options, **more):
        grads = _cpu_flash_backward(grad, q, k, v, out, lse, softmax_scale)
        for buffer, value in zip((dq, dk, dv), grads, strict=True):
            buffer.copy_(value)  # yunchang's kernels write into given buffers

    kernels = {"fwd-only": forward, "bwd-only": backward}
    ring_flash_attn.select_flash_attn_impl = lambda kind, stage, attn_processor=None: kernels[stage]
    return yunchang.LongContextAttention(ring_impl_type="basic")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, **options) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, scale=softmax_scale).transpose(1, 2)
