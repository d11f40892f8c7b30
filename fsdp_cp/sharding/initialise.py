"""First values of a network that was built on the meta device and sharded: drawn from a seed, or sent by rank 0.

No rank holds more than its shards and one module (:func:`initialise`) or one tensor (:func:`broadcast_from_rank0`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_cp.launch import rank
from fsdp_cp.reduce import all_gather_objects
from fsdp_cp.rng import stream_seed
from fsdp_cp.sharding.state import reshard


class _Resets(Protocol):
    def reset_parameters(self) -> object: ...


@torch.no_grad()
def initialise(
    model: nn.Module,
    *,
    seed: int,
    special: Callable[[nn.Module, str, Tensor], None] | None = None,
    stream: Callable[[str], str | None] = str,
) -> None:
    """Draw every parameter: the same full values whatever the mesh, the strategy, the rank and the dtypes.

    One module at a time, all of its own parameters are made whole on the CPU in fp32 by its ``reset_parameters``, from
    a random stream of the module's own, and this rank's part is copied into the shard; nothing is communicated. torch's
    global generators are left as they were, and what they were seeded with does not matter. Every rank draws all values
    (12 s for 1e9 parameters, 4 ranks on 2 cores).

    Args:
        model: with memory (after :func:`fsdp_cp.materialise`), sharded or not. Buffers stay as they are.
        seed: with the module's name, the key of its stream.
        special: ``special(module, name, tensor)`` fills ``tensor``, the full value of ``module``'s own parameter
            ``name``, where ``reset_parameters`` does not do what it should; otherwise it leaves it alone.
        stream: a module's name to that of its stream: its own by default; ``None`` leaves the module's parameters as
            they are.

    Raises:
        ValueError: a parameter that nobody initialises, is on the meta device, or belongs to a module whose
            ``reset_parameters`` needs another module's.
    """
    reshard(model)  # a gathered parameter is a copy, which the next gather overwrites
    done: set[nn.Parameter] = set()
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            parameters = {key: p for key, p in module._parameters.items() if p is not None and p not in done}
            done.update(parameters.values())
            key_of_stream = stream(name) if parameters else None
            if key_of_stream is None:
                continue
            # Not torch.manual_seed, which would seed the GPUs' generators too.
            torch.default_generator.manual_seed(stream_seed("initialise", seed, key_of_stream))
            prefix = f"{name}." if name else ""
            for key, full in _full_values(module, prefix, special).items():
                if key in parameters:
                    copy_own_part(parameters[key], full, prefix + key)


def _full_values(
    module: nn.Module, prefix: str, special: Callable[[nn.Module, str, Tensor], None] | None
) -> dict[str, Tensor]:
    """New values of the module's own parameters, by their names in it."""
    # Not copy.copy: FSDP2's classes answer it by building the module anew.
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    # NaN shows afterwards what nobody filled. Without its children the copy cannot reach beyond its own parameters.
    vars(copied)["_modules"] = {}
    vars(copied)["_buffers"] = {key: None if x is None else x.clone() for key, x in module._buffers.items()}
    vars(copied)["_parameters"] = {
        key: None if p is None else nn.Parameter(_unfilled(p), requires_grad=False)
        for key, p in module._parameters.items()
    }
    if hasattr(copied, "reset_parameters"):
        try:
            cast(_Resets, copied).reset_parameters()
        except AttributeError as error:
            kind = type(module).__name__
            raise ValueError(
                f"{prefix}reset_parameters ({kind}) needs more than its own parameters: {error}"
            ) from error
    values = {key: p.detach() for key, p in copied._parameters.items() if p is not None}
    for key, full in values.items():
        if special is not None:
            special(module, key, full)
        if full.sum().isnan():  # of the sum: a mask of the elements would take a quarter of the memory again
            raise ValueError(
                f"{prefix}{key} is initialised by nobody: {type(module).__name__} has no reset_parameters that fills"
                " it; fill it in `special`"
            )
    return values


def _unfilled(parameter: Tensor) -> Tensor:
    if not parameter.is_floating_point():
        raise ValueError(f"parameters of {parameter.dtype} have no initialisation")
    return torch.full(tuple(parameter.shape), torch.nan, dtype=torch.float32, device="cpu")


def copy_own_part(parameter: Tensor, full: Tensor, name: str) -> None:
    """Copy this rank's part of ``full`` into the ``parameter`` of that shape, a DTensor or a plain tensor.

    Raises:
        ValueError: a parameter on the meta device; ``name`` says which.
    """
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device; call materialise before initialise")
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    # What torch.distributed.checkpoint asks a DTensor for: which part of the whole this rank holds.
    (chunk,) = parameter.__create_chunk_list__()
    own = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    parameter.to_local().copy_(full[own])


def broadcast_from_rank0(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load rank 0's full state dict into the shards of every rank, one tensor at a time. Called by all ranks.

    Args:
        model: sharded, with memory (after :func:`fsdp_cp.materialise`).
        state_dict: on rank 0 full tensors by name, on any device; it is not looked at on the others.

    Raises:
        ValueError: a tensor that is missing, unexpected or of another shape; on all ranks.
    """
    reshard(model)
    given = all_gather_objects({n: tuple(x.shape) for n, x in state_dict.items()} if rank() == 0 else None)[0]
    needed = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    problems = [f"lacks {name}" for name in sorted(needed.keys() - given.keys())]
    problems += [f"has the unexpected {name}" for name in sorted(given.keys() - needed.keys())]
    problems += [
        f"has {name} as {given[name]}, not {needed[name]}"
        for name in sorted(needed.keys() & given.keys())
        if given[name] != needed[name]
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"the state dict of rank 0 {problems[0]}{more}")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # A new dict: torch puts its own tensors into the one it is given.
    set_model_state_dict(model, dict(state_dict) if rank() == 0 else {}, options=options)
