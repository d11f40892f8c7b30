"""Tensors that FSDP2 allocates for a sharded network beyond its shards: parameters, gradients, staging buffers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from typing import Any

from torch import Tensor, nn

from fsdp_cp.runtime.torch_versions import param_groups
from fsdp_cp.sharding.state import fsdp_modules, fsdp_params

KINDS = ("gathered", "staging", "full_gradients", "reduce_inputs", "shard_gradients")
"""Kinds of allocations:

- ``gathered``: full parameters;
- ``staging``: outputs of all-gathers (full parameters in rank order);
- ``full_gradients``: gradients of units in backward or waiting for a reduction;
- ``reduce_inputs``: gradient buffers, which are copies of full gradients in rank order;
- ``shard_gradients``: outputs of reductions, which become the gradients of the shards.
"""


def has_run(network: nn.Module) -> bool:
    """Return whether any unit has run a forward, which makes the buffers that :func:`watch_allocations` watches."""
    return any(parameter.all_gather_outputs for parameter in fsdp_params(network))


@contextmanager
def watch_allocations(network: nn.Module, report: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within this context, call ``report(kind, tensor)`` for each tensor that FSDP2 allocates for a root ``network``.

    Tensors that exist on entry are reported too, ``gathered`` ones only then: FSDP2 keeps them, resized to 0 between
    uses. A tensor may be reported twice. The network must have run: its first forward makes the buffers.
    """
    with ExitStack() as stack:
        for unit in fsdp_modules(network):
            for group in param_groups(unit):
                stack.enter_context(_watch_group(group, report))
        yield


@contextmanager
def _watch_group(group: Any, report: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Watch the buffers of one parameter group. The private parts of FSDP2 are all here (torch 2.11 to 2.13).

    ``FSDPParam.all_gather_outputs`` hold the full parameters and are resized to 0 between uses. ``_unsharded_param``
    gets the full gradient. ``Comm.allocate`` (public) makes the staging buffers; in ``foreach_reduce`` it makes first
    the input of a reduction, then its output, also with one shard.
    """
    if not all(parameter.all_gather_outputs for parameter in group.fsdp_params):
        raise RuntimeError(f"{group!r} has not run yet; run one forward before measuring")

    def report_any(kind: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            report(kind, tensor)

    handles = []
    for parameter in group.fsdp_params:
        for output in parameter.all_gather_outputs:
            report("gathered", output)
        shard, full = parameter.sharded_param, parameter._unsharded_param
        report_any("full_gradients", full.grad)
        report_any("full_gradients", parameter.unsharded_accumulated_grad)
        report_any("shard_gradients", shard.grad)
        if full.requires_grad:
            handles.append(full.register_post_accumulate_grad_hook(lambda p: report_any("full_gradients", p.grad)))
            # FSDP2 calls this hook once the gradient exists. If dtypes differ, it is not the reduction's output.
            handles.append(shard.register_post_accumulate_grad_hook(lambda p: report_any("shard_gradients", p.grad)))

        def cast_watched(parameter: Any = parameter, cast: Callable = parameter.to_accumulated_grad_if_needed) -> None:
            cast()  # casts gradients that wait to the dtype of the reduction
            report_any("full_gradients", parameter.unsharded_accumulated_grad)

        parameter.to_accumulated_grad_if_needed = cast_watched
    gather, reduce = group._all_gather_comm, group._reduce_scatter_comm
    gather.allocate = _allocating(gather.allocate, report, "staging")
    reduce.allocate = _allocating(reduce.allocate, report, "reduce_inputs", "shard_gradients")
    try:
        yield
    finally:
        del gather.allocate, reduce.allocate  # restores the methods of their classes
        for handle in handles:
            handle.remove()
        for parameter in group.fsdp_params:
            del parameter.to_accumulated_grad_if_needed


def _allocating(
    allocate: Callable[..., Tensor], report: Callable[[str, Tensor], None], *kinds: str
) -> Callable[..., Tensor]:
    """Wrap ``allocate``, whose results are of ``kinds`` in turn."""
    kind = cycle(kinds)

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        report(next(kind), tensor)
        return tensor

    return watched
