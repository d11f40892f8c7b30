"""Context parallelism for any ``nn.Module`` whose plan says where tokens are split and gathered.

The plan has the format of diffusers' ``_cp_plan``: ``{module name: entry}``, where an entry is either
``{argument name or output index: split}`` or a gather (or a list of gathers, one per output). A *split* is any object
with ``split_dim``, ``expected_dims`` and ``split_output``; a *gather* has ``gather_dim``. diffusers'
``ContextParallelInput`` and ``ContextParallelOutput`` are such objects, and so are the two classes here, for models
from elsewhere. Attention itself is the model's business: its processor calls
:func:`fsdp_cp.attention.context_parallel_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_cp.mesh import Mesh
from fsdp_cp.sequence import gather_tokens, split_tokens


@dataclass(frozen=True)
class SplitTokens:
    """Split an argument (or, with ``split_output``, an output) of a module along ``split_dim``.

    With ``expected_dims`` a tensor of another rank is left whole: diffusers uses that for arguments which carry
    tokens in some models only.
    """

    split_dim: int
    expected_dims: int | None = None
    split_output: bool = False


@dataclass(frozen=True)
class GatherTokens:
    """Gather an output of a module along ``gather_dim``."""

    gather_dim: int
    expected_dims: int | None = None


def parallelize_context(model: nn.Module, *, mesh: Mesh, plan: Mapping[str, Any]) -> None:
    """Register the hooks that split and gather tokens by ``plan``, in place; before :func:`shard_module`.

    Args:
        model: the module whose sub-modules the plan names (``""`` is the model itself).
        mesh: the mesh; nothing is registered when ``cp`` is 1.
        plan: see the module's docstring.

    Raises:
        ValueError: an entry that names no module or no argument, or that is neither split nor gather.
    """
    if mesh.cp_size == 1:
        return
    for name, entry in plan.items():
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"the context-parallel plan names {name!r}, which {type(model).__name__} has not"
            ) from error
        if isinstance(entry, Mapping):
            _register_splits(module, name, entry, mesh)
        else:
            _register_gathers(module, name, entry if isinstance(entry, (list, tuple)) else [entry], mesh)


def _apply_split(x: Tensor, split: Any, mesh: Mesh) -> Tensor:
    if split.expected_dims is not None and x.ndim != split.expected_dims:
        return x
    return split_tokens(x, mesh, split.split_dim)


def _register_splits(module: nn.Module, name: str, entry: Mapping[str | int, Any], mesh: Mesh) -> None:
    if not all(hasattr(split, "split_dim") for split in entry.values()):
        raise ValueError(f"the context-parallel plan of {name!r} has an entry without split_dim")
    inputs = {key: split for key, split in entry.items() if not split.split_output}
    outputs = {key: split for key, split in entry.items() if split.split_output}
    parameters = list(inspect.signature(module.forward).parameters)
    unknown = [key for key in inputs if key not in parameters]
    if unknown:
        raise ValueError(f"the context-parallel plan of {name!r} names the argument {unknown[0]!r}, which it has not")

    def split_inputs(_module, args, kwargs):
        args = list(args)
        for key, split in inputs.items():
            index = parameters.index(key)
            if isinstance(kwargs.get(key), Tensor):
                kwargs = {**kwargs, key: _apply_split(kwargs[key], split, mesh)}
            elif index < len(args) and isinstance(args[index], Tensor):
                args[index] = _apply_split(args[index], split, mesh)
        return tuple(args), kwargs

    def split_outputs(_module, _args, output):
        if isinstance(output, Tensor):
            return _apply_split(output, outputs[0], mesh)
        return tuple(_apply_split(x, outputs[i], mesh) if i in outputs else x for i, x in enumerate(output))

    if inputs:
        module.register_forward_pre_hook(split_inputs, with_kwargs=True)
    if outputs:
        module.register_forward_hook(split_outputs)


def _register_gathers(module: nn.Module, name: str, gathers: list[Any], mesh: Mesh) -> None:
    if not all(gather is None or hasattr(gather, "gather_dim") for gather in gathers):
        raise ValueError(f"the context-parallel plan of {name!r} is neither a split nor a gather")

    def gather_outputs(_module, _args, output):
        outputs = [output] if isinstance(output, torch.Tensor) else list(output)
        if len(outputs) != len(gathers):
            raise ValueError(f"{name!r} has {len(outputs)} outputs, its context-parallel plan {len(gathers)}")
        outputs = [
            x if gather is None else gather_tokens(x, mesh, dim=gather.gather_dim)
            for x, gather in zip(outputs, gathers, strict=True)
        ]
        return outputs[0] if isinstance(output, torch.Tensor) else tuple(outputs)

    module.register_forward_hook(gather_outputs)
