"""What the forward or backward of a sharded network cannot do, said in one sentence where it is tried.

Dtypes that nobody casts, gradient penalties, and a first forward in inference mode.

Nothing here costs a forward more than a few Python calls: dtypes are looked at after an error alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp_cp.errors import UserError
from fsdp_cp.sharding.settings import COMPUTE_DTYPE, ShardSettings
from fsdp_cp.sharding.state import ShardedModule, never_gathered_units

_DTYPES_DIFFER = re.compile(r"dtype|scalar type|Input type|BFloat16|torch\.(bfloat16|float)", re.IGNORECASE)


def explain_dtypes(model: nn.Module, settings: ShardSettings) -> None:
    """Wrap ``model.forward``: an error of dtypes on inputs that are not of the compute dtype says what to do.

    FSDP2 casts no inputs here (docs/gradients.md, "Precision"), and many networks cast their own, so that inputs of
    another dtype are no mistake by themselves: only the error that follows is explained.
    """
    inner, kind, dtype = model.forward, _kind(model), COMPUTE_DTYPE[settings.precision]

    @wraps(inner)
    def forward(*args, **kwargs):
        try:
            return inner(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            others = _of_another_dtype(inner, args, kwargs, dtype)
            if not others or isinstance(error, UserError) or not _DTYPES_DIFFER.search(str(error)):
                raise
            found = ", ".join(f"{name} ({str(x.dtype).removeprefix('torch.')})" for name, x in others.items())
            where = _failing_module(model, error)
            raise UserError(
                f"precision={settings.precision!r} computes in {str(dtype).removeprefix('torch.')}, but"
                f" {kind} got {found}{where}: {str(error).splitlines()[0].rstrip('.')}. Inputs are not"
                f" cast, since that would round times: pass {next(iter(others))}.to({dtype}), or cast inside the"
                " network what it computes with"
            ) from error

    model.forward = forward


def _of_another_dtype(forward: Any, args: tuple, kwargs: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating-point tensors among the arguments whose dtype is not ``dtype``, by the argument's name."""
    try:
        given = inspect.signature(forward).bind(*args, **kwargs).arguments
    except TypeError:  # arguments that do not fit: that error says so itself
        return {}
    tensors = [(name, x) for name, value in given.items() for x in _tensors(value)]
    return {name: x for name, x in tensors if x.is_floating_point() and x.dtype != dtype}


def _failing_module(model: nn.Module, error: BaseException) -> str:
    """``" in 'blocks.0.qkv' (Linear)"``: the innermost module of ``model`` whose forward raised; "" if unknown."""
    names = {module: name for name, module in model.named_modules()}
    found, frame = "", error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            found = f" in {names[module]!r} ({_kind(module)})"
        frame = frame.tb_next
    return found


def refuse_double_backward(model: nn.Module, settings: ShardSettings) -> None:
    """Raise where a backward with ``create_graph=True`` would free the weights that the second backward needs.

    Registered before FSDP2's own hooks, so that nothing has been gathered yet when it raises.
    """
    kind, keeps = _kind(model), settings.strategy in ("optim", "optim_grads") or settings.keep_gathered

    def check(_grad: Tensor) -> None:
        if not torch.is_grad_enabled():  # in a backward: only with create_graph=True
            return
        open_contexts = getattr(model, "_open_microbatches", ())
        if keeps and open_contexts and open_contexts[-1] is False:
            return
        instead = (
            "put it into `with microbatch(model, is_first=False, is_last=False)`"
            if keeps
            else "use strategy='optim', 'optim_grads' or keep_gathered=True"
        )
        raise UserError(
            f"a backward with create_graph=True (a gradient penalty) through {kind}: under"
            f" strategy={settings.strategy!r} its weights are freed before the second backward needs them; take a"
            f" finite difference, or, without fsdp_cp.attention, {instead} (docs/gradients.md, 'Gradient penalties')"
        )

    def watch(_module: nn.Module, _args: tuple, output: Any) -> None:
        if torch.is_grad_enabled():
            for x in _tensors(output):
                if x.requires_grad:
                    x.register_hook(check)

    model.register_forward_hook(watch)


def _kind(module: nn.Module) -> str:
    """The name of its class as the user wrote it: ``fully_shard`` makes an ``FSDPTransformer`` of a ``Transformer``."""
    kind = type(module)
    return kind.__mro__[2].__name__ if isinstance(module, FSDPModule) else kind.__name__


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in containers as FSDP2 looks through: mappings, lists, tuples, dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for x in value.values():
            yield from _tensors(x)
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def allow_inference_mode(model: ShardedModule) -> None:
    """Let a first forward run under ``torch.inference_mode()`` without spoiling the network for training.

    FSDP2 makes the memory of full parameters in the first forward and keeps it: made in inference mode it would be
    inference tensors for ever, which neither a later gather nor a backward can use. So it is made here, outside of that
    mode: each unit is gathered and let go of, once. Registered in front of FSDP2's own hooks.
    """

    def make(_module: nn.Module, _args: tuple) -> None:
        if not torch.is_inference_mode_enabled():
            return
        with torch.inference_mode(False), torch.no_grad():
            for unit in never_gathered_units(model):
                unit.unshard()
                unit.reshard()

    model.register_forward_pre_hook(make, prepend=True)
