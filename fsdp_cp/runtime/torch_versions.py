"""Wrappers for differences between torch 2.11 and 2.13. Delete a wrapper once no supported torch needs it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad

from fsdp_cp.errors import UserError

if TYPE_CHECKING:  # these take half a second to import
    from torch.distributed.checkpoint.staging import DefaultStager
    from torch.distributed.fsdp import FSDPModule

FORWARD_AD_SINCE = (2, 13)
"""First torch whose FSDP2 hooks pass forward-mode tangents on with gradients enabled (pytorch issue 182641)."""
STAGER_REUSED_SINCE = (2, 13)
"""First torch whose ``DefaultStager`` copies more than one checkpoint."""


def all_gather_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Gather the flat ``x`` of every rank of ``group`` into the flat ``out``, in rank order."""
    # torch 2.13 renamed the call and warns about the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out, x, group=group)


def reduce_scatter_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Sum the flat ``x`` of every rank of ``group``; ``out`` gets the rank's own part of the sum."""
    # torch 2.13 renamed the call and warns about the old name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(out, x, group=group)


def in_backward() -> bool:
    """Return whether a backward recomputes a forward here, by ``torch._C._current_graph_task_id`` (private)."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def compile_options(graphs: int) -> dict[str, Any]:
    """Return arguments of ``torch.compile`` that allow this many ``graphs``; none before torch 2.13, which allow 8."""
    return {"recompile_limit": graphs} if "recompile_limit" in signature(torch.compile).parameters else {}


def fsdp_setter(model: nn.Module, setter: str, instead: str) -> Callable[..., None]:
    """Return a setter of ``FSDPModule``; without it (torch 2.11) raise a ``UserError`` that names ``instead``."""
    if not hasattr(model, setter):
        raise UserError(f"torch {torch.__version__} has no {setter}; use {instead}, or torch 2.13")
    return getattr(model, setter)


def param_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups (``FSDPParamGroup``) of one unit; empty if the unit has no parameters itself."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11 and 2.12


def reset_iter_state(root: FSDPModule, units: list[Any]) -> None:
    """Call ``root.reset_iter_state()``; before torch 2.13 reset ``root`` and ``units``, and parameters stay
    gathered."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    idle = type(state._training_state).IDLE
    for unit in units:
        unit._get_fsdp_state()._training_state = idle
        for group in param_groups(unit):
            group._training_state = idle
            group._post_forward_indices.clear()
            group._partial_reduce_output = None


def make_reusable(stager: DefaultStager) -> None:
    """Let ``stager`` copy more than one checkpoint.

    Before torch 2.13 it closes ``_state_dict_stager`` after each copy, and the next copy raises ``KeyError: type``
    (pytorch issue 183413). Not closed, it frees its copies when it is collected.
    """
    if torch.__version__ < STAGER_REUSED_SINCE:  # type: ignore[operator]  # TorchVersion compares with tuples
        stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]


def refuse_tangents_with_gradients(model: nn.Module) -> None:
    """Make a sharded ``model`` refuse tangents with gradients enabled, which FSDP2's hooks lose before torch 2.13."""
    if torch.__version__ >= FORWARD_AD_SINCE:  # type: ignore[operator]  # TorchVersion compares with tuples
        return

    def check(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            needed = f"torch {'.'.join(map(str, FORWARD_AD_SINCE))} or torch.no_grad(), not {torch.__version__}"
            raise RuntimeError(f"forward-mode AD through a sharded network with gradients enabled needs {needed}")

    model.register_forward_pre_hook(check, with_kwargs=True)
