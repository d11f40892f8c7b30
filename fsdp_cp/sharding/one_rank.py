"""One rank alone holds every parameter whole: computed with where it lies, its gradients taken as they come.

FSDP2 copies there too: each shard into a full parameter, and each gradient into the input and then the output of a
reduction that has nothing to add. On a CPU that is a quarter of a step (``python -m benchmarks.overhead``), and it is
memory for a unit's weights and gradients. Its private classes ``FSDPParam`` and ``FSDPParamGroup`` (torch 2.13) are
taught otherwise here, and here alone; hooks, states and DTensors stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, alloc_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_cp.sharding.state import ShardedModule, fsdp_modules, param_groups

OF_TORCH = "2.13."
"""Whose classes these are; any other copies, with the same results: its post-backward may do what is left out here."""

_ALONE = "_one_rank_alone"
"""Attribute of a root: to ask each unit would cost every step of the other meshes time."""


def compute_in_place(root: ShardedModule) -> None:
    """Let every unit of ``root``, which one rank holds alone, go without the copies of a gather and of a reduction.

    Results are the same to the last bit. Left to torch: what is offloaded to the CPU, gathers itself (fp8) or is a
    part of a larger storage; gradients that are divided, or summed over replicas.
    """
    if not torch.__version__.startswith(OF_TORCH):
        return
    root.__dict__[_ALONE] = True
    for unit in fsdp_modules(root):
        for group in param_groups(unit):
            group.__class__ = _Group
            for parameter in group.fsdp_params:
                parameter.__class__ = _Parameter


def is_alone(root: ShardedModule) -> bool:
    """Was ``root`` given to :func:`compute_in_place`?"""
    return _ALONE in vars(root)


def is_in_place(parameter: FSDPParam) -> bool:
    """Is the full parameter the shard's own memory, and so nothing that a rank holds beside its shards?"""
    return isinstance(parameter, _Parameter) and parameter.is_in_place()


def computes_in_place(unit: ShardedModule) -> bool:
    """Does ``unit`` hold nothing beside its shards while it is gathered? Not known before it was, once."""
    return all(is_in_place(parameter) for group in param_groups(unit) for parameter in group.fsdp_params)


def watch_gradients(group: FSDPParamGroup, seen: Callable[[FSDPParam], None]) -> Callable[[], None]:
    """Call ``seen`` with each parameter of ``group`` that has got a sharded gradient here, without a reduction.

    Returns:
        Ends it.
    """
    if not isinstance(group, _Group):
        return lambda: None
    take = group.take_gradient

    def watched(parameter: FSDPParam) -> None:
        take(parameter)
        seen(parameter)

    vars(group)["take_gradient"] = watched
    return lambda: vars(group).pop("take_gradient", None)


class _Parameter(FSDPParam):
    _in_place = False
    """Is the full parameter the shard's own memory?"""

    def init_all_gather_outputs(
        self, numels: list[int], dtypes: list[torch.dtype], world_size: int, device: torch.device
    ) -> None:
        """Memory of the full parameter: the shard's own if it can be. FSDP2 then "copies" a tensor onto itself."""
        in_place = self._can_be_in_place()
        if in_place and self.is_in_place():
            return
        if in_place:
            self.all_gather_outputs = [self._sharded_param_data]
        elif self._in_place:  # weights were loaded by assignment, as parts of a larger storage
            self.all_gather_outputs = []
        changes, self._in_place = in_place or self._in_place, in_place
        # Memory made in inference mode would be of no use to training for ever.
        with torch.inference_mode(False), torch.no_grad():
            # In the dtype of compute still, whatever weights were loaded.
            of_compute = [self._full_dtype()] if changes else dtypes
            super().init_all_gather_outputs(numels, of_compute, world_size, device)
            if changes and hasattr(self, "_unsharded_param"):
                # Not a new one: gradients that wait for the last micro-batch hang on it.
                (full,) = self.all_gather_outputs
                self._unsharded_param.data = full.as_strided(self._orig_size, self._contiguous_orig_stride, 0)

    def reset_sharded_param(self) -> None:
        """Where the weights are others now, the full parameter's memory is at once: the old ones would stay till the
        next forward, as much again."""
        super().reset_sharded_param()
        if self._in_place and not self.is_in_place():
            shard = self._sharded_param_data
            self.init_all_gather_outputs([shard.numel()], [shard.dtype], 1, self.device)
            self.free_unsharded_param()

    def _full_dtype(self) -> torch.dtype:
        return self.param_dtype or self.orig_dtype

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What FSDP2 copies into the full parameter. A cast goes there at once, without a tensor of its own."""
        shard = self._sharded_param_data
        if shard.dtype == self._full_dtype() or not self._is_plain():
            return super().all_gather_inputs
        self.init_all_gather_outputs([shard.numel()], [self._full_dtype()], 1, self.device)
        (full,) = self.all_gather_outputs
        alloc_storage(full)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(full):
            full.copy_(shard)
        return [full]

    def free_unsharded_param(self) -> None:
        """Not in place: that would be the weights themselves."""
        if not self._in_place:
            super().free_unsharded_param()

    def is_in_place(self) -> bool:
        """Is there a full parameter, and is it the shard's own memory, still?"""
        return self._in_place and self.all_gather_outputs[0] is self._sharded_param_data

    def _is_plain(self) -> bool:
        shard = self._sharded_local_tensor
        gathers_itself = hasattr(shard, "fsdp_pre_all_gather")
        of_parts = is_traceable_wrapper_subclass(shard)  # a fake tensor, of the planner, is none
        return not (self.offload_to_cpu or self.is_dtensor or gathers_itself or of_parts)

    def _can_be_in_place(self) -> bool:
        shard = self._sharded_param_data
        # FSDP2 would resize a storage that is larger than the parameter.
        fills_its_storage = shard.storage_offset() == 0 and shard.untyped_storage().nbytes() == shard.nbytes
        return shard.dtype == self._full_dtype() and self._is_plain() and fills_its_storage


