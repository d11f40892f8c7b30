"""Wrappers of a unit's ``forward``: activation checkpointing, compilation, activation offload.

They wrap only ``forward``, so hooks (token splitting, FSDP's all-gather) run once, outside, and names do not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdp_cp.duals import inside_dual_level
from fsdp_cp.runtime.torch_versions import compile_options
from fsdp_cp.sequence_lengths import entered, within
from fsdp_cp.sharding.settings import ShardSettings, find_operator

ATTENTION = ("fsdp_cp.ring_attention", "fsdp_cp.cached_attention")
"""Attention operators, whose outputs selective checkpointing keeps by default."""
MOST_GRAPHS = 64
"""Maximum number of compiled variants of one class of units."""
SMALLEST_OFFLOADED = 64 * 1024
"""Bytes of the smallest storage that is copied to the host; smaller copies cost more time than they save memory."""


def wrap_unit(unit: nn.Module, settings: ShardSettings) -> None:
    """Wrap the forward of ``unit`` in place: activation checkpointing, compilation, then offload of saved tensors.

    The compiler sees the checkpointing and applies the same policy to its backward graph. Offload comes last, since it
    handles the tensors that the other two still save.
    """
    if settings.activation_checkpointing == "full":
        recompute_in_backward(unit)
    elif settings.activation_checkpointing == "selective":
        recompute_in_backward(unit, _kept(settings), offload=settings.activation_offload and not settings.compile)
    if settings.compile:
        compile_forward(unit)
    if settings.activation_offload:
        offload_saved_tensors(unit)


def _kept(settings: ShardSettings) -> tuple[str, ...]:
    return tuple(settings.keep_operators) or ATTENTION


def keeps_attention(settings: ShardSettings) -> bool:
    """Return whether recomputation skips attention because its output is kept."""
    names = {name.replace("::", ".").removesuffix(".default") for name in _kept(settings)}
    return settings.activation_checkpointing == "selective" and ATTENTION[0] in names


def recompute_in_backward(module: nn.Module, keep: tuple[str, ...] = (), *, offload: bool = False) -> None:
    """Checkpoint the activations of ``module`` in place; the outputs of operators in ``keep`` are not recomputed.

    ``offload`` keeps those outputs in CPU memory. In a compiled module :func:`offload_saved_tensors` does so.
    """
    options: dict[str, Any] = {}
    if keep:
        operators = frozenset(find_operator(name, "keep_operators") for name in keep)
        options["context_fn"] = partial(_offloading_contexts, operators) if offload else _keeping_contexts(operators)
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


def offload_saved_tensors(module: nn.Module) -> None:
    """Keep the tensors that autograd saves during ``module.forward`` in CPU memory until backward, in place.

    Parameters, buffers and views of them stay on the device: FSDP's resharding frees gathered weights, and a copy would
    only double them. Storages below :data:`SMALLEST_OFFLOADED` stay too. Copies run on the current stream, in pinned
    memory for CUDA tensors; CPU tensors are copied too. Forwards without gradients copy nothing.
    """
    inner = module.forward

    def forward(*args, **kwargs):
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        host = _HostMemory(module)
        with torch.autograd.graph.saved_tensors_hooks(host.pack, _Saved.restore):
            return inner(*args, **kwargs)

    module.forward = forward


class _HostMemory:
    """Copies in CPU memory of the tensors that one forward saves. Views of one storage share a copy."""

    def __init__(self, module: nn.Module | None = None):
        owned = [] if module is None else [*module.parameters(), *module.buffers()]
        # These stay alive during the whole forward, so that no other storage gets their addresses.
        self._stay = {x.untyped_storage()._cdata for x in owned if not is_traceable_wrapper_subclass(x)}
        self._copies: dict[tuple[int, ...], tuple[weakref.ref, _HostCopy]] = {}

    def pack(self, x: Tensor) -> _Saved:
        x = x.detach()  # required by autograd: a reference to x itself would be a cycle
        if x.layout != torch.strided or x.device.type == "meta" or is_traceable_wrapper_subclass(x):
            return _Saved(x)
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        storage = x.untyped_storage()
        if storage.nbytes() < SMALLEST_OFFLOADED or storage._cdata in self._stay:
            return _Saved(x)
        first, last = _bytes_of(x)
        if 2 * (last - first) >= storage.nbytes():  # neighbors such as q, k and v of one projection share a copy
            first, last = 0, storage.nbytes() // x.element_size() * x.element_size()
        key = (storage._cdata, x._version, first, last)  # version: x may be saved again after an in-place change
        owner, copy = self._copies.get(key, (lambda: None, None))
        if copy is None or owner() is not storage:  # a freed storage's address may belong to another by now
            copy = _HostCopy(x, first, last)
            self._copies[key] = (weakref.ref(storage), copy)
        copy.users += 1
        return _Saved(x, copy, int(x.storage_offset()) - first // x.element_size())


def host_buffer(size: int, pinned: bool) -> Tensor:
    """Allocate ``size`` bytes of CPU memory for an activation. The planner counts these calls."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class _HostCopy:
    """Copy in CPU memory of bytes ``first`` to ``last`` of the storage of ``x``."""

    def __init__(self, x: Tensor, first: int, last: int):
        self.device, self.users = x.device, 0
        self._on_device: Tensor | None = None
        self._waiting = 0
        # Use a view. FakeTensorMode would keep the storage of a set_ call in its cache forever.
        source = x.as_strided((last // x.element_size(),), (1,), 0).view(torch.uint8)[first:]
        pinned = x.device.type == "cuda"
        self._bytes = host_buffer(last - first, pinned)
        # The stream orders the copy after the kernel that writes the source and before one that reuses its memory.
        self._bytes.copy_(source, non_blocking=pinned)

    def restore(self) -> Tensor:
        """Return the bytes on the device, as one copy that all users share and the last one frees."""
        if self._on_device is None:
            self._on_device = torch.empty_like(self._bytes, device=self.device)
            self._on_device.copy_(self._bytes, non_blocking=True)
            self._waiting = self.users
        restored = self._on_device
        self._waiting -= 1
        if not self._waiting:
            self._on_device = None
        return restored


class _Saved:
    """A saved tensor: the tensor itself, or its location in a copy of its storage."""

    def __init__(self, x: Tensor, copy: _HostCopy | None = None, offset: int = 0):
        self._copy = copy
        if copy is None:
            self._tensor, self._version = x, x._version
        else:
            self._dtype, self._place = x.dtype, (offset, tuple(x.shape), x.stride())

    def restore(self) -> Tensor:
        if self._copy is None:
            # Autograd skips this check for tensors with hooks.
            if self._tensor._version != self._version:
                shape = tuple(self._tensor.shape)
                raise RuntimeError(f"an in-place operation changed a tensor of shape {shape} that backward needs")
            return self._tensor
        restored, (offset, shape, stride) = self._copy.restore(), self._place
        whole = len(restored) // self._dtype.itemsize * self._dtype.itemsize
        return restored[:whole].view(self._dtype).as_strided(shape, stride, offset)


def _bytes_of(x: Tensor) -> tuple[int, int]:
    """Return the range of bytes of the storage of ``x`` from its first to its last element."""
    if not x.numel():
        return 0, 0
    offset = int(x.storage_offset())  # never a SymInt: hooks get the tensors of a real forward
    last = offset + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return offset * x.element_size(), (last + 1) * x.element_size()


def _offloading_contexts(operators: frozenset) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Replace ``create_selective_checkpoint_contexts``, whose cache cannot use CPU memory in eager mode."""
    keeping = _Keeping(operators)
    return keeping, _Replaying(keeping)


class _Keeping(TorchDispatchMode):
    """Mode that keeps the outputs of ``operators`` in CPU memory."""

    def __init__(self, operators: frozenset):
        super().__init__()
        self.operators, self._host = operators, _HostMemory()
        self.outputs: list[tuple[torch._ops.OpOverload, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in self.operators:
            self.outputs.append((func, tree_map_only(Tensor, self._host.pack, out)))
        return out


class _Replaying(TorchDispatchMode):
    """Mode that returns the outputs of ``kept``, in their order, instead of calling the operators again."""

    def __init__(self, kept: _Keeping):
        super().__init__()
        self._kept, self._next = kept, 0

    def __enter__(self):
        self._next = 0  # a second backward through the same graph
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self._kept.operators:
            return func(*args, **(kwargs or {}))
        if self._next == len(self._kept.outputs) or self._kept.outputs[self._next][0] is not func:
            raise RuntimeError(f"recomputation calls {func}, which the forward did not call at this point")
        outputs = self._kept.outputs[self._next][1]
        self._next += 1
        return tree_map_only(_Saved, _Saved.restore, outputs)
