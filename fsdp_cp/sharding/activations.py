"""Wrappers of a unit's ``forward``: activation checkpointing, compilation, activation offload.

They wrap only ``forward``, so hooks (token splitting, FSDP's all-gather) run once, outside, and names do not change.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_cp.duals import inside_dual_level
from fsdp_cp.runtime.torch_versions import compile_options
from fsdp_cp.sequence_lengths import entered, within
from fsdp_cp.sharding.settings import ShardSettings, find_operator

ATTENTION = ("fsdp_cp.ring_attention", "fsdp_cp.cached_attention", "fsdp_cp.sparse_attention")
"""Attention operators, whose outputs selective checkpointing keeps by default."""
MOST_GRAPHS = 64
"""Maximum number of compiled variants of one class of units."""


def wrap_unit(unit: nn.Module, settings: ShardSettings) -> None:
    """Wrap the forward of ``unit`` in place: activation checkpointing, compilation, then offload of inputs.

    The compiler sees the checkpointing and applies the same policy to its backward graph. Offload comes last, since it
    handles the tensors that the other two still save.
    """
    if settings.activation_checkpointing == "full":
        recompute_in_backward(unit)
    elif settings.activation_checkpointing == "selective":
        recompute_in_backward(unit, _kept(settings))
    if settings.compile:
        compile_forward(unit)
    if settings.activation_offload:
        offload_inputs(unit)


def _kept(settings: ShardSettings) -> tuple[str, ...]:
    return tuple(settings.keep_operators) or ATTENTION


def keeps_attention(settings: ShardSettings) -> bool:
    """Return whether recomputation skips attention because its output is kept."""
    names = {name.replace("::", ".").removesuffix(".default") for name in _kept(settings)}
    return settings.activation_checkpointing == "selective" and ATTENTION[0] in names


def recompute_in_backward(module: nn.Module, keep: tuple[str, ...] = ()) -> None:
    """Checkpoint the activations of ``module`` in place; the outputs of operators in ``keep`` are not recomputed."""
    options: dict[str, Any] = {}
    if keep:
        operators = frozenset(find_operator(name, "keep_operators") for name in keep)
        options["context_fn"] = _keeping_contexts(operators)
    inner = module.forward

    def recomputed(*args, **kwargs):
        if not torch.is_grad_enabled():  # torch 2.11's checkpoint loses forward-mode tangents here
            return inner(*args, **kwargs)
        # Pass all arguments by position: offload cannot see the references that checkpoint keeps to keyword arguments.
        names = tuple(kwargs)
        # Recomputation needs the token counts of its own forward. (A compiled graph contains them.)
        lengths = None if torch.compiler.is_compiling() else entered()

        def run(*values):
            count = len(values) - len(names)
            with nullcontext() if lengths is None else within(lengths):
                return inner(*values[:count], **dict(zip(names, values[count:], strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, **options)

    module.forward = recomputed


@cache  # one function for all units, so that they can share a compiled graph
def _keeping_contexts(operators: frozenset) -> Callable[[], tuple]:
    return partial(create_selective_checkpoint_contexts, list(operators))


def compile_forward(module: nn.Module) -> None:
    """Compile the ``forward`` of ``module`` as one graph, in place; a graph break is an error.

    Inside ``forward_ad.dual_level()`` and ``torch.func.jvp`` the module runs uncompiled, since compiled graphs lose
    tangents silently. The dual level decides, not the arguments, since ``forward`` can close over a tangent.
    """
    # On a CPU inductor fuses loops over a transposed sequence, as in a patch embedding, into wrong gradients without an
    # error (torch 2.13: off by 4 to 9 % after a modulated norm and a feed-forward; the forward is correct).
    options: dict[str, Any] = {"cpp.max_horizontal_fusion_size": 1}
    uncompiled = module.forward
    # Units and networks of one class share their graphs, one per shape (until sizes are dynamic) and gradient mode.
    compiled = torch.compile(uncompiled, fullgraph=True, options=options, **compile_options(MOST_GRAPHS))

    def forward(*args, **kwargs):
        return (uncompiled if inside_dual_level() else compiled)(*args, **kwargs)

    module.forward = forward


def offload_inputs(module: nn.Module) -> None:
    """Keep the inputs that a recomputed ``module.forward`` saves in CPU memory until backward, in place.

    Parameters and buffers, which a compiled forward saves too, stay on the device: FSDP's resharding frees gathered
    weights, and a copy would only double them. Expanded and sliced inputs stay too: a compiled backward checks strides,
    which only a dense copy keeps. Copies run on the current stream, in pinned memory for CUDA tensors; CPU
    tensors are copied too. Forwards without gradients copy nothing.
    """
    inner = module.forward

    def forward(*args, **kwargs):
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        owned = [x for x in (*module.parameters(), *module.buffers()) if not is_traceable_wrapper_subclass(x)]
        # These stay alive during the whole forward, so that no other storage gets their addresses.
        stay = {x.untyped_storage()._cdata for x in owned}

        def pack(x: Tensor) -> Tensor | tuple[torch.device, Tensor]:
            x = x.detach()  # required by autograd: a reference to x itself would be a cycle
            if is_traceable_wrapper_subclass(x) or x.untyped_storage()._cdata in stay:
                return x
            if torch.empty_like(x, device="meta").stride() != x.stride():
                return x
            # The stream orders the copy after the kernel that writes x and before one that reuses its memory.
            return x.device, host_buffer(x, pinned=x.is_cuda).copy_(x, non_blocking=x.is_cuda)

        with torch.autograd.graph.saved_tensors_hooks(pack, _restore):
            return inner(*args, **kwargs)

    module.forward = forward


def host_buffer(like: Tensor, pinned: bool) -> Tensor:
    """Allocate CPU memory for an activation. The planner counts these calls."""
    return torch.empty_like(like, device="cpu", pin_memory=pinned)


def _restore(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    device, host = saved
    return torch.empty_like(host, device=device).copy_(host, non_blocking=True)