class _Group(FSDPParamGroup):
    _weights: tuple[tuple[int, int], ...] = ()
    """Which ones those in place were, at the latest forward that a backward may follow."""

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather, as FSDP2, and note with which weights."""
        found = super().pre_forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._weights = self._weights_now()
        return found

    def pre_backward(self, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            RuntimeError: weights in place that changed behind the forward. A copy that stays gathered would still have
                those that it ran with; autograd, which refuses this of any other weights, doesn't see it through a
                shard.
        """
        if self._weights != self._weights_now():
            raise RuntimeError(
                f"weights of {self._module_fqn or 'the root'} were changed between a forward and its backward, whose"
                " gradients would be of neither; change them (optimizer, averages, loading) behind the backward"
            )
        super().pre_backward(*args, **kwargs)

    def _weights_now(self) -> tuple[tuple[int, int], ...]:
        shards = (p._sharded_local_tensor for p in self.fsdp_params if is_in_place(p))
        return tuple((id(shard), shard._version) for shard in shards)

    def wait_for_unshard(self) -> None:
        """Nothing to wait for where every full parameter is in place already: of 27 in a block each call counts."""
        if self._all_gather_result is not None and all(
            p.is_in_place() for p in cast(list[_Parameter], self.fsdp_params)
        ):
            self._to_unsharded()
            self._all_gather_result = None
            return
        super().wait_for_unshard()

    def post_backward(self, *unused: Any) -> None:
        """Make the sharded gradients of the full ones, which FSDP2 finds none of then."""
        if (
            self.reduce_grads
            and self.gradient_divide_factor is None
            and not self.reduce_scatter_unused_params
            and not self._is_hsdp
            and self._all_reduce_hook is None
        ):
            with torch.no_grad():
                found = [parameter for parameter in self.fsdp_params if _has_full_gradient(parameter)]
                for parameter in found:
                    self.take_gradient(parameter)
            if found:
                # As a reduction leaves it to the end of the last backward, without which a step is not closed.
                event = self.device_handle.Event()
                event.record()
                self.comm_ctx._last_post_reduce_events[self.device_handle.current_stream()] = event
        super().post_backward(*unused)

    def take_gradient(self, parameter: FSDPParam) -> None:
        """Let the full gradient be that of the shard, or a part of it."""
        parameter.accumulate_unsharded_grad_if_needed()
        if parameter.unsharded_accumulated_grad is not None:
            gradient = parameter.unsharded_accumulated_grad_data
            parameter.unsharded_accumulated_grad = None
        else:
            gradient = parameter.unsharded_grad_data
            parameter.unsharded_param.grad = None
        for dtype in (self._reduce_dtype, self._orig_dtype):
            if dtype is not None and dtype != gradient.dtype:
                gradient = gradient.to(dtype)
        gradient = gradient.detach()  # of a backward with create_graph it has a graph of its own
        gradient = _alone(gradient)
        shard = parameter.sharded_param
        if shard.grad is not None:
            cast(DTensor, shard.grad)._local_tensor.add_(gradient)
        else:
            shard.grad = parameter.to_sharded_dtensor(gradient)
        for hook in (getattr(shard, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(shard)


def _has_full_gradient(parameter: FSDPParam) -> bool:
    if parameter.offload_to_cpu or not hasattr(parameter, "_unsharded_param"):
        return False
    return parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None


def _alone(gradient: Tensor) -> Tensor:
    """``gradient``, contiguous and in memory that no other tensor has: clipping scales each one in place.

    Autograd hands out views of one tensor as the gradients of several parameters (of ``a`` and ``b`` for
    ``a.view(-1) + b``). ``torch._C._storage_Use_Count`` is private (torch 2.13): the tensor, and Python's handle.
    """
    storage = gradient.untyped_storage()
    owners = torch._C._storage_Use_Count(storage._cdata)
    if owners > 2 or storage.nbytes() != gradient.nbytes or not gradient.is_contiguous():
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient
